"""bf16 on GPUs that have no units for it: it runs, and its speed says nothing of GPUs that have.

The training half writes the same into the run's record, when the GPU is paid for.
"""

from fastlaunch.base_image_file import version
from fastlaunch.catalog.hardware import Accelerator
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.jobs.machine import Machine
from fastlaunch_train.recipes.recipes import Recipe

#: The compute capability from which on GPUs have units for bf16 (Ampere).
BF16_CAPABILITY = "8.0"
#: Compute capability of the GPUs without that AWS rents out (P3, G4dn, G5g) and the catalogue leaves out, by
#: what nvidia-smi's name of them begins with: Volta's and Turing's, by NVIDIA's CUDA programming guide.
_LEFT_OUT = {"Tesla V100": "7.0", "Tesla T4": "7.5", "NVIDIA T4G": "7.5"}


def emulated_on(recipe: Recipe, accelerator: Accelerator) -> str | None:
    """A warning where `recipe` computes in bf16 and the accelerator only emulates that."""
    return _emulated(recipe, accelerator.name, accelerator.compute_capability)


def emulated_here(recipe: Recipe, machine: Machine, catalogue: Catalogue | None) -> str | None:
    """The warning for the first such GPU of this machine. One that is not known is believed."""
    for device in dict.fromkeys(machine.devices):
        known = catalogue.accelerator_of_device(device) if catalogue else None
        left_out = next((text for start, text in _LEFT_OUT.items() if device.startswith(start)), None)
        if told := _emulated(recipe, device, known.compute_capability if known else left_out):
            return told
    return None


def _emulated(recipe: Recipe, gpu: str, capability: str | None) -> str | None:
    if recipe.precision != "bf16" or capability is None or version(capability) >= version(BF16_CAPABILITY):
        return None
    return (
        f"recipe {recipe.label}: {gpu} emulates bf16, having compute capability {capability}, where GPUs "
        f"have units for it from {BF16_CAPABILITY} on: its figures say nothing of theirs; recipe fp16 is the "
        "nearest that it has units for"
    )
