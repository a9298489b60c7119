"""A certificate: what `noninterference` found for given tasks on given images, in a JSON file that can be kept.

`vit-memory-certificate/1` is a JSON object. `sha256` covers everything else in it, as one line of JSON with sorted
keys, so that a changed content is found. That is integrity, not identity: whoever changes the content can compute the
hash again, so an auditor repeats the checks with `checking.check_again` instead of trusting it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from vit_memory.backbone import BackboneIdentity
from vit_memory.choices import KindOrAuto, Precision, SplitName
from vit_memory.evaluation.noninterference import Check
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
