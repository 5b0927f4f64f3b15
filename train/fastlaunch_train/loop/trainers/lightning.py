"""Steps by the Trainer of Lightning: its own code makes them, of our data and into our records."""

import logging
import signal
import warnings
from typing import Any

import torch
from torch import nn

from fastlaunch_train.distributed.parallel import sum_in_bf16
from fastlaunch_train.loop.train import Progress
from fastlaunch_train.loop.trainers.adapter import Feed, StepLoss, torch_optimizer, try_on
from fastlaunch_train.loop.training import Training
from fastlaunch_train.steppers.torch_stepper import CUDA_GRAPH_MODES, check_loss
from fastlaunch_train.workloads.contract import Batch


def train_with_lightning(progress: Progress) -> None:
    """Do the steps that are left of `progress`. Raises what `Progress.step_done` does.

    Lightning wraps the model for several ranks, in the process group that is there, scales the loss, sums up
    micro-batches and calls the optimizer, which is the recipe's. It leaves nothing on the disk.
    """
    training = progress.training
    import lightning.pytorch as lightning

    # It tells which devices it found, and gives hints.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    module = _module(progress)
    process = training.process
    trainer = lightning.Trainer(
        accelerator="gpu" if process.device.type == "cuda" else "cpu",
        strategy=_strategy(training),
        devices=process.world_size // process.num_nodes,
        num_nodes=process.num_nodes,
        plugins=[_precision_plugin(training)],
        max_epochs=1,
        accumulate_grad_batches=training.recipe.grad_accumulation,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=training.writer.path.parent,
    )
    with warnings.catch_warnings():
        # Such as that what is no DataLoader of torch's has no workers.
        warnings.filterwarnings("ignore", module="lightning")
        trainer.fit(module, train_dataloaders=Feed(progress))
    assert progress.finished, "Lightning ended before the last step"


def _module(progress: Progress) -> Any:
    """The LightningModule of a training."""
    import lightning.pytorch as lightning

    training = progress.training
    recipe = training.recipe
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.stepper.model
            self.step_loss = StepLoss()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch_optimizer(training)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=recipe.set_to_none)

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return batch  # the workload has put it where it belongs

        def on_train_start(self) -> None:
            # Lightning's answer to SIGTERM is a broadcast, from within the handler: ours are a flag each.
            for number, handler in handlers.items():
                signal.signal(number, handler)
            wrapped = self.trainer.strategy.model
            if recipe.wire_dtype == "bf16" and isinstance(wrapped, nn.parallel.DistributedDataParallel):
                # Here, since its strategy registers the hook that it is given on GPUs alone.
                wrapped.register_comm_hook(None, sum_in_bf16)
            progress.begin(self.compile_ahead)

        def compile_ahead(self, batch: Batch) -> None:
            def forward(micro_batch: Batch) -> torch.Tensor:
                with self.trainer.precision_plugin.forward_context():
                    return self.loss_of(micro_batch)

            try_on(training, batch, forward)

        def loss_of(self, batch: Batch) -> torch.Tensor:
            if recipe.compile_mode in CUDA_GRAPH_MODES:
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            loss = training.workload.loss(self.model, batch)
            check_loss(training.workload, loss)
            return loss

        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            loss = self.loss_of(batch)
            self.step_loss.add(loss)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
            if (batch_idx + 1) % recipe.grad_accumulation == 0:
                progress.step_done(self.step_loss.take())

    return Module()


def _strategy(training: Training) -> Any:
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

    recipe, process = training.recipe, training.process
    if process.world_size == 1:
        return SingleDeviceStrategy(device=process.device)
    if recipe.compile_mode != "none":
        # Else a compiled region would be cut wherever a bucket ends.
        torch._dynamo.config.optimize_ddp = False
    return DDPStrategy(
        bucket_cap_mb=recipe.ddp_bucket_mb,
        gradient_as_bucket_view=True,
        static_graph=recipe.grad_accumulation == 1,
    )


def _precision_plugin(training: Training) -> Any:
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision

    precision, device = training.recipe.precision, training.process.device
    if precision in ("fp32", "tf32"):  # they differ in torch's settings alone
        return Precision()
    # The scaler is the checkpoint's.
    return MixedPrecision(
        "bf16-mixed" if precision == "bf16" else "16-mixed", device.type, scaler=training.precision.scaler
    )
