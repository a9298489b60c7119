"""Which images train, which choose and which judge: drawn by content, class by class, from a seed.

An image's place is decided by a hash of its content and the seed, never by file names, order or the machine, and
copies of one image stay together. So the same images give the same split wherever and however they are stored.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vit_memory.data.images import Images, digests

SHARE = 0.2  # of a class's images, for a test or validation split that has to be drawn
WHY_EMPTY = (
    "a split is drawn from classes with at least two different images that have one label only (copies count once). "
    "Add images, three different ones per class at least, or bring your own splits: DATA/train/, DATA/val/ and "
    "DATA/test/, or a column split in a table"
)


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Some images with their labels."""

    images: Images
    labels: np.ndarray  # (n,) int64, indices into the dataset's labels
    digests: tuple[bytes, ...]  # (n,) of the images' contents

    @classmethod
    def of(cls, images: Images, labels: Sequence[int] | np.ndarray) -> "Split":
        """Take digests of the images' contents, which reads every file that is not remembered from an earlier time."""
        return cls(images, np.asarray(labels, dtype=np.int64), digests(images))

    def __len__(self) -> int:
        return len(self.labels)

    def digest(self) -> str:
        """One digest of the whole split, contents and labels, in any order."""
        pairs = sorted(zip(self.digests, self.labels.tolist(), strict=True))
        return hashlib.sha256(b"".join(d + label.to_bytes(4, "little") for d, label in pairs)).hexdigest()

    def select(self, which: Sequence[int] | np.ndarray) -> "Split":
        """Those images, in that order."""
        which = [int(i) for i in which]
        kept = tuple(self.digests[i] for i in which)
        return Split(self.images.select(which), self.labels[np.asarray(which, dtype=np.int64)], kept)

    def per_class(self, count: int, seed: int) -> "Split":
        """At most `count` images of every class, drawn by content."""
        ranked = _ranked(self, f"per class {seed}")
        return self.select(sorted(i for members in ranked.values() for i in members[:count]))


def draw(split: Split, purpose: str, seed: int, share: float = SHARE) -> tuple[Split, Split]:
    """Split into (the rest, drawn): `share` of the distinct images of every class, at least one where there are two.

    An image that turns up under two labels is never drawn: nothing could be right about it.
    """
    everywhere: dict[bytes, set[int]] = defaultdict(set)
    for content, label in zip(split.digests, split.labels.tolist(), strict=True):
        everywhere[content].add(label)
    drawn: set[int] = set()
    for members in _ranked(split, f"{purpose} {seed}").values():
        copies: dict[bytes, list[int]] = defaultdict(list)  # in rank order
        for i in members:
            if len(everywhere[split.digests[i]]) == 1:
                copies[split.digests[i]].append(i)
        count = max(1, round(share * len(copies))) if len(copies) > 1 else 0
        for same in list(copies.values())[:count]:
            drawn.update(same)
    rest = [i for i in range(len(split)) if i not in drawn]
    return split.select(rest), split.select(sorted(drawn))


def _ranked(split: Split, salt: str) -> dict[int, list[int]]:
    """The images of every class in the order of a salted hash of their content."""
    keys = [hashlib.sha256(salt.encode() + content).digest() for content in split.digests]
    ranked: dict[int, list[int]] = defaultdict(list)
    for i in sorted(range(len(split)), key=keys.__getitem__):
        ranked[int(split.labels[i])].append(i)
    return ranked
