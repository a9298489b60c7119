"""The datasets of the paper and its reproductions, in the layouts their official archives unpack to.

Their official validation images are the test split here, because that is what results are reported on and what must
choose nothing; a validation split is drawn from the training images like everywhere else.
"""

import csv
import io
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vit_memory.data.images import ImageArray, ImageFiles
from vit_memory.data.layouts import Found, Part, classes_in
from vit_memory.errors import DataError


@dataclass(frozen=True, slots=True)
class Named:
    """How one dataset is read and, through torchvision, fetched."""

    read: Callable[[Path], Found]
    needs: str  # what has to be in --data-dir
    torchvision: Mapping[str, Any] | None = None  # class and arguments of each download; None: ask its makers


def open_named(name: str, data_dir: Path | None, download: bool) -> Found:
    """Read a named dataset from `data_dir`, after fetching it there if asked to."""
    known = NAMED[name]
    if data_dir is None:
        raise DataError(f"{name}: say where it is with --data-dir. Expected there: {known.needs}.")
    if download:
        _download(name, known, data_dir)
    if not data_dir.is_dir():
        raise DataError(f"{data_dir}: no such folder. Expected there, for {name}: {known.needs}.")
    try:
        return known.read(data_dir)
    except FileNotFoundError as error:
        offer = "add --download, or unpack" if known.torchvision else "download it from its makers and unpack"
        raise DataError(
            f"{data_dir}: {name} is not there whole: {error.filename or error} is missing. Expected: {known.needs}. "
            f"To get it, {offer} its official archives there."
        ) from error
    except (LookupError, ValueError, TypeError, AttributeError) as error:  # lists that are cut off, or other ones
        raise DataError(
            f"{data_dir}: the files of {name} are damaged or not the official ones ({type(error).__name__}: {error}). "
            f"Unpack its official archives again. Expected: {known.needs}."
        ) from error


def _download(name: str, known: Named, data_dir: Path) -> None:
    if known.torchvision is None:
        raise DataError(f"{name}: its makers ask you to sign for it, so it cannot be downloaded here.")
    try:
        from torchvision import datasets
    except ImportError as error:
        raise DataError(f"{name}: downloading needs torchvision: pip install torchvision") from error
    data_dir.mkdir(parents=True, exist_ok=True)
    for split, arguments in known.torchvision.items():
        given = dict(arguments)
        try:
            getattr(datasets, given.pop("cls"))(str(data_dir), download=True, **given)
        except (OSError, RuntimeError) as error:
            # torchvision's own way to say that the extracted folder is already there
            if "already exists" not in str(error):
                raise DataError(f"{name}: downloading its {split} images failed ({error}).") from error


def _first(folder: Path, *candidates: str) -> Path:
    """The first of the candidates that is there."""
    for candidate in candidates:
        if (folder / candidate).exists():
            return folder / candidate
    raise FileNotFoundError(2, "missing", str(folder / candidates[0]))


# ----------------------------------------------------------------------------------------------------------- CIFAR


_IN_CIFAR = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class _PlainUnpickler(pickle.Unpickler):
    """Reads the CIFAR batches, which are pickles of dicts, lists and one array, and refuses any other class."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _IN_CIFAR:  # numpy moved its home since 2009, and forwards the old name
            return super().find_class(module, name)
        raise DataError(f"a CIFAR batch asks for {module}.{name}, which no official one does: refused.")


def _batch(path: Path) -> Mapping[bytes, Any]:
    with path.open("rb") as file:
        try:
            batch: Mapping[bytes, Any] = _PlainUnpickler(file, encoding="bytes").load()
        except (pickle.UnpicklingError, EOFError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"{path}: not a CIFAR batch ({error}).") from error
    return batch


def _planes(rows: np.ndarray) -> np.ndarray:
    """(n, 3072) of three 32 × 32 planes to (n, 32, 32, 3)."""
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _cifar(folder: Path, train: list[str], test: str, key: bytes, names: tuple[str, bytes]) -> Found:
    classes = [name.decode() for name in _batch(folder / names[0])[names[1]]]
    parts = {}
    for part, files in (("train", train), ("test", [test])):
        batches = [_batch(_first(folder, file)) for file in files]
        pixels = _planes(np.concatenate([batch[b"data"] for batch in batches]))
        labels = [classes[i] for batch in batches for i in batch[key]]
        parts[part] = Part(ImageArray.whole(f"{folder}:{part}", pixels), labels)
    return Found("named", parts, classes)


def _cifar_binary(folder: Path, train: list[str], test: str, label_bytes: int, names: str) -> Found:
    """Rows of one or two label bytes (the last is the fine one), then 3072 pixels."""
    classes = (folder / names).read_text().split()
    parts = {}
    for part, files in (("train", train), ("test", [test])):
        raw = np.concatenate([np.fromfile(_first(folder, file), np.uint8) for file in files])
        if len(raw) % (label_bytes + 3072):
            raise DataError(f"{folder}: {', '.join(files)} are not made of rows of {label_bytes + 3072} bytes.")
        rows = raw.reshape(-1, label_bytes + 3072)
        labels = [classes[i] for i in rows[:, label_bytes - 1]]
        parts[part] = Part(ImageArray.whole(f"{folder}:{part}", _planes(rows[:, label_bytes:])), labels)
    return Found("named", parts, classes)


def _read_cifar10(folder: Path) -> Found:
    batches = [f"data_batch_{i}" for i in range(1, 6)]
    home = _first(folder, "cifar-10-batches-py", "cifar-10-batches-bin")
    if home.name.endswith("bin"):
        return _cifar_binary(home, [f"{name}.bin" for name in batches], "test_batch.bin", 1, "batches.meta.txt")
    return _cifar(home, batches, "test_batch", b"labels", ("batches.meta", b"label_names"))


def _read_cifar100(folder: Path) -> Found:
    home = _first(folder, "cifar-100-python", "cifar-100-binary")
    if home.name.endswith("binary"):
        return _cifar_binary(home, ["train.bin"], "test.bin", 2, "fine_label_names.txt")
    return _cifar(home, ["train"], "test", b"fine_labels", ("meta", b"fine_label_names"))


# -------------------------------------------------------------------------------------------- folders and file lists


def _read_imagenet(folder: Path) -> Found:
    """Training images in synset folders; validation images too, or flat with one of the two official answer files."""
    home = folder / "ILSVRC/Data/CLS-LOC" if (folder / "ILSVRC").exists() else folder
    ignored: list[str] = []
    train = classes_in(_first(home, "train"), ignored)
    val = _first(home, "val")
    if any(child.is_dir() for child in val.iterdir()):
        return Found("named", {"train": train, "test": classes_in(val, ignored)}, ignored=ignored)
    answers = _imagenet_answers(folder)
    paths = sorted(str(path) for path in val.iterdir() if path.suffix == ".JPEG")
    unknown = [path for path in paths if Path(path).stem not in answers]
    if unknown:
        raise DataError(f"{unknown[0]}: no answer for this validation image in {folder}.")
    labels = [answers[Path(path).stem] for path in paths]
    return Found("named", {"train": train, "test": Part(ImageFiles(tuple(paths)), labels)}, ignored=ignored)


def _imagenet_answers(folder: Path) -> Mapping[str, str]:
    """Synset of every validation image, by file stem."""
    solution = folder / "LOC_val_solution.csv"
    if solution.exists():
        with solution.open(newline="") as file:
            return {row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(file)}
    kit = _first(folder, "ILSVRC2012_devkit_t12") / "data"
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise DataError(f"{kit}: reading meta.mat needs scipy; or put LOC_val_solution.csv into {folder}.") from error
    synsets = loadmat(io.BytesIO((kit / "meta.mat").read_bytes()), squeeze_me=True)["synsets"]
    by_number = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
    numbers = (kit / "ILSVRC2012_validation_ground_truth.txt").read_text().split()
    return {f"ILSVRC2012_val_{i:08d}": by_number[int(number)] for i, number in enumerate(numbers, 1)}


def _coco_part(folder: Path, listing: Path) -> tuple[Part, dict[int, str]]:
    """Images and categories of one of iNaturalist's JSON lists."""
    told = json.loads(listing.read_text(encoding="utf-8"))
    names = {category["id"]: category["name"] for category in told["categories"]}
    if len(set(names.values())) < len(names):  # one name under several supercategories
        names = {category["id"]: f"{category['supercategory']}/{category['name']}" for category in told["categories"]}
    files = {image["id"]: image["file_name"] for image in told["images"]}
    pairs = [(str(folder / files[a["image_id"]]), names[a["category_id"]]) for a in told["annotations"]]
    return Part(ImageFiles(tuple(path for path, _ in pairs)), [label for _, label in pairs]), names


def _read_inaturalist(train: tuple[str, ...], test: tuple[str, ...]) -> Callable[[Path], Found]:
    def read(folder: Path) -> Found:
        learnt, names = _coco_part(folder, _first(folder, *train))
        judged, _ = _coco_part(folder, _first(folder, *test))
        return Found("named", {"train": learnt, "test": judged}, [names[i] for i in sorted(names)])

    return read


def _read_inaturalist_2021(folder: Path) -> Found:
    if (folder / "2021_train").is_dir() or (folder / "2021_train_mini").is_dir():  # as torchvision lays it out
        ignored: list[str] = []
        train = classes_in(_first(folder, "2021_train", "2021_train_mini"), ignored)
        return Found(
            "named", {"train": train, "test": classes_in(_first(folder, "2021_valid"), ignored)}, ignored=ignored
        )
    return _read_inaturalist(("train.json", "train_mini.json"), ("val.json",))(folder)


def _read_places365(folder: Path) -> Found:
    """The easy layout of class folders, or the challenge's archives with their lists."""
    if (folder / "places365_standard").exists() or (folder / "train").is_dir():
        home = folder / "places365_standard" if (folder / "places365_standard").exists() else folder
        ignored: list[str] = []
        parts = {"train": classes_in(_first(home, "train"), ignored), "test": classes_in(_first(home, "val"), ignored)}
        return Found("named", parts, ignored=ignored)
    rows = [line.split() for line in (folder / "categories_places365.txt").read_text().splitlines() if line.strip()]
    classes = [name.removeprefix("/").split("/", 1)[1] for name, _ in sorted(rows, key=lambda row: int(row[1]))]
    lists = (
        (
            "train",
            "places365_train_standard.txt",
            ("data_256_standard", "data_256", "data_large_standard", "data_large"),
        ),
        ("test", "places365_val.txt", ("val_256", "val_large")),
    )
    parts = {}
    for part, listing, homes in lists:
        home = _first(folder, *homes)
        pairs = [line.rsplit(maxsplit=1) for line in (folder / listing).read_text().splitlines() if line.strip()]
        paths = tuple(str(home / name.removeprefix("/")) for name, _ in pairs)
        parts[part] = Part(ImageFiles(paths), [classes[int(number)] for _, number in pairs])
    return Found("named", parts, classes)


def _read_sun397(folder: Path) -> Found:
    """Class folders up to three deep, /a/abbey or /a/apse/indoor; split by the first official partition if present."""
    home = _first(folder, "SUN397")
    names = [line.strip() for line in (home / "ClassName.txt").read_text().splitlines() if line.strip()]
    label = {name: name.split("/", 2)[2] for name in names}
    classes = [label[name] for name in names]
    listing = next((p for p in (folder / "Partitions", folder, home) if (p / "Training_01.txt").exists()), None)
    if listing is None:
        pairs = [(str(p), label[n]) for n in names for p in sorted((home / n[1:]).glob("*.jpg"))]
        return Found("named", {"all": Part(ImageFiles(tuple(p for p, _ in pairs)), [n for _, n in pairs])}, classes)
    parts = {}
    for part, file in (("train", "Training_01.txt"), ("test", "Testing_01.txt")):
        lines = [line.strip() for line in (listing / file).read_text().splitlines() if line.strip()]
        paths = tuple(str(home / line.removeprefix("/")) for line in lines)
        parts[part] = Part(ImageFiles(paths), [label[line.rsplit("/", 1)[0]] for line in lines])
    return Found("named", parts, classes)


NAMED: Mapping[str, Named] = {
    "cifar10": Named(
        _read_cifar10,
        "cifar-10-batches-py/ or cifar-10-batches-bin/",
        {"train": {"cls": "CIFAR10", "train": True}},
    ),
    "cifar100": Named(
        _read_cifar100,
        "cifar-100-python/ or cifar-100-binary/",
        {"train": {"cls": "CIFAR100", "train": True}},
    ),
    "imagenet-1k": Named(
        _read_imagenet,
        "train/n01440764/…, and val/ in such folders or flat with LOC_val_solution.csv or ILSVRC2012_devkit_t12/",
    ),
    "inaturalist-2017": Named(
        _read_inaturalist(("train2017.json",), ("val2017.json",)),
        "train_val_images/, train2017.json and val2017.json",
    ),
    "inaturalist-2021": Named(
        _read_inaturalist_2021,
        "train/ (or train_mini/), val/, train.json (or train_mini.json) and val.json",
        {
            "train": {"cls": "INaturalist", "version": "2021_train"},
            "val": {"cls": "INaturalist", "version": "2021_valid"},
        },
    ),
    "places365": Named(
        _read_places365,
        "places365_standard/, or data_256/ and val_256/ with places365_train_standard.txt, places365_val.txt and "
        "categories_places365.txt",
        {
            "train": {"cls": "Places365", "split": "train-standard", "small": True},
            "val": {"cls": "Places365", "split": "val", "small": True},
        },
    ),
    "sun397": Named(
        _read_sun397,
        "SUN397/ and, for the official split, Partitions/Training_01.txt and Testing_01.txt",
        {"all": {"cls": "SUN397"}},
    ),
}
