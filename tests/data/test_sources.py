"""Every layout opens to the same images, labels and splits."""

import csv
import gzip
import json
import shutil
import struct
import sys

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from data.odd_images import encoded
from vit_memory.cli import app
from vit_memory.data import sources
from vit_memory.data.images import ImageArray
from vit_memory.data.readers.base import RawDataset, RawSplit, Reader
from vit_memory.data.sources import READERS, open_data
from vit_memory.errors import DataError

LABELS = ("ant", "bee", "cow")


def pictures(count=10, side=12, seed=0):
    """`count` pictures of every label, as (label, pixels)."""
    rng = np.random.default_rng(seed)
    return [(label, rng.integers(0, 256, (side, side, 3), np.uint8)) for label in LABELS for _ in range(count)]


def as_png(pixels):
    return encoded(Image.fromarray(pixels), "PNG")


def write_folder(root, pairs, named="{:03}.png"):
    for i, (label, pixels) in enumerate(pairs):
        (root / label).mkdir(parents=True, exist_ok=True)
        (root / label / named.format(i)).write_bytes(as_png(pixels))
    return root


def contents(split):
    """The sorted (label, pixels) of a split, in any layout."""
    from vit_memory.data.decoding import decode

    decoded = (decode(split.images.read(i), split.images.name(i)) for i in range(len(split)))
    return sorted((int(label), pixels.numpy().tobytes()) for label, pixels in zip(split.targets, decoded, strict=True))


def same(a, b):
    assert a.labels == b.labels
    assert a.splits.keys() == b.splits.keys()
    for name in a.splits:
        assert contents(a.splits[name]) == contents(b.splits[name]), name


def test_names_order_and_folders_of_files_do_not_change_the_split(tmp_path):
    pairs = pictures()
    one = open_data(write_folder(tmp_path / "one", pairs))
    two = open_data(write_folder(tmp_path / "two", pairs[::-1], named="photo {}.png"))
    same(one, two)
    assert {name: len(split) for name, split in one.splits.items()} == {"train": 18, "validation": 6, "test": 6}


def test_a_table_opens_as_the_folder_it_lists(tmp_path):
    pairs = pictures()
    folder = write_folder(tmp_path / "images", pairs)
    rows = [(str(path.relative_to(tmp_path)), path.parent.name) for path in folder.glob("*/*.png")]
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "label"), *rows])
    with (tmp_path / "t.jsonl").open("w") as file:
        file.writelines(json.dumps({"picture": f, "species": k}) + "\n" for f, k in rows[::-1])
    same(open_data(folder), open_data(tmp_path / "t.csv"))
    same(open_data(folder), open_data(tmp_path / "t.jsonl", image_column="picture", label_column="species"))


def test_split_folders_and_a_split_column_are_kept_as_they_are(tmp_path):
    train, val, test = pictures(6, seed=1), pictures(2, seed=2), pictures(3, seed=3)
    for name, pairs in (("train", train), ("val", val), ("test", test)):
        write_folder(tmp_path / "d" / name, pairs)
    opened = open_data(tmp_path / "d")
    assert [len(split) for split in opened.splits.values()] == [18, 6, 9]
    assert set(opened.origin.values()) == {"official"}
    with (tmp_path / "t.csv").open("w", newline="") as file:
        rows = [(p.relative_to(tmp_path), p.parent.name, p.parts[-3]) for p in (tmp_path / "d").glob("*/*/*.png")]
        csv.writer(file).writerows([("file", "label", "split"), *rows])
    same(opened, open_data(tmp_path / "t.csv"))
    shutil.rmtree(tmp_path / "d/val")
    redrawn = open_data(tmp_path / "d")
    assert redrawn.test.digest() == opened.test.digest()
    assert "from the training images" in redrawn.origin["validation"]
    shutil.rmtree(tmp_path / "d/test")
    assert set(open_data(tmp_path / "d").labels) == {"train"}  # one folder of that name is a class of toy trains


def test_npz_idx_and_parquet_open_alike(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    grey = [(label, pixels[:, :, 0]) for label, pixels in pictures(10)]
    train, test = grey[::2], grey[1::2]
    stacked = {n: np.stack([p for _, p in part]) for n, part in (("train", train), ("test", test))}
    numbers = {n: np.array([LABELS.index(k) for k, _ in part]) for n, part in (("train", train), ("test", test))}
    arrays = {f"x_{n}": stacked[n] for n in stacked} | {f"y_{n}": numbers[n] for n in numbers}
    np.savez(tmp_path / "pack.npz", classes=np.array(LABELS), **arrays)
    (tmp_path / "idx").mkdir()
    for name, prefix in (("train", "train"), ("test", "t10k")):
        x, y = stacked[name], numbers[name].astype(np.uint8)
        images = struct.pack(">4I", 0x803, *x.shape) + x.tobytes()
        (tmp_path / f"idx/{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (tmp_path / f"idx/{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, len(y)) + y.tobytes())
    (tmp_path / "pq").mkdir()
    metadata = {"info": {"features": {"label": {"names": LABELS, "_type": "ClassLabel"}, "image": {"_type": "Image"}}}}
    for name, pixels in stacked.items():
        cells = [{"bytes": as_png(p), "path": None} for p in pixels]
        table = pa.table({"image": cells, "label": numbers[name]}).replace_schema_metadata(
            {"huggingface": json.dumps(metadata)}
        )
        pq.write_table(table, tmp_path / f"pq/{name}-00000-of-00001.parquet")
    npz, idx, parquet = (open_data(tmp_path / name) for name in ("pack.npz", "idx", "pq"))
    assert npz.labels == parquet.labels == LABELS
    assert idx.labels == ("0", "1", "2")
    assert contents(npz.test) == contents(idx.test) == contents(parquet.test)
    assert npz.train.digest() == idx.train.digest()  # the same pixels, so the same draw


def test_hugging_face_datasets_opens_local_parquet_and_image_folders(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    folder = write_folder(tmp_path / "images", pictures())
    same(open_data(f"hf:{folder}"), open_data(folder))


def test_digits_open_without_a_download():
    digits = open_data("digits")
    assert sum(map(len, digits.splits.values())) == 1797
    assert digits.train.images.read(0).shape == (8, 8)


def test_a_new_layout_is_one_reader_in_the_list(monkeypatch):
    images = ImageArray.whole("noise", np.random.default_rng(0).integers(0, 256, (20, 4, 4), np.uint8))
    noise = RawDataset("noise", {"all": RawSplit(images, ["a", "b"] * 10)})
    reader = Reader("noise: random images", lambda source: source.name == "noise", lambda source: noise)
    monkeypatch.setattr(sources, "READERS", (reader, *READERS))
    opened = open_data("noise")
    assert (opened.layout, opened.labels) == ("noise", ("a", "b"))
    assert [len(split) for split in opened.splits.values()] == [12, 4, 4]
    with pytest.raises(DataError, match="noise: random images"):
        open_data("nothing")


def test_the_data_command_notes_problems_and_counts_every_class(tmp_path):
    pairs = pictures(10)
    write_folder(tmp_path / "d/train", [*pairs[:3], *pairs[10:30]])
    write_folder(tmp_path / "d/val", pairs[:4], named="copy{}.png")
    result = CliRunner().invoke(app, ["data", str(tmp_path / "d")])
    assert result.exit_code == 0, result.output
    assert "3 classes, folder" in result.output
    assert "no test images" in result.output
    assert "3 duplicate images are in both train and validation" in result.output
    summary = json.loads(CliRunner().invoke(app, ["data", str(tmp_path / "d"), "--json", "--check", "none"]).output)
    assert summary["splits"]["train"]["per_class"] == {"ant": 3, "bee": 10, "cow": 10}
    assert summary["format"] == "vit-memory-data/1"


def test_a_missing_library_is_named_with_its_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "x.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"pip install 'vit-memory\[datasets\]'"):
        open_data(tmp_path / "x.parquet")
