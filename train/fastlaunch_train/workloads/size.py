"""Print the size of a model, counted without weights: python -m fastlaunch_train.workloads.size WORKLOAD"""

import json
import sys
from typing import Any

from torch import nn

from fastlaunch_train.models.flops import build_on_meta
from fastlaunch_train.workloads.contract import load_workload
from fastlaunch_train.workloads.registry import WorkloadError


def main(name: str) -> int:
    """Print the parameters, FLOPs and tokens of a sample, and the layers, as JSON; null is unknown."""
    try:
        workload = load_workload(name)
    except WorkloadError as error:
        sys.stderr.write(f"{error.message}{f'; {error.hint}' if error.hint else ''}\n")
        return 2
    model = build_on_meta(workload.build_model)
    size = {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops_per_sample": workload.flops_per_sample,
        "tokens_per_sample": workload.tokens_per_sample or None,
        "num_trained": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        **_layers(model),
    }
    sys.stdout.write(f"{json.dumps(size)}\n")
    return 0


def _layers(model: nn.Module) -> dict[str, int | None]:
    """Return the sizes of the layers of a decoder with gated MLPs; all None for another model."""
    config: Any = next((part.config for part in model.modules() if hasattr(part, "config")), None)
    heads: Any = getattr(config, "num_key_value_heads", None)
    gated = any(name.endswith("gate_proj") for name, _ in model.named_modules())
    is_known = config is not None and heads and gated and not hasattr(config, "num_experts")
    if not is_known:
        names = ("num_layers", "width", "mlp_width", "num_kv_features", "vocabulary")
        return dict.fromkeys(names)
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "num_layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "mlp_width": config.intermediate_size,
        "num_kv_features": 2 * heads * head_width,
        "vocabulary": config.vocab_size,
    }


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
