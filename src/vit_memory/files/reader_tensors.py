"""A learned reader as tensors of a task file: `gains`, and per block and projection a `lora_A` and a `lora_B`.

gains                       (L, 6, D): see `learned_reader.GAINS`, as differences from identity
blocks.0.q.lora_A.weight    (r, in), as peft names them
blocks.0.q.lora_B.weight    (out, r); the update is lora_B @ lora_A, without a scaling factor
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from vit_memory.errors import TaskError
from vit_memory.learned_reader import PROJECTIONS, LearnedReader, LowRank

_NAME = re.compile(rf"blocks\.(0|[1-9]\d*)\.({'|'.join(PROJECTIONS)})\.lora_([AB])\.weight")


def is_reader_tensor(name: str) -> bool:
    """Whether a tensor of that name belongs to a learned reader."""
    return name == "gains" or _NAME.fullmatch(name) is not None


def reader_to_tensors(reader: LearnedReader) -> dict[str, Tensor]:
    """The tensors of a reader by their names in the file."""
    tensors = {} if reader.gains is None else {"gains": reader.gains}
    for projection, update in reader.low_rank.items():
        for side, stacked in (("A", update.A), ("B", update.B)):
            for i, tensor in enumerate(stacked):
                tensors[f"blocks.{i}.{projection}.lora_{side}.weight"] = tensor
    return tensors


def reader_from_tensors(tensors: Mapping[str, Tensor], depth: int) -> LearnedReader:
    """The reader whose tensors are among these. Raises TaskError if a block is missing or of another shape."""
    named = [match.group(2) for name in tensors if (match := _NAME.fullmatch(name))]  # the projection of each tensor
    projections = [projection for projection in PROJECTIONS if projection in named]
    expected = 2 * depth * len(projections)
    if len(named) != expected:  # before any loop over the depth, which a forged file may claim to be anything
        raise TaskError(
            f"{len(named)} tensors of low-rank updates of {', '.join(projections)}, expected {expected}: a lora_A and "
            f"a lora_B for each of {depth} blocks."
        )
    low_rank = {
        projection: LowRank(*(_stacked(tensors, depth, f"{projection}.lora_{side}.weight") for side in "AB"))
        for projection in projections
    }
    return LearnedReader(tensors.get("gains"), low_rank)


def _stacked(tensors: Mapping[str, Tensor], depth: int, name: str) -> Tensor:
    blocks = [tensors.get(f"blocks.{i}.{name}") for i in range(depth)]
    present = [block for block in blocks if block is not None]
    shapes = {tuple(block.shape) for block in present}
    dtypes = {block.dtype for block in present}
    if len(present) < depth or len(shapes) > 1 or len(dtypes) > 1 or any(block.dim() != 2 for block in present):
        raise TaskError(
            f"{name}: {len(present)} of {depth} blocks, of the shapes {sorted(shapes)}; expected one shape, of a rank "
            f"and a width, for all."
        )
    return torch.stack(present)


def describe_reader(reader: LearnedReader) -> dict[str, object]:
    """What the file's description says of a reader; compared with its tensors when it is read."""
    return {
        "gains": reader.gains is not None,
        "rank": {projection: update.rank for projection, update in reader.low_rank.items()},
    }
