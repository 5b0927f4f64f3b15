"""How many JPEGs a CPU decodes, resizes, crops and normalises a second, as `--data folder:PATH` does.

    python tests/benchmarks/jpeg_decode.py

The images have the size of ImageNet's, 500 x 375 pixels in about 100 kB. One thread prepares them, and the
time is that of its CPU, so that other processes hardly matter. `JPEGS_PER_VCPU_S` in the launcher's
`lifecycle/evidence.py` has the result.
"""

import io
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "train")]

from fastlaunch_train.data.cpu_torchvision import prepare_torchvision  # noqa: E402
from fastlaunch_train.data.images import ImageShape, _FolderImages  # noqa: E402

NUM_IMAGES, ROUNDS = 64, 5
WIDTH, HEIGHT, KILOBYTES = 500, 375, 110


def jpeg(seed: int) -> bytes:
    """Return an image of smooth areas and fine detail, of the size and weight of ImageNet's."""
    noise = np.random.default_rng(seed)
    coarse = Image.fromarray(noise.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), dtype=np.float32)
    detail = noise.normal(0, 14, smooth.shape)
    picture = Image.fromarray(np.clip(smooth + detail, 0, 255).astype(np.uint8))
    for quality in range(95, 50, -3):
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=quality)
        if file.tell() <= 1000 * KILOBYTES:
            break
    return file.getvalue()


def main() -> None:
    torch.set_num_threads(1)
    prepare_torchvision()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number}.jpg") for number in range(NUM_IMAGES)]
        for number, path in enumerate(paths):
            path.write_bytes(jpeg(number))
        kilobytes = statistics.mean(path.stat().st_size for path in paths) / 1000
        images = _FolderImages([(str(path), 0) for path in paths], ImageShape(size=224, num_classes=1000))
        rates = []
        for _ in range(ROUNDS):
            started = time.process_time()
            for number in range(NUM_IMAGES):
                images[number, number % 2 == 0]
            rates.append(NUM_IMAGES / (time.process_time() - started))
    print(f"{statistics.median(rates):.0f} images of {kilobytes:.0f} kB per second of one CPU")


if __name__ == "__main__":
    main()
