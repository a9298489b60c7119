"""An adapter as tensors of a file: `gains`, and per block and projection a `lora_A` and a `lora_B`.

gains                       (blocks, 6, D): see `adapter.GAINS`, as differences from identity
blocks.0.q.lora_A.weight    (r, in), as peft names them; the number is the backbone's block
blocks.0.q.lora_B.weight    (out, r); the update is scaling · lora_B @ lora_A, the scaling 1 unless described,
                            as one number for all blocks or one for each
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vit_memory.adapter import PROJECTIONS, Adapter, LowRank
from vit_memory.errors import TaskError

_NAME = re.compile(rf"blocks\.(0|[1-9]\d*)\.({'|'.join(PROJECTIONS)})\.lora_([AB])\.weight")


def is_adapter_tensor(name: str) -> bool:
    """Whether a tensor of that name belongs to an adapter."""
    return name == "gains" or _NAME.fullmatch(name) is not None


def adapter_to_tensors(adapter: Adapter, start: int = 0) -> dict[str, Tensor]:
    """The tensors of an adapter by their names in the file; its first block is the backbone's block `start`."""
    tensors = {} if adapter.gains is None else {"gains": adapter.gains}
    for projection, update in adapter.low_rank.items():
        for side, stacked in (("A", update.A), ("B", update.B)):
            for i, tensor in enumerate(stacked, start):
                tensors[f"blocks.{i}.{projection}.lora_{side}.weight"] = tensor
    return tensors


def adapter_from_tensors(
    tensors: Mapping[str, Tensor], description: Mapping[str, Any] | None, blocks: range
) -> Adapter:
    """The adapter whose tensors are among these and whose description is this one (None: that of an empty adapter).

    Raises TaskError if a block is missing or of another shape, or if the two do not agree.
    """
    named = [match.group(2) for name in tensors if (match := _NAME.fullmatch(name))]  # the projection of each tensor
    projections = [projection for projection in PROJECTIONS if projection in named]
    count = blocks.stop - blocks.start  # not len(), which fails where a forged file claims too many
    expected = 2 * count * len(projections)
    if len(named) != expected:  # before any loop over the depth, which a forged file may claim to be anything
        raise TaskError(
            f"{len(named)} tensors of low-rank updates of {', '.join(projections)}, expected {expected}: a lora_A and "
            f"a lora_B for each of {count} blocks."
        )
    scaling = {} if description is None else description.get("scaling", {})
    low_rank = {
        projection: LowRank(
            _stacked(tensors, blocks, f"{projection}.lora_A.weight"),
            _stacked(tensors, blocks, f"{projection}.lora_B.weight"),
            _read_scaling(scaling.get(projection, 1.0)),
        )
        for projection in projections
    }
    adapter = Adapter(tensors.get("gains"), low_rank)
    if (description or describe_adapter(Adapter())) != describe_adapter(adapter):
        raise TaskError(f"the description of the adapter is {description}, its tensors are another.")
    return adapter


def _read_scaling(value: Any) -> float | tuple[float, ...]:
    return tuple(map(float, value)) if isinstance(value, list) else float(value)


def _stacked(tensors: Mapping[str, Tensor], blocks: range, name: str) -> Tensor:
    blocks_of_file = [tensors.get(f"blocks.{i}.{name}") for i in blocks]
    present = [block for block in blocks_of_file if block is not None]
    shapes = {tuple(block.shape) for block in present}
    dtypes = {block.dtype for block in present}
    if len(present) < len(blocks) or len(shapes) > 1 or len(dtypes) > 1 or any(block.dim() != 2 for block in present):
        raise TaskError(
            f"{name}: {len(present)} of {len(blocks)} blocks, of the shapes {sorted(shapes)}; expected one shape, of a "
            f"rank and a width, for all."
        )
    return torch.stack(present)


def describe_adapter(adapter: Adapter) -> dict[str, Any]:
    """What the file's description says of an adapter; compared with its tensors when it is read."""
    description: dict[str, Any] = {
        "gains": adapter.gains is not None,
        "rank": {projection: update.rank for projection, update in adapter.low_rank.items()},
    }
    return {**description, "scaling": adapter.scalings} if adapter.scalings else description
