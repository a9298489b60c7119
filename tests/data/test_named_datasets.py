"""The datasets of the paper are read as their official archives unpack, and damaged ones are refused."""

import io
import json
import logging
import pickle
import shutil
import struct
from types import BuiltinFunctionType, FunctionType

import numpy as np
import pytest

from data.test_sources import LABELS, as_png, contents, pictures, same, write_folder
from vit_memory.data.readers.named import DATASETS
from vit_memory.data.sources import open_data
from vit_memory.errors import DataError


class Python2Pickler(pickle._Pickler):
    """Writes what Python 2 and the numpy of 2009 wrote, as the official CIFAR batches are: bytes for every text."""

    dispatch = dict(pickle._Pickler.dispatch)  # noqa: RUF012

    def save_text(self, text):
        raw = text.encode("latin-1") if isinstance(text, str) else text
        self.write(pickle.BINSTRING + struct.pack("<i", len(raw)) + raw)
        self.memoize(text)

    def save_global(self, obj, name=None):
        module = obj.__module__.replace("numpy._core", "numpy.core")
        self.write(pickle.GLOBAL + f"{module}\n{obj.__qualname__}\n".encode())
        self.memoize(obj)

    dispatch[bytes] = dispatch[str] = save_text
    dispatch[type] = dispatch[FunctionType] = dispatch[BuiltinFunctionType] = save_global


def as_python2_pickle(value):
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(value)
    assert b"numpy._core" not in file.getvalue()
    return file.getvalue()


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
            batch = {b"batch_label": b"batch 1 of 1", key: labels, b"data": rows, b"filenames": [b"x.png"] * len(rows)}
            (folder / file).write_bytes(as_python2_pickle(batch | ({b"coarse_labels": labels} if fine else {})))
    if binary:
        (folder / ("fine_label_names.txt" if fine else "batches.meta.txt")).write_text("\n".join(names) + "\n\n")
    else:
        key = b"fine_label_names" if fine else b"label_names"
        meta = {key: [name.encode() for name in names]}
        (folder / ("meta" if fine else "batches.meta")).write_bytes(as_python2_pickle(meta))


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
        with pytest.raises(DataError, match=r"is incomplete\. Missing: .* Expected in the folder: ") as error:
            open_data(name, data_dir=tmp_path)
        assert all(archive in str(error.value) for archive in DATASETS[name].archives)


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
    with pytest.raises(DataError, match=r"damaged or not the official ones .* download .* Expected in the folder: "):
        open_data(layout, data_dir=tmp_path)


def official(layout, root):
    """A tiny dataset in the official layout."""
    root.mkdir(parents=True, exist_ok=True)
    WRITERS[layout][0](root)
    return root


def test_cifar100_has_the_fine_labels_and_pixels_of_the_official_batches(tmp_path):
    pickled = open_data("cifar100", data_dir=official("cifar100", tmp_path / "pickle"))
    binary = open_data("cifar100", data_dir=official("cifar100 binary", tmp_path / "binary"))
    assert pickled.labels[:2] == ("class0", "class1")
    same(pickled, binary)
    rows = np.fromfile(tmp_path / "binary/cifar-100-binary/test.bin", np.uint8).reshape(-1, 3074)
    first = pickled.test.images.read(0)
    assert first.shape == (32, 32, 3)
    np.testing.assert_array_equal(first.transpose(2, 0, 1).ravel(), rows[0, 2:])
    assert pickled.test.targets[0] == rows[0, 1]


def test_places365_is_the_same_in_all_layouts(tmp_path):
    lists = open_data("places365", data_dir=official("places365", tmp_path / "lists"))
    torchvision = official("places365", tmp_path / "torchvision")
    (torchvision / "data_256").rename(torchvision / "data_256_standard")
    same(lists, open_data("places365", data_dir=torchvision))
    easy = tmp_path / "easy"
    write_folder(easy / "places365_standard/train", pictures(10))
    write_folder(easy / "places365_standard/val", pictures(2, seed=1))
    same(lists, open_data("places365", data_dir=easy))


def test_inaturalist_2017_without_its_lists_is_split_by_content(tmp_path):
    folder = official("inaturalist-2017", tmp_path / "torchvision")
    for file in ("train2017.json", "val2017.json"):
        (folder / file).unlink()
    (folder / "train_val_images").rename(folder / "2017")
    shutil.rmtree(folder / "2017/y")
    opened = open_data("inaturalist-2017", data_dir=folder)
    assert opened.labels == LABELS
    assert {name: len(split) for name, split in opened.splits.items()} == {"train": 18, "validation": 6, "test": 6}
    assert opened.origin["test"] == "20% of every class, drawn by content with seed 0"
    same(opened, open_data(write_folder(tmp_path / "plain", pictures(10))))  # the split of any folder of these images


def test_inaturalist_2017_has_its_official_split_whatever_its_folders_are_called(tmp_path):
    folder = official("inaturalist-2017", tmp_path / "a")
    expected = contents(open_data("inaturalist-2017", data_dir=folder).test)
    (folder / "train_val_images").rename(folder / "2017")
    (folder / "train_val2017").mkdir()
    for file in ("train2017.json", "val2017.json"):
        (folder / file).rename(folder / "train_val2017" / file)
    opened = open_data("inaturalist-2017", data_dir=folder)
    assert contents(opened.test) == expected
    assert opened.origin["test"] == "official"


def test_one_species_name_in_two_supercategories_gives_two_classes(tmp_path):
    for i, parent in enumerate(("Insecta", "Plantae")):
        write_folder(tmp_path / "2017" / parent, pictures(3, seed=i))
    assert open_data("inaturalist-2017", data_dir=tmp_path).labels == tuple(
        f"{parent}/{label}" for parent in ("Insecta", "Plantae") for label in LABELS
    )


def test_sun397_without_its_partitions_is_split_by_content(tmp_path):
    folder = official("sun397", tmp_path)
    assert open_data("sun397", data_dir=folder).origin["test"] == "official"
    shutil.rmtree(folder / "Partitions")
    opened = open_data("sun397", data_dir=folder)
    assert opened.labels == ("abbey", "apse/indoor", "barn")
    assert opened.origin["test"] == "20% of every class, drawn by content with seed 0"
    assert len(opened.test) == 6  # of 36
    before = contents(opened.test)
    for image in (folder / "SUN397/a/abbey").glob("*.jpg"):
        image.rename(image.with_name(f"sun_z{image.name}"))
    assert contents(open_data("sun397", data_dir=folder).test) == before


def test_another_number_of_classes_than_the_official_one_is_reported(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        open_data("sun397", data_dir=official("sun397", tmp_path / "sun"))
    assert "3 classes; the official sun397 has 397" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        open_data("cifar100", data_dir=official("cifar100", tmp_path / "cifar"))
    assert caplog.text == ""


HALF_UNPACKED = {
    "a listed training image of places365": ("places365", "data_256/a/ant", "10 of the 30 images in places365_train"),
    "a listed test image of places365": ("places365", "val_256/Places365_val_00000003.jpg", "1 of the 6 images in"),
    "all test images of places365": ("places365", "val_256", "Missing: .*/val_256. "),
    "the class list of places365": ("places365", "categories_places365.txt", "Missing: .*categories_places365.txt"),
    "a listed image of sun397": ("sun397", "SUN397/b/barn/sun_Testi_5.jpg", "1 of the 6 images in Testing_01.txt"),
    "the second list of sun397": ("sun397", "Partitions/Testing_01.txt", "Missing: .*Testing_01.txt"),
    "a class of inaturalist-2017": ("inaturalist-2017", "train_val_images/x/bee", "10 of the 30 images in train2017"),
    "a list of inaturalist-2017": ("inaturalist-2017", "val2017.json", "Missing: .*val2017.json"),
    "the images of inaturalist-2017": ("inaturalist-2017", "train_val_images", "Missing: .*train_val_images"),
    "the test batch of cifar100": ("cifar100", "cifar-100-python/test", "Missing: .*/test. "),
}


@pytest.mark.parametrize("case", HALF_UNPACKED)
def test_a_half_unpacked_archive_is_refused_with_what_to_unpack(case, tmp_path):
    layout, lost, message = HALF_UNPACKED[case]
    folder = official(layout, tmp_path)
    archive = DATASETS[layout].archives[0]
    (folder / archive).touch()
    shutil.rmtree(folder / lost) if (folder / lost).is_dir() else (folder / lost).unlink()
    with pytest.raises(DataError, match=message) as error:
        open_data(layout, data_dir=folder)
    assert f"To get it, unpack {archive} there, completely" in str(error.value)
    assert f"Expected in the folder: {DATASETS[layout].expected_files}" in str(error.value)


def test_half_unpacked_class_folders_are_refused(tmp_path):
    sun = official("sun397", tmp_path / "sun")
    shutil.rmtree(sun / "Partitions")
    shutil.rmtree(sun / "SUN397/b")
    with pytest.raises(DataError, match=r"the images of 1 of the 3 classes in ClassName.txt, the first .*barn"):
        open_data("sun397", data_dir=sun)
    write_folder(tmp_path / "places/train", pictures(3))
    write_folder(tmp_path / "places/val", pictures(1, seed=1))
    shutil.rmtree(tmp_path / "places/train/cow")
    with pytest.raises(DataError, match=r"images in 1 class folders of .*train, the first cow"):
        open_data("places365", data_dir=tmp_path / "places")


def test_a_cifar_batch_that_is_cut_off_is_refused(tmp_path):
    python = official("cifar100", tmp_path / "python")
    batch = python / "cifar-100-python/train"
    batch.write_bytes(batch.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"not a CIFAR batch .* download cifar-100-python.tar.gz"):
        open_data("cifar100", data_dir=python)
    batch.write_bytes(as_python2_pickle({b"data": np.zeros((3, 3072), np.uint8), b"fine_labels": [1, 2]}))
    with pytest.raises(DataError, match="expected 2 rows of 3072 bytes"):
        open_data("cifar100", data_dir=python)
    binary = official("cifar100 binary", tmp_path / "binary")
    batch = binary / "cifar-100-binary/train.bin"
    batch.write_bytes(batch.read_bytes()[:-100])
    with pytest.raises(DataError, match="the file is cut off"):
        open_data("cifar100", data_dir=binary)
