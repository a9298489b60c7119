"""Sources that cannot be read are refused with the file, the fault and what to do."""

import gzip
import io
import struct

import numpy as np
import pytest

from data.test_sources import as_png, pictures, write_folder
from vit_memory.data.sources import open_data
from vit_memory.errors import DataError


def test_bad_sources_are_refused_with_what_to_do(tmp_path):
    def refused(match, source=tmp_path, **options):
        with pytest.raises(DataError, match=match):
            open_data(source, **options)

    refused(r"no such file or folder.*Supported data sources", tmp_path / "nowhere")
    refused("no such file or folder, and no dataset of that name. Did you mean the dataset cifar10", "CIFAR10")
    refused("no images in it")
    (tmp_path / "a.jpg").write_bytes(b"x")
    refused("1 images, but no class folders")
    (tmp_path / "x.zip").write_bytes(b"x")
    refused(".zip files are not supported", tmp_path / "x.zip")
    table = tmp_path / "t.csv"
    table.write_text("file,label\na.jpg,\n,b\n")
    refused(r"1 rows cannot be used\. line 3: no file", table)
    table.write_text("file,label\na.jpg,\nb.jpg,b\nc.jpg, \n")
    refused(r"2 label cells cannot be used\. line 2: no label; line 4: no label", table)
    table.write_text("path,class\na.jpg,b\n")
    refused(r"no file and no label.*columns are path, class.*--image-column", table)
    table.write_text("file,label,split\na.jpg,b,holdout\n")
    refused("split is 'holdout'; expected train, val or test", table)
    (tmp_path / "t.jsonl").write_text('{"file": "a.jpg", "label": "x"}\nnot json\n')
    refused("line 2 is not valid JSON", tmp_path / "t.jsonl")
    np.savez(tmp_path / "o.npz", x_train=np.array([{}], dtype=object), y_train=np.zeros(1))
    refused("not a readable .npz of plain arrays", tmp_path / "o.npz")
    np.savez(tmp_path / "n.npz", x_train=np.zeros((3, 4, 4), np.uint8), y_train=np.zeros(2))
    refused(r"x_train is \(3, 4, 4\), y_train is \(2,\)", tmp_path / "n.npz")
    np.savez(tmp_path / "c.npz", x_train=np.zeros((2, 4, 4), np.uint8), y_train=np.array([0, 7]), classes=["a", "b"])
    refused("label 7 is none of the 2 classes", tmp_path / "c.npz")


def test_test_labels_without_training_images_are_refused(tmp_path):
    write_folder(tmp_path / "train", [p for p in pictures() if p[0] != "cow"])
    write_folder(tmp_path / "test", pictures(2))
    with pytest.raises(DataError, match="the test images have 1 labels without any training image: cow"):
        open_data(tmp_path)


def test_an_incomplete_idx_file_is_refused(tmp_path):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(struct.pack(">4I", 0x803, 5, 4, 4) + bytes(70))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, 5) + bytes(5))
    with pytest.raises(DataError, match="70 bytes of values; expected 80 by its header"):
        open_data(tmp_path)


def npz(**arrays):
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


PIXELS, CLASS_NUMBERS = np.random.default_rng(0).integers(0, 256, (20, 8, 8), np.uint8), np.arange(20) % 2
PACK = npz(x_train=PIXELS, y_train=CLASS_NUMBERS)
UNREADABLE = {
    "cut-off.npz": (PACK[:-200], "not a readable .npz"),
    "without-its-directory.npz": (PACK[:300], "not a readable .npz"),
    "scrambled.npz": (PACK[:200] + bytes(255 - b for b in PACK[200:240]) + PACK[240:], "not a readable .npz"),
    "empty.npz": (b"", "not a readable .npz"),
    "array.npz": (npy(PIXELS), "a single array .* expected an .npz with x_train, y_train"),
    "one-number.npz": (npz(x_train=np.array(1), y_train=np.array(1)), r"x_train is \(\), y_train is \(\)"),
    "latin-1.jsonl": (b'{"file": "a.jpg", "label": "x"}\n{"file": "\xe9.jpg", "label": "x"}', "line 2 is not UTF-8"),
    "latin-1.csv": (b"file,label\n" + b"a.jpg,x\n" * 4000 + b"\xe9.jpg,x\n", "line 4002 is not UTF-8 text"),
    "utf-16.csv": ("file,label\na.jpg,x\n".encode("utf-16"), "line 1 is not UTF-8 text"),
    "utf-16-le.csv": ("file,label\na.jpg,x\n".encode("utf-16-le"), "line 1 contains NUL bytes.*Save it as UTF-8"),
    "nul.csv": (b"file,label\na.jpg,x\nb\0.jpg,x\n", "line 3 contains NUL bytes"),
    "nul.jsonl": (b'{"file": "b\\u0000.jpg", "label": "x"}', "line 1: file is .*a file name cannot contain NUL"),
    "deep.jsonl": (b"[" * 100_000, "line 1 is not valid JSON"),
    "wide.csv": (b"file,label\n" + b"a" * 200_000, "cannot be parsed after line 1"),
    "empty.csv": (b"", "no images in it"),
    "header-only.csv": (b"file,label\n", "no images in it"),
    "cut-off.parquet": (b"PAR1" + bytes(100), "cannot be read"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_damaged_or_unexpected_file_is_refused_with_the_reason(tmp_path, name):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow.parquet")
    content, reason = UNREADABLE[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}.*{reason}"):
        open_data(tmp_path / name)


def test_a_damaged_compressed_idx_file_is_refused(tmp_path):
    whole = gzip.compress(struct.pack(">4I", 0x803, *PIXELS.shape) + PIXELS.tobytes())
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, 20) + bytes(20))
    for content in (whole[:-600], whole[:5], b"", whole[:100] + bytes(8) + whole[108:]):
        (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(content)
        with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: (cannot be read|begins with)"):
            open_data(tmp_path)


def test_a_folder_named_like_a_table_and_an_impossible_name_are_refused(tmp_path):
    (tmp_path / "x.csv").mkdir()
    with pytest.raises(DataError, match="no images in it"):
        open_data(tmp_path / "x.csv")
    with pytest.raises(DataError, match="cannot be read .*too long"):
        open_data("x" * 5000)


def test_unexpected_parquet_metadata_is_refused(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    table = pa.table({"image": [{"bytes": as_png(p), "path": None} for _, p in pictures(2)], "label": [0, 1] * 3})
    for metadata in ("not json", "[1]", '{"info": {"features": {"label": {"names": 5}}}}'):
        pq.write_table(table.replace_schema_metadata({"huggingface": metadata}), tmp_path / "x.parquet")
        with pytest.raises(DataError, match=r"x\.parquet: its Hugging Face metadata cannot be read"):
            open_data(tmp_path / "x.parquet")
