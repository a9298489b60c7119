"""How a training runs: what a machine and a person decide, as opposed to the recipe."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from vit_memory.choices import OnBadImage
from vit_memory.errors import TrainingError
from vit_memory.training.cache import Cache
from vit_memory.training.ranks import Ranks


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How `fit` runs a training; what it learns is decided by the recipe.

    >>> TrainingOptions(cache=Cache("disk"), workers=4, checkpoint="birds.checkpoint", resume=True).checkpoint_every
    50
    """

    cache: Cache = field(default_factory=Cache)  # whether trunks are stored, and where
    image_size: int | None = None  # None: the backbone's own
    workers: int = 0  # processes that load images; 0: this process
    threads: int | None = None  # that compute; None: torch's. Another number changes the last bits of the weights
    on_bad_image: OnBadImage = "fail"  # or "skip": leave unreadable images out
    checkpoint: Path | str | None = None  # file to write
    checkpoint_every: int = 50  # steps
    resume: bool = False  # continue from the checkpoint file if it exists
    ranks: Ranks = field(default_factory=Ranks)  # the processes that train together: see `init_ranks`

    def __post_init__(self) -> None:
        if self.on_bad_image not in get_args(OnBadImage):
            raise TrainingError(f"on_bad_image is {self.on_bad_image!r}; expected {', '.join(get_args(OnBadImage))}.")
        if self.checkpoint_every < 1:
            raise TrainingError(f"checkpoint_every is {self.checkpoint_every}; expected 1 or more.")

    @property
    def checkpoint_path(self) -> Path | None:
        """The checkpoint file."""
        return None if self.checkpoint is None else Path(self.checkpoint)
