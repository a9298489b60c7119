"""How large an experiment is: datasets, images, recipes and seeds.

`small` runs on two cores in hours: 20 images per class of any folder of datasets, on a small backbone. `paper` is the
paper's recipe on its four datasets and its backbone. Both run the same code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from vit_memory.evaluation.reproduce.methods import Group
from vit_memory.training.recipe import RateFactors, Recipe

ScaleName = Literal["small", "paper"]


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a run. Learning rates are searched per method on the validation images of seed 0."""

    name: ScaleName
    backbone: str
    datasets: tuple[str, ...]  # () means every folder of the data folder
    per_class: int | None  # training images; None: all
    seeds: tuple[int, ...]
    recipes: Mapping[Group, Recipe]


_ADAM_RATES = (1e-3, 3e-3, 1e-2)
# Heads, class tokens and cells want higher rates than low-rank updates: of _ADAM_RATES the highest was mostly the best.
_MEMORY_RATES = (3e-3, 1e-2, 3e-2)
# Three rates for every method. Methods with a pass of their own have half the steps: each of theirs costs tenfold.
_SMALL = Recipe(steps=200, batch=32, optimiser="adamw", learning_rates=_ADAM_RATES, evaluate_every=25, keep_best=True)
_SMALL_MEMORY = replace(_SMALL, learning_rates=_MEMORY_RATES)
_SMALL_OWN_PASS = replace(_SMALL, steps=100)
# Unmasked cells change every token of the image: at the rates that suit masked ones, accuracy stays at chance.
_SMALL_UNMASKED = replace(_SMALL_OWN_PASS, learning_rates=(1e-4, 3e-4, 1e-3), rate_factors=RateFactors(head=10.0))
# A head learns from zero, so it needs the rate that other heads have; a pretrained weight needs a hundredth of it.
_FULL_FACTORS = RateFactors(head=100.0)
SMALL = Scale(
    "small",
    backbone="bundled",
    datasets=(),
    per_class=20,
    seeds=(0, 1, 2),
    recipes={
        "memory": _SMALL_MEMORY,
        "short memory": replace(_SMALL_MEMORY, steps=100),
        "reader": _SMALL,
        "variant": _SMALL_MEMORY,
        "branch": _SMALL_OWN_PASS,
        "lora": _SMALL_OWN_PASS,
        "unmasked": _SMALL_UNMASKED,
        "full": replace(_SMALL_OWN_PASS, learning_rates=(1e-5, 3e-5, 1e-4), rate_factors=_FULL_FACTORS),
    },
)

# The paper gives batch, steps, optimiser and warm-up; rates, momentum, clipping and schedule are ours.
_PAPER = Recipe.paper()
_PAPER_ADAM = replace(_PAPER, optimiser="adamw", learning_rates=_ADAM_RATES, keep_best=True)
PAPER = Scale(
    "paper",
    backbone="google/vit-base-patch32-224-in21k",
    datasets=("cifar100", "inaturalist-2017", "places365", "sun397"),
    per_class=None,
    seeds=(0, 1, 2),
    recipes={
        "memory": _PAPER,
        "variant": _PAPER,
        "unmasked": _PAPER,
        "full": replace(_PAPER, learning_rates=(0.003, 0.01, 0.03)),
        "reader": _PAPER_ADAM,
        "branch": _PAPER_ADAM,
        "lora": _PAPER_ADAM,
    },
)
SCALES: Mapping[ScaleName, Scale] = {"small": SMALL, "paper": PAPER}
