"""Task files that somebody made to harm a server: damaged ones, and whole ones with a checksum of their own. Seeded."""

import hashlib
import json
import struct
from pathlib import Path

import torch
from hostile_images import mutated

from vit_memory.files.container import container_bytes, read_container

# Values in places where others are expected.
JUNK = (
    None, True, False, 0, -1, 1.5, 1e308, -0.0, 10**400, "", "a", "\x00", "\ud800", "../../etc/passwd", "pets",
    [], {}, [[]], [None], ["pets", 1], {"a": {"b": []}}, ["pets"] * 300, "x" * 100_000, [{}], [{"name": "a"}],
    [{"name": 1, "data": 2}],
)  # fmt: skip
TAKEN_OR_NOT = {200, 201, 400, 409}


def hostile_files(draw, task_file):
    """What each tries, its content, and the statuses that a PUT of it may get; without end."""
    (length,) = struct.unpack_from("<Q", task_file)
    head, data = task_file[: 8 + length], task_file[8 + length :]
    for claimed in (0, 1, length - 1, length + 1, len(task_file), 2**31, 2**63, 2**64 - 1):
        yield f"a header of {claimed} bytes", struct.pack("<Q", claimed) + task_file[8:], {400}
    for shape in ([2**39, 2**39, 0], [0, 2**39, 2**39], [0] * 8):
        yield f"an empty tensor of shape {shape}", with_empty_tensor(shape), {400}
    for _ in range(40):
        yield "mutated header", mutated(draw, head) + data, TAKEN_OR_NOT
        yield "mutated data", head + mutated(draw, data), {400}
    yield from _sealed_files(draw, *read_container(Path("new"), bytearray(task_file)))


def _sealed_files(draw, metadata, tensors):
    def sealed(description=None, **changed):
        text = metadata["task"] if description is None else json.dumps(description)
        kept = {name: tensor for name, tensor in {**tensors, **changed}.items() if tensor is not None}
        return b"".join(container_bytes({**metadata, "task": text}, kept))

    yield "an unknown tensor", sealed(unknown=torch.zeros(3)), {400}
    for name, tensor in tensors.items():
        weird = {
            "NaN": torch.full_like(tensor, float("nan")),
            "infinity": torch.full_like(tensor, float("inf")),
            "the largest numbers": torch.full_like(tensor, 3e38),
            "no rows": tensor[:0],
            "one dimension more": tensor[None],
            "a number too few": tensor.flatten()[:-1],
            "half precision": tensor.half(),
            "the other half precision": tensor.bfloat16(),
            "nothing at all": None,
        }
        for what, value in weird.items():
            yield f"{name} of {what}", sealed(**{name: value}), TAKEN_OR_NOT
    while True:
        description = json.loads(metadata["task"])
        place, key = description, draw.choice(list(description))
        while isinstance(place[key], dict) and place[key] and draw.random() < 0.7:
            place, key = place[key], draw.choice(list(place[key]))
        place[key] = draw.choice(JUNK)
        yield f"{key}: {place[key]!r:.40}", sealed(description), TAKEN_OR_NOT


def with_empty_tensor(shape):
    """A file with one tensor of this shape, which has no numbers."""
    zeros = "0" * 64
    header = {
        "__metadata__": {"sha256": zeros, "format": "vit-memory-task/1", "task": "{}"},
        "memory": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]},
    }
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text
    return content.replace(zeros.encode(), hashlib.sha256(content).hexdigest().encode(), 1)
