"""Train, validation and test splits, drawn by content and seed, stratified by target.

A hash of an image's content and the seed decides its split, never file names, order or the machine, and copies of one
image stay in one split. So the same images give the same splits, wherever and however they are stored. A fixed share of
every class, of every label (multi-label) or of every tenth of the values (regression) is drawn.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vit_memory.choices import Kind
from vit_memory.data.images import Images, digests
from vit_memory.errors import DataError

DRAWN_SHARE = 0.2  # of a class's images, for a test or validation split that has to be drawn
_QUANTILES = 10


def why_empty(kind: Kind) -> str:
    """For messages: why a drawn split can be empty, and what to do."""
    drawn_from = {
        "single-label": "classes with at least two different images that have one label only",
        "multi-label": "labels that at least two different images have",
        "regression": "images with a known value, at least two different ones",
    }[kind]
    return (
        f"a split is drawn from {drawn_from} (duplicates count once). Add images"
        f"{', at least three different ones per class' if kind == 'single-label' else ''}, or provide the splits: "
        f"{'DATA/train/, DATA/val/ and DATA/test/, or ' if kind == 'single-label' else ''}a column split in a table"
    )


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Images with their targets."""

    images: Images
    targets: np.ndarray  # (n,) int64 class numbers; (n, C) float32 labels or float64 values, NaN where not known
    digests: tuple[bytes, ...]  # (n,) of the images' contents
    kind: Kind = "single-label"

    @classmethod
    def of(cls, images: Images, targets: Sequence[int] | np.ndarray, kind: Kind = "single-label") -> "Split":
        """Build a split; computes the digests of the images, which reads every file."""
        array = np.asarray(targets, dtype=np.int64) if kind == "single-label" else np.asarray(targets)
        return cls(images, array, digests(images), kind)

    def __len__(self) -> int:
        return len(self.targets)

    def digest(self) -> str:
        """One digest of all contents and targets, independent of their order."""
        if self.kind == "single-label":
            rows = [int(label).to_bytes(4, "little") for label in self.targets]
        else:
            rows = [np.ascontiguousarray(row).tobytes() for row in self.targets]
        return hashlib.sha256(b"".join(sorted(d + row for d, row in zip(self.digests, rows, strict=True)))).hexdigest()

    def select(self, indices: Sequence[int] | np.ndarray) -> "Split":
        """The images with these indices, in this order."""
        indices = [int(i) for i in indices]
        kept = tuple(self.digests[i] for i in indices)
        return Split(self.images.select(indices), self.targets[np.asarray(indices, dtype=np.int64)], kept, self.kind)

    def per_class(self, count: int, seed: int) -> "Split":
        """At most `count` images of every class, drawn by content."""
        if self.kind != "single-label":
            raise DataError(f"a number of images per class needs a single-label task; this one is {self.kind}.")
        order = _hash_order(self.digests, f"per class {seed}")
        members = _by_class(self.targets, order)
        return self.select(sorted(i for images in members.values() for i in images[:count]))


def draw_split(split: Split, purpose: str, seed: int, share: float = DRAWN_SHARE) -> tuple[Split, Split]:
    """Split into (the rest, drawn): `share` of the distinct images, stratified by target.

    At least one image of every class with two or more is drawn. An image that occurs with two different targets is
    never drawn, because no prediction for it could be correct.
    """
    copies: dict[bytes, list[int]] = defaultdict(list)
    for i in _hash_order(split.digests, f"{purpose} {seed}"):
        copies[split.digests[i]].append(i)
    # The first copy of each image, unless its copies have different targets.
    distinct = [same[0] for same in copies.values() if len(same) == 1 or _all_equal(split.targets[same])]
    draw = _draw_by_label if split.kind == "multi-label" else _draw_by_class
    drawn = {copy for i in draw(_strata(split), distinct, share) for copy in copies[split.digests[i]]}
    rest = [i for i in range(len(split)) if i not in drawn]
    return split.select(rest), split.select(sorted(drawn))


def _strata(split: Split) -> np.ndarray:
    """What the draw is stratified by: class numbers, labels, or the tenth of the range that a value is in."""
    if split.kind != "regression":
        return split.targets
    known = np.isfinite(split.targets)
    values = np.where(known, split.targets, 0.0)
    std = values.std(axis=0)
    # Several values are ranked by their sum in standard deviations.
    rank = (values / np.where(std > 0, std, 1.0)).sum(axis=1)
    any_known = known.any(axis=1)
    if not any_known.any():
        return np.full(len(rank), -1)
    # At least five images per stratum; a fifth of fewer rounds to none or far too many.
    count = min(_QUANTILES, max(1, int(any_known.sum()) // 5))
    edges = np.unique(np.quantile(rank[any_known], np.linspace(0, 1, count + 1)[1:-1]))
    return np.where(any_known, np.searchsorted(edges, rank, side="right"), -1)


def _draw_by_class(classes: np.ndarray, order: Sequence[int], share: float) -> list[int]:
    """The first `share` of every class, in that order."""
    drawn: list[int] = []
    for members in _by_class(classes, order).values():
        drawn += members[: max(1, round(share * len(members))) if len(members) > 1 else 0]
    return drawn


def _draw_by_label(labels: np.ndarray, order: Sequence[int], share: float) -> list[int]:
    """Iterative stratification (Sechidis et al., 2011): the images of the rarest label are assigned first.

    Each image goes to the side (drawn or rest) that needs most images of that label; on a tie, to the side that needs
    most images. A label of a single image stays in the rest.
    """
    labels_of = {i: np.flatnonzero(labels[i] == 1).tolist() for i in order}
    images_of: dict[int, list[int]] = defaultdict(list)
    for i in order:
        for label in labels_of[i]:
            images_of[label].append(i)
    unassigned_count = {label: len(images) for label, images in images_of.items()}
    drawn_count = {label: max(1.0, share * n) if n > 1 else 0.0 for label, n in unassigned_count.items()}
    rest_count = {label: n - drawn_count[label] for label, n in unassigned_count.items()}
    needed_of_label = {True: drawn_count, False: rest_count}  # by: is drawn
    needed = {True: share * len(order), False: (1 - share) * len(order)}
    unassigned = dict.fromkeys(order)
    drawn: list[int] = []

    def assign(i: int, to_drawn: bool) -> None:
        del unassigned[i]
        needed[to_drawn] -= 1
        for label in labels_of[i]:
            needed_of_label[to_drawn][label] -= 1
            unassigned_count[label] -= 1
        if to_drawn:
            drawn.append(i)

    while rarest := min(((count, label) for label, count in unassigned_count.items() if count), default=None):
        label = rarest[1]
        for i in [i for i in images_of[label] if i in unassigned]:
            assign(i, (drawn_count[label], needed[True]) > (rest_count[label], needed[False]))
    for i in list(unassigned):  # images without any label
        assign(i, needed[True] > needed[False])
    return drawn


def _hash_order(contents: Sequence[bytes], salt: str) -> list[int]:
    """All indices, sorted by a salted hash of their content; copies are neighbours."""
    keys = [hashlib.sha256(salt.encode() + content).digest() for content in contents]
    return sorted(range(len(contents)), key=keys.__getitem__)


def _by_class(classes: np.ndarray, order: Sequence[int]) -> dict[int, list[int]]:
    members: dict[int, list[int]] = defaultdict(list)
    for i in order:
        members[int(classes[i])].append(i)
    return members


def _all_equal(targets: np.ndarray) -> bool:
    """Whether all rows are equal; NaN equals NaN."""
    first = np.broadcast_to(targets[:1], targets.shape)
    return bool(np.array_equal(targets, first, equal_nan=targets.dtype.kind == "f"))
