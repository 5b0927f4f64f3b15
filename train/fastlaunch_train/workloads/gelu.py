"""GELU written out in five operations, to measure what the fusion of pointwise functions gains.

`gelu` or `gelu:ROWSxCOLUMNS`. A batch is several tensors, and a step is one forward call for each, so that
only the call is timed. Every step has the same tensors: drawing new ones takes longer than the function.
Every run is a separate process, so that no compiler's cache carries over from one shape, dtype or device to
another. The first calls, in which torch.jit.script watches and then compiles, are a phase before the steps.
"""

import itertools
import re
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from fastlaunch_train.records.data_identity import DataIdentity
from fastlaunch_train.workloads.contract import Batch, DataRequest, Workload
from fastlaunch_train.workloads.registry import WorkloadError

#: The input of GELU in ViT-Huge: 64 images x 197 tokens, by the width inside the MLP.
ROWS, COLUMNS = 64 * 197, 5120
#: Number of values of each tensor that the checks compare, evenly spread.
COMPARED = 65_536
#: The warning of new torch releases about torch.jit.script, which this workload measures.
SCRIPT_WARNING = r"`torch\.jit\.script` is (deprecated|not supported)"
#: Every change of what is drawn needs a new version.
SYNTHETIC = DataIdentity(generator="normal tensors", generator_version=1, seeded_by="seed, rank, world size")

Function = Callable[[torch.Tensor], torch.Tensor]


def build(name: str) -> Workload:
    """Return the workload called `gelu` or `gelu:ROWSxCOLUMNS`."""
    rows, columns = shape_of(name)
    return Workload(
        name=name,
        sample_unit="tensors",
        build_model=GeluCalls,
        batches=partial(tensors, rows, columns),
        loss=first_value,
        blocks=_functions,
        outputs=some_values,
        pointwise=choose_function,
        trains=False,
        data_identity=lambda source: SYNTHETIC,
    )


def shape_of(name: str) -> tuple[int, int]:
    """Return (rows, columns) of the workload called `name`."""
    match = re.fullmatch(r"gelu:(\d+)x(\d+)", name)
    return (int(match[1]), int(match[2])) if match else (ROWS, COLUMNS)


def written_gelu(x: torch.Tensor) -> torch.Tensor:
    """Return GELU in five operations, as in the fourth experiment; 1.41421 is the square root of 2."""
    return x * 0.5 * (1.0 + torch.erf(x / 1.41421))


def function_of(kind: str) -> Function:
    """Return the GELU of a recipe's `pointwise`: `written`, `library`, or `scripted`, new each time."""
    if kind == "scripted":
        # torch.jit.script caches compiled code by function.
        unseen = types.FunctionType(written_gelu.__code__, globals(), written_gelu.__name__)
        unseen.__annotations__ = written_gelu.__annotations__
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", SCRIPT_WARNING, DeprecationWarning)
            scripted: Function = torch.jit.script(unseen)
        return scripted
    plain: dict[str, Function] = {"written": written_gelu, "library": nn.functional.gelu}
    return plain[kind]


class Gelu(nn.Module):
    """Applies `function`, a GELU, to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.function: Function = written_gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class GeluCalls(nn.Module):
    """Calls GELU once for each of a batch's tensors, and returns a list. It has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.functions = nn.ModuleList([Gelu()])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the results for x: (tensors, rows, columns)."""
        (function,) = self.functions
        # Compute in the tensors' dtype: under autocast torch.jit.script would compute in fp32.
        with torch.autocast(x.device.type, enabled=False):
            return [function(tensor) for tensor in x.unbind()]


def choose_function(model: nn.Module, kind: str) -> None:
    """Have `model` compute GELU with the function of `kind`."""
    for module in _functions(model):
        assert isinstance(module, Gelu)
        module.function = function_of(kind)


def first_value(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the first value of the last result, which serves as a loss; no kernel runs to read it."""
    (x,) = batch
    result: torch.Tensor = model(x)[-1]
    return result[0, 0]


def some_values(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return (tensors, at most COMPARED values of each), evenly spread."""
    (x,) = batch
    stride = -(-x[0].numel() // COMPARED)
    return torch.stack([result.flatten()[::stride] for result in model(x)])


def tensors(rows: int, columns: int, request: DataRequest) -> Iterator[Batch]:
    """Return the same tensors forever: (batch_size, rows, columns) in the requested dtype, on the device.

    They are standard normal, by seed and rank: constant data would draw less power and run at higher clocks.
    Raises WorkloadError for another data source.
    """
    if request.source != "synthetic":
        raise WorkloadError(f"the gelu workload makes its own data, not {request.source}", "leave out --data")
    generator = torch.Generator(request.device)
    generator.manual_seed(request.seed * request.world_size + request.rank)
    # Tensor by tensor: a whole batch drawn in fp32 would take twice the memory of one in bf16.
    x = torch.empty(request.batch_size, rows, columns, dtype=request.dtype, device=request.device)
    for tensor in x:
        tensor.normal_(generator=generator)
    return itertools.repeat((x,))


def _functions(model: nn.Module) -> nn.ModuleList:
    functions = model.functions
    assert isinstance(functions, nn.ModuleList)
    return functions
