"""A loop of one's own under Accelerate; `fl.steps` records its steps.

    fastlaunch submit --local -L mixed=no,bf16 --repeats 3 -- \\
      accelerate launch --num_processes 2 accelerate_loop.py --mixed_precision {mixed}

`accelerate launch` starts the ranks itself, so `--nproc` is left out.
"""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fastlaunch_train as fl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mixed_precision", choices=("no", "fp16", "bf16"), default="no")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--per_device_train_batch_size", type=int, default=32)
    parser.add_argument("--num_train_epochs", type=int, default=10)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--output_dir", default=os.environ.get("FASTLAUNCH_OUTPUT", "model"))
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()

    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
    )
    set_seed(int(os.environ.get("FASTLAUNCH_ROUND", "0")))
    x = torch.randn(2048, 64)
    y = x[:, :16].reshape(-1, 4, 4).sum(2).argmax(1)
    train_loader = DataLoader(
        TensorDataset(x[256:], y[256:]), args.per_device_train_batch_size, shuffle=True, drop_last=True
    )
    eval_loader = DataLoader(TensorDataset(x[:256], y[:256]), args.per_device_train_batch_size)
    model: nn.Module = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, train_batches, eval_batches = accelerator.prepare(
        model, optimizer, train_loader, eval_loader
    )

    for epoch in range(args.num_train_epochs):
        model.train()
        for inputs, targets in fl.steps(train_batches, accumulate=accelerator.gradient_accumulation_steps):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                fl.step(loss=loss)

        model.eval()
        losses, hits = [], []
        for inputs, targets in eval_batches:
            with torch.no_grad():
                logits = model(inputs)
            loss = nn.functional.cross_entropy(logits, targets, reduction="none")
            for kept, value in ((losses, loss), (hits, (logits.argmax(1) == targets).float())):
                kept.append(accelerator.gather_for_metrics(value))
        held_out, accuracy = torch.cat(losses).mean().item(), torch.cat(hits).mean().item()
        fl.evaluate(loss=held_out, accuracy=accuracy, num_samples=256)
        accelerator.print(f"epoch {epoch}: validation loss {held_out:.4f}, accuracy {accuracy:.3f}")
    accelerator.save_model(model, args.output_dir)


if __name__ == "__main__":
    main()
