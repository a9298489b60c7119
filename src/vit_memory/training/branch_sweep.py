"""Settings that each train a branch together with the task that stands on it.

The original tokens before a branch starts need no gradient: they are computed without a graph, or read from a store,
once for all settings. Each setting then runs all tokens through the blocks of its own branch with a graph, and its
class token, if it has one, reads them.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vit_memory.adapter import Adapter
from vit_memory.branch import Branch
from vit_memory.choices import Part
from vit_memory.errors import TrainingError
from vit_memory.outputs import Original
from vit_memory.task import Task
from vit_memory.training.frozen_linear import PooledLinear
from vit_memory.training.sizes import free_memory, size
from vit_memory.training.stored_rows import BranchStartRows, StoredRows
from vit_memory.training.sweep import Encoding, Stack
from vit_memory.training.trunk_shape import TrunkShape
from vit_memory.training.trunk_sweep import TrunkSweep
from vit_memory.trunk import BranchStart, BranchTrunk, run_branch, run_to_branches
from vit_memory.updates import PreparedBranch, prepare_branch

_GRAPH_BYTES = 720 * 2**20  # of graphs, over all threads
_GRAPH_WIDTHS = 24  # values, in widths, that the graph of one token holds per block
_MAX_MEMORY = 0.85  # share of the free memory that one image per thread may take
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _BranchesInTraining:
    """The branches of all settings over one batch, as class tokens and heads read them."""

    start: BranchStart
    branches: Mapping[str, BranchTrunk]

    def at(self, branch: str | None, block: int) -> tuple[Tensor, Tensor]:
        own = self.branches[_known(branch)]
        if block < own.start:
            return self.start.keys[block], self.start.values[block]
        return own.keys[block - own.start], own.values[block - own.start]

    def output(self, branch: str | None) -> Original:
        return self.branches[_known(branch)].output

    def patches(self, branch: str | None) -> Tensor:
        return self.branches[_known(branch)].patch_mean


def _known(branch: str | None) -> str:
    assert branch is not None, "every setting stands on a branch of its own"
    return branch


class BranchSweep(TrunkSweep):
    """Settings of any composable regime, each with a branch that is trained with it."""

    def check_parents(self) -> None:
        """Raise TrainingError if a setting has no branch to train, or extends a task."""
        for setting in self.settings:
            if setting.branch is None:
                raise TrainingError(f"{setting.name}: has no branch to train; all settings need one.")
        if self.parents or self.settings[0].task.parents:
            raise TrainingError(
                f"{self.settings[0].task.name}: while a branch is trained, a task on it cannot extend others: the "
                f"original tokens that these read are not computed beyond the start of the branch. Train the branch "
                f"first, then a task on it that extends them: --branch FILE --extends FILE."
            )

    def create_parameters(self) -> dict[str, Stack]:
        """Those of the tasks, and the adapters of the branches."""
        stacks = super().create_parameters()
        self._branch_stacks: list[dict[str, Stack]] = []
        for i, branch in enumerate(self._untrained_branches):
            own: dict[str, Stack] = {}
            for name, tensor in branch.tensors().items():
                values = tensor.to(self.backbone.device, torch.float32, copy=True).requires_grad_()
                owner = torch.full((len(values),), i, device=self.backbone.device)
                part: Part = "gains" if name == "gains" else "low_rank"
                own[name] = Stack.of(values, owner, 0, part)
            self._branch_stacks.append(own)
            stacks |= {f"branch.{i}.{name}": stack for name, stack in own.items()}
        return stacks

    @property
    def _untrained_branches(self) -> list[Branch]:
        return [setting.branch for setting in self.settings if setting.branch is not None]

    def _prepare_branches(self) -> tuple[PreparedBranch, ...]:
        """No branch is frozen."""
        return ()

    def branch_key(self, i: int) -> str | None:
        """Every setting has a branch of its own."""
        return f"setting {i}"

    @property
    def _trunk_keys(self) -> list[str | None]:
        return [self.branch_key(i) for i in range(len(self.settings))]

    @property
    def starts(self) -> tuple[int, ...]:
        """The blocks at which branches start, each once."""
        return tuple(sorted({branch.start for branch in self._untrained_branches}))

    @property
    def kept_blocks(self) -> int:
        """How many blocks of the original trunk class tokens read."""
        return max((self._untrained_branches[i].start for i in self.with_token), default=0)

    def stored_rows(self, image_size: tuple[int, int]) -> StoredRows | None:
        """The tokens that enter the branches."""
        return BranchStartRows(self.backbone, image_size, self.starts, self.kept_blocks)

    def live_chunk(self, shape: TrunkShape, threads: int) -> int:
        """As many images as their graphs leave memory for: with many tokens, one image is enough work."""
        return self._chunk(shape, threads)

    def stored_chunk(self, shape: TrunkShape, threads: int) -> int:
        """The same."""
        return self._chunk(shape, threads)

    def _chunk(self, shape: TrunkShape, threads: int) -> int:
        return max(1, _GRAPH_BYTES // (threads * self.graph_bytes(shape)))

    def graph_bytes(self, shape: TrunkShape) -> int:
        """Bytes of the graphs of one image, of all settings."""
        blocks = sum(branch.blocks for branch in self._untrained_branches)
        return blocks * shape.tokens * _GRAPH_WIDTHS * shape.width * self.backbone.dtype.itemsize

    def check_memory(self, shape: TrunkShape, threads: int) -> None:
        """Log what a step costs. Raises TrainingError if not even one image per thread fits the memory."""
        need, free = threads * self.graph_bytes(shape), free_memory()
        blocks = sum(branch.blocks for branch in self._untrained_branches)
        if need > _MAX_MEMORY * free:
            raise TrainingError(
                f"training {len(self.settings)} branches of {blocks} blocks in all needs {size(need)} for one image on "
                f"each of {threads} threads; free: {size(free)} memory. Use fewer settings, fewer --branch-blocks, a "
                f"smaller --image-size or fewer --threads."
            )
        passes = 2 * blocks / self.backbone.depth
        log.info(
            "every setting trains a branch of its own: a step of %d settings costs about %.2g plain forward passes",
            len(self.settings),
            passes,
        )

    def encode(self, images: Tensor) -> Encoding:
        """The tokens that enter the branches. They are valid until the next call in the same thread."""
        return run_to_branches(self.backbone.roles, images, self.starts, keep=self.kept_blocks, pool=self._buffers.pool)

    def logits(self, encoding: Encoding) -> Tensor:
        """Outputs (T, B, C) of every setting, with a graph to the leaves."""
        assert isinstance(encoding, BranchStart)
        roles, run = self.backbone.roles, PooledLinear(self._buffers.pool)
        branches: dict[str, BranchTrunk] = {}
        for i, untrained in enumerate(self._untrained_branches):
            values = {name: stack.values.to(self.backbone.dtype) for name, stack in self._branch_stacks[i].items()}
            adapter = _with_values(untrained.adapter, values)
            prepared = prepare_branch(roles.blocks, _known(self.branch_key(i)), untrained.start, adapter)
            tokens = encoding.tokens[untrained.start]
            branches[prepared.key] = run_branch(
                roles, prepared, tokens, encoding.rotation, keep=i in self.with_token, run=run
            )
        return self.read_logits(_BranchesInTraining(encoding, branches), run)

    def leaves(self) -> list[Tensor]:
        """Those of the tasks, and the adapters."""
        return [*super().leaves(), *(stack.values for own in self._branch_stacks for stack in own.values())]

    def branches(self) -> Sequence[Branch | None]:
        """The trained branches, on the CPU."""
        values = self.final_values()
        trained = []
        for i, untrained in enumerate(self._untrained_branches):
            own = {name: values[f"branch.{i}.{name}"].clone() for name in self._branch_stacks[i]}
            trained.append(replace(untrained, adapter=_with_values(untrained.adapter, own)))
        return trained

    def tasks(self) -> list[Task]:
        """The trained tasks, each standing on its trained branch."""
        return [
            replace(task, branch=None if branch is None else branch.ref)
            for task, branch in zip(super().tasks(), self.branches(), strict=True)
        ]


def _with_values(adapter: Adapter, values: Mapping[str, Tensor]) -> Adapter:
    """The adapter with other tensors, by the names of `Adapter.tensors`."""
    return Adapter(
        values.get("gains"),
        {
            name: replace(update, A=values[f"{name}.lora_A"], B=values[f"{name}.lora_B"])
            for name, update in adapter.low_rank.items()
        },
    )
