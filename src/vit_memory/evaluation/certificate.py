"""A certificate: what `noninterference` found for given tasks on given images, in a JSON file that can be kept.

`vit-memory-certificate/1` is a JSON object. `sha256` covers everything else in it, as one line of JSON with sorted
keys, so that a changed content is found. That is integrity, not identity: whoever changes the content can compute the
hash again, so an auditor repeats the checks with `check_again` instead of trusting it.
"""

import hashlib
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

import torch

from vit_memory.atomic import write_atomic
from vit_memory.backbone import BackboneIdentity
from vit_memory.choices import KindOrAuto, Precision, SplitName
from vit_memory.data.images import Images
from vit_memory.data.loading import load_one, nothing_usable
from vit_memory.data.sources import Dataset, open_data
from vit_memory.data.splits import Split
from vit_memory.data.transforms import EvalTransform
from vit_memory.errors import BadImage, DamagedFile, DataError, FileError
from vit_memory.evaluation.models import open_composable, preprocessing_of
from vit_memory.evaluation.noninterference import Check, OnProgress, Result, check_noninterference
from vit_memory.files.collect import Collected
from vit_memory.files.container import parse_json
from vit_memory.files.description import check_format, read_backbone, read_preprocessing
from vit_memory.model import MemoryViT
from vit_memory.preprocessing import Preprocessing

FORMAT, VERSION = "vit-memory-certificate", 1


@dataclass(frozen=True, slots=True)
class Request:
    """What to certify, on which images, and how to compute: all that is needed to do it again."""

    sources: tuple[str, ...]  # task files and bundles
    data: str
    split: SplitName = "test"
    images: int = 64
    batch: int = 16
    threads: int = 1  # of every pass
    dtype: Precision = "float32"
    device: str = "cpu"
    backbone: str | None = None  # None: the one that the tasks name
    rename: tuple[tuple[str, str], ...] = ()  # file and name
    data_dir: str | None = None
    image_column: str | None = None
    label_columns: tuple[str, ...] = ("label",)
    kind: KindOrAuto = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = (self.images, self.batch, self.threads)
        if not all(type(value) is int and value >= 1 for value in numbers) or type(self.seed) is not int:
            raise ValueError(f"images, batch, threads and seed are {(*numbers, self.seed)}; expected whole numbers")
        for choices, value in ((SplitName, self.split), (Precision, self.dtype), (KindOrAuto, self.kind)):
            if value not in get_args(choices):
                raise ValueError(f"{value!r} is none of {', '.join(get_args(choices))}")
        texts = (
            *self.sources,
            self.data,
            self.device,
            *self.label_columns,
            *(text for pair in self.rename for text in pair),
        )
        optional = (self.backbone, self.data_dir, self.image_column)
        if not all(isinstance(text, str) for text in (*texts, *(text for text in optional if text is not None))):
            raise ValueError("paths, names and columns must be texts")


@dataclass(frozen=True, slots=True)
class CertifiedTask:
    """A task that was attached."""

    name: str
    digest: str
    file: str
    regime: str
    method: str
    kind: str
    labels: int
    parameters: int
    parents: tuple[str, ...]
    branch: str | None


@dataclass(frozen=True, slots=True)
class CertifiedBranch:
    """A branch that was attached."""

    name: str
    digest: str
    method: str
    parameters: int


@dataclass(frozen=True, slots=True)
class CertifiedImage:
    """An image that was computed on; `sha256` is of its file, or of its pixels if it is a row of an array."""

    name: str
    sha256: str

    def __post_init__(self) -> None:
        if len(bytes.fromhex(self.sha256)) != 32:
            raise ValueError(f"image {self.name!r}: {self.sha256!r} is no SHA-256")


@dataclass(frozen=True, slots=True)
class CertifiedImages:
    """The images that were computed on, in order, and those that could not be decoded."""

    source: str
    split: str
    origin: str  # of the split: official, or how it was drawn
    sha256: str  # of the SHA-256 of all images, one after the other
    used: tuple[CertifiedImage, ...]
    bad: tuple[tuple[str, str], ...]  # name and reason


@dataclass(frozen=True, slots=True)
class Environment:
    """Versions and machine."""

    python: str
    vit_memory: str
    torch: str
    transformers: str | None
    timm: str | None
    system: str
    processor: str
    cores: int


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was checked, how, on what, and what was found."""

    created: str  # ISO 8601, UTC
    seconds: float
    command: str | None
    request: Request
    backbone: BackboneIdentity
    tasks: tuple[CertifiedTask, ...]
    branches: tuple[CertifiedBranch, ...]
    images: CertifiedImages
    preprocessing: Preprocessing
    environment: Environment
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    @property
    def failures(self) -> tuple[str, ...]:
        """Every failed check, with its subject and what broke it."""
        return tuple(
            f"{check.name}: {result.subject}: {', '.join(result.failures)}"
            for check in self.checks
            for result in check.failed
        )

    def content(self) -> dict[str, Any]:
        """The certificate as JSON values, without its hash."""
        values: dict[str, Any] = {"format": f"{FORMAT}/{VERSION}", "passed": self.passed, **asdict(self)}
        for check, value in zip(self.checks, values["checks"], strict=True):
            value["passed"] = check.passed
            for result, result_value in zip(check.results, value["results"], strict=True):
                result_value["passed"] = result.passed
        content: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))  # tuples become lists
        return content

    @property
    def sha256(self) -> str:
        """The hash that the file holds."""
        return content_sha256(self.content())


def content_sha256(content: Mapping[str, Any]) -> str:
    """SHA-256 of JSON values without `sha256`: one line, keys sorted, no spaces, everything beyond ASCII escaped."""
    values = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# ----------------------------------------------------------------------------------------------------------- computing


def certify(
    request: Request,
    *,
    images_of: Certificate | None = None,
    command: str | None = None,
    download: bool = False,
    on_progress: OnProgress | None = None,
) -> Certificate:
    """Check the tasks of a request on its images, or on the images of another certificate."""
    started = time.perf_counter()
    model, collected = _open(request)
    preprocessing = preprocessing_of(model, model.tasks)
    images, pixels = _load_images(request, preprocessing, None if images_of is None else images_of.images, download)
    model = model.to(getattr(torch, request.dtype))
    pixels = pixels.to(model.backbone.device, model.backbone.dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(request.threads)  # all passes must be cut up alike, or their bits may differ
    try:
        checks = check_noninterference(model, pixels, request.batch, on_progress)
    finally:
        torch.set_num_threads(threads)
    return Certificate(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - started, 1),
        command=command,
        request=request,
        backbone=model.backbone.identity,
        tasks=_certified_tasks(model, collected),
        branches=tuple(
            CertifiedBranch(branch.name, branch.digest, branch.method, branch.parameters)
            for branch in model.tasks.branches.values()
        ),
        images=images,
        preprocessing=preprocessing,
        environment=_environment(),
        checks=checks,
    )


def _open(request: Request) -> tuple[MemoryViT, Collected]:
    rename = {Path(path): name for path, name in request.rename}
    return open_composable([Path(source) for source in request.sources], request.backbone, request.device, rename)


def _certified_tasks(model: MemoryViT, collected: Collected) -> tuple[CertifiedTask, ...]:
    tasks = []
    for file in collected.files:
        task, branch = file.task, model.tasks.branch_of(file.task.name)
        tasks.append(
            CertifiedTask(
                name=task.name,
                digest=task.digest,
                file=str(file.path),
                regime=task.regime,
                method=task.method,
                kind=task.kind,
                labels=len(task.labels),
                parameters=task.parameters,
                parents=task.parents,
                branch=None if branch is None else branch.name,
            )
        )
    return tuple(tasks)


def _environment() -> Environment:
    return Environment(
        python=platform.python_version(),
        vit_memory=version("vit-memory"),
        torch=torch.__version__,
        transformers=_installed("transformers"),
        timm=_installed("timm"),
        system=f"{platform.system()} {platform.machine()}",
        processor=_processor(),
        cores=os.cpu_count() or 1,
    )


def _installed(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:  # Linux; platform.processor() is empty there
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# -------------------------------------------------------------------------------------------------------------- images


def _load_images(
    request: Request, preprocessing: Preprocessing, wanted: CertifiedImages | None, download: bool
) -> tuple[CertifiedImages, torch.Tensor]:
    """The images of a request and their pixels (n, 3, height, width); those that are `wanted`, wherever they are."""
    dataset = open_data(
        request.data,
        data_dir=request.data_dir,
        download=download,
        image_column=request.image_column,
        label_column=request.label_columns,
        kind=request.kind,
        seed=request.seed,
    )
    if request.split not in dataset.splits:
        raise DataError(
            f"{request.data}: has no {request.split} images, but {', '.join(dataset.splits)}: choose with --split."
        )
    chosen = _in_order(dataset.splits[request.split]) if wanted is None else _find(dataset, wanted)
    transform = EvalTransform(preprocessing)
    used: list[CertifiedImage] = []
    pixels: list[torch.Tensor] = []
    bad: list[BadImage] = []
    for split, i in chosen:
        if len(used) == request.images:
            break
        try:
            image = CertifiedImage(split.images.name(i), _sha256(split.images, i))
            pixels.append(load_one(split, i, transform))
        except BadImage as error:
            bad.append(error)
        else:
            used.append(image)
    if not used:
        if wanted is not None and not bad:
            raise DataError(f"{request.data}: holds none of the {len(wanted.used)} images of the certificate.")
        raise nothing_usable("image", bad[0] if bad else None)
    images = CertifiedImages(
        source=dataset.source,
        split=request.split,
        origin=dataset.origin[request.split],
        sha256=hashlib.sha256("".join(image.sha256 for image in used).encode()).hexdigest(),
        used=tuple(used),
        bad=tuple((error.name, error.reason) for error in bad),
    )
    return images, transform.normalised(torch.stack(pixels))


def _in_order(split: Split) -> list[tuple[Split, int]]:
    """All images in the order of their digests: of all classes, and the same whatever their names are."""
    return [(split, i) for i in sorted(range(len(split)), key=split.digests.__getitem__)]


def _find(dataset: Dataset, wanted: CertifiedImages) -> list[tuple[Split, int]]:
    """The images of a certificate that the dataset holds, in any split, in the order of the certificate.

    Digests of splits are the first bytes of an image's SHA-256.
    """
    places: dict[bytes, list[tuple[Split, int]]] = {}
    for split in dataset.splits.values():
        for i, digest in enumerate(split.digests):
            places.setdefault(digest, []).append((split, i))
    found = []
    for image in wanted.used:
        same = places.get(bytes.fromhex(image.sha256)[:8], [])
        if same:
            found.append(same.pop(0) if len(same) > 1 else same[0])
    return found


def _sha256(images: Images, i: int) -> str:
    content = images.read(i)
    return hashlib.sha256(content if isinstance(content, bytes) else content.tobytes()).hexdigest()


# --------------------------------------------------------------------------------------------------------------- files


def write_certificate(path: Path, certificate: Certificate) -> None:
    """Write the JSON file, whole or not at all."""
    content = certificate.content()
    record = {"sha256": content_sha256(content), **content}
    write_atomic(path, [json.dumps(record, indent=2).encode(), b"\n"])


def read_certificate(path: Path) -> Certificate:
    """Read a certificate; raises DamagedFile if its content does not match its hash."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(f"{path}: no such certificate. Make one: vit-memory certify BUNDLE --data DATA") from None
    except OSError as error:
        raise FileError(f"{path}: cannot be read, {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path}: not a certificate, {error}.") from None
    if not isinstance(content, dict) or not isinstance(content.get("format"), str):
        raise DamagedFile(f"{path}: not a certificate: no format in it, expected {FORMAT}/{VERSION}.")
    check_format(path, content["format"], FORMAT, VERSION)
    if content.get("sha256") != content_sha256(content):
        raise DamagedFile(
            f"{path}: the content does not match its SHA-256: changed or damaged since it was written. Get the "
            f"certificate again from its source, or make a new one: vit-memory certify BUNDLE --data DATA"
        )
    try:
        certificate = _rebuild(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFile(f"{path}: a missing or mistyped field: {error}.") from None
    if certificate.content() != {key: value for key, value in content.items() if key != "sha256"}:
        raise DamagedFile(f"{path}: its verdicts contradict its results, or it has unknown fields: made by hand.")
    return certificate


def _rebuild(content: Mapping[str, Any]) -> Certificate:
    request, images = dict(content["request"]), content["images"]
    for name in ("sources", "label_columns"):
        request[name] = tuple(request[name])
    request["rename"] = tuple((path, name) for path, name in request["rename"])
    preprocessing = read_preprocessing(content["preprocessing"])
    if preprocessing is None:
        raise ValueError("no preprocessing")
    return Certificate(
        created=content["created"],
        seconds=content["seconds"],
        command=content["command"],
        request=Request(**request),
        backbone=read_backbone(content["backbone"]),
        tasks=tuple(CertifiedTask(**{**task, "parents": tuple(task["parents"])}) for task in content["tasks"]),
        branches=tuple(CertifiedBranch(**branch) for branch in content["branches"]),
        images=CertifiedImages(
            **{
                **images,
                "used": tuple(CertifiedImage(**image) for image in images["used"]),
                "bad": tuple((name, reason) for name, reason in images["bad"]),
            }
        ),
        preprocessing=preprocessing,
        environment=Environment(**content["environment"]),
        checks=tuple(_rebuild_check(check) for check in content["checks"]),
    )


def _rebuild_check(values: Mapping[str, Any]) -> Check:
    fields = {key: value for key, value in values.items() if key not in ("passed", "results")}
    results = [{key: value for key, value in result.items() if key != "passed"} for result in values["results"]]
    return Check(
        **fields, results=tuple(Result(**{**result, "failures": tuple(result["failures"])}) for result in results)
    )


# ----------------------------------------------------------------------------------------------------------- repeating


@dataclass(frozen=True, slots=True)
class Repetition:
    """The checks of a certificate, made again."""

    certificate: Certificate  # the new one
    differences: tuple[str, ...]  # what is not as it was, and what failed
    notes: tuple[str, ...]  # other versions or another machine, which is no failure

    @property
    def passed(self) -> bool:
        """Whether everything is as it was and every check passed."""
        return not self.differences


def check_again(
    old: Certificate, request: Request, *, download: bool = False, on_progress: OnProgress | None = None
) -> Repetition:
    """Repeat the checks of a certificate on its images; `request` is its own, or one with other paths."""
    new = certify(request, images_of=old, download=download, on_progress=on_progress)
    differences = [
        *_other_backbone(old, new),
        *_other_items("task", {t.name: t.digest for t in old.tasks}, {t.name: t.digest for t in new.tasks}, new),
        *_other_items("branch", {b.name: b.digest for b in old.branches}, {b.name: b.digest for b in new.branches}),
        *_other_images(old.images, new.images),
        *(f"check failed: {failure}" for failure in new.failures),
    ]
    if old.preprocessing != new.preprocessing:
        differences.append(f"preprocessing: was {old.preprocessing}, is {new.preprocessing}")
    if not old.passed:
        differences.append(f"the certificate itself is of failed checks: {'; '.join(old.failures)}")
    dropped = {check.name for check in old.checks} - {check.name for check in new.checks}
    differences += [f"check {name!r} is in the certificate, but was not made" for name in sorted(dropped)]
    return Repetition(new, tuple(differences), tuple(_notes(old, new)))


def _other_backbone(old: Certificate, new: Certificate) -> list[str]:
    was, now = old.backbone.fingerprint, new.backbone.fingerprint
    return [] if was == now else [f"backbone {new.backbone.name}: fingerprint was {was[:12]}…, is {now[:12]}…"]


def _other_items(
    what: str, old: Mapping[str, str], new: Mapping[str, str], certificate: Certificate | None = None
) -> list[str]:
    files = {task.name: f" ({task.file})" for task in certificate.tasks} if certificate is not None else {}
    changed = [
        f"{what} {name}{files.get(name, '')}: digest was {old[name][:12]}…, is {new[name][:12]}…"
        for name in old
        if name in new and old[name] != new[name]
    ]
    missing = [f"{what} {name}: is in the certificate, but was not given" for name in old if name not in new]
    added = [f"{what} {name}{files.get(name, '')}: is not in the certificate" for name in new if name not in old]
    return [*changed, *missing, *added]


def _other_images(old: CertifiedImages, new: CertifiedImages) -> list[str]:
    """The images of the certificate that were not found again; others are not looked at."""
    there = Counter(image.sha256 for image in new.used)
    missing = []
    for image in old.used:
        there[image.sha256] -= 1
        if there[image.sha256] < 0:
            missing.append(f"image {image.name}: not found in {new.source} with the same content")
    return missing


def _notes(old: Certificate, new: Certificate) -> list[str]:
    was, now = asdict(old.environment), asdict(new.environment)
    return [f"{name}: was {was[name]}, is {now[name]}" for name in was if was[name] != now[name]]
