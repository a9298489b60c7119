"""The learned readers of many settings: their gains, and their low-rank updates stacked by projection and rank.

Shape letters: L blocks, G settings of one stack, D width, r rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vit_memory.adapter import Adapter, LowRank
from vit_memory.choices import Part
from vit_memory.training.sweep import Stack
from vit_memory.updates import GainGroup, LowRankGroup, updates_by_size


@dataclass(frozen=True, slots=True)
class ReaderStacks:
    """Learned readers by setting. Stacks have the blocks first, then the settings."""

    untrained: Mapping[int, Adapter]  # by the number of the setting
    stacks: Mapping[str, Stack]  # "gains" (L, G, 6, D), "q.8.A" (L, G, r, in), "q.8.B" (L, G, out, r) …

    @classmethod
    def of(cls, readers: Mapping[int, Adapter], device: torch.device) -> "ReaderStacks":
        """Parameters that start as the untrained readers."""
        stacks: dict[str, Stack] = {}

        def add(name: str, part: Part, tensors: Mapping[int, Tensor]) -> None:
            values = torch.stack(list(tensors.values()), dim=1).to(device, torch.float32, copy=True)
            owner = torch.tensor(list(tensors), dtype=torch.long, device=device)
            stacks[name] = Stack.of(values.requires_grad_(), owner, 1, part)

        gains = {i: reader.gains for i, reader in readers.items() if reader.gains is not None}
        if gains:
            add("gains", "gains", gains)
        for (projection, rank), updates in updates_by_size(readers).items():
            add(f"{projection}.{rank}.A", "low_rank", {i: update.A for i, update in updates.items()})
            add(f"{projection}.{rank}.B", "low_rank", {i: update.scaled_b for i, update in updates.items()})
        return cls(readers, stacks)

    def groups(
        self, positions: Mapping[int, int], leaf: Callable[[Tensor], Tensor]
    ) -> tuple[list[GainGroup], list[LowRankGroup]]:
        """The stacks as the pass takes them. `positions` are the settings' places among its readers."""

        def blocks(name: str) -> list[Tensor]:
            return [leaf(block) for block in self.stacks[name].values.unbind(0)]

        def places(name: str) -> tuple[int, ...]:
            return tuple(positions[i] for i in self.stacks[name].owner.tolist())

        gains = [GainGroup(places("gains"), blocks("gains"))] if "gains" in self.stacks else []
        low_rank = [
            LowRankGroup(projection, places(f"{name}.A"), blocks(f"{name}.A"), blocks(f"{name}.B"))
            for projection, rank in updates_by_size(self.untrained)
            for name in (f"{projection}.{rank}",)
        ]
        return gains, low_rank

    def reader(self, setting: int, values: Mapping[str, Tensor]) -> Adapter:
        """The reader of one setting with these values of the stacks."""

        def own(name: str) -> Tensor:
            place = self.stacks[name].owner.tolist().index(setting)
            return values[name][:, place].clone()

        untrained = self.untrained[setting]
        return Adapter(
            None if untrained.gains is None else own("gains"),
            {
                projection: LowRank(own(f"{projection}.{update.rank}.A"), own(f"{projection}.{update.rank}.B"))
                for projection, update in untrained.low_rank.items()
            },
        )
