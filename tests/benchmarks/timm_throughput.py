"""Training throughput of timm's models on this GPU, as rows that predictions learn from.

    python -m benchmarks.timm_throughput --output FILE.csv (in tests/, on a machine with a GPU)

Measures what timm's own `benchmark.py --bench train --amp --channels-last` does: forward, backward and SGD
under autocast to float16 on random images; 10 steps to warm up and 40 timed, or those of 4 seconds. Takes
the models and batches of the published RTX 3090 rows, one of each family first, until the time is up. A batch
that does not fit is halved.
"""

import argparse
import csv
import datetime
import itertools
import lzma
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import timm
import torch
from torch.nn.functional import cross_entropy

_ROWS = Path(__file__).parents[2] / "launcher/fastlaunch/catalog/training_throughput.csv.xz"
_PUBLISHED = "benchmark-train-amp-nhwc"
_NUM_WARMUP, _NUM_STEPS, _SECONDS = 10, 40, 4.0


def published() -> Iterator[Mapping[str, str]]:
    """Yield the published rows: one of every family, then another of every family, and so on."""
    with lzma.open(_ROWS, "rt") as file:
        rows = [row for row in csv.DictReader(file) if _PUBLISHED in row["path"]]
    random.Random(0).shuffle(rows)
    families = defaultdict(list)
    for row in rows:
        families[re.split(r"[\d_]", row["model"])[0]].append(row)
    for turn in itertools.zip_longest(*families.values()):
        yield from filter(None, turn)


def images_per_s(name: str, batch: int, pixels: int) -> tuple[float, int]:
    """Return images per second, and of how many training steps. Raises torch.OutOfMemoryError."""
    device = torch.device("cuda")
    model = timm.create_model(name, img_size=pixels) if "vit" in name else timm.create_model(name)
    model = model.to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    images = torch.randn(batch, 3, pixels, pixels, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(model.num_classes, (batch,), device=device)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def seconds_of(num_steps: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    step()
    num_warmup = min(_NUM_WARMUP, 1 + int(_SECONDS / seconds_of(1)))
    num_steps = min(_NUM_STEPS, 1 + int(_SECONDS / seconds_of(num_warmup) * num_warmup))
    seconds = seconds_of(num_steps)
    # What is not finite can be faster than what trains.
    if not step().isfinite():
        raise ValueError("the loss is not finite")
    return batch * num_steps / seconds, num_steps


def measured(row: Mapping[str, str]) -> dict[str, str]:
    """Return the row as measured here."""
    batch, pixels = int(float(row["batch_per_gpu"])), int(re.sub(r"\D", "", row["seq_or_image"]))
    while True:
        try:
            rate, num_steps = images_per_s(row["model"], batch, pixels)
            break
        except torch.OutOfMemoryError:
            batch //= 2
            torch.cuda.empty_cache()
    notes = (
        f"PyTorch {torch.__version__} CUDA {torch.version.cuda} cuDNN {torch.backends.cudnn.version()},"
        f" timm {timm.__version__}, {num_steps} steps"
    )
    return {
        **row,
        "source_repo": "fastlaunch",
        "path": "tests/benchmarks/timm_throughput.py",
        "gpu": torch.cuda.get_device_name(),
        "batch_per_gpu": str(batch),
        "throughput": f"{rate:.2f}",
        "date": datetime.date.today().isoformat(),
        "notes": notes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540)
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    end = time.monotonic() + options.seconds
    with options.output.open("w", newline="") as file:
        writer = None
        for row in published():
            if time.monotonic() > end:
                break
            try:
                found = measured(row)
            except Exception as error:
                # A model that this version of timm has no more, or makes otherwise.
                print(f"{row['model']}: {type(error).__name__}: {error}"[:200], file=sys.stderr)
                continue
            writer = writer or csv.DictWriter(file, list(found))
            if not file.tell():
                writer.writeheader()
            writer.writerow(found)
            file.flush()
            ratio = float(found["throughput"]) / float(row["throughput"])
            print(f"{found['model']:40} {found['throughput']:>10} {ratio:6.2f}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
