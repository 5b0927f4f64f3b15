"""Steps by the Trainer of Transformers: its own code makes them, of our data and into our records."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fastlaunch_train.distributed.parallel import Process, sum_in_bf16
from fastlaunch_train.loop.checkpoint import random_state, restore_random_state
from fastlaunch_train.loop.train import Progress
from fastlaunch_train.loop.trainers.adapter import Feed, LossShare, StepLoss, torch_optimizer, try_on
from fastlaunch_train.loop.training import Training
from fastlaunch_train.steppers.torch_stepper import CUDA_GRAPH_MODES, check_loss
from fastlaunch_train.workloads.contract import Batch


def train_with_transformers(progress: Progress) -> None:
    """Do the steps that are left of `progress`. Raises what `Progress.step_done` does.

    The Trainer wraps the model for several ranks, in the process group that is there, puts autocast around
    its forward pass, scales the loss, sums up micro-batches and calls the optimizer, which is the recipe's.
    Its schedule is constant, and it clips no gradients. It leaves nothing on the disk. What it does beside is
    part of its steps: of release 5 on it works out the gradients' norm. Raises RecipeError for a release that
    takes no mean of micro-batches.
    """
    training = progress.training
    # The Trainer seeds every generator.
    drawn = random_state(training.process.device)
    with _alone_where_alone(training.process):
        trainer = _trainer(progress, drawn)
        trainer.train()
    assert progress.finished, "the Trainer ended before the last step"


def _trainer(progress: Progress, drawn: dict[str, torch.Tensor]) -> Any:
    from transformers import PrinterCallback, Trainer, TrainerCallback

    training = progress.training
    recipe, workload = training.recipe, training.workload
    step_loss = StepLoss()
    share = LossShare(recipe, training.precision)

    class OurTrainer(Trainer):
        # Of what compute_loss returns: a mean, which the Trainer divides by the number of micro-batches.
        loss_is_scaled_for_ga = False

        def get_train_dataloader(self) -> Any:
            return Feed(progress)

        def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            found = super()._wrap_model(model, *args, **kwargs)
            # Before release 5 that has set anew how DDP is to wrap it, which is done after it.
            _set_up(self.accelerator, training)
            return found

        def get_batch_samples(self, epoch_iterator: Iterator[Batch], num_batches: int, *_: Any) -> Any:
            return [next(epoch_iterator) for _ in range(num_batches)], None

        def _prepare_inputs(self, inputs: Batch) -> Batch:
            return inputs  # the workload has put them where they belong

        def floating_point_ops(self, inputs: Batch) -> int:
            return 0  # it would look for inputs of its own models

        def compute_loss(self, model: nn.Module, inputs: Batch, *_: Any, **__: Any) -> torch.Tensor:
            if recipe.compile_mode in CUDA_GRAPH_MODES:
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            loss = workload.loss(model, inputs)
            check_loss(workload, loss)
            step_loss.add(loss)
            share.watch(loss)
            return loss

    class Steps(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            wrapped = trainer.model_wrapped
            if isinstance(wrapped, nn.parallel.DistributedDataParallel):
                assert wrapped.gradient_as_bucket_view, "wrapped as our loop does it"
                if recipe.wire_dtype == "bf16":
                    wrapped.register_comm_hook(None, sum_in_bf16)
            restore_random_state(drawn, training.process.device)
            # Without autocast around it, which is inside the model's forward pass now.
            model = training.stepper.model
            progress.begin(
                lambda batch: try_on(training, batch, lambda micro_batch: workload.loss(model, micro_batch))
            )

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            share.check()
            progress.step_done(step_loss.take())

    trainer = OurTrainer(
        model=training.stepper.model,
        args=_arguments(progress),
        optimizers=(torch_optimizer(training), None),
        callbacks=[Steps()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.model_accepts_loss_kwargs = False
    return trainer


def _arguments(progress: Progress) -> Any:
    from transformers import TrainingArguments

    training = progress.training
    recipe = training.recipe
    arguments = TrainingArguments(
        output_dir=str(training.writer.path.parent),
        max_steps=training.last_step - progress.last_done,
        per_device_train_batch_size=training.request.batch_size // recipe.grad_accumulation,
        gradient_accumulation_steps=recipe.grad_accumulation,
        bf16=recipe.precision == "bf16",
        fp16=recipe.precision == "fp16",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=training.process.device.type == "cpu",
        save_strategy="no",
        logging_strategy="no",
        # It would wait for each micro-batch's loss, to leave NaN out of a log that is switched off: Progress
        # sees NaN.
        logging_nan_inf_filter=False,
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    # One process drives one GPU, however many a machine has.
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def _set_up(accelerator: Any, training: Training) -> None:
    """Have the Trainer's accelerator wrap the model as our loop does, and use the scaler of checkpoints."""
    from accelerate.utils import DistributedDataParallelKwargs

    recipe = training.recipe
    if training.process.world_size > 1 and recipe.compile_mode != "none":
        # Else a compiled region would be cut wherever a bucket ends.
        torch._dynamo.config.optimize_ddp = False
    accelerator.ddp_handler = DistributedDataParallelKwargs(
        bucket_cap_mb=recipe.ddp_bucket_mb,
        gradient_as_bucket_view=True,
        static_graph=recipe.grad_accumulation == 1,
    )
    if training.precision.scaler is not None:
        accelerator.scaler = training.precision.scaler
    # Model and optimizer are where they belong; moved, an optimizer's step counts would be waited for.
    accelerator.device_placement = False


@contextlib.contextmanager
def _alone_where_alone(process: Process) -> Iterator[None]:
    """Hides torchrun's variables in a world of one, for which the Trainer would start a process group."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE") if process.world_size == 1 else ()
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
