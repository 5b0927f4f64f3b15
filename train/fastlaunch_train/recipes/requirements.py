"""What each recipe needs of hardware and software: one table, for this machine and for one to be rented."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from fastlaunch_train.recipes.recipe import TE_SCALINGS, TORCHAO_SCALINGS, ZERO_STAGES, Recipe

Version = tuple[int, ...]

#: Which extra of this package installs what.
EXTRAS = {
    "transformer_engine": "te",
    "torchao": "float8",
    "deepspeed": "deepspeed",
    "lightning": "lightning",
    "transformers": "train",
    "accelerate": "train",
    "torch_ort": "ort",
}
#: First compute capability with units for bf16.
BF16_CAPABILITY = (8, 0)
#: The oldest torchao whose float8 configurations go by name.
TORCHAO_RELEASE = (0, 9)

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
    """What decides which recipes run on a machine. A version of () is unknown and taken to suffice."""

    #: Of the GPU; None without one.
    compute_capability: Version | None
    #: The GPU in words.
    gpu: str = "this GPU"
    #: That torch was built with; None without.
    cuda: Version | None = ()
    #: Of an installed package, by the name it is imported by; None if it is not installed.
    version_of: Callable[[str], Version | None] = lambda _: ()
    #: Why a package cannot be used; None if it can. This and what follows may take time to find out.
    package_problem: Callable[[str], str | None] = _nothing
    #: Why Transformer Engine refuses one of its FP8 scalings on this GPU; None if it does not.
    scaling_problem: Callable[[str], str | None] = _nothing
    #: Why torch.compile cannot use a backend; None if it can.
    compile_problem: Callable[[str], str | None] = _nothing


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """What recipes with certain values of their fields need of a machine."""

    #: Field -> its values that need it. All fields have to match.
    fields: Mapping[str, tuple[str, ...]]

    def is_of(self, recipe: Recipe) -> bool:
        """Whether the recipe needs it."""
        return all(getattr(recipe, field) in values for field, values in self.fields.items())

    def missing(self, recipe: Recipe, machine: Capabilities) -> str | None:
        """Return what the machine lacks, in words; None if nothing."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class GpuRequirement(Requirement):
    """A GPU of a compute capability."""

    what: str
    least: Version
    #: First compute capability that no longer does it.
    below: Version = ()
    #: Whether it works without a GPU too.
    runs_on_cpu: bool = False

    def missing(self, recipe: Recipe, machine: Capabilities) -> str | None:
        capability = machine.compute_capability
        if capability is None:
            return None if self.runs_on_cpu else f"{self.what} needs an NVIDIA GPU, and there is none"
        if not capability:
            return None
        if capability < self.least:
            return (
                f"{self.what} needs compute capability {dotted(self.least)} ({_GENERATIONS[self.least]}), "
                f"and {machine.gpu} has {dotted(capability)}"
            )
        if self.below and capability >= self.below:
            return (
                f"{self.what} lacks some of its products from compute capability {dotted(self.below)} on, "
                f"and {machine.gpu} has {dotted(capability)}"
            )
        return None


@dataclass(frozen=True, kw_only=True)
class CudaRequirement(Requirement):
    """A torch that was built with a release of CUDA."""

    what: str
    least: Version

    def missing(self, recipe: Recipe, machine: Capabilities) -> str | None:
        if not machine.cuda or machine.cuda >= self.least:
            return None
        return f"{self.what} needs CUDA {dotted(self.least)}, and torch has {dotted(machine.cuda)}"


@dataclass(frozen=True, kw_only=True)
class PackageRequirement(Requirement):
    """A package, in a release or a later one."""

    package: str
    least: Version = ()
    what: str = ""
    #: Only without a GPU.
    only_on_cpu: bool = False
    #: Only from this compute capability on.
    from_capability: Version = ()

    def missing(self, recipe: Recipe, machine: Capabilities) -> str | None:
        capability = machine.compute_capability
        if (self.only_on_cpu and capability is not None) or (capability or ()) < self.from_capability:
            return None
        if problem := machine.package_problem(self.package):
            return problem
        version = machine.version_of(self.package)
        if version is not None and (not version or version >= self.least):
            return None
        what = self.what or " and ".join(f"{field} {getattr(recipe, field)}" for field in self.fields)
        extra = f" (pip install 'fastlaunch[{EXTRAS[self.package]}]')" if self.package in EXTRAS else ""
        if version is None:
            return f"{what} needs {self.package}, which is not installed{extra}"
        return f"{what} needs {self.package} {dotted(self.least)}, and {dotted(version)} is installed{extra}"


@dataclass(frozen=True, kw_only=True)
class ScalingRequirement(Requirement):
    """Transformer Engine's own consent to a scaling of FP8."""

    def missing(self, recipe: Recipe, machine: Capabilities) -> str | None:
        problem = machine.scaling_problem(recipe.fp8_scaling)
        return problem and f"Transformer Engine refuses fp8_scaling {recipe.fp8_scaling}: {problem}"


@dataclass(frozen=True, kw_only=True)
class CompilerRequirement(Requirement):
    """A backend of torch.compile that works."""

    def missing(self, recipe: Recipe, machine: Capabilities) -> str | None:
        return machine.compile_problem(recipe.compile_backend)


_COMPILED = {"compile_mode": ("default", "reduce-overhead", "max-autotune")}
_INDUCTOR = {**_COMPILED, "compile_backend": ("inductor",)}
#: In the order in which they are looked at: the GPU first, then releases, then what takes time to find out.
REQUIREMENTS: tuple[Requirement, ...] = (
    # Matrix units. torchao's products are emulated on a CPU: nothing to time, but to see what they compute.
    # Data centers' Blackwell has MXFP8; that of workstations, from 12.0 on, lacks some of the products.
    GpuRequirement(fields={"fp8_scaling": ("mxfp8",)}, what="MXFP8", least=(10, 0), below=(12, 0)),
    # Products scaled by blocks of 128 values, and by rows: Transformer Engine's support matrix.
    GpuRequirement(fields={"fp8_scaling": ("block",)}, what="FP8 block scaling", least=(9, 0)),
    GpuRequirement(
        fields={"fp8_scaling": ("rowwise",)}, what="FP8 scaled by rows", least=(9, 0), runs_on_cpu=True
    ),
    GpuRequirement(fields={"fp8_scaling": ("delayed", "current")}, what="FP8", least=(8, 9)),
    GpuRequirement(fields={"fp8_scaling": ("tensorwise",)}, what="FP8", least=(8, 9), runs_on_cpu=True),
    GpuRequirement(fields={"blocks": _TE_BLOCKS}, what="Transformer Engine", least=(8, 0)),
    GpuRequirement(fields={"precision": ("tf32",)}, what="TF32", least=(8, 0)),
    # triton, which inductor writes its kernels in, supports 7.0 and up. Below 8.0 inductor warns, and runs
    # eagerly what it was to compile in bf16 (torch 2.13, _inductor.compile_fx._check_triton_bf16_support).
    GpuRequirement(fields=_INDUCTOR, what="torch.compile", least=(7, 0), runs_on_cpu=True),
    GpuRequirement(
        fields={**_INDUCTOR, "precision": ("bf16", "fp8")},
        what="torch.compile of bf16",
        least=BF16_CAPABILITY,
        runs_on_cpu=True,
    ),
    CudaRequirement(fields={"fp8_scaling": ("block",)}, what="FP8 block scaling", least=(12, 9)),
    # torch, which is old where ORTModule is: Module.compile; fp16 autocast and loss scaling on a CPU; fused
    # SGD and AdamW on every device; fully_shard where we import it from. On a CPU fully_shard fails in 2.6
    # (its streams record no events); 2.9 is the next that was tried.
    PackageRequirement(
        fields={"precision": ("fp16",)},
        package="torch",
        least=(2, 3),
        what="fp16 on a CPU",
        only_on_cpu=True,
    ),
    PackageRequirement(fields={"optimizer_impl": ("fused",)}, package="torch", least=(2, 4)),
    PackageRequirement(fields=_COMPILED, package="torch", least=(2, 2), what="torch.compile"),
    PackageRequirement(fields={"parallelism": ("fsdp2",)}, package="torch", least=(2, 6), what="fully_shard"),
    PackageRequirement(
        fields={"parallelism": ("fsdp2",)},
        package="torch",
        least=(2, 9),
        what="fully_shard on a CPU",
        only_on_cpu=True,
    ),
    # Transformer Engine's releases, by its release notes.
    PackageRequirement(fields={"blocks": _TE_BLOCKS}, package="transformer_engine", least=(2, 0)),
    PackageRequirement(fields={"fp8_scaling": ("current",)}, package="transformer_engine", least=(2, 2)),
    PackageRequirement(fields={"fp8_scaling": ("block",)}, package="transformer_engine", least=(2, 3)),
    # Blackwell computes products scaled by blocks of 128 by way of MXFP8, since this release.
    PackageRequirement(
        fields={"fp8_scaling": ("block",)},
        package="transformer_engine",
        least=(2, 9),
        what="fp8_scaling block on Blackwell",
        from_capability=(10, 0),
    ),
    ScalingRequirement(fields={"fp8_scaling": TE_SCALINGS}),
    PackageRequirement(fields={"fp8_scaling": TORCHAO_SCALINGS}, package="torchao", least=TORCHAO_RELEASE),
    CompilerRequirement(fields=_COMPILED),
    PackageRequirement(fields={"engine": ("ort",)}, package="torch_ort"),
    PackageRequirement(fields={"parallelism": ZERO_STAGES}, package="deepspeed"),
    PackageRequirement(fields={"loop": ("lightning",)}, package="lightning"),
    PackageRequirement(fields={"loop": ("transformers",)}, package="transformers"),
    PackageRequirement(fields={"loop": ("transformers",)}, package="accelerate"),
)


def missing_part(recipe: Recipe, machine: Capabilities) -> str | None:
    """Return what `recipe` needs and `machine` lacks, in words; None if the recipe can run."""
    return next(filter(None, (one.missing(recipe, machine) for one in requirements_of(recipe))), None)


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
    packages = (row.package for row in requirements_of(recipe) if isinstance(row, PackageRequirement))
    return tuple(dict.fromkeys(package for package in packages if package != "torch"))


def bf16_emulation(recipe: Recipe, machine: Capabilities) -> str | None:
    """Return a warning where `recipe` computes in bf16 and the GPU has no units for it; else None."""
    # torch says nothing of it: its is_bf16_supported() counts emulation in.
    capability = machine.compute_capability
    if recipe.precision != "bf16" or not capability or capability >= BF16_CAPABILITY:
        return None
    return (
        f"recipe {recipe.label}: {machine.gpu} emulates bf16 with compute capability {dotted(capability)}. "
        f"GPUs compute in bf16 from {dotted(BF16_CAPABILITY)} on, so the figures say nothing about them. The "
        "nearest recipe that this GPU has units for is fp16"
    )


def dotted(version: Version) -> str:
    """Return `9.15.1` for (9, 15, 1)."""
    return ".".join(map(str, version))


def parse_version(text: str) -> Version:
    """Return (2, 11, 0) for `2.11.0+cu130`; what is no number ends it."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
