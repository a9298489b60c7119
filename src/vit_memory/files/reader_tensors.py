"""A learned reader as tensors of a task file: `gains`, and per block and projection a `lora_A` and a `lora_B`.

gains                       (L, 6, D): see `learned_reader.GAINS`, as differences from identity
blocks.0.q.lora_A.weight    (r, in), as peft names them
blocks.0.q.lora_B.weight    (out, r); the update is lora_B @ lora_A, without a scaling factor
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from vit_memory.choices import Projection
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
    found = {match.groups(): name for name in tensors if (match := _NAME.fullmatch(name))}
    low_rank: dict[Projection, LowRank] = {}
    for projection in PROJECTIONS:
        if any(key[1] == projection for key in found):
            low_rank[projection] = LowRank(
                *(_stacked(tensors, depth, f"{projection}.lora_{side}.weight") for side in "AB")
            )
    expected = 2 * depth * len(low_rank)
    if len(found) != expected:
        raise TaskError(f"{len(found)} tensors of low-rank updates, expected {expected}: two per block and projection.")
    return LearnedReader(tensors.get("gains"), low_rank)


def _stacked(tensors: Mapping[str, Tensor], depth: int, name: str) -> Tensor:
    blocks = [tensors.get(f"blocks.{i}.{name}") for i in range(depth)]
    present = [block for block in blocks if block is not None]
    shapes = {tuple(block.shape) for block in present}
    if len(present) < depth or len(shapes) > 1 or len({block.dtype for block in present}) > 1:
        raise TaskError(
            f"{name}: {len(present)} of {depth} blocks, of the shapes {sorted(shapes)}; expected one shape for all."
        )
    return torch.stack(present)


def describe_reader(reader: LearnedReader) -> dict[str, object]:
    """What the file's description says of a reader; compared with its tensors when it is read."""
    return {
        "gains": reader.gains is not None,
        "rank": {projection: update.rank for projection, update in reader.low_rank.items()},
    }
