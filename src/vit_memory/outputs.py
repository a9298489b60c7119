"""What a call returns: the backbone's own output, and one tensor per task. No model is known here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vit_memory.errors import UnknownTask


@dataclass(frozen=True, slots=True, eq=False)
class Original:
    """What the backbone itself says, as its library's own forward says it."""

    tokens: Tensor  # (B, N, D), the library's last hidden state
    feature: Tensor  # (B, D), what a `head` task reads: the class token's (or the pooled) final output
    pooled: Tensor | None = None  # the library's pooler or projection output, where the model has one
    logits: Tensor | None = None  # (B, classes), where the model has a head


@dataclass(frozen=True, slots=True, eq=False)
class Outputs(Mapping[str, Tensor]):
    """The backbone's own answer, untouched, and one tensor of logits per task asked for.

    A mapping from task name to logits (B, C); regression tasks give their values, in the user's units.
    """

    original: Original
    tasks: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self.tasks[name]
        except KeyError:
            raise UnknownTask(
                f"no answer for {name!r}: this call asked for {', '.join(self.tasks) or 'no task'}."
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)


for _cls in (Original, Outputs):  # so that torch.export can hand them out
    torch.export.register_dataclass(_cls, serialized_type_name=f"vit_memory.{_cls.__name__}")
