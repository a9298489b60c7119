"""Which images train, which choose and which judge: drawn by content and seed, so that each part looks like the whole.

An image's place is decided by a hash of its content and the seed, never by file names, order or the machine, and
copies of one image stay together. So the same images give the same split wherever and however they are stored.
Drawn is a share of every class, of every label (multi-label), or of every tenth of the range (regression).
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vit_memory.data.images import Images, digests
from vit_memory.errors import DataError
from vit_memory.task import Kind

SHARE = 0.2  # of a class's images, for a test or validation split that has to be drawn
_QUANTILES = 10


def why_empty(kind: Kind) -> str:
    """For messages: how a drawn split comes to hold no image, and what helps."""
    drawn_from = {
        "single-label": "classes with at least two different images that have one label only",
        "multi-label": "labels that at least two different images have",
        "regression": "images with a known value, at least two different ones",
    }[kind]
    return (
        f"a split is drawn from {drawn_from} (copies count once). Add images"
        f"{', three different ones per class at least' if kind == 'single-label' else ''}, or bring your own splits: "
        f"{'DATA/train/, DATA/val/ and DATA/test/, or ' if kind == 'single-label' else ''}a column split in a table"
    )


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Some images with what they show."""

    images: Images
    targets: np.ndarray  # (n,) int64 class numbers; (n, C) float32 labels or float64 values, NaN where not known
    digests: tuple[bytes, ...]  # (n,) of the images' contents
    kind: Kind = "single-label"

    @classmethod
    def of(cls, images: Images, targets: Sequence[int] | np.ndarray, kind: Kind = "single-label") -> "Split":
        """Take digests of the images' contents, which reads every file."""
        numbers = np.asarray(targets, dtype=np.int64) if kind == "single-label" else np.asarray(targets)
        return cls(images, numbers, digests(images), kind)

    def __len__(self) -> int:
        return len(self.targets)

    def digest(self) -> str:
        """One digest of the whole split, contents and targets, in any order."""
        if self.kind == "single-label":
            rows = [int(label).to_bytes(4, "little") for label in self.targets]
        else:
            rows = [np.ascontiguousarray(row).tobytes() for row in self.targets]
        return hashlib.sha256(b"".join(sorted(d + row for d, row in zip(self.digests, rows, strict=True)))).hexdigest()

    def select(self, which: Sequence[int] | np.ndarray) -> "Split":
        """Those images, in that order."""
        which = [int(i) for i in which]
        kept = tuple(self.digests[i] for i in which)
        return Split(self.images.select(which), self.targets[np.asarray(which, dtype=np.int64)], kept, self.kind)

    def per_class(self, count: int, seed: int) -> "Split":
        """At most `count` images of every class, drawn by content."""
        if self.kind != "single-label":
            raise DataError(f"so many images per class are for single-label tasks; this one is {self.kind}.")
        order = _order(self.digests, f"per class {seed}")
        members = _members(self.targets, order)
        return self.select(sorted(i for one in members.values() for i in one[:count]))


def draw(split: Split, purpose: str, seed: int, share: float = SHARE) -> tuple[Split, Split]:
    """Split into (the rest, drawn): `share` of the distinct images, evenly over what they show.

    Of every class at least one where there are two. An image that turns up with two different targets is never drawn:
    no answer to it could be right.
    """
    copies: dict[bytes, list[int]] = defaultdict(list)
    for i in _order(split.digests, f"{purpose} {seed}"):
        copies[split.digests[i]].append(i)
    # One of the copies stands for all of them; those that contradict each other stay where they are.
    first = [same[0] for same in copies.values() if all(_equal(split.targets[i], split.targets[same[0]]) for i in same)]
    choose = _by_label if split.kind == "multi-label" else _by_class
    chosen = choose(_strata(split), first, share)
    drawn = {i for one in chosen for i in copies[split.digests[one]]}
    rest = [i for i in range(len(split)) if i not in drawn]
    return split.select(rest), split.select(sorted(drawn))


def _strata(split: Split) -> np.ndarray:
    """What the draw is to be even over: class numbers, labels, or the tenth of the range that a value is in."""
    if split.kind != "regression":
        return split.targets
    known = np.isfinite(split.targets)
    values = np.where(known, split.targets, 0.0)
    spread = values.std(axis=0)
    # Several values are ranked by their sum in standard deviations.
    rank = (values / np.where(spread > 0, spread, 1.0)).sum(axis=1)
    some = known.any(axis=1)
    if not some.any():
        return np.full(len(rank), -1)
    # Strata of five at least, or a fifth of each would be none or far too much.
    count = min(_QUANTILES, max(1, int(some.sum()) // 5))
    edges = np.unique(np.quantile(rank[some], np.linspace(0, 1, count + 1)[1:-1]))
    return np.where(some, np.searchsorted(edges, rank, side="right"), -1)


def _by_class(classes: np.ndarray, order: Sequence[int], share: float) -> list[int]:
    """The first `share` of every class, in that order."""
    chosen: list[int] = []
    for members in _members(classes, order).values():
        chosen += members[: max(1, round(share * len(members))) if len(members) > 1 else 0]
    return chosen


def _by_label(labels: np.ndarray, order: Sequence[int], share: float) -> list[int]:
    """Iterative stratification (Sechidis et al., 2011): the rarest label is shared out first.

    Each image goes to whichever side lacks most of that label; where both lack alike, to the side that lacks most
    images. A label that only one image has stays with the rest, which is trained on.
    """
    present = {i: np.flatnonzero(labels[i] == 1).tolist() for i in order}
    holders: dict[int, list[int]] = defaultdict(list)
    for i in order:
        for label in present[i]:
            holders[label].append(i)
    left = {label: len(images) for label, images in holders.items()}
    drawn = {label: max(1.0, share * count) if count > 1 else 0.0 for label, count in left.items()}
    lacking = {True: drawn, False: {label: count - drawn[label] for label, count in left.items()}}
    images = {True: share * len(order), False: (1 - share) * len(order)}
    waiting = dict.fromkeys(order)
    chosen: list[int] = []

    def place(i: int, side: bool) -> None:
        del waiting[i]
        images[side] -= 1
        for label in present[i]:
            lacking[side][label] -= 1
            left[label] -= 1
        if side:
            chosen.append(i)

    while rarest := min(((count, label) for label, count in left.items() if count), default=None):
        label = rarest[1]
        for i in [i for i in holders[label] if i in waiting]:
            place(i, (lacking[True][label], images[True]) > (lacking[False][label], images[False]))
    for i in list(waiting):  # images that show none of the labels
        place(i, images[True] > images[False])
    return chosen


def _order(contents: Sequence[bytes], salt: str) -> list[int]:
    """All places in the order of a salted hash of their content; copies are neighbours."""
    keys = [hashlib.sha256(salt.encode() + content).digest() for content in contents]
    return sorted(range(len(contents)), key=keys.__getitem__)


def _members(classes: np.ndarray, order: Sequence[int]) -> dict[int, list[int]]:
    members: dict[int, list[int]] = defaultdict(list)
    for i in order:
        members[int(classes[i])].append(i)
    return members


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f"))
