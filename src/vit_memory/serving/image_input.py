"""From the bytes of a request to what the model takes. Runs in decoding threads."""

import io
import math
from collections.abc import Iterable

import torch
from PIL import Image
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.data.decoding import Encoded
from vit_memory.data.resizing import resized_size
from vit_memory.data.transforms import EvalTransform
from vit_memory.errors import BadImage, DataError, ImageError, ServingError, VitMemoryError
from vit_memory.preprocessing import Preprocessing
from vit_memory.serving.requests import Request

LARGEST_FREE_SIZE = 2**20  # pixels of an image, where a task has no fixed size: attention costs their square


def read_image(request: Request, backbone: Backbone, max_pixels: int) -> None:
    """Give every part of a request its pixels, or raise BadImage or ImageError."""
    content, name = request.content, request.name
    if isinstance(content, Tensor):
        request.parts[0].pixels = _check_tensor(content, backbone, name)
        return
    encoded = _open(content, name, max_pixels)
    for part in request.parts:
        assert part.preprocessing is not None
        _check_size(encoded, part.preprocessing, backbone, max_pixels)
    pixels = encoded.decode()
    for part in request.parts:
        assert part.preprocessing is not None
        part.pixels = _preprocess(pixels, part.preprocessing, name)


def warm_up(preprocessings: Iterable[Preprocessing | None]) -> None:
    """Read a blank image, so that the first request does not wait for the libraries to be loaded."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG")
    pixels = Encoded(file.getvalue(), "blank").decode()
    for preprocessing in preprocessings:
        if preprocessing is not None:
            _preprocess(pixels, preprocessing, "blank")


def _open(content: object, name: str, max_pixels: int) -> Encoded:
    """An image that is not decoded yet; BadImage if it is none, or its header claims too many pixels."""
    if not isinstance(content, (bytes, bytearray, memoryview)):
        raise BadImage(name, f"expected the bytes of an image file or a normalised tensor, not {_type_name(content)}")
    encoded = Encoded(bytes(content), name)
    if encoded.width * encoded.height > max_pixels:
        raise BadImage(
            name, f"{encoded.width} × {encoded.height} pixels are more than the limit of {max_pixels / 1e6:g} million"
        )
    return encoded


def _check_size(encoded: Encoded, preprocessing: Preprocessing, backbone: Backbone, max_pixels: int) -> None:
    """BadImage if preprocessing would make too many pixels of an image, or a size that the backbone does not take."""
    size, name = (encoded.height, encoded.width), encoded.name
    if preprocessing.resize is not None:
        smallest = math.prod(resized_size(preprocessing.resize, 1, 1))  # of all images: it is what the backbone wants
        size = resized_size(preprocessing.resize, *size)
        if math.prod(size) > max(max_pixels, smallest):  # a narrow image, resized by its shorter side
            raise BadImage(
                name,
                f"{encoded.height} × {encoded.width} pixels would be resized to {size[0]} × {size[1]}, more than the "
                f"limit of {max_pixels / 1e6:g} million; cut it",
            )
    if preprocessing.crop is not None:
        size = preprocessing.crop
    elif not isinstance(preprocessing.resize, tuple) and math.prod(size) > LARGEST_FREE_SIZE:
        raise BadImage(
            name,
            f"{size[0]} × {size[1]} pixels after preprocessing are more than the limit of {LARGEST_FREE_SIZE}, since "
            f"the model has no fixed image size; resize or cut it",
        )
    problem = backbone.roles.check_size(*size)
    if problem is not None:
        raise BadImage(name, f"{size[0]} × {size[1]} pixels after preprocessing: {problem}")


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
    """What a request is told of an exception while its image was decoded: our own errors, else mostly BadImage."""
    if isinstance(error, VitMemoryError):
        return error
    if isinstance(error, MemoryError):  # not the image's fault: a client may try again
        return ServingError(f"{name}: the server has too little memory to decode it now.")
    return BadImage(name, f"it cannot be read ({_type_name(error)}: {error})")


def _type_name(value: object) -> str:
    return type(value).__name__
