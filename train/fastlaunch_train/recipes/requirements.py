"""What hardware and software each recipe needs: one table, for this machine and for one to be rented."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from fastlaunch_train.recipes.recipe import (
    CUDA_GRAPH_MODES,
    TE_SCALINGS,
    TORCHAO_SCALINGS,
    ZERO_STAGES,
    Recipe,
)

Version = tuple[int, ...]

#: The extra of this package that installs each package.
EXTRAS = {
    "transformer_engine": "te",
    "torchao": "float8",
    "peft": "tune",
    "liger_kernel": "tune",
    "deepspeed": "deepspeed",
    "lightning": "lightning",
    "transformers": "train",
    "accelerate": "train",
    "torch_ort": "ort",
}
#: The command that installs an extra of the package that is installed, in whatever folder.
INSTALL_EXTRA = "pip install 'fastlaunch[{}]'"
#: The first compute capability with units for bf16.
BF16_CAPABILITY = (8, 0)
#: The oldest torchao whose float8 configurations go by name.
TORCHAO_RELEASE = (0, 9)

#: The oldest torchao with the tensors of frozen weights where they are imported from.
FROZEN_RELEASE = (0, 15)

_GENERATIONS: Mapping[Version, str] = {
    (7, 0): "Volta",
    (8, 0): "Ampere",
    (8, 9): "Ada",
    (9, 0): "Hopper",
    (10, 0): "Blackwell",
}
_TE_BLOCKS = ("te", "te-article")


def _nothing(_: str) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The properties of a machine that decide which recipes run. The version () is unknown and suffices."""

    #: The GPU's; None without one.
    compute_capability: Version | None
    #: The GPU in words.
    gpu: str = "this GPU"
    #: The CUDA version that torch was built with; None without CUDA.
    cuda: Version | None = ()
    #: The version of an installed package, by the name it is imported by; None if it is not installed.
    version_of: Callable[[str], Version | None] = lambda _: ()
    #: Why a package cannot be used; None if it can. This and what follows may take time to find out.
    package_problem: Callable[[str], str | None] = _nothing
    #: Why Transformer Engine refuses one of its FP8 scalings on this GPU; None if it does not.
    scaling_problem: Callable[[str], str | None] = _nothing
    #: Why torch.compile cannot use a backend; None if it can.
    compile_problem: Callable[[str], str | None] = _nothing


#: What a machine lacks for a recipe, in words; None if nothing.
Missing = Callable[[Recipe, Capabilities], str | None]


@dataclass(frozen=True)
class Requirement:
    """What recipes with certain values of their fields need of a machine."""

    #: Field -> its values that need it. All fields have to match.
    fields: Mapping[str, tuple[object, ...]]
    missing: Missing
    package: str | None = None  #: what has to be installed, by the name that is imported

    def is_of(self, recipe: Recipe) -> bool:
        """Return whether the recipe needs it."""
        return all(getattr(recipe, field) in values for field, values in self.fields.items())


def _gpu(what: str, least: Version, *, below: Version | None = None, runs_on_cpu: bool = False) -> Missing:
    """Require a GPU of compute capability `least` or more, and less than `below`, or perhaps no GPU."""

    def missing(recipe: Recipe, machine: Capabilities) -> str | None:
        capability = machine.compute_capability
        if capability is None:
            return None if runs_on_cpu else f"{what} needs an NVIDIA GPU, and there is none"
        if not capability:
            return None
        if capability < least:
            return (
                f"{what} needs compute capability {dotted(least)} ({_GENERATIONS[least]}), "
                f"and {machine.gpu} has {dotted(capability)}"
            )
        if below and capability >= below:
            return (
                f"{what} lacks some of its products from compute capability {dotted(below)} on, "
                f"and {machine.gpu} has {dotted(capability)}"
            )
        return None

    return missing


def _cuda(what: str, least: Version) -> Missing:
    """Require a torch that was built with CUDA `least` or newer."""

    def missing(recipe: Recipe, machine: Capabilities) -> str | None:
        if not machine.cuda or machine.cuda >= least:
            return None
        return f"{what} needs CUDA {dotted(least)}, and torch has {dotted(machine.cuda)}"

    return missing


def _package(
    fields: Mapping[str, tuple[object, ...]],
    package: str,
    least: Version = (),
    *,
    what: str = "",
    only_on_cpu: bool = False,
    from_capability: Version = (),
) -> Requirement:
    """Require a package in release `least` or newer; only without a GPU, or from a compute capability on."""

    def missing(recipe: Recipe, machine: Capabilities) -> str | None:
        capability = machine.compute_capability
        if (only_on_cpu and capability is not None) or (capability or ()) < from_capability:
            return None
        if problem := machine.package_problem(package):
            return problem
        version = machine.version_of(package)
        if version is not None and (not version or version >= least):
            return None
        named = what or " and ".join(f"{field} {getattr(recipe, field)}" for field in fields)
        extra = f" ({INSTALL_EXTRA.format(EXTRAS[package])})" if package in EXTRAS else ""
        if version is None:
            return f"{named} needs {package}, which is not installed{extra}"
        return f"{named} needs {package} {dotted(least)}, and {dotted(version)} is installed{extra}"

    return Requirement(fields, missing, package)


def _scaling_refused(recipe: Recipe, machine: Capabilities) -> str | None:
    problem = machine.scaling_problem(recipe.fp8_scaling)
    return problem and f"Transformer Engine refuses fp8_scaling {recipe.fp8_scaling}: {problem}"


_COMPILED = {"compile_mode": ("default", *CUDA_GRAPH_MODES)}
_INDUCTOR = {**_COMPILED, "compile_backend": ("inductor",)}
_FSDP2 = {"parallelism": ("fsdp2",)}
#: In the order in which they are looked at: the GPU first, then releases, then what takes time to find out.
REQUIREMENTS: tuple[Requirement, ...] = (
    # Matrix units. torchao's products are emulated on a CPU: nothing to time, but to see what they compute.
    # Data centers' Blackwell has MXFP8; that of workstations, from 12.0 on, lacks some of the products.
    Requirement({"fp8_scaling": ("mxfp8",)}, _gpu("MXFP8", (10, 0), below=(12, 0))),
    # Products scaled by blocks of 128 values, and by rows: Transformer Engine's support matrix.
    Requirement({"fp8_scaling": ("block",)}, _gpu("FP8 block scaling", (9, 0))),
    Requirement({"fp8_scaling": ("rowwise",)}, _gpu("FP8 scaled by rows", (9, 0), runs_on_cpu=True)),
    Requirement({"fp8_scaling": ("delayed", "current"), "blocks": _TE_BLOCKS}, _gpu("FP8", (8, 9))),
    # Their kernels round with instructions of Ada and newer; without a GPU torch computes the same.
    Requirement({"blocks": ("fused",), "precision": ("fp8",)}, _gpu("FP8", (8, 9), runs_on_cpu=True)),
    Requirement({"blocks": ("fused",)}, _gpu("bf16", BF16_CAPABILITY, runs_on_cpu=True)),
    Requirement({"blocks": ("native",), "step_graph": (True,)}, _gpu("a CUDA graph", (7, 0))),
    Requirement({"fp8_scaling": ("tensorwise",)}, _gpu("FP8", (8, 9), runs_on_cpu=True)),
    Requirement({"blocks": _TE_BLOCKS}, _gpu("Transformer Engine", (8, 0))),
    Requirement({"precision": ("tf32",)}, _gpu("TF32", (8, 0))),
    # triton, which inductor writes its kernels in, supports 7.0 and up. Below 8.0 inductor warns, and runs
    # eagerly what it was to compile in bf16 (torch 2.13, _inductor.compile_fx._check_triton_bf16_support).
    Requirement(_INDUCTOR, _gpu("torch.compile", (7, 0), runs_on_cpu=True)),
    Requirement(
        {**_INDUCTOR, "precision": ("bf16", "fp8")},
        _gpu("torch.compile of bf16", BF16_CAPABILITY, runs_on_cpu=True),
    ),
    Requirement({"fp8_scaling": ("block",)}, _cuda("FP8 block scaling", (12, 9))),
    # torch, which is old where ORTModule is: Module.compile; fp16 autocast and loss scaling on a CPU; fused
    # SGD and AdamW on every device; fully_shard where we import it from. On a CPU fully_shard fails in 2.6
    # (its streams record no events); 2.9 is the next that was tried.
    _package({"precision": ("fp16",)}, "torch", (2, 3), what="fp16 on a CPU", only_on_cpu=True),
    _package({"optimizer_impl": ("fused",)}, "torch", (2, 4)),
    _package(_COMPILED, "torch", (2, 2), what="torch.compile"),
    _package(_FSDP2, "torch", (2, 6), what="fully_shard"),
    _package(_FSDP2, "torch", (2, 9), what="fully_shard on a CPU", only_on_cpu=True),
    # Transformer Engine's releases, by its release notes.
    _package({"blocks": _TE_BLOCKS}, "transformer_engine", (2, 0)),
    _package({"fp8_scaling": ("current",)}, "transformer_engine", (2, 2)),
    _package({"fp8_scaling": ("block",)}, "transformer_engine", (2, 3)),
    # Blackwell computes products scaled by blocks of 128 by way of MXFP8, since this release.
    _package(
        {"fp8_scaling": ("block",)},
        "transformer_engine",
        (2, 9),
        what="fp8_scaling block on Blackwell",
        from_capability=(10, 0),
    ),
    Requirement({"fp8_scaling": TE_SCALINGS, "blocks": _TE_BLOCKS}, _scaling_refused),
    _package({"fp8_scaling": TORCHAO_SCALINGS}, "torchao", TORCHAO_RELEASE),
    _package({"frozen_weights": ("fp8", "nf4")}, "torchao", FROZEN_RELEASE),
    Requirement({"kernels": ("liger",)}, _gpu("Liger Kernel", BF16_CAPABILITY)),
    _package({"kernels": ("liger",)}, "liger_kernel", (0, 8)),
    Requirement(_COMPILED, lambda recipe, machine: machine.compile_problem(recipe.compile_backend)),
    _package({"engine": ("ort",)}, "torch_ort"),
    _package({"parallelism": ZERO_STAGES}, "deepspeed"),
    _package({"loop": ("lightning",)}, "lightning"),
    # This Trainer takes the mean of micro-batches; 4.46.1 adds them up.
    _package({"loop": ("transformers",)}, "transformers", (4, 49)),
    _package({"loop": ("transformers",)}, "accelerate"),
)


def missing_part(recipe: Recipe, machine: Capabilities) -> str | None:
    """Return what `recipe` needs and `machine` lacks, in words; None if the recipe can run."""
    return next(filter(None, (row.missing(recipe, machine) for row in requirements_of(recipe))), None)


def can_stand_in(recipe: Recipe, machine: Capabilities) -> bool:
    """Return whether `recipe` runs on `machine` and is worth proposing: FP8 on a CPU is only emulated."""
    if recipe.precision == "fp8" and machine.compute_capability is None:
        return False
    return missing_part(recipe, machine) is None


def requirements_of(recipe: Recipe) -> Iterator[Requirement]:
    """Yield the rows of the table that hold for `recipe`, in order."""
    return (row for row in REQUIREMENTS if row.is_of(recipe))


def needed_packages(recipe: Recipe) -> tuple[str, ...]:
    """Return what `recipe` needs beside torch, by the names that are imported."""
    packages = (row.package for row in requirements_of(recipe))
    return tuple(dict.fromkeys(package for package in packages if package not in (None, "torch")))


def bf16_emulation(recipe: Recipe, machine: Capabilities) -> str | None:
    """Return a warning where `recipe` computes in bf16 and the GPU has no units for it; else None."""
    # torch does not tell: its is_bf16_supported() counts emulation in.
    capability = machine.compute_capability
    if recipe.precision != "bf16" or not capability or capability >= BF16_CAPABILITY:
        return None
    return (
        f"recipe {recipe.label}: {machine.gpu} emulates bf16 with compute capability {dotted(capability)}. "
        f"GPUs compute in bf16 from {dotted(BF16_CAPABILITY)} on, so the figures say nothing about them. The "
        "nearest recipe that this GPU has units for is fp16"
    )


def caveats(recipe: Recipe, machine: Capabilities, *, world_size: int) -> Iterator[str]:
    """Yield warnings for the run's record."""
    if emulation := bf16_emulation(recipe, machine):
        yield emulation
    if recipe.blocks == "fused" and machine.compute_capability is None:
        yield "without a GPU plain torch computes what fused blocks do: their speed says nothing of a GPU's"
    if world_size > 1:
        if recipe.step_graph and recipe.blocks == "native":
            yield "step_graph with several ranks has no effect: no step is one CUDA graph"
        return
    if recipe.parallelism in ("fsdp2", *ZERO_STAGES):
        yield f"parallelism {recipe.parallelism} with one rank shards nothing: its figures say nothing of it"
    if recipe.wire_dtype != "fp32":
        yield f"wire_dtype {recipe.wire_dtype} with one rank has no effect: no gradient travels"


def dotted(version: Version) -> str:
    """Return `9.15.1` for (9, 15, 1)."""
    return ".".join(map(str, version))


def parse_version(text: str) -> Version:
    """Return (2, 11, 0) for `2.11.0+cu130`; the version ends at the first part that is not a number."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
