"""A GPT-2 in plain PyTorch, trained by a loop in nanoGPT's style; `fl.step` is the line that records it.

    fastlaunch submit --local -L amp=fp32,tf32,bf16 --repeats 3 -- python nanogpt.py --amp {amp}
    torchrun --nproc-per-node=8 nanogpt.py      # the global batch is that of all ranks

It needs torch alone. The text is drawn: each token has eight successors, so the best loss is ln 8 = 2.08.
"""

import argparse
import math
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

import fastlaunch_train as fl

#: Blocks, heads, width, vocabulary.
SIZES = {"124M": (12, 12, 768, 50304), "350M": (24, 16, 1024, 50304), "tiny": (2, 2, 64, 512)}
NUM_SUCCESSORS = 8


class Block(nn.Module):
    """Attention and a perceptron, each on what is normalised, each added to the stream."""

    def __init__(self, num_heads: int, width: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, tokens, width)
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(heads.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """GPT-2: learned positions, and one matrix for the embedding and the head."""

    def __init__(self, num_blocks: int, num_heads: int, width: int, vocabulary: int, sequence: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(num_heads, width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                is_residual = name.endswith(("proj.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * num_blocks) if is_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def main() -> None:
    args = parse_arguments()
    is_ddp = "RANK" in os.environ
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if is_ddp:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("highest" if args.amp == "fp32" else "high")
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.amp == "bf16")

    num_blocks, num_heads, width, vocabulary = SIZES[args.size]
    train, validation = draw_text(args.rows, args.sequence, vocabulary, args.seed)
    draw = torch.Generator().manual_seed(1000 * args.seed + rank)

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        rows = train[torch.randint(len(train), (args.batch,), generator=draw)]
        if device.type == "cuda":
            rows = rows.pin_memory()
        rows = rows.to(device, non_blocking=True)
        return rows[:, :-1], rows[:, 1:]

    model: nn.Module = GPT(num_blocks, num_heads, width, vocabulary, args.sequence).to(device)
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=args.fused_adamw == "on",
    )
    if args.compile == "on":
        model = torch.compile(model)
    if is_ddp:
        model = nn.parallel.DistributedDataParallel(model)

    @torch.no_grad()
    def estimate_loss() -> float:
        model.eval()
        losses = []
        for rows in validation.split(args.batch):
            with autocast:
                losses.append(model(rows[:, :-1].to(device), rows[:, 1:].to(device)).item())
        model.train()
        return sum(losses) / len(losses)

    num_samples = args.batch * args.accumulate
    tokens, targets = get_batch()
    started = time.time()
    for iteration in range(args.steps):
        rate = learning_rate(iteration, args.steps, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for micro in range(args.accumulate):
            if is_ddp:
                model.require_backward_grad_sync = micro == args.accumulate - 1
            with autocast:
                loss = model(tokens, targets) / args.accumulate
            tokens, targets = get_batch()  # while the GPU is busy
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        fl.step(num_samples=num_samples, loss=loss.detach() * args.accumulate)

        if args.log_every and (iteration + 1) % args.log_every == 0 and rank == 0:
            step_ms = 1000 * (time.time() - started) / args.log_every
            print(f"step {iteration + 1}: loss {loss.item() * args.accumulate:.4f}, {step_ms:.2f} ms")
            started = time.time()
        if iteration + 1 == args.steps or (args.eval_every and (iteration + 1) % args.eval_every == 0):
            held_out = estimate_loss()  # on every rank, so that none waits for another at a step
            fl.evaluate(loss=held_out, num_samples=len(validation))
            if rank == 0:
                print(f"step {iteration + 1}: validation loss {held_out:.4f}")
            started = time.time()
    if is_ddp:
        dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--amp", choices=("fp32", "tf32", "bf16"), default="bf16")
    parser.add_argument("--compile", choices=("on", "off"), default="off")
    parser.add_argument("--fused-adamw", choices=("on", "off"), default="off")
    parser.add_argument("--size", choices=sorted(SIZES), default="124M")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and micro-step")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-steps of a step")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--log-every", type=int, default=10, help="0: never")
    parser.add_argument("--eval-every", type=int, default=0, help="0: at the end only")
    parser.add_argument("--rows", type=int, default=4096, help="sequences of the text")
    parser.add_argument("--seed", type=int, default=os.environ.get("FASTLAUNCH_ROUND", "0"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def draw_text(rows: int, sequence: int, vocabulary: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows, sequence + 1) token ids to train on, and 64 rows or fewer that are held out."""
    draw = torch.Generator().manual_seed(seed)
    successors = torch.randint(vocabulary, (min(vocabulary, 1024), NUM_SUCCESSORS), generator=draw)
    num_kinds = len(successors)
    successors %= num_kinds
    num_held_out = min(64, rows)
    text = torch.randint(num_kinds, (rows + num_held_out, 1), generator=draw)
    columns = [text[:, 0]]
    for _ in range(sequence):
        choice = torch.randint(NUM_SUCCESSORS, (len(text),), generator=draw)
        columns.append(successors[columns[-1], choice])
    text = torch.stack(columns, dim=1)
    return text[:rows], text[rows:]


def learning_rate(iteration: int, steps: int, peak: float) -> float:
    """Rise for the first tenth, then fall along half a cosine to a tenth of the peak."""
    warmup = max(1, steps // 10)
    if iteration < warmup:
        return peak * (iteration + 1) / warmup
    done = (iteration - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


if __name__ == "__main__":
    main()
