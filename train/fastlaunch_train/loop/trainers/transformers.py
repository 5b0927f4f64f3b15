"""Steps by the Transformers Trainer: its own code does them, on our data and into our records."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fastlaunch_train.distributed.parallel import Process
from fastlaunch_train.loop.checkpoint import random_state, restore_random_state
from fastlaunch_train.loop.train import TrainingLoop
from fastlaunch_train.loop.trainers.adapter import Adapter
from fastlaunch_train.workloads.contract import Batch


def train_with_transformers(loop: TrainingLoop) -> None:
    """Do the remaining steps of `loop`. Raises what `TrainingLoop.after_step` does.

    The Trainer wraps the model for several ranks in the existing process group, puts autocast around its
    forward pass, scales the loss, sums up micro-batches, clips gradients and calls the optimizer. Its own
    schedule is constant: after each step our loop sets the learning rate. It leaves nothing on the disk.
    All its other work is part of its steps: from release 5 on it always computes the gradients' norm.
    """
    # The Trainer seeds every generator.
    generators = random_state(loop.training.process.device)
    with _torchrun_hidden(loop.training.process):
        _trainer(Adapter(loop), generators).train()
    assert loop.finished, "the Trainer ended before the last step"


def _trainer(adapter: Adapter, generators: dict[str, torch.Tensor]) -> Any:
    from transformers import PrinterCallback, Trainer, TrainerCallback

    training = adapter.training

    class OurTrainer(Trainer):
        # compute_loss returns a mean, which the Trainer divides by the number of micro-batches.
        loss_is_scaled_for_ga = False

        def get_train_dataloader(self) -> Any:
            return adapter

        def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            wrapped = super()._wrap_model(model, *args, **kwargs)
            # Before release 5 this resets DDP's options; the accelerator wraps the model later.
            _set_up(self.accelerator, adapter)
            return wrapped

        def get_batch_samples(self, epoch_iterator: Iterator[Batch], num_batches: int, *_: Any) -> Any:
            return [next(epoch_iterator) for _ in range(num_batches)], None

        def _prepare_inputs(self, inputs: Batch) -> Batch:
            return inputs  # the workload has put them where they belong

        def floating_point_ops(self, inputs: Batch) -> int:
            return 0  # the Trainer's looks for the inputs of its own models

        def compute_loss(self, model: nn.Module, inputs: Batch, *_: Any, **__: Any) -> torch.Tensor:
            return adapter.train_on(model, inputs)

    class Steps(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            wrapped = trainer.model_wrapped
            if isinstance(wrapped, nn.parallel.DistributedDataParallel):
                assert wrapped.gradient_as_bucket_view, "wrapped as our loop does it"
            restore_random_state(generators, training.process.device)
            adapter.begin(wrapped, forward)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            adapter.end_step()

    def forward(batch: Batch) -> torch.Tensor:
        # No autocast is needed around it: by now it is inside the model's forward pass.
        return training.workload.loss(training.stepper.model, batch)

    trainer = OurTrainer(
        model=training.stepper.model,
        args=_arguments(adapter),
        optimizers=(adapter.optimizer, None),
        callbacks=[Steps()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.model_accepts_loss_kwargs = False
    return trainer


def _arguments(adapter: Adapter) -> Any:
    from transformers import TrainingArguments

    training = adapter.training
    recipe = training.recipe
    arguments = TrainingArguments(
        output_dir=str(training.writer.path.parent),
        max_steps=training.last_step - adapter.loop.last_done,
        per_device_train_batch_size=training.request.batch_size // recipe.grad_accumulation,
        gradient_accumulation_steps=recipe.grad_accumulation,
        bf16=recipe.precision == "bf16",
        fp16=recipe.precision == "fp16",
        lr_scheduler_type="constant",
        max_grad_norm=adapter.max_grad_norm,
        use_cpu=training.process.device.type == "cpu",
        save_strategy="no",
        logging_strategy="no",
        # True would wait for each micro-batch's loss, to keep NaN out of a log that is off.
        logging_nan_inf_filter=False,
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    # One process drives one GPU, however many the machine has.
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def _set_up(accelerator: Any, adapter: Adapter) -> None:
    """Have the Trainer's accelerator wrap the model as our loop does, and use the scaler that is saved."""
    from accelerate.utils import DistributedDataParallelKwargs

    accelerator.ddp_handler = DistributedDataParallelKwargs(**adapter.ddp_options())
    if adapter.training.precision.scaler is not None:
        accelerator.scaler = adapter.training.precision.scaler
    # Model and optimizer are where they belong; moving an optimizer would wait for its step counts.
    accelerator.device_placement = False


@contextlib.contextmanager
def _torchrun_hidden(process: Process) -> Iterator[None]:
    """Hide torchrun's variables in a world of one, where the Trainer would start a group."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE") if process.world_size == 1 else ()
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
