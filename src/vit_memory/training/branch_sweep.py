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
from vit_memory.training.row_formats import BranchInputRows, RowFormat
from vit_memory.training.sizes import free_memory, size
from vit_memory.training.sweep import Encoding, Stack
from vit_memory.training.trunk_shape import TrunkShape
from vit_memory.training.trunk_sweep import TrunkSweep
from vit_memory.trunk import BranchInputs, BranchTrunk, run_branch, run_to_branches
from vit_memory.updates import PreparedBranch, prepare_adapter

_GRAPH_BYTES = 720 * 2**20  # of graphs, over all threads
_GRAPH_WIDTHS = 24  # values, in widths, that the graph of one token holds per block
_MAX_MEMORY = 0.85  # share of the free memory that one image per thread may take
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _BranchesInTraining:
    """The branches of all settings over one batch, as class tokens and heads read them."""

    inputs: BranchInputs
    branches: Mapping[str | None, BranchTrunk]  # by key; None is no key: every setting stands on a branch

    def at(self, branch: str | None, block: int) -> tuple[Tensor, Tensor]:
        own = self.branches[branch]
        return own.at(block) if block >= own.start else (self.inputs.keys[block], self.inputs.values[block])

    def output(self, branch: str | None) -> Original:
        return self.branches[branch].output

    def patches(self, branch: str | None) -> Tensor:
        return self.branches[branch].patch_mean


class BranchSweep(TrunkSweep):
    """Settings of any composable regime, each with a branch that is trained with it."""

    def check_parents(self) -> None:
        """Raise TrainingError if a setting has no branch to train, or extends a task."""
        for setting in self.settings:
            if setting.branch is None:
                raise TrainingError(f"{setting.name}: has no branch to train; all settings need one.")
        check_extends_nothing(self.settings[0].task.name, [*self.parents, *self.settings[0].task.parents])

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
        return {**stacks, **self.branch_stacks}

    @property
    def _untrained_branches(self) -> list[Branch]:
        """Of every setting; `check_parents` has refused settings without one."""
        return [setting.branch for setting in self.settings if setting.branch is not None]

    @property
    def _trained_blocks(self) -> int:
        """How many blocks all branches have together."""
        return sum(branch.blocks for branch in self._untrained_branches)

    def _prepare_branches(self) -> tuple[PreparedBranch, ...]:
        """No branch is frozen."""
        return ()

    def branch_key(self, i: int) -> str:
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

    def stored_rows(self, image_size: tuple[int, int]) -> RowFormat | None:
        """The tokens that enter the branches."""
        return BranchInputRows(self.backbone, image_size, self.starts, self.kept_blocks)

    def live_chunk(self, shape: TrunkShape, threads: int) -> int:
        """As many images as their graphs leave memory for: with many tokens, one image is enough work."""
        return max(1, _GRAPH_BYTES // (threads * self.graph_bytes(shape)))

    stored_chunk = live_chunk

    def graph_bytes(self, shape: TrunkShape) -> int:
        """Bytes of the graphs of one image, of all settings."""
        return self._trained_blocks * shape.tokens * _GRAPH_WIDTHS * shape.width * self.backbone.dtype.itemsize

    def check_memory(self, shape: TrunkShape, threads: int) -> None:
        """Log what a step costs. Raises TrainingError if not even one image per thread fits the memory."""
        need, free = threads * self.graph_bytes(shape), free_memory()
        blocks = self._trained_blocks
        if need > _MAX_MEMORY * free:
            raise TrainingError(
                f"training {len(self.settings)} branches of {blocks} blocks in all needs {size(need)} for one image on "
                f"each of {threads} threads; free: {size(free)} memory. Use fewer settings, fewer --branch-blocks, a "
                f"smaller --image-size or fewer --threads."
            )
        passes = 2 * blocks / self.backbone.depth  # forward, and backward to the activations: weights have no gradient
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
        assert isinstance(encoding, BranchInputs)
        roles, run = self.backbone.roles, PooledLinear(self._buffers.pool)
        branches: dict[str | None, BranchTrunk] = {}
        for i, untrained in enumerate(self._untrained_branches):
            values = {name: stack.values.to(self.backbone.dtype) for name, stack in self._branch_stacks[i].items()}
            adapter = _with_values(untrained.adapter, values)
            prepared = prepare_adapter(roles.blocks, self.branch_key(i), untrained.start, adapter)
            tokens = encoding.tokens[untrained.start]
            branches[prepared.key] = run_branch(
                roles, prepared, tokens, encoding.rotation, keep=i in self.with_token, run=run
            )
        return self.read_logits(_BranchesInTraining(encoding, branches), run)

    def leaves(self) -> list[Tensor]:
        """Those of the tasks, and the adapters."""
        return [*self.task_leaves(), *self.branch_leaves()]

    def task_leaves(self) -> list[Tensor]:
        """The leaves of the tasks alone."""
        return super().leaves()

    def branch_leaves(self) -> list[Tensor]:
        """The adapters of the branches."""
        return [stack.values for stack in self.branch_stacks.values()]

    @property
    def branch_stacks(self) -> dict[str, Stack]:
        """The stacks of all branches, by their names among all stacks."""
        return {f"branch.{i}.{name}": s for i, own in enumerate(self._branch_stacks) for name, s in own.items()}

    def share_branches(self, other: "BranchSweep") -> None:
        """Train the branches of another sweep instead of its own. Its settings must have the same branches."""
        self._branch_stacks = other._branch_stacks
        self.stacks |= other.branch_stacks

    def branches(self) -> list[Branch]:
        """The trained branches, on the CPU."""
        values = self.final_values()
        trained = []
        for i, untrained in enumerate(self._untrained_branches):
            own = {name: values[f"branch.{i}.{name}"].clone() for name in self._branch_stacks[i]}
            trained.append(replace(untrained, adapter=_with_values(untrained.adapter, own)))
        return trained

    def tasks(self) -> list[Task]:
        """The trained tasks, each standing on its trained branch."""
        return [replace(task, branch=branch.ref) for task, branch in zip(super().tasks(), self.branches(), strict=True)]


def check_extends_nothing(name: str, parents: Sequence[str]) -> None:
    """Raise TrainingError if a task that is trained with a branch extends others, on whatever trunk these stand."""
    if parents:
        listed = ", ".join(dict.fromkeys(parents))
        raise TrainingError(
            f"{name}: while a branch is trained, a task on it cannot extend others ({listed}): the trunks that these "
            f"read are not computed beyond the start of the branch. Train the branch first, then a task on it that "
            f"extends them: --branch FILE --extends FILE."
        )


def _with_values(adapter: Adapter, values: Mapping[str, Tensor]) -> Adapter:
    """The adapter with other tensors, by the names of `Adapter.tensors`."""
    return Adapter(
        values.get("gains"),
        {
            name: replace(update, A=values[f"{name}.lora_A"], B=values[f"{name}.lora_B"])
            for name, update in adapter.low_rank.items()
        },
    )
