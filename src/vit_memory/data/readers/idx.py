"""Folders of IDX files, the format of MNIST, EMNIST and Fashion-MNIST."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from vit_memory.data.images import ImageArray
from vit_memory.data.readers.base import DataSource, RawDataset, RawSplit, Reader, without_lone_train
from vit_memory.errors import DataError


def read_idx(folder: Path) -> RawDataset:
    """Read every file of images and the file of labels beside it. Labels are the class numbers."""
    splits: dict[str, RawSplit] = {}
    for path in sorted(folder.iterdir()):
        stem = path.name.removesuffix(".gz")
        if not stem.endswith("idx3-ubyte"):
            continue
        name = "train" if "train" in stem else "test"
        labels_path = _labels_path(path)
        images, labels = _read_array(path, 3), _read_array(labels_path, 1)
        if len(images) != len(labels):
            raise DataError(f"{path}: {len(images)} images, but {labels_path.name} has {len(labels)} labels.")
        if name in splits:
            raise DataError(f"{path}: a second file of {name} images. Keep one of them, as .gz or uncompressed.")
        splits[name] = RawSplit(ImageArray.whole(str(path), images), [str(label) for label in labels.tolist()])
    return RawDataset("idx", without_lone_train(splits))


def _labels_path(images_path: Path) -> Path:
    name = images_path.name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
    for candidate in (images_path.with_name(name), images_path.with_name(name + ".gz")):
        if candidate.exists():
            return candidate
    raise DataError(f"{images_path}: its file of labels is missing; expected {name} or {name}.gz beside it.")


def _read_array(path: Path, dimensions: int) -> np.ndarray:
    """Two zero bytes, the type (8: uint8), the number of dimensions, each size as a big-endian uint32, the values."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise DataError(f"{path}: cannot be read ({error}).") from error
    magic = struct.pack(">HBB", 0, 8, dimensions)
    if raw[:4] != magic:
        raise DataError(
            f"{path}: begins with {raw[:4].hex(' ')}; expected {magic.hex(' ')}, an IDX file of uint8 values with "
            f"{dimensions} dimensions."
        )
    sizes = struct.unpack_from(f">{dimensions}I", raw, 4) if len(raw) >= 4 + 4 * dimensions else (0,)
    count = math.prod(sizes)
    start = 4 + 4 * dimensions
    if len(raw) - start != count:
        raise DataError(
            f"{path}: {len(raw) - start} bytes of values; expected {count} by its header. The file is incomplete."
        )
    return np.frombuffer(raw, np.uint8, count, start).reshape(sizes)


def _accepts(source: DataSource) -> bool:
    if not source.path.is_dir():
        return False
    names = [entry.name for entry in source.path.iterdir() if not entry.name.startswith(".")]
    return any("-idx3-ubyte" in name or ".idx3-ubyte" in name for name in names)


IDX = Reader(
    "a folder of IDX files:              train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-… (or .gz)",
    _accepts,
    lambda source: read_idx(source.path),
)
