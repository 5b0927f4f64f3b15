"""Steps by DeepSpeed: ZeRO-1, 2 and 3."""

from fastlaunch_train.torch_stepper import TorchStepper


class DeepSpeedStepper(TorchStepper):
    """A `Stepper` around DeepSpeed's engine."""
