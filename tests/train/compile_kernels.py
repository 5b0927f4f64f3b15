"""Compile the kernels of fused blocks for GPUs that are not here, and print what each takes.

`PYTHONPATH=train:.build/triton python tests/train/compile_kernels.py`, after `make triton`. A line of JSON
for each: kernel, products, compute capability, registers a thread, bytes a thread that did not fit in them.
"""

import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from fastlaunch_train.models.fp8_fused import attention_backward, kernels

#: Ampere, which has no FP8, Ada, Hopper, and Blackwell's two.
CAPABILITIES = (80, 89, 90, 100, 120)
TYPES = {
    **dict.fromkeys(("x", "branch", "total", "skip", "gradient", "hidden"), "*bf16"),
    **dict.fromkeys(("weight", "bias", "velocity", "partial", "scale_in", "amax"), "*fp32"),
    **dict.fromkeys(("mean_out", "rstd_out", "mean_in", "rstd_in"), "*fp32"),
    **dict.fromkeys(("lr", "momentum", "decay", "eps"), "fp32"),
    **dict.fromkeys(("num_rows", "width"), "i32"),
    "transposed": "*i32",
}
WIDTH, MLP_WIDTH = 1280, 5120
FP8_ONLY = {"transposed": None, "scale_in": None, "amax": None}


def cases() -> Iterator[tuple[Any, str, dict[str, Any], Mapping[str, str], int]]:
    """Each kernel with its constants as it ships, types that are not the usual ones, and warps."""
    norm_rows, norm_columns, norm_warps = kernels._NORM
    for products, constants, forward, backward in (
        ("fp8", {}, {"out": "*fp8e4nv"}, {"out": "*fp8e5"}),
        ("bf16", FP8_ONLY, {"out": "*bf16"}, {"out": "*bf16"}),
    ):
        for has_branch in (True, False):
            tile = {"ROWS": norm_rows, "COLUMNS": norm_columns, "WIDTH": WIDTH, "HAS_BRANCH": has_branch}
            yield kernels._norm_forward, products, {**tile, **constants}, forward, norm_warps
        rows, columns, tiles, warps = kernels._GELU
        tile = {"ROWS": rows, "COLUMNS": columns, "TILES": tiles, "WIDTH": MLP_WIDTH}
        yield kernels._gelu_forward, products, {**tile, **constants}, forward, warps
        rows, columns, tiles, warps = kernels._GELU_BACKWARD
        tile = {"ROWS": rows, "COLUMNS": columns, "TILES": tiles, "WIDTH": MLP_WIDTH}
        yield kernels._gelu_backward, products, {**tile, **constants}, backward, warps
        rows, columns, tiles, warps = kernels._CAST
        tile = {"ROWS": rows, "COLUMNS": columns, "TILES": tiles, "WIDTH": WIDTH, "OUT_COLUMN": WIDTH}
        of_gradient = {**tile, "OUT_WIDTH": 3 * WIDTH, "SUMS": True, "E5": True}
        yield kernels._cast_transpose, products, {**of_gradient, **constants}, backward, warps
        of_weight = {**tile, "OUT_COLUMN": 0, "OUT_WIDTH": WIDTH, "SUMS": False, "E5": False, "partial": None}
        yield kernels._cast_transpose, products, {**of_weight, **constants}, {**forward, "x": "*fp32"}, warps
    # Where nothing is written but the sums.
    yield kernels._cast_transpose, "bf16", {**of_gradient, **FP8_ONLY, "out": None}, {}, warps
    rows, columns, warps = kernels._SGD
    tile = {"ROWS": rows, "COLUMNS": columns, "WIDTH": WIDTH, "HAS_MOMENTUM": True}
    yield kernels._sgd_cast, "fp8", tile, {"gradient": "*fp32", "out": "*fp8e4nv"}, warps
    num_programs, warps = kernels._NORM_BACKWARD
    halves = {"LEFT": 1024, "RIGHT": 256, "NUM_PROGRAMS": num_programs}
    yield kernels._norm_backward, "bf16", halves, {"out": "*bf16"}, warps
    yield kernels._sum_rows, "bf16", {"ROWS": 64, "COLUMNS": 32}, {"out": "*fp32"}, 4


def compiled(
    kernel: Any, constants: Mapping[str, Any], types: Mapping[str, str], capability: int, warps: int
) -> tuple[int, int]:
    """Return registers and spilt bytes a thread."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else {**TYPES, **types}[name] for name in names}
    # As tensors of torch's are, and numbers of rows.
    aligned = [name for name, of in signature.items() if of.startswith("*") or name in ("num_rows", "width")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return usage_of(source, capability, warps)


def compiled_attention(right: int, *, among_ranks: bool) -> tuple[int, int]:
    """Return registers and spilt bytes a thread, of heads of 64 + `right` columns."""
    kernel = attention_backward._attention_backward
    names = kernel.arg_names
    constants = {"HEADS": 16, "TOKENS": 197, "RIGHT": right}
    if not among_ranks:
        constants["num_taken"] = None
    types = {"lse_in": "*fp32", "num_taken": "*i32", "scale": "fp32", "scale_log2": "fp32"}
    for name in names:
        columns = right if name.endswith("_right") and right else 64
        layout = gl.NVMMASharedLayout(2 * columns, 16, 3)
        if name.endswith(("_left", "_right")):
            types[name] = f"tensordesc<bf16[1, 256, {columns}],{layout!r}>"
    source = GluonASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index("lse_in"),): [["tt.divisibility", 16]]},
    )
    return usage_of(source, 90, attention_backward.NUM_WARPS)


def usage_of(source: ASTSource, capability: int, warps: int) -> tuple[int, int]:
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", usage)
    assert match, usage
    return int(match[1]), int(match[2]) + int(match[3])


if __name__ == "__main__":
    for kernel, products, constants, types, warps in cases():
        for capability in CAPABILITIES:
            if products == "bf16" or capability >= 89:
                registers, spilt = compiled(kernel, constants, types, capability, warps)
                name = kernel.fn.__name__
                print(json.dumps([name, products, capability, registers, spilt]), flush=True)
    for right, among_ranks in itertools.product((0, 16), (False, True)):
        usage = compiled_attention(right, among_ranks=among_ranks)
        print(json.dumps([f"attention of {64 + right}", "bf16", 90, *usage]), flush=True)
