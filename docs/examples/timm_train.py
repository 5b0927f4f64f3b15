"""timm's train.py in small: an image classifier, from a folder of each class in train/ and in validation/.

    fastlaunch submit --local -L dtype=float16,bfloat16 --repeats 3 -- \\
      python timm_train.py --data-dir images --model resnet50 --amp --amp-dtype {dtype}

It has the options and functions of that script. The lines with `fl.` record its steps and its evaluations.
"""

import argparse
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm import utils
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import nn

import fastlaunch_train as fl


def main() -> None:
    args = parse_arguments()
    device = utils.init_distributed_device(args)
    utils.random_seed(args.seed, args.rank)
    amp_dtype = getattr(torch, args.amp_dtype)
    amp_autocast = partial(torch.autocast, device.type, dtype=amp_dtype) if args.amp else suppress
    loss_scaler = utils.NativeScaler(device=device.type) if args.amp and args.amp_dtype == "float16" else None

    model = create_model(args.model, num_classes=args.num_classes, **args.model_kwargs).to(device)
    data_config = resolve_data_config(vars(args), model=model)
    optimizer = create_optimizer_v2(model, opt=args.opt, lr=args.lr, weight_decay=args.weight_decay)
    if args.torchcompile:
        model = torch.compile(model, backend=args.torchcompile)
    if args.distributed:
        model = nn.parallel.DistributedDataParallel(model)

    def loader_of(split: str, is_training: bool) -> Any:
        return create_loader(
            create_dataset("", root=args.data_dir, split=split),
            input_size=data_config["input_size"],
            mean=data_config["mean"],
            std=data_config["std"],
            batch_size=args.batch_size,
            is_training=is_training,
            num_workers=args.workers,
            distributed=args.distributed,
            device=device,
            persistent_workers=args.workers > 0,
        )

    loader_train, loader_eval = loader_of(args.train_split, True), loader_of(args.val_split, False)
    scheduler, num_epochs = create_scheduler_v2(optimizer, sched=args.sched, num_epochs=args.epochs)
    output = Path(utils.get_outdir(args.output, args.experiment)) if utils.is_primary(args) else None

    for epoch in range(num_epochs):
        if args.distributed:
            loader_train.sampler.set_epoch(epoch)
        train_metrics = train_one_epoch(
            model, loader_train, optimizer, args, device, amp_autocast=amp_autocast, loss_scaler=loss_scaler
        )
        eval_metrics = validate(model, loader_eval, args, device, amp_autocast=amp_autocast)
        fl.evaluate(loss=eval_metrics["loss"], accuracy=eval_metrics["top1"] / 100)
        scheduler.step(epoch + 1)
        if output is not None:
            utils.update_summary(
                epoch, train_metrics, eval_metrics, output / "summary.csv", write_header=epoch == 0
            )
            torch.save(utils.unwrap_model(model).state_dict(), output / "last.pth.tar")


def train_one_epoch(
    model: nn.Module,
    loader: Any,
    optimizer: torch.optim.Optimizer,
    args: argparse.Namespace,
    device: torch.device,
    amp_autocast: Any,
    loss_scaler: Any,
) -> dict[str, float]:
    losses = utils.AverageMeter()
    loss_fn = nn.CrossEntropyLoss(label_smoothing=args.smoothing)
    accum_steps = args.grad_accum_steps
    last_accum_steps = len(loader) % accum_steps or accum_steps
    model.train()
    optimizer.zero_grad()
    for batch_idx, (input, target) in enumerate(fl.steps(loader, accumulate=accum_steps)):
        is_last = batch_idx + 1 == len(loader)
        need_update = is_last or (batch_idx + 1) % accum_steps == 0
        with amp_autocast():
            loss = loss_fn(model(input), target)
        is_in_last_update = batch_idx >= len(loader) - last_accum_steps
        scaled = loss / (last_accum_steps if is_in_last_update else accum_steps)
        if loss_scaler is not None:
            loss_scaler(scaled, optimizer, parameters=model.parameters(), need_update=need_update)
        else:
            scaled.backward()
            if need_update:
                optimizer.step()
        losses.update(loss.item(), input.size(0))
        if need_update:
            optimizer.zero_grad()
        if utils.is_primary(args) and (is_last or batch_idx % args.log_interval == 0):
            print(f"Train: [{batch_idx}/{len(loader)}] Loss: {losses.val:.4f} ({losses.avg:.4f})")
    return {"loss": losses.avg}


@torch.no_grad()
def validate(
    model: nn.Module, loader: Any, args: argparse.Namespace, device: torch.device, amp_autocast: Any
) -> dict[str, float]:
    losses, top1 = utils.AverageMeter(), utils.AverageMeter()
    model.eval()
    for input, target in loader:
        with amp_autocast():
            output = model(input)
            loss = nn.functional.cross_entropy(output, target)
        (acc1,) = utils.accuracy(output, target, topk=(1,))
        if args.distributed:
            loss, acc1 = (utils.reduce_tensor(each, args.world_size) for each in (loss, acc1))
        losses.update(loss.item(), input.size(0))
        top1.update(acc1.item(), input.size(0))
    if utils.is_primary(args):
        print(f"Test: Loss: {losses.avg:.4f} Acc@1: {top1.avg:.2f}")
    return {"loss": losses.avg, "top1": top1.avg}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data-dir", required=True, metavar="DIR")
    parser.add_argument("--train-split", default="train")
    parser.add_argument("--val-split", default="validation")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--num-classes", type=int, default=1000)
    parser.add_argument("--img-size", type=int)
    parser.add_argument("-b", "--batch-size", type=int, default=128)
    parser.add_argument("--grad-accum-steps", type=int, default=1)
    parser.add_argument("--model-kwargs", nargs="*", default={}, action=utils.ParseKwargs)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--amp-dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--torchcompile", nargs="?", const="inductor")
    parser.add_argument("--opt", default="sgd")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--weight-decay", type=float, default=2e-5)
    parser.add_argument("--sched", default="cosine")
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--log-interval", type=int, default=50)
    parser.add_argument("-j", "--workers", type=int, default=4)
    parser.add_argument("--output", default="./output/train")
    parser.add_argument("--experiment", default="timm_train")
    return parser.parse_args()


if __name__ == "__main__":
    main()
