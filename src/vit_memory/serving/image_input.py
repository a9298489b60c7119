"""From the bytes of a request to what the model takes. Runs in decoding threads."""

import io
from collections.abc import Iterable

import torch
from PIL import Image
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.data.decoding import Encoded
from vit_memory.data.transforms import EvalTransform
from vit_memory.errors import BadImage, DataError, ImageError, VitMemoryError
from vit_memory.preprocessing import Preprocessing
from vit_memory.serving.requests import Request


def read_image(request: Request, backbone: Backbone, max_pixels: int) -> None:
    """Give every part of a request its pixels, or raise BadImage or ImageError."""
    content, name = request.content, request.name
    if isinstance(content, Tensor):
        request.parts[0].pixels = _check_tensor(content, backbone, name)
        return
    pixels = _decode(content, name, max_pixels)
    for part in request.parts:
        assert part.preprocessing is not None
        part.pixels = _preprocess(pixels, part.preprocessing, name)


def warm_up(preprocessings: Iterable[Preprocessing | None]) -> None:
    """Read a blank image, so that the first request does not wait for the libraries to be loaded."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG")
    pixels = _decode(file.getvalue(), "blank", 64 * 64)
    for preprocessing in preprocessings:
        if preprocessing is not None:
            _preprocess(pixels, preprocessing, "blank")


def _decode(content: object, name: str, max_pixels: int) -> Tensor:
    """Pixels (3, height, width), uint8; BadImage if it cannot be decoded or its header claims too many pixels."""
    if not isinstance(content, (bytes, bytearray, memoryview)):
        raise BadImage(name, f"expected the bytes of an image file or a normalised tensor, not {_type_name(content)}")
    encoded = Encoded(bytes(content), name)
    if encoded.width * encoded.height > max_pixels:
        raise BadImage(
            name, f"{encoded.width} × {encoded.height} pixels are more than the limit of {max_pixels / 1e6:g} million"
        )
    return encoded.decode()


def _preprocess(pixels: Tensor, preprocessing: Preprocessing, name: str) -> Tensor:
    """Pixels (3, H, W) uint8 to the backbone's input (3, h, w), float32."""
    transform = EvalTransform(preprocessing)
    try:
        return transform.normalised(transform(pixels)[None])[0]
    except DataError as error:
        raise BadImage(name, str(error)) from error


def _check_tensor(image: Tensor, backbone: Backbone, name: str) -> Tensor:
    """A normalised image (3, h, w) or (1, 3, h, w) as (3, h, w) float32; ImageError if the backbone cannot read it."""
    if image.dim() == 4 and len(image) == 1:
        image = image[0]
    try:
        return backbone.check_images(image[None].to(backbone.device))[0].to("cpu", torch.float32)
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from error


def as_image_error(error: Exception, name: str) -> VitMemoryError:
    """What a request is told of an exception while its image was decoded: our own errors, else BadImage."""
    if isinstance(error, VitMemoryError):
        return error
    return BadImage(name, f"it cannot be read ({_type_name(error)}: {error})")


def _type_name(value: object) -> str:
    return type(value).__name__
