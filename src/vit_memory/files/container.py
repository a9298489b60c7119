"""The safetensors container: equal content gives equal bytes, and every byte is checked when it is read.

    8 bytes   length of the header, little endian
    header    JSON, padded with spaces to a multiple of 8:
              {"__metadata__": {"sha256": …, "format": …, <name>: <text> …},
               <tensor>: {"dtype": …, "shape": […], "data_offsets": [from, to]} …}
    data      the tensors' bytes, one after the other in the header's order, no gaps

`sha256` covers the whole file, with itself as 64 zeros, so that a flipped bit anywhere is detected. Any safetensors
reader opens these files. This one also refuses unknown or repeated keys, gaps, overlaps, other dtypes, and headers
larger than their data justifies. It runs no code, and the tensors are views of one copy of the file in memory.
"""

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit_memory.atomic import write_atomic
from vit_memory.errors import DamagedFile, FileError, UnsafeFile

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ZEROS = "0" * 64
_LARGEST_HEADER = 64 * 2**20
# A label takes a few bytes in the header and a row of the head in the data. A header with far more items than its data
# justifies would only fill memory: the two bytes of `[]` become a Python object of some sixty bytes.
_FREE_ITEMS, _BYTES_PER_ITEM = 10_000, 16
# A tensor is three groups (itself, its shape, its place); those of a learned reader are small, but not this small.
_FREE_GROUPS, _BYTES_PER_GROUP = 2_000, 16
_LARGEST_EMPTY = 2**40


def write_container(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors (float32, float16 or bfloat16) and texts, whole or not at all."""
    write_atomic(path, container_bytes(metadata, tensors))


def container_bytes(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> list[bytes]:
    """The content of a file with these tensors and texts, in pieces."""
    header: dict[str, Any] = {"__metadata__": {"sha256": _ZEROS, **metadata}}  # the first zeros of the text
    data: list[bytes] = []
    position = 0
    for name, tensor in tensors.items():
        raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + len(raw)],
        }
        data.append(raw)
        position += len(raw)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    length = struct.pack("<Q", len(text))
    digest = hashlib.sha256(b"".join((length, text, *data))).hexdigest()
    return [length, text.replace(_ZEROS.encode(), digest.encode(), 1), *data]


def read_container(path: Path, content: bytearray | None = None) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a file, every byte checked.

    With `content`, that is parsed instead, and `path` is only what messages call it. The tensors are views of it.
    """
    content = _read(path) if content is None else content
    if len(content) < 8:
        raise DamagedFile(f"{path}: {len(content)} bytes, too short to be a task file.")
    (length,) = struct.unpack("<Q", content[:8])
    if length > min(len(content) - 8, _LARGEST_HEADER):
        if _is_pickle(content):
            raise UnsafeFile(
                f"{path}: a pickled PyTorch file, which could run code; not opened. "
                f"Files of the 2023 reproduction: vit-memory import {path.name} --backbone …"
            )
        raise DamagedFile(
            f"{path}: the header claims {length} bytes, the file has {len(content)}: cut off, or not a task file."
        )
    text = bytes(memoryview(content)[8 : 8 + length])
    data = memoryview(content)[8 + length :]
    header = _parse(path, text, len(data))
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedFile(f"{path}: the header has no metadata of texts: not a vit-memory file.")
    _check_digest(path, content, text, metadata.pop("sha256", ""))
    return metadata, _tensors(path, header, data)


def read_format(path: Path) -> str | None:
    """The format in the header of a file, without reading the rest; None if there is no such header."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _LARGEST_HEADER):
                return None
            text = file.read(length)
        return str(_parse(path, text, size - 8 - length)["__metadata__"]["format"])
    except (OSError, struct.error, DamagedFile, KeyError, TypeError):
        return None


def _is_pickle(content: bytearray) -> bool:
    """A zip as torch.save writes it, or a bare pickle: its protocol, then a first instruction."""
    return content[:4] == b"PK\x03\x04" or (content[0] == 0x80 and 2 <= content[1] <= 5 and content[2] != 0)


def _read(path: Path) -> bytearray:
    try:
        size = path.stat().st_size
        content = bytearray(size)
        with path.open("rb") as file:
            size_read = file.readinto(content)
    except FileNotFoundError:
        raise FileError(f"{path}: no such file.") from None
    except OSError as error:
        raise FileError(f"{path}: cannot be read, {error.strerror}.") from error
    if size_read != size:
        raise DamagedFile(f"{path}: {size_read} of {size} bytes could be read.")
    return content


def _parse(path: Path, text: bytes, data_bytes: int) -> dict[str, Any]:
    items, nested = text.count(b","), text.count(b"[") + text.count(b"{")
    too_many_items = items > _FREE_ITEMS + data_bytes // _BYTES_PER_ITEM
    if too_many_items or nested > _FREE_GROUPS + data_bytes // _BYTES_PER_GROUP:
        raise DamagedFile(f"{path}: the header lists {items} items in {nested} groups, more than its data justifies.")
    try:
        header = parse_json(text.decode())
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path}: the header is not valid JSON: {error}.") from None
    if not isinstance(header, dict):
        raise DamagedFile(f"{path}: the header is not a JSON object.")
    return header


def parse_json(text: str) -> Any:
    """Strict JSON: ValueError for a repeated key, NaN or infinity."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise ValueError(f"key {key[:100]!r} is given twice")
            values[key] = value
        return values

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not valid JSON")

    return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)


def _check_digest(path: Path, content: bytearray, text: bytes, claimed: str) -> None:
    blank = text.replace(claimed.encode(), _ZEROS.encode(), 1) if len(claimed) == 64 else text
    digest = hashlib.sha256(content[:8])
    digest.update(blank)
    digest.update(memoryview(content)[8 + len(text) :])
    if digest.hexdigest() != claimed:
        raise DamagedFile(f"{path}: the content does not match its checksum: damaged or changed by hand. Get it again.")


def _tensors(path: Path, header: Mapping[str, Any], data: memoryview) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    position = 0
    for name, entry in header.items():
        where = f"{path}: tensor {name!r}"
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise DamagedFile(f"{where}: expected the fields dtype, shape and data_offsets.")
        if entry["dtype"] not in _DTYPES:
            raise DamagedFile(f"{where}: dtype {entry['dtype']!r}, expected one of {', '.join(_DTYPES)}.")
        dtype, shape, offsets = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        valid = _whole_numbers(shape) and _whole_numbers(offsets) and len(offsets) == 2 and len(shape) <= 8
        # Without numbers no length is checked by the data, and torch cannot hold the product of very large ones.
        if not valid or (0 in shape and math.prod(length or 1 for length in shape) > _LARGEST_EMPTY):
            raise DamagedFile(f"{where}: shape {shape!r} at {offsets!r} is not a valid shape or position.")
        size = math.prod(shape) * dtype.itemsize
        if offsets != [position, position + size] or offsets[1] > len(data):
            raise DamagedFile(
                f"{where}: {size} bytes expected at {position} of {len(data)}, the header says {offsets}: cut off, "
                f"overlapping or with gaps."
            )
        if size:
            flat = torch.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=position)
            tensors[name] = flat.view(shape)
        else:
            tensors[name] = torch.empty(shape, dtype=dtype)
        position += size
    if position != len(data):
        raise DamagedFile(f"{path}: {len(data) - position} bytes after the last tensor are not described.")
    return tensors


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**40 for value in values)
