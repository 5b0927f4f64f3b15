"""Which recipes a machine can run: what each needs of hardware and software, and which runs instead."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fastlaunch_train.models.te_fp8 import TE_RELEASES
from fastlaunch_train.recipes.recipes import Recipe
from fastlaunch_train.recipes.rules import TE_SCALINGS, TORCHAO_SCALINGS, ZERO_STAGES

#: FP8 matrix units: Ada (8.9), Hopper, Blackwell. TF32, and Transformer Engine: Ampere (8.0).
FP8_CAPABILITY = (8, 9)
TF32_CAPABILITY = (8, 0)
#: What triton, which inductor writes its GPU kernels in, supports.
TRITON_CAPABILITY = (7, 0)
#: What inductor compiles bf16 for. On less it warns, and runs eagerly what it was to compile (torch 2.13, in
#: `_inductor.compile_fx._check_triton_bf16_support`).
COMPILED_BF16_CAPABILITY = (8, 0)
#: Of products scaled in blocks of 128 values, and by rows: Hopper. (Transformer Engine's support matrix.)
SCALED_CAPABILITY = (9, 0)
BLOCK_SCALING_CUDA = (12, 9)
#: Blackwell computes products scaled in blocks of 128 by way of MXFP8, since this release.
BLOCKS_ON_BLACKWELL, BLOCKS_ON_BLACKWELL_RELEASE = (10, 0), (2, 9)
#: Blackwell of data centers; that of workstations, from 12.0 on, lacks some of the products.
MXFP8_CAPABILITY = (10, 0)
NO_MXFP8_CAPABILITY = (12, 0)

Version = tuple[int, ...]

#: The oldest torch with `Module.compile`, with `fully_shard` where it is imported from here, with fp16
#: autocast and loss scaling on a CPU, and with fused SGD and AdamW on every device.
COMPILE_TORCH = (2, 2)
FSDP2_TORCH = (2, 6)
#: On a CPU 2.6 fails in the first pass (its streams record no events), and 2.9 is the next that was tried.
FSDP2_CPU_TORCH = (2, 9)
CPU_FP16_TORCH = (2, 3)
FUSED_TORCH = (2, 4)
#: The oldest torchao whose float8 configurations go by name.
TORCHAO_RELEASE = (0, 9)

#: Which extra of this package installs what.
EXTRAS = {
    "transformer_engine": "te",
    "torchao": "float8",
    "deepspeed": "deepspeed",
    "lightning": "lightning",
    "transformers": "train",
    "accelerate": "train",
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What decides which recipes run here.

    compute_capability: of the GPU; None without one. cuda: that torch was built with. The rest are functions
    because finding out takes time: version_of a distribution, None if it is not installed; the problems say
    why a thing cannot be used, and are None if it can; scaling_problem is Transformer Engine's own word on
    one of its FP8 scalings.
    """

    device_type: str
    compute_capability: tuple[int, int] | None
    cuda: Version | None
    version_of: Callable[[str], Version | None]
    transformer_engine_problem: Callable[[], str | None]
    scaling_problem: Callable[[str], str | None]
    ort_problem: Callable[[], str | None]
    inductor_problem: Callable[[], str | None]
    compile_backends: Callable[[], list[str]]


def missing_part(recipe: Recipe, machine: Machine) -> str | None:
    """What `recipe` needs and `machine` has not; None if it can run."""
    for needs in (_gpu, _release, _transformer_engine, _torchao, _compile, _engine, _parallelism, _loop):
        for missing in needs(recipe, machine):
            return missing
    return None


def dotted(version: Version) -> str:
    """`9.15.1` of (9, 15, 1)."""
    return ".".join(map(str, version))


def _gpu(recipe: Recipe, machine: Machine) -> Iterator[str]:
    """What the recipe's products and blocks need of the GPU."""
    if recipe.fp8_scaling == "mxfp8":
        yield from _capability("MXFP8", MXFP8_CAPABILITY, machine, "Blackwell")
        if machine.compute_capability is not None and machine.compute_capability >= NO_MXFP8_CAPABILITY:
            yield f"MXFP8 has not all its products on compute capability {dotted(NO_MXFP8_CAPABILITY)} and up"
    elif recipe.fp8_scaling == "block":
        yield from _capability("FP8 block scaling", SCALED_CAPABILITY, machine, "Hopper")
        if machine.cuda is not None and machine.cuda < BLOCK_SCALING_CUDA:
            yield (
                f"FP8 block scaling needs a torch built with CUDA {dotted(BLOCK_SCALING_CUDA)}, "
                f"and this one has {dotted(machine.cuda)}"
            )
    elif recipe.fp8_scaling in TE_SCALINGS:
        yield from _capability("FP8", FP8_CAPABILITY, machine, "Ada")
    elif recipe.fp8_scaling == "rowwise" and machine.compute_capability is not None:
        # On a CPU torchao's products are emulated: nothing to time, but what they compute can be seen.
        yield from _capability("FP8 scaled by rows", SCALED_CAPABILITY, machine, "Hopper")
    elif recipe.fp8_scaling == "tensorwise" and machine.compute_capability is not None:
        yield from _capability("FP8", FP8_CAPABILITY, machine, "Ada")
    elif recipe.blocks != "native":
        yield from _capability("Transformer Engine", TF32_CAPABILITY, machine, "Ampere")
    if recipe.precision == "tf32":
        yield from _capability("TF32", TF32_CAPABILITY, machine, "Ampere")


def _release(recipe: Recipe, machine: Machine) -> Iterator[str]:
    """What plain recipes need of torch, which may be old where ORTModule is."""
    if recipe.precision == "fp16" and machine.compute_capability is None:
        yield from _torch("fp16 on a CPU", CPU_FP16_TORCH, machine)
    if recipe.optimizer_impl == "fused":
        yield from _torch("optimizer_impl fused", FUSED_TORCH, machine)


def _capability(what: str, needed: tuple[int, int], machine: Machine, name: str) -> Iterator[str]:
    found = machine.compute_capability
    if found is None:
        yield f"{what} needs an NVIDIA GPU, and there is none here"
    elif found < needed:
        yield f"{what} needs compute capability {dotted(needed)} ({name}), and this GPU has {dotted(found)}"


def _transformer_engine(recipe: Recipe, machine: Machine) -> Iterator[str]:
    if recipe.blocks == "native":
        return
    problem = machine.transformer_engine_problem()
    if problem is not None:
        yield problem
    if recipe.fp8_scaling not in TE_SCALINGS:
        return
    needed, found = TE_RELEASES[recipe.fp8_scaling], machine.version_of("transformer_engine")
    there = ""
    if recipe.fp8_scaling == "block" and (machine.compute_capability or ()) >= BLOCKS_ON_BLACKWELL:
        needed, there = BLOCKS_ON_BLACKWELL_RELEASE, " on Blackwell"
    if found is not None and found < needed:
        yield (
            f"fp8_scaling {recipe.fp8_scaling}{there} needs Transformer Engine {dotted(needed)}, "
            f"and {dotted(found)} is installed"
        )
    problem = machine.scaling_problem(recipe.fp8_scaling)
    if problem is not None:
        yield f"Transformer Engine refuses fp8_scaling {recipe.fp8_scaling}: {problem}"


def _torchao(recipe: Recipe, machine: Machine) -> Iterator[str]:
    if recipe.fp8_scaling in TORCHAO_SCALINGS:
        yield from _package(f"fp8_scaling {recipe.fp8_scaling}", "torchao", machine, TORCHAO_RELEASE)


def _compile(recipe: Recipe, machine: Machine) -> Iterator[str]:
    if recipe.compile_mode == "none":
        return
    yield from _torch("torch.compile", COMPILE_TORCH, machine)
    if recipe.compile_backend == "inductor":
        if machine.compute_capability is not None:
            yield from _capability("torch.compile", TRITON_CAPABILITY, machine, "Volta")
            if recipe.precision in ("bf16", "fp8"):
                yield from _capability("torch.compile of bf16", COMPILED_BF16_CAPABILITY, machine, "Ampere")
        problem = machine.inductor_problem()
        if problem is not None:
            yield problem
        return
    known = machine.compile_backends()
    if recipe.compile_backend not in known:
        yield f"torch.compile has no backend {recipe.compile_backend!r} here (known: {', '.join(known)})"


def _engine(recipe: Recipe, machine: Machine) -> Iterator[str]:
    problem = machine.ort_problem() if recipe.engine == "ort" else None
    if problem is not None:
        yield problem


def _parallelism(recipe: Recipe, machine: Machine) -> Iterator[str]:
    if recipe.parallelism == "fsdp2":
        yield from _torch("fully_shard", FSDP2_TORCH, machine)
        if machine.compute_capability is None:
            yield from _torch("fully_shard on a CPU", FSDP2_CPU_TORCH, machine)
    if recipe.parallelism in ZERO_STAGES:
        yield from _package(f"parallelism {recipe.parallelism}", "deepspeed", machine)


def _loop(recipe: Recipe, machine: Machine) -> Iterator[str]:
    packages = {"ours": (), "lightning": ("lightning",), "transformers": ("transformers", "accelerate")}
    for package in packages[recipe.loop]:
        yield from _package(f"loop {recipe.loop}", package, machine)


def _package(what: str, package: str, machine: Machine, needed: Version = ()) -> Iterator[str]:
    found = machine.version_of(package)
    how = f"the extra `{EXTRAS[package]}` installs it"
    if found is None:
        yield f"{what} needs {package}, which is not installed ({how})"
    elif found < needed:
        yield f"{what} needs {package} {dotted(needed)}, and {dotted(found)} is installed ({how})"


def _torch(what: str, needed: Version, machine: Machine) -> Iterator[str]:
    found = machine.version_of("torch")
    if found is not None and found < needed:
        yield f"{what} needs torch {dotted(needed)}, and {dotted(found)} is installed"
