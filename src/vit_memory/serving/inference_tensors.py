"""Requests and answers of the Open Inference Protocol v2 as bytes: JSON, and tensors in it or in binary after it.

A request is a JSON object; a tensor's data stands in it, or, with the parameter `binary_data_size`, in the bytes that
follow it (Triton's binary tensor data extension). Everything is checked against what the bytes really hold, and what
does not fit is refused with a message that says where. No model and no routes here.
"""

import base64
import binascii
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vit_memory.serving.image_input import LARGEST_FREE_SIZE
from vit_memory.serving.json_body import JsonLimits, parse_json_body
from vit_memory.serving.problems import ProblemError

IMAGE, PIXELS = "image", "pixels"  # the inputs: encoded files, or normalised pixels
JSON_LIMITS = JsonLimits(
    values=1_000_000,  # parsing them holds the interpreter for about 0.2 s; binary data costs nothing
    groups=100_000,  # a nested tensor of 224 × 224 pixels and 16 images has 11,000 rows
    advice="send tensors of that size as binary data (parameter binary_data_size)",
)
LONGEST_ID = 256


@dataclass(frozen=True, slots=True)
class InputLimits:
    """What one request to a task may hold."""

    images: int
    size: tuple[int, int] | None  # (height, width) of `pixels`; None: images of the task have no fixed size


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """An output that a request asks for, and how."""

    name: str
    binary: bool
    classes: int = 0  # above 0: that many best classes as texts, in place of the numbers


@dataclass(frozen=True, slots=True, eq=False)
class InferRequest:
    """A request, checked: its images, and which outputs it wants."""

    images: Sequence[bytes | Tensor]  # encoded files, or normalised pixels (3, height, width) float32
    outputs: tuple[RequestedOutput, ...] | None  # None: all of them
    binary: bool  # whether outputs that are not listed one by one are sent in binary
    id: str | None
    timeout_s: float | None


@dataclass(frozen=True, slots=True, eq=False)
class OutputTensor:
    """An output of an answer: numbers or texts."""

    name: str
    values: np.ndarray | Sequence[str]  # float32 of any shape, or texts (n,)
    shape: tuple[int, ...]
    binary: bool


def parse_request(body: bytes | bytearray, header_length: str | None, limits: InputLimits) -> InferRequest:
    """The request in `body`; `header_length` is the header Inference-Header-Content-Length, if there is one."""
    view = memoryview(body)
    length = len(view) if header_length is None else _header_length(header_length, len(view))
    request = _parse_json(bytes(view[:length]))
    parameters = _parameters(request, "the request")
    inputs = _objects(request, "inputs")
    binary_data = view[length:]
    if len(inputs) != 1:
        raise _malformed(f"the request has {len(inputs)} inputs; expected one, {IMAGE!r} or {PIXELS!r}.")
    images, used = _images(inputs[0], binary_data, limits)
    if used != len(binary_data):
        raise _malformed(
            f"{len(binary_data) - used} bytes after the JSON belong to no input; expected {used}, found "
            f"{len(binary_data)}."
        )
    binary = _flag(parameters, "binary_data_output", "the request")
    outputs = None
    if request.get("outputs") is not None:
        outputs = tuple(_requested_output(entry, binary) for entry in _objects(request, "outputs"))
    if outputs and len({output.name for output in outputs}) < len(outputs):
        raise _malformed("an output is asked for twice.")
    identifier = request.get("id")
    if identifier is not None and (not isinstance(identifier, str) or len(identifier) > LONGEST_ID):
        raise _malformed(f"id must be a text of at most {LONGEST_ID} characters.")
    return InferRequest(images, outputs or None, binary, identifier, _timeout_s(parameters))


def encode_answer(answer: Mapping[str, Any], outputs: Sequence[OutputTensor]) -> tuple[bytes, int | None]:
    """The bytes of an answer with these outputs, and the length of its JSON if binary data follow it."""
    entries, data = [], []
    for output in outputs:
        texts = not isinstance(output.values, np.ndarray)
        entry: dict[str, Any] = {"name": output.name, "datatype": "BYTES" if texts else "FP32"}
        entry["shape"] = list(output.shape)
        if output.binary:
            data.append(_text_bytes(output.values) if texts else _float_bytes(output.values))
            entry["parameters"] = {"binary_data_size": len(data[-1])}
        else:
            entry["data"] = list(output.values) if texts else _json_numbers(output.values)
        entries.append(entry)
    header = json.dumps({**answer, "outputs": entries}, allow_nan=False, separators=(",", ":")).encode()
    return b"".join((header, *data)), len(header) if data else None


def _malformed(detail: str) -> ProblemError:
    return ProblemError(400, detail)


def _header_length(text: str, body_length: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16 and int(text) <= body_length):
        raise _malformed(
            f"the header Inference-Header-Content-Length is {text[:20]!r}; expected the length of the JSON at the "
            f"start of the body, which has {body_length} bytes."
        )
    return int(text)


def _parse_json(text: bytes) -> Mapping[str, Any]:
    request = parse_json_body(text, JSON_LIMITS)
    if not isinstance(request, dict):
        raise _malformed("the body is not a JSON object with the list 'inputs'.")
    return request


def _objects(request: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    entries = request.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _malformed(f"{key!r} must be a list of JSON objects.")
    return entries


def _parameters(entry: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    parameters = entry.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise _malformed(f"{where}: 'parameters' must be a JSON object.")
    if any(key.startswith("shared_memory") for key in parameters):
        raise _malformed(f"{where}: shared memory is not supported; send the data in the request.")
    return parameters


def _flag(parameters: Mapping[str, Any], key: str, where: str, default: bool = False) -> bool:
    value = parameters.get(key, default)
    if not isinstance(value, bool):
        raise _malformed(f"{where}: parameter {key!r} must be true or false.")
    return value


def _whole(parameters: Mapping[str, Any], key: str, where: str) -> int | None:
    value = parameters.get(key)
    if value is not None and (type(value) is not int or not 0 <= value < 2**53):
        raise _malformed(f"{where}: parameter {key!r} must be a whole number of 0 or more.")
    return value


def _timeout_s(parameters: Mapping[str, Any]) -> float | None:
    microseconds = _whole(parameters, "timeout", "the request")
    return microseconds / 1e6 if microseconds else None  # 0 is Triton's word for none


def _requested_output(entry: Mapping[str, Any], binary: bool) -> RequestedOutput:
    name = entry.get("name")
    if not isinstance(name, str):
        raise _malformed("an entry of 'outputs' has no name.")
    where = f"output {name[:100]!r}"
    parameters = _parameters(entry, where)
    classes = _whole(parameters, "classification", where) or 0
    return RequestedOutput(name, _flag(parameters, "binary_data", where, binary), classes)


def _images(entry: Mapping[str, Any], binary_data: memoryview, limits: InputLimits) -> tuple[Sequence[Any], int]:
    """The images of an input, and how many bytes of the binary data are its own."""
    name, datatype = entry.get("name"), entry.get("datatype")
    if not isinstance(name, str) or name not in _READERS:
        raise _malformed(f"the input is called {str(name)[:100]!r}; expected {IMAGE!r} or {PIXELS!r}.")
    where = f"input {name!r}"
    expected, from_json, from_bytes = _READERS[name]
    if datatype != expected:
        raise _malformed(f"{where}: datatype {str(datatype)[:100]!r}, expected {expected}.")
    shape = _shape(entry, where, limits)
    size = _whole(_parameters(entry, where), "binary_data_size", where)
    if size is None:
        if not isinstance(entry.get("data"), list):
            raise _malformed(f"{where}: neither a list 'data' nor the parameter 'binary_data_size'.")
        return from_json(entry["data"], shape, where), 0
    if "data" in entry:
        raise _malformed(f"{where}: has 'data' and 'binary_data_size'; expected one of them.")
    if size > len(binary_data):
        raise _malformed(
            f"{where}: binary_data_size is {size}, but {len(binary_data)} bytes follow the JSON. Is the header "
            f"Inference-Header-Content-Length set?"
        )
    return from_bytes(binary_data[:size], shape, where), size


def _shape(entry: Mapping[str, Any], where: str, limits: InputLimits) -> tuple[int, ...]:
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(type(length) is int for length in shape):
        raise _malformed(f"{where}: 'shape' must be a list of whole numbers.")
    if entry["name"] == IMAGE:
        expected, fits = "[n] or [n, 1]", shape[1:] in ([], [1])
    else:
        height, width = limits.size or ("height", "width")
        expected, fits = f"[n, 3, {height}, {width}]", len(shape) == 4 and shape[1] == 3 and _size_fits(shape, limits)
    if not fits or not shape or shape[0] < 1:
        raise _malformed(f"{where}: shape {str(shape)[:100]}, expected {expected} with n of 1 or more.")
    if shape[0] > limits.images:
        raise _malformed(f"{where}: {shape[0]} images, at most {limits.images} in one request.")
    return tuple(shape)


def _size_fits(shape: list[int], limits: InputLimits) -> bool:
    height, width = shape[2:]
    if limits.size is not None:
        return (height, width) == limits.size
    return min(height, width) > 0 and height * width <= LARGEST_FREE_SIZE


def _files_from_json(data: list[Any], shape: tuple[int, ...], where: str) -> Sequence[bytes]:
    texts = [entry[0] if isinstance(entry, list) and len(entry) == 1 else entry for entry in data]
    if len(texts) != shape[0] or not all(isinstance(text, str) for text in texts):
        raise _malformed(f"{where}: 'data' must hold {shape[0]} texts, each an image file in base64.")
    try:
        return [base64.b64decode(text, validate=True) for text in texts]
    except (binascii.Error, ValueError) as error:  # ValueError: characters beyond ASCII
        raise _malformed(
            f"{where}: 'data' must hold image files in base64 ({error}). Send the files as they are as binary data."
        ) from None


def _files_from_bytes(data: memoryview, shape: tuple[int, ...], where: str) -> Sequence[bytes]:
    """Elements of BYTES: each a length of four bytes, little-endian, then so many bytes."""
    files: list[bytes] = []
    position = 0
    while position < len(data) and len(files) < shape[0]:
        if position + 4 > len(data):
            raise _malformed(f"{where}: its binary data end within the length of image {len(files)}.")
        (length,) = struct.unpack_from("<I", data, position)
        position += 4
        if length > len(data) - position:
            raise _malformed(f"{where}: image {len(files)} claims {length} bytes, {len(data) - position} are left.")
        files.append(bytes(data[position : position + length]))
        position += length
    if len(files) != shape[0] or position != len(data):
        raise _malformed(
            f"{where}: its binary data hold {len(files)} images in {position} of {len(data)} bytes; the shape says "
            f"{shape[0]}."
        )
    return files


def _pixels_from_json(data: list[Any], shape: tuple[int, ...], where: str) -> Sequence[Tensor]:
    try:
        # Only numbers: of texts, numpy would make an array with room for the longest one in every place.
        values = np.array(data if _only_numbers(data, len(shape)) else None)
    except ValueError:  # rows of different lengths
        values = np.array(None)
    if values.dtype.kind not in "iuf" or values.shape not in (shape, (math.prod(shape),)):
        raise _malformed(f"{where}: 'data' must hold {math.prod(shape)} numbers, flat or nested as {list(shape)}.")
    return _planes(values, shape)


def _only_numbers(data: list[Any], levels: int) -> bool:
    """Whether lists, nested so many levels deep at most, hold nothing but numbers."""
    types = set(map(type, data))
    if types == {list} and levels > 1:
        return all(_only_numbers(row, levels - 1) for row in data)
    return types <= {int, float}


def _pixels_from_bytes(data: memoryview, shape: tuple[int, ...], where: str) -> Sequence[Tensor]:
    if len(data) != 4 * math.prod(shape):
        raise _malformed(
            f"{where}: {len(data)} bytes, expected {4 * math.prod(shape)} for shape {list(shape)} of FP32."
        )
    return _planes(np.frombuffer(data, "<f4"), shape)


def _planes(values: np.ndarray, shape: tuple[int, ...]) -> Sequence[Tensor]:
    with np.errstate(over="ignore"):  # beyond float32 is infinite, which the model refuses by name
        # A copy: the bytes of a body are read-only, and unaligned where the JSON ends.
        return torch.from_numpy(values.astype(np.float32, copy=True).reshape(shape)).unbind()


_Reader = Callable[[Any, tuple[int, ...], str], Sequence[Any]]
_READERS: Mapping[str, tuple[str, _Reader, _Reader]] = {
    IMAGE: ("BYTES", _files_from_json, _files_from_bytes),
    PIXELS: ("FP32", _pixels_from_json, _pixels_from_bytes),
}


def _text_bytes(texts: Any) -> bytes:
    encoded = [text.encode("utf-8", "replace") for text in texts]  # of a file, which may hold half a surrogate pair
    return b"".join(struct.pack("<I", len(text)) + text for text in encoded)


def _float_bytes(values: Any) -> bytes:
    return bytes(values.astype("<f4").tobytes())


def _json_numbers(values: Any) -> list[float | None]:
    """Flat, in rows; JSON has no NaN and no infinity: null."""
    return [value if math.isfinite(value) else None for value in values.ravel().tolist()]
