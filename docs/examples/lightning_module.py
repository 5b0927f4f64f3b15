"""A LightningModule and Lightning's Trainer; the callback records steps, validations and checkpoints.

    fastlaunch submit --local -L precision=32-true,bf16-mixed --repeats 3 -- \\
      python lightning_module.py --precision {precision}
"""

import argparse
import os

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fastlaunch_train as fl


class Classifier(pl.LightningModule):
    def __init__(self, width: int, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 4))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self.model(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), sync_dist=True)
        self.log("val_acc", (logits.argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--max-epochs", type=int, default=10)
    parser.add_argument("--limit-train-batches", type=int)
    parser.add_argument("--accumulate-grad-batches", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--ckpt-path", help="a checkpoint to go on from")
    args = parser.parse_args()

    pl.seed_everything(int(os.environ.get("FASTLAUNCH_ROUND", "0")))
    x = torch.randn(2048, 64)
    data = TensorDataset(x, x[:, :16].reshape(-1, 4, 4).sum(2).argmax(1))
    train, validation = torch.utils.data.random_split(data, [1792, 256])
    trainer = pl.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        precision=args.precision,
        max_epochs=args.max_epochs,
        limit_train_batches=args.limit_train_batches,
        accumulate_grad_batches=args.accumulate_grad_batches,
        default_root_dir=os.environ.get("FASTLAUNCH_OUTPUT"),
        logger=False,
        enable_progress_bar=False,
        callbacks=[fl.lightning_callback()],
    )
    trainer.fit(
        Classifier(args.width, args.lr),
        DataLoader(train, args.batch_size, shuffle=True),
        DataLoader(validation, args.batch_size),
        ckpt_path=args.ckpt_path,
    )


if __name__ == "__main__":
    main()
