"""Steps by Lightning's Trainer: its own code does them, on our data and into our records."""

import logging
import signal
import warnings
from typing import Any

import torch

from fastlaunch_train.loop.train import TrainingLoop
from fastlaunch_train.loop.trainers.adapter import Adapter
from fastlaunch_train.loop.training import Training
from fastlaunch_train.workloads.contract import Batch


def train_with_lightning(loop: TrainingLoop) -> None:
    """Do the remaining steps of `loop`. Raises what `TrainingLoop.after_step` does.

    Lightning wraps the model for several ranks in the existing process group, scales the loss, sums up
    micro-batches, clips gradients and calls the optimizer, whose learning rate our loop sets. It leaves
    nothing on the disk.
    """
    import lightning.pytorch as lightning

    training, adapter = loop.training, Adapter(loop)
    # Lightning reports its devices, and gives hints.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    process = training.process
    trainer = lightning.Trainer(
        accelerator="gpu" if process.device.type == "cuda" else "cpu",
        strategy=_strategy(adapter),
        devices=process.world_size // process.num_nodes,
        num_nodes=process.num_nodes,
        plugins=[_precision_plugin(training)],
        max_epochs=1,
        accumulate_grad_batches=training.recipe.grad_accumulation,
        gradient_clip_val=adapter.max_grad_norm,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=training.writer.path.parent,
    )
    with warnings.catch_warnings():
        # For example, it warns that the adapter, which is not torch's DataLoader, has no workers.
        warnings.filterwarnings("ignore", module="lightning")
        trainer.fit(_module(adapter), train_dataloaders=adapter)
    assert loop.finished, "Lightning ended before the last step"


def _module(adapter: Adapter) -> Any:
    """Return the LightningModule of a training."""
    import lightning.pytorch as lightning

    training = adapter.training
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.stepper.model

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adapter.optimizer

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=training.recipe.set_to_none)

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return batch  # the workload has put it where it belongs

        def on_train_start(self) -> None:
            # Lightning's handler of SIGTERM broadcasts from within; ours sets a flag on each rank.
            for number, handler in handlers.items():
                signal.signal(number, handler)
            # Lightning's strategy registers its communication hook on GPUs alone.
            adapter.begin(self.trainer.strategy.model, self.forward_in_context)

        def forward_in_context(self, batch: Batch) -> torch.Tensor:
            with self.trainer.precision_plugin.forward_context():
                return adapter.forward(self.model, batch)

        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            return adapter.train_on(self.model, batch)

        def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
            if (batch_idx + 1) % training.recipe.grad_accumulation == 0:
                adapter.end_step()

    return Module()


def _strategy(adapter: Adapter) -> Any:
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

    process = adapter.training.process
    if process.world_size == 1:
        return SingleDeviceStrategy(device=process.device)
    return DDPStrategy(**adapter.ddp_options())


def _precision_plugin(training: Training) -> Any:
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision

    precision, device = training.recipe.precision, training.process.device
    if precision in ("fp32", "tf32"):  # they differ in torch's settings alone
        return Precision()
    # With the scaler that checkpoints save.
    return MixedPrecision(
        "bf16-mixed" if precision == "bf16" else "16-mixed", device.type, scaler=training.precision.scaler
    )
