"""The datasets of the paper are read as their official archives unpack, and damaged ones are refused."""

import json
import pickle

import numpy as np
import pytest

from data.test_sources import LABELS, as_png, pictures, write_folder
from vit_memory.data.readers.named import DATASETS
from vit_memory.data.sources import open_data
from vit_memory.errors import DataError


def write_cifar(root, fine, binary):
    rng = np.random.default_rng(0)
    names = [f"class{i}" for i in range(100 if fine else 10)]
    files = ["train", "test"] if fine else [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    folder = root / (
        ("cifar-100-binary" if binary else "cifar-100-python")
        if fine
        else f"cifar-10-batches-{'bin' if binary else 'py'}"
    )
    folder.mkdir(parents=True)
    for file in files:
        rows, labels = rng.integers(0, 256, (2 * len(names), 3072), np.uint8), [*range(len(names))] * 2
        if binary:
            head = np.array([[label // 5, label] if fine else [label] for label in labels], np.uint8)
            np.concatenate([head, rows], 1).tofile(folder / f"{file}.bin")
        else:
            key = b"fine_labels" if fine else b"labels"
            (folder / file).write_bytes(pickle.dumps({b"data": rows, key: labels}, protocol=2))
    if binary:
        (folder / ("fine_label_names.txt" if fine else "batches.meta.txt")).write_text("\n".join(names) + "\n\n")
    else:
        key = b"fine_label_names" if fine else b"label_names"
        meta = {key: [name.encode() for name in names]}
        (folder / ("meta" if fine else "batches.meta")).write_bytes(pickle.dumps(meta, protocol=2))


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
    for folder, listing, pairs in (
        ("data_256", "places365_train_standard.txt", pictures(10)),
        ("val_256", "places365_val.txt", pictures(2, seed=1)),
    ):
        lines = []
        for i, (label, pixels) in enumerate(pairs):
            name = f"/{label[0]}/{label}/{i:08}.jpg" if folder == "data_256" else f"Places365_val_{i:08}.jpg"
            path = root / folder / name.removeprefix("/")
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
    assert len(set(opened.test.targets.tolist())) == len(opened.labels)  # every class is in the test split


def test_errors_of_every_named_dataset_list_the_expected_files(tmp_path):
    assert {layout.split()[0] for layout in WRITERS} == set(DATASETS)
    for name in DATASETS:
        with pytest.raises(DataError, match=r"--data-dir\. Expected in it"):
            open_data(name)
        with pytest.raises(DataError, match=r"is incomplete: .* is missing\. Expected: "):
            open_data(name, data_dir=tmp_path)


def test_download_uses_torchvision(tmp_path, monkeypatch):
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
