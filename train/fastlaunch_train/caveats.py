"""What a reader of a run's figures must know: the recipe runs, and does not what its name says."""

from collections.abc import Iterator

from fastlaunch_train.recipes.recipes import Recipe
from fastlaunch_train.recipes.requirements import COMPILED_BF16_CAPABILITY, dotted
from fastlaunch_train.recipes.rules import ZERO_STAGES


def caveats(recipe: Recipe, *, capability: tuple[int, int] | None, world_size: int) -> Iterator[str]:
    """Warnings for the run's record. capability: compute capability of the GPU; None without one."""
    # Of which torch says nothing: its is_bf16_supported() counts emulation in.
    if recipe.precision == "bf16" and capability is not None and capability < COMPILED_BF16_CAPABILITY:
        yield (
            f"bf16 is emulated on compute capability {dotted(capability)}: GPUs have it from "
            f"{dotted(COMPILED_BF16_CAPABILITY)} on, and its figures say nothing of theirs; the nearest "
            "recipe that this GPU has units for is fp16"
        )
    if world_size > 1:
        return
    if recipe.parallelism in ("fsdp2", *ZERO_STAGES):
        yield (
            f"parallelism {recipe.parallelism} with one rank: nothing is sharded, and its figures say "
            "nothing of sharding"
        )
    if recipe.wire_dtype != "fp32":
        yield f"wire_dtype {recipe.wire_dtype} with one rank: no gradient travels, so that it does nothing"
