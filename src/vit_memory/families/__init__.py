"""One file per library layout; nothing else in the package imports transformers or timm.

A family is an object called `FAMILY` in a module of this folder. It is found by being there, so a new layout touches
one file. Families look at a model's classes and never import its library to do so.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from typing import Protocol

from torch import Tensor, nn

from vit_memory.errors import UnsupportedFamily
from vit_memory.families.roles import Roles
from vit_memory.preprocessing import Preprocessing


class Family(Protocol):
    """How one library layout maps to our roles."""

    @property
    def name(self) -> str:
        """What messages, files and commands call it."""

    @property
    def library(self) -> str:
        """The package whose models it knows."""

    def accepts(self, model: nn.Module) -> bool:
        """Whether this model is of the family, by its classes alone."""

    def roles(self, model: nn.Module) -> Roles:
        """Where the parts are. Raises UnsupportedFamily naming what is missing."""

    def preprocessing(self, model: nn.Module) -> Preprocessing | None:
        """What the model itself knows about how its images are prepared."""

    def library_forward(self, model: nn.Module, images: Tensor) -> Mapping[str, Tensor]:
        """The library's own forward, as fields of `Original`; our passes must equal it."""

    def tiny_models(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Small random models of every variant, by name, for `verify` and the tests."""


@cache
def families() -> tuple[Family, ...]:
    """Every family in this folder, in the order of their names."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    all_families: list[Family] = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    return tuple(sorted(all_families, key=lambda family: family.name))


def family_of(model: nn.Module) -> Family:
    """The family that knows this model, or an error that names those there are."""
    for family in families():
        if family.accepts(model):
            return family
    known = ", ".join(f"{family.name} ({family.library})" for family in families())
    cls = type(model)
    raise UnsupportedFamily(
        f"{cls.__module__}.{cls.__qualname__} is of no supported family. Supported: {known}. "
        f"A family is one file: see CONTRIBUTING.md, 'Where to add something'."
    )
