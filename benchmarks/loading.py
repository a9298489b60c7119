"""How fast a folder of photographs becomes training batches, against a plain Pillow Dataset in torch's DataLoader.

    python -m benchmarks.loading --json out.json

JPEGs whose shorter side is 512 pixels (or more, the second row) to normalised float32 batches of 64 at 224 pixels,
random resized crops and mirroring, bilinear, the same number of worker processes on both sides. The photographs are
drawn here: noise with the spectrum of natural images, saved at quality 75, Pillow's default, and at 90. At 90 a file
is as large as the largest real photographs of its size, and most of the work is undoing its entropy coding.
`speed` is images per second over the plain loader's, in the same interleaved run.
"""

import argparse
import json
import math
import random
import re
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.measure import commit, compare, seconds, write
from vit_memory.data import decoding
from vit_memory.data.images import ImageFiles
from vit_memory.data.loading import Loader
from vit_memory.data.splits import Split
from vit_memory.data.transforms import TrainTransform
from vit_memory.preprocessing import Preprocessing

BATCH, SIZE = 64, 224
FACTS = Preprocessing(256, (SIZE, SIZE), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bilinear")


class Plain(Dataset[Any]):
    """What everybody writes first: Pillow opens, crops, mirrors; numpy and torch scale and normalise."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.mean, self.std = (torch.tensor(values)[:, None, None] for values in (FACTS.mean, FACTS.std))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        image = Image.open(self.paths[i]).convert("RGB")
        width, height = image.size
        for _ in range(10):
            area = width * height * random.uniform(0.08, 1)
            shape = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
            if w <= width and h <= height:
                break
        else:
            w = h = min(width, height)
        left, top = random.randint(0, width - w), random.randint(0, height - h)
        image = image.crop((left, top, left + w, top + h)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        return (pixels - self.mean) / self.std, i


def photograph(rng: np.random.Generator, height: int, width: int) -> Image.Image:
    """Noise whose amplitude falls as one over frequency, as in photographs, in three correlated channels."""
    down, across = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    fall = 1 / np.maximum(np.hypot(down, across), 1 / max(height, width))
    planes = [
        np.fft.irfft2(np.fft.rfft2(rng.standard_normal((height, width))) * fall, (height, width)) for _ in range(3)
    ]
    mixed = np.einsum("ij,jhw->hwi", [[1, 0.4, 0.2], [1, 0, 0.1], [1, -0.3, 0.3]], np.stack(planes))
    scaled = (mixed - mixed.mean()) / mixed.std() * 55 + 120
    return Image.fromarray(np.clip(scaled, 0, 255).astype(np.uint8))


def write_photographs(folder: Path, shorter: int, count: int, quality: int) -> list[str]:
    """JPEG files of several shapes."""
    rng = np.random.default_rng(0)
    paths = []
    for i in range(count):
        longer = round(shorter * (4 / 3, 1.0, 1.5)[i % 3])
        height, width = (shorter, longer) if i % 2 else (longer, shorter)
        paths.append(str(folder / f"{i}.jpg"))
        photograph(rng, height, width).save(paths[-1], quality=quality)
    return paths


def measure(shorter: int, quality: int, count: int, workers: int, decoder: str, budget_s: float) -> dict[str, object]:
    """One row."""
    with tempfile.TemporaryDirectory() as folder:
        paths = write_photographs(Path(folder), shorter, count, quality)
        size = sum(Path(path).stat().st_size for path in paths) / count
        plain = DataLoader(Plain(paths), batch_size=BATCH, num_workers=workers, shuffle=True)
        ours = Loader(Split.of(ImageFiles(tuple(paths)), [0] * count), TrainTransform(FACTS), BATCH, workers)

        def run(batches: Callable[[], Any]) -> Callable[[], int]:
            return lambda: sum(1 for _ in batches())

        without = mock.patch.object(decoding, "_simplejpeg", return_value=None)  # workers inherit it by fork
        if decoder == "Pillow":
            without.start()
        try:
            found = compare(run(ours.batches), run(lambda: iter(plain)), budget_s=budget_s)
            rate = count / seconds(run(ours.batches))
        finally:
            mock.patch.stopall()
    return {
        "case": f"{shorter}px-q{quality}-{decoder}-workers{workers}",
        "speed": 1 / found.median,
        "spread": (1 / found.spread[1], 1 / found.spread[0]),
        "repeats": found.repeats,
        "images_per_s": rate,
        "file_kb": size / 1000,
        "commit": commit(),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--count", type=int, default=640, help="photographs per epoch; few measure how workers start")
    parser.add_argument("--only", default="", help="cases whose names match this pattern")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds per row")
    asked = parser.parse_args()
    rows = []
    print(f"{'case':28} {'speed':>6}  {'quartiles':>13} {'images/s':>9}")
    for shorter, quality, decoder in product((512, 1536), (75, 90), ("simplejpeg", "Pillow")):
        if not re.search(asked.only, f"{shorter}px-q{quality}-{decoder}"):
            continue
        count = asked.count if shorter == 512 else max(BATCH, asked.count // 6)
        row = measure(shorter, quality, count, asked.workers, decoder, asked.budget)
        low, high = row["spread"]  # type: ignore[misc]
        print(f"{row['case']:28} {row['speed']:6.2f}  {low:6.2f}-{high:6.2f} {row['images_per_s']:9.0f}", flush=True)
        rows.append(row)
    if asked.json:
        write(asked.json, rows, batch=BATCH, size=SIZE)
    else:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
