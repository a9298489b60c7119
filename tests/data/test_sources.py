"""Every layout opens to the same images, labels and splits; the splits follow content and seed, nothing else."""

import csv
import gzip
import io
import json
import pickle
import shutil
import struct
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from data.odd_images import encoded
from vit_memory.cli import app
from vit_memory.data.images import ImageArray
from vit_memory.data.readers.named import DATASETS
from vit_memory.data.sources import open_data
from vit_memory.data.splits import Split, draw_split
from vit_memory.errors import DataError

LABELS = ("ant", "bee", "cow")


def pictures(count=10, side=12, seed=0):
    """count pictures of every label, as (label, pixels)."""
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
    """What is in a split, whatever holds it: (label, pixels)."""
    from vit_memory.data.decoding import decode

    decoded = (decode(split.images.read(i), split.images.name(i)) for i in range(len(split)))
    return sorted((int(label), pixels.numpy().tobytes()) for label, pixels in zip(split.targets, decoded, strict=True))


def same(a, b):
    assert a.labels == b.labels
    assert a.splits.keys() == b.splits.keys()
    for name in a.splits:
        assert contents(a.splits[name]) == contents(b.splits[name]), name


# ------------------------------------------------------------------------------------------------------- splits


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    copies=st.integers(0, 8),
    seed=st.integers(0, 3),
    data=st.data(),
)
def test_a_drawn_split_is_stratified_keeps_copies_together_and_does_not_know_the_order(sizes, copies, seed, data):
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    pixels = np.arange(len(labels), dtype=np.uint16)[:, None, None] + np.zeros((1, 1, 1), np.uint16)
    for _ in range(copies):  # a copy of some image, under its own or another label
        i = data.draw(st.integers(0, len(labels) - 1))
        labels.append(data.draw(st.sampled_from([labels[i], *range(len(sizes))])))
        pixels = np.concatenate([pixels, pixels[i : i + 1]])
    order = np.array(data.draw(st.permutations(range(len(labels)))))
    straight = Split.of(ImageArray.whole("a", pixels), labels)
    shuffled = Split.of(ImageArray.whole("b", pixels[order]), np.array(labels)[order])
    rest, drawn = draw_split(straight, "test", seed)
    assert [s.digest() for s in draw_split(shuffled, "test", seed)] == [rest.digest(), drawn.digest()]
    assert len(rest) + len(drawn) == len(labels)
    assert not set(rest.digests) & set(drawn.digests)
    for label in range(len(sizes)):
        mine = {d for d, k in zip(straight.digests, straight.targets, strict=True) if k == label}
        elsewhere = {d for d, k in zip(straight.digests, straight.targets, strict=True) if k != label}
        got = {d for d, k in zip(drawn.digests, drawn.targets, strict=True) if k == label}
        alone = len(mine - elsewhere)
        assert len(got) == (max(1, round(0.2 * alone)) if alone > 1 else 0)


def test_another_seed_draws_another_split_and_few_per_class_are_drawn_alike(tmp_path):
    write_folder(tmp_path, pictures())
    first, again, other = (open_data(tmp_path, seed=seed) for seed in (0, 0, 1))
    assert first.record() == again.record()
    assert first.test.digest() != other.test.digest()
    few = first.train.per_class(3, seed=0)
    assert np.bincount(few.targets).tolist() == [3, 3, 3]
    assert few.digest() == again.train.per_class(3, seed=0).digest() != again.train.per_class(3, seed=1).digest()


# ------------------------------------------------------------------------------------------------------ layouts


def test_names_order_and_place_of_files_do_not_change_the_split(tmp_path):
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
        file.writelines(json.dumps({"picture": f, "kind": k}) + "\n" for f, k in rows[::-1])
    same(open_data(folder), open_data(tmp_path / "t.csv"))
    same(open_data(folder), open_data(tmp_path / "t.jsonl", image_column="picture", label_column="kind"))


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
    carved = open_data(tmp_path / "d")
    assert carved.test.digest() == opened.test.digest()
    assert "from the training images" in carved.origin["validation"]
    shutil.rmtree(tmp_path / "d/test")
    assert set(open_data(tmp_path / "d").labels) == {"train"}  # one folder of that name is a class of toy trains


def test_npz_idx_and_parquet_hold_the_same(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    grey = [(label, pixels[:, :, 0]) for label, pixels in pictures(10)]
    train, test = grey[::2], grey[1::2]
    stacked = {n: np.stack([p for _, p in part]) for n, part in (("train", train), ("test", test))}
    numbers = {n: np.array([LABELS.index(k) for k, _ in part]) for n, part in (("train", train), ("test", test))}
    arrays = {f"x_{n}": stacked[n] for n in stacked} | {f"y_{n}": numbers[n] for n in numbers}
    np.savez(tmp_path / "pack.npz", classes=np.array(LABELS), **arrays)
    (tmp_path / "idx").mkdir()
    for name, beginning in (("train", "train"), ("test", "t10k")):
        x, y = stacked[name], numbers[name].astype(np.uint8)
        images = struct.pack(">4I", 0x803, *x.shape) + x.tobytes()
        (tmp_path / f"idx/{beginning}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (tmp_path / f"idx/{beginning}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, len(y)) + y.tobytes())
    (tmp_path / "pq").mkdir()
    about = {"info": {"features": {"label": {"names": LABELS, "_type": "ClassLabel"}, "image": {"_type": "Image"}}}}
    for name, pixels in stacked.items():
        cells = [{"bytes": as_png(p), "path": None} for p in pixels]
        table = pa.table({"image": cells, "label": numbers[name]}).replace_schema_metadata(
            {"huggingface": json.dumps(about)}
        )
        pq.write_table(table, tmp_path / f"pq/{name}-00000-of-00001.parquet")
    npz, idx, parquet = (open_data(tmp_path / name) for name in ("pack.npz", "idx", "pq"))
    assert npz.labels == parquet.labels == LABELS
    assert idx.labels == ("0", "1", "2")
    assert contents(npz.test) == contents(idx.test) == contents(parquet.test)
    assert npz.train.digest() == idx.train.digest()  # the same pixels, so the same carving


def test_hugging_face_datasets_opens_local_parquet_and_image_folders(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    folder = write_folder(tmp_path / "images", pictures())
    same(open_data(f"hf:{folder}"), open_data(folder))


def test_digits_are_there_without_a_download():
    digits = open_data("digits")
    assert sum(map(len, digits.splits.values())) == 1797
    assert digits.train.images.read(0).shape == (8, 8)


# -------------------------------------------------------------------------------------------- the paper's datasets


def write_cifar(root, fine, binary):
    rng = np.random.default_rng(0)
    names = [f"class{i}" for i in range(100 if fine else 10)]
    files = ["train", "test"] if fine else [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    home = root / (
        ("cifar-100-binary" if binary else "cifar-100-python")
        if fine
        else f"cifar-10-batches-{'bin' if binary else 'py'}"
    )
    home.mkdir(parents=True)
    for file in files:
        rows, labels = rng.integers(0, 256, (2 * len(names), 3072), np.uint8), [*range(len(names))] * 2
        if binary:
            head = np.array([[label // 5, label] if fine else [label] for label in labels], np.uint8)
            np.concatenate([head, rows], 1).tofile(home / f"{file}.bin")
        else:
            key = b"fine_labels" if fine else b"labels"
            (home / file).write_bytes(pickle.dumps({b"data": rows, key: labels}, protocol=2))
    if binary:
        (home / ("fine_label_names.txt" if fine else "batches.meta.txt")).write_text("\n".join(names) + "\n\n")
    else:
        key = b"fine_label_names" if fine else b"label_names"
        meta = {key: [name.encode() for name in names]}
        (home / ("meta" if fine else "batches.meta")).write_bytes(pickle.dumps(meta, protocol=2))


def write_coco(root, listing, prefix, pairs):
    images, annotations = [], []
    for i, (label, pixels) in enumerate(pairs):
        path = root / prefix / label / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(as_png(pixels))
        images.append({"id": i, "file_name": str(path.relative_to(root))})
        annotations.append({"image_id": i, "category_id": LABELS.index(label)})
    categories = [{"id": i, "name": label, "supercategory": "animal"} for i, label in enumerate(LABELS)]
    (root / listing).write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))


def write_places(root):
    (root / "categories_places365.txt").write_text("".join(f"/{k[0]}/{k} {i}\n" for i, k in enumerate(LABELS)))
    for home, listing, pairs in (
        ("data_256", "places365_train_standard.txt", pictures(10)),
        ("val_256", "places365_val.txt", pictures(2, seed=1)),
    ):
        lines = []
        for i, (label, pixels) in enumerate(pairs):
            name = f"/{label[0]}/{label}/{i:08}.jpg" if home == "data_256" else f"Places365_val_{i:08}.jpg"
            path = root / home / name.removeprefix("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(as_png(pixels))
            lines.append(f"{name} {LABELS.index(label)}\n")
        (root / listing).write_text("".join(lines))


def write_sun(root):
    classes = ["/a/abbey", "/a/apse/indoor", "/b/barn"]
    (root / "SUN397").mkdir(parents=True)
    (root / "SUN397/ClassName.txt").write_text("\n".join(classes) + "\n")
    (root / "Partitions").mkdir()
    for file, pairs in (("Training_01.txt", pictures(10)), ("Testing_01.txt", pictures(2, seed=1))):
        lines = []
        for i, (label, pixels) in enumerate(pairs):
            name = f"{classes[LABELS.index(label)]}/sun_{file[:5]}_{i}.jpg"
            path = root / "SUN397" / name[1:]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(as_png(pixels))
            lines.append(name)
        (root / "Partitions" / file).write_text("\n".join(lines) + "\n")


def write_imagenet(root):
    write_folder(root / "train", pictures(10), named="n_{}.JPEG".replace("JPEG", "jpeg"))
    (root / "val").mkdir()
    rows = ["ImageId,PredictionString\n"]
    for i, (label, pixels) in enumerate(pictures(2, seed=1), 1):
        (root / f"val/ILSVRC2012_val_{i:08}.JPEG").write_bytes(as_png(pixels))
        rows.append(f"ILSVRC2012_val_{i:08},{label} 1 2 3 4\n")
    (root / "LOC_val_solution.csv").write_text("".join(rows))


def write_inaturalist(root, train, val, prefix):
    root.mkdir(parents=True, exist_ok=True)
    write_coco(root, train, prefix[0], pictures(10))
    write_coco(root, val, prefix[1], pictures(2, seed=1))


WRITERS = {
    "cifar10": (lambda root: write_cifar(root, False, False), (100, 20)),
    "cifar10 binary": (lambda root: write_cifar(root, False, True), (100, 20)),
    "cifar100": (lambda root: write_cifar(root, True, False), (200, 200)),
    "cifar100 binary": (lambda root: write_cifar(root, True, True), (200, 200)),
    "imagenet-1k": (write_imagenet, (30, 6)),
    "inaturalist-2017": (
        lambda root: write_inaturalist(
            root, "train2017.json", "val2017.json", ("train_val_images/x", "train_val_images/y")
        ),
        (30, 6),
    ),
    "inaturalist-2021": (lambda root: write_inaturalist(root, "train.json", "val.json", ("train", "val")), (30, 6)),
    "places365": (write_places, (30, 6)),
    "sun397": (write_sun, (30, 6)),
}


@pytest.mark.parametrize("layout", WRITERS)
def test_a_dataset_of_the_paper_is_read_as_its_archives_unpack(layout, tmp_path):
    write, (train, test) = WRITERS[layout]
    tmp_path.joinpath("root").mkdir()
    write(tmp_path / "root")
    opened = open_data(layout.split()[0], data_dir=tmp_path / "root")
    assert len(opened.train) + len(opened.validation) == train
    assert len(opened.test) == test
    assert opened.origin["test"] == "official"
    assert opened.test.images.read(0) is not None
    assert len(set(opened.test.targets.tolist())) == len(opened.labels)  # every class is judged


def test_every_named_dataset_says_what_it_expects(tmp_path):
    assert {layout.split()[0] for layout in WRITERS} == set(DATASETS)
    for name in DATASETS:
        with pytest.raises(DataError, match=r"--data-dir\. Expected in it"):
            open_data(name)
        with pytest.raises(DataError, match=r"is incomplete: .* is missing\. Expected: "):
            open_data(name, data_dir=tmp_path)


def test_downloads_go_through_torchvision_when_asked_for(tmp_path, monkeypatch):
    datasets = pytest.importorskip("torchvision.datasets")
    monkeypatch.setattr(datasets, "CIFAR10", lambda root, train, download: write_cifar(tmp_path / "d", False, False))
    assert len(open_data("cifar10", data_dir=tmp_path / "d", download=True).test) == 20
    with pytest.raises(DataError, match="torchvision cannot download it"):
        open_data("imagenet-1k", data_dir=tmp_path, download=True)


def test_a_cifar_batch_that_would_run_code_is_refused(tmp_path):
    write_cifar(tmp_path, False, False)
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (ran.write_text, ("owned",))

    (tmp_path / "cifar-10-batches-py/data_batch_3").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(DataError, match="refused"):
        open_data("cifar10", data_dir=tmp_path)
    assert not ran.exists()


# ------------------------------------------------------------------------------------------------------- bad input


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


def test_test_labels_that_were_never_trained_are_refused(tmp_path):
    write_folder(tmp_path / "train", [p for p in pictures() if p[0] != "cow"])
    write_folder(tmp_path / "test", pictures(2))
    with pytest.raises(DataError, match="the test images have 1 labels without any training image: cow"):
        open_data(tmp_path)


def test_a_cut_off_idx_file_is_refused(tmp_path):
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


PIXELS, NUMBERS = np.random.default_rng(0).integers(0, 256, (20, 8, 8), np.uint8), np.arange(20) % 2
PACK = npz(x_train=PIXELS, y_train=NUMBERS)
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
def test_a_damaged_or_mistaken_file_is_refused_with_the_reason(tmp_path, name):
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


def test_parquet_metadata_of_another_kind_is_refused(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    table = pa.table({"image": [{"bytes": as_png(p), "path": None} for _, p in pictures(2)], "label": [0, 1] * 3})
    for about in ("not json", "[1]", '{"info": {"features": {"label": {"names": 5}}}}'):
        pq.write_table(table.replace_schema_metadata({"huggingface": about}), tmp_path / "x.parquet")
        with pytest.raises(DataError, match=r"x\.parquet: its Hugging Face metadata cannot be read"):
            open_data(tmp_path / "x.parquet")


@pytest.mark.parametrize(
    ("layout", "file", "content"),
    [
        ("cifar10", "cifar-10-batches-py/data_batch_2", pickle.dumps({b"other": 1})),
        ("cifar10", "cifar-10-batches-py/data_batch_2", pickle.dumps({b"data": 1})[:-3]),
        ("inaturalist-2017", "train2017.json", b'{"images": [{"id"'),
        ("inaturalist-2021", "val.json", b'{"images": []}'),
        ("places365", "places365_val.txt", b"Places365_val_00000001.jpg 400\n"),
        ("sun397", "Partitions/Testing_01.txt", b"/q/nowhere/1.jpg\n"),
        ("imagenet-1k", "LOC_val_solution.csv", b"\xff\xfe"),
    ],
    ids=["cifar keys", "cifar cut off", "json cut off", "json keys", "unknown number", "unknown class", "not text"],
)
def test_a_dataset_of_the_paper_with_a_damaged_list_is_refused(tmp_path, layout, file, content):
    WRITERS[layout][0](tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=r"damaged or not the official ones|not a CIFAR batch"):
        open_data(layout, data_dir=tmp_path)


def test_the_data_command_tells_what_is_worth_knowing(tmp_path):
    pairs = pictures(10)
    write_folder(tmp_path / "d/train", [*pairs[:3], *pairs[10:30]])
    write_folder(tmp_path / "d/val", pairs[:4], named="copy{}.png")
    shown = CliRunner().invoke(app, ["data", str(tmp_path / "d")])
    assert shown.exit_code == 0, shown.output
    assert "3 classes, folder" in shown.output
    assert "no test images" in shown.output
    assert "3 duplicate images are in both train and validation" in shown.output
    told = json.loads(CliRunner().invoke(app, ["data", str(tmp_path / "d"), "--json", "--check", "none"]).output)
    assert told["splits"]["train"]["per_class"] == {"ant": 3, "bee": 10, "cow": 10}
    assert told["format"] == "vit-memory-data/1"


def test_a_missing_library_is_named_with_its_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "x.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"pip install 'vit-memory\[datasets\]'"):
        open_data(tmp_path / "x.parquet")
