"""How long the passes of fused blocks take on this GPU, beside a copy of as many bytes.

    cd tests; PYTHONPATH=../train python -m benchmarks.passes [--only norm] [--products fp8]
        [--try norm_forward 32,128,8 16,256,8] [--against OTHER/kernels.py]

Each pass is first compared with plain torch. Then CUDA graphs of it, on several sets of tensors so that the
L2 cache holds none, are replayed in turns with graphs of copies on the device, there and back (A B B A), so
that a drift of the clocks cancels. A row has the median time, the bytes that have to be read and written
once, their rate, the time as a multiple of the copy's, and the largest relative error of a result.

--try      times one kernel with other constants, those of kernels.py: its tile and number of warps. A tile's
           columns have to divide the width.
--against  times another version of kernels.py, too: below 1, the one here is faster
"""

import argparse
import importlib.util
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton

from fastlaunch_train.models.fp8_fused import kernels, reference
from fastlaunch_train.models.fp8_fused.reference import E4M3, E5M2

CONSTANTS = {
    "norm_forward": "_NORM",
    "norm_backward": "_NORM_BACKWARD",
    "gelu_forward": "_GELU",
    "gelu_backward": "_GELU_BACKWARD",
    "cast_transpose": "_CAST",
    "sgd_cast": "_SGD",
}
#: A result that is further off than this is not timed.
MOST_ERROR = 0.01
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Pass:
    kernel: str
    variant: str
    draw: Callable[[], Tensors]  #: new tensors, each of which the pass reads
    compute: Callable[[ModuleType, Tensors], Sequence[Any]]
    num_updated: int = 0  #: of the first tensors, which it also writes


def passes(rows: int, width: int, *, in_fp8: bool, device: str) -> Iterator[Pass]:
    forward, backward = (E4M3, E5M2) if in_fp8 else (torch.bfloat16, torch.bfloat16)
    scaled = (torch.full((1,), 20.0, device=device), torch.zeros(1, device=device))
    given = scaled if in_fp8 else (None, None)
    stream, hidden, matrix = (rows, width), (rows, 4 * width), (4 * width, width)

    def draw(*shapes: tuple[int, ...]) -> Tensors:
        """Vectors and weights are in fp32."""
        return tuple(
            torch.randn(of, device=device, dtype=torch.bfloat16 if of in (stream, hidden) else torch.float32)
            for of in shapes
        )

    def update(of: ModuleType, tensors: Tensors) -> Sequence[Any]:
        weight, velocity, gradient = tensors
        rounded = [torch.empty(shape, device=device, dtype=E4M3) for shape in (matrix, matrix[::-1])]
        of.sgd_cast(weight, gradient, velocity, *rounded, *scaled, lr=1e-3, momentum=0.9, decay=0.01)
        return weight, velocity, *rounded

    yield Pass(
        "norm_forward", "with a branch", lambda: draw(stream, stream, (width,), (width,)),
        lambda of, tensors: of.norm_forward(*tensors, 1e-6, *given, forward),
    )  # fmt: skip
    yield Pass(
        "norm_forward", "without", lambda: draw(stream, (width,), (width,)),
        lambda of, tensors: of.norm_forward(tensors[0], None, *tensors[1:], 1e-6, *given, forward),
    )  # fmt: skip
    if not in_fp8:
        yield Pass(
            "norm_backward", "", lambda: draw(stream, stream, stream, (width,), (rows,), (rows,)),
            lambda of, tensors: of.norm_backward(*tensors),
        )  # fmt: skip
    yield Pass(
        "gelu_forward", "", lambda: draw(hidden),
        lambda of, tensors: of.gelu_forward(*tensors, *given, forward),
    )  # fmt: skip
    yield Pass(
        "gelu_backward", "", lambda: draw(hidden, hidden),
        lambda of, tensors: of.gelu_backward(*tensors, *given, backward),
    )  # fmt: skip
    if in_fp8:
        yield Pass(
            "cast_transpose", "1 part", lambda: draw(stream),
            lambda of, tensors: of.cast_transpose(tensors, *given, forward, sums=False),
        )  # fmt: skip
        yield Pass("sgd_cast", "", lambda: draw(matrix, matrix, matrix), update, num_updated=2)
    for variant, parts in (("3 parts, sums", [stream] * 3), ("1 part, sums", [stream])):
        yield Pass(
            "cast_transpose", variant, lambda parts=parts: draw(*parts),
            lambda of, tensors: of.cast_transpose(tensors, *given, backward, sums=True),
        )  # fmt: skip


def num_bytes(tensors: Sequence[Any], seen: set[int]) -> int:
    """Return the bytes of the tensors whose memory is not `seen`, and add it."""
    total = 0
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and (place := tensor.untyped_storage().data_ptr()) not in seen:
            seen.add(place)
            total += tensor.numel() * tensor.itemsize
    return total


def largest_error(results: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest relative error. Raises ValueError if a result is not finite or too far off."""
    largest = 0.0
    for ours, theirs in zip(results, expected, strict=True):
        if ours is not None:
            norm = theirs.float().norm()
            error = float((ours.float() - theirs.float()).norm() / norm)
            # A NaN is not below it.
            if not error < MOST_ERROR:
                raise ValueError(f"wrong: a result is off by {error:.2g}")
            largest = max(largest, error)
    return largest


def check(of: ModuleType, each: Pass, tensors: Tensors) -> tuple[float, int]:
    """Return the largest relative error and the bytes that the pass has to move."""
    given, copies = (tuple(tensor.clone() for tensor in tensors) for _ in range(2))
    results = each.compute(of, given)
    error = largest_error(results, each.compute(reference, copies))
    seen: set[int] = set()
    num_read = num_bytes(given, seen)
    return error, num_read + num_bytes(given[: each.num_updated], set()) + num_bytes(results, seen)


def captured(compute: Callable[[Tensors], Any], sets: Sequence[Tensors]) -> torch.cuda.CUDAGraph:
    """Return a graph that computes on each of the sets, into memory of its own."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [compute(tensors) for tensors in sets]
    del kept
    return graph


def in_turns(replays: Sequence[Callable[[], None]], num_rounds: int) -> list[list[float]]:
    """Return each one's milliseconds a round: the mean of two, one on the way there and one back."""
    order = [*range(len(replays)), *reversed(range(len(replays)))]
    for index in order:
        replays[index]()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_rounds * len(order) + 1)]
    marks[0].record()
    for mark, index in zip(marks[1:], order * num_rounds, strict=True):
        replays[index]()
        mark.record()
    torch.cuda.synchronize()
    spans = [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]
    rounds = [spans[start : start + len(order)] for start in range(0, len(spans), len(order))]
    return [[(times[index] + times[-1 - index]) / 2 for times in rounds] for index in range(len(replays))]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("other_kernels", path)
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tile(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def row(each: Pass, sets: Sequence[Tensors], other: ModuleType | None, num_rounds: int) -> str:
    """Return a pass's cells, timed with the constants that kernels.py has now."""
    error, num_moved = check(kernels, each, sets[0])
    graphs = [captured(lambda tensors: each.compute(kernels, tensors), sets)]
    # In whole MiB: some copies of other sizes took half as long again (one H200, 25 Nov 2026).
    num_copied = max(1, num_moved // 2 >> 20) << 20
    pairs = [tuple(torch.zeros(2, num_copied, dtype=torch.uint8, device="cuda")) for _ in sets]
    graphs.append(captured(lambda pair: pair[0].copy_(pair[1]), pairs))
    if other:
        check(other, each, sets[0])
        graphs.append(captured(lambda tensors: each.compute(other, tensors), sets))
    times = in_turns([graph.replay for graph in graphs], num_rounds)
    ours, copy, *_ = (statistics.median(found) / len(sets) for found in times)
    beside = (ours / num_moved) / (copy / (2 * num_copied))
    cells = f"{ours:9.4f} {num_moved / 1e6:8.1f} {num_moved / ours / 1e9:6.2f} {beside:6.2f} {error:8.1e}"
    if other:
        ratios = [a / b for a, b in zip(times[0], times[2], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cells += f"  {middle:.3f} ({low:.3f} to {high:.3f})"
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256 * 197)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--products", choices=("fp8", "bf16"), nargs="+", default=("fp8", "bf16"))
    parser.add_argument("--only", default="", help="part of the kernels' names")
    parser.add_argument("--try", dest="attempts", nargs="+", metavar=("KERNEL", "TILE"))
    parser.add_argument("--against", type=Path)
    parser.add_argument("--sets", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    kernel, *texts = options.attempts or [""]
    if kernel and kernel not in CONSTANTS:
        parser.error(f"--try takes one of {', '.join(CONSTANTS)}")
    other = load(options.against) if options.against else None
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"{'':54}  {'ms':>9} {'MB':>8} {'TB/s':>6} {'x copy':>6} {'error':>8}{'  x other' * bool(other)}")
    for products in options.products:
        torch.manual_seed(0)
        for each in passes(options.rows, options.width, in_fp8=products == "fp8", device="cuda"):
            if options.only not in each.kernel or kernel not in ("", each.kernel):
                continue
            sets = [each.draw() for _ in range(options.sets)]
            constant = CONSTANTS[each.kernel]
            shipped = getattr(kernels, constant)
            for constants in (shipped, *map(tile, texts)):
                setattr(kernels, constant, constants)
                try:
                    cells = row(each, sets, other, options.rounds)
                except (ValueError, triton.CompilationError, triton.OutOfResources) as error:
                    cells = str(error)
                name = f"{each.kernel} {each.variant}".strip()
                print(f"{name:34} {products:4} {','.join(map(str, constants)):>14}  {cells}", flush=True)
            setattr(kernels, constant, shipped)
            del sets
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
