"""Proof that pointwise functions were fused: the kernels that a forward pass really runs.

On a GPU, torch's profiler sees the kernels. On a CPU, it sees the operators called one by one, among them the
groups that torch.jit.script fused, but not the kernels that torch.compile wrote, which are added.
"""

import re
import sys
from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fastlaunch_train.models.precision import Precision
from fastlaunch_train.workloads.contract import Batch, Workload

#: Operators that compute nothing.
_VIEWS = frozenset(
    {"unbind", "select", "slice", "view", "reshape", "flatten", "detach", "as_strided", "alias"}
)
#: The most kernels to name; a large model has hundreds.
_NUM_NAMED = 12
_FUSED = "fused_"


def describe_kernels(
    workload: Workload,
    model: nn.Module,
    batch: Batch,
    precision: Precision,
    device: torch.device,
    *,
    num_samples: int,
) -> str:
    """Profile a forward pass on `num_samples` samples: `1 kernel a tensor: triton_poi_fused_...`.

    Call it after everything is compiled; otherwise compilation is counted, too.
    """
    on_gpu = device.type == "cuda"
    with torch.no_grad(), precision.autocast():
        # CUPTI attaches itself in the first profiled pass, and may miss some of its kernels.
        for _ in range(2 if on_gpu else 1):
            with profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
            ) as profiled:
                workload.loss(model, batch)
                if on_gpu:
                    torch.cuda.synchronize(device)
    sample = workload.sample_unit.removesuffix("s")
    events = list(profiled.events() or ())
    if on_gpu:
        kernels = Counter(short_name(event.name) for event in events if event.device_type.name == "CUDA")
        if not kernels:
            return "unknown: the profiler sees no kernels on this machine"
        return listing("kernel", sample, kernels, num_samples)
    parts = []
    graphs = sum(event.name.startswith("## Call CompiledFxGraph") for event in events)
    if graphs:
        parts.append(listing("kernel", sample, _written_kernels(graphs), num_samples))
    operators = Counter(
        event.name.removeprefix("aten::")
        for event in events
        if _is_operator(event.name) and not (event.cpu_parent and _is_operator(event.cpu_parent.name))
    )
    operators = Counter({name: count for name, count in operators.items() if name not in _VIEWS})
    if operators or not parts:
        parts.append(listing("operator", sample, operators, num_samples))
    if is_scripted(model) and not any(name.startswith(_FUSED) for name in operators):
        # torch.jit.script's CPU kernels need LLVM, and torch's packages are built without it.
        has_llvm = getattr(torch._C, "_llvm_enabled", lambda: True)()
        why = "" if has_llvm else ": on a CPU it needs a torch built with LLVM, and this one is not"
        parts.append(f"torch.jit.script fused nothing{why}")
    return "; ".join(parts)


def listing(kind: str, sample: str, counts: Mapping[str, int], num_samples: int) -> str:
    """Return how many of a kind each sample takes, and their names: `2 kernels a tensor: one, other`."""
    total = sum(counts.values())
    whole = all(count % num_samples == 0 for count in counts.values())
    share = num_samples if whole else 1
    per = f"a {sample}" if whole else f"for {num_samples} {sample}s"
    number = total // share
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    names = [f"{name} x{count // share}" if count > share else name for name, count in ranked[:_NUM_NAMED]]
    if len(ranked) > _NUM_NAMED:
        names.append(f"{len(ranked) - _NUM_NAMED} others")
    text = f"{number} {kind}{'' if number == 1 else 's'} {per}"
    return f"{text}: {', '.join(names)}" if names else text


def short_name(kernel: str) -> str:
    """Return a CUDA kernel's name without types, with the operation of one of torch's templates.

    `void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<..., MulFunctor<...>>...>` is
    `vectorized_elementwise_kernel(Mul)`.
    """
    name = re.split(r"[<(]", kernel.removeprefix("void "), maxsplit=1)[0].strip()
    base = name.rpartition("::")[2] or kernel
    if base == kernel:
        return base
    operations = re.findall(r"CUDAFunctor\w*?_(\w+)|(\w+?)(?:_kernel_cuda|Functor\b)", kernel)
    return f"{base}({operations[-1][0] or operations[-1][1]})" if operations else base


def is_scripted(model: nn.Module) -> bool:
    """Return whether torch.jit.script made a part of `model`, or a function in it."""
    return any(
        isinstance(module, torch.jit.ScriptModule)
        or any(isinstance(value, torch.jit.ScriptFunction) for value in vars(module).values())
        for module in model.modules()
    )


def _is_operator(name: str) -> bool:
    return name.startswith(("aten::", _FUSED))


def _written_kernels(graphs: int) -> Counter[str]:
    """Return the kernels that torch.compile wrote for a CPU, each as often as its graph was called.

    If this process compiled several graphs, their numbers of calls are unknown, and each counts once.
    """
    code_cache = sys.modules.get("torch._inductor.codecache")
    modules: list[object] = list(getattr(getattr(code_cache, "PyCodeCache", None), "modules", ()))
    times = graphs if len(modules) == 1 else 1
    return Counter(
        {name: times for module in modules for name in vars(module) if name.startswith("cpp_fused")}
    )
