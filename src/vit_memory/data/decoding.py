"""Image decoding: from a file's bytes to 8-bit RGB pixels, or a BadImage with the reason.

Pixels are those an image viewer shows: EXIF orientation applied, palettes and CMYK converted, 16-bit values scaled,
transparency composited on white, the first frame of an animation. If `simplejpeg` is installed, it decodes ordinary
JPEGs three times as fast as Pillow, to the same pixels.
"""

import io
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vit_memory.errors import BadImage

# Only formats that Pillow decodes itself: no EPS, which runs Ghostscript, and none that reads other files.
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF")
_EXTENSIONS = "jpg jpeg jpe jfif mpo png gif webp avif bmp tif tiff ppm pgm pbm pnm"
EXTENSIONS = frozenset(f".{extension}" for extension in _EXTENSIONS.split())
LARGEST_PIXELS = 100_000_000  # 300 MB of RGB; a few kilobytes of PNG can claim a thousand times that
_STRIP_PIXELS = 2**20  # 4 MB in Pillow; most images are one strip
_ORIENTATION = 0x0112
# An entry of warnings.filters for all of Pillow's modules; the comment in its pattern makes it unique.
_IGNORE_PILLOW = ("ignore", None, Warning, re.compile(r"PIL\.(?#vit_memory)"), 0)


class Encoded:
    """An encoded image whose header has been read: its format, and its size after applying EXIF orientation."""

    def __init__(self, content: bytes, name: str) -> None:
        self.content, self.name = content, name
        self._image = _open(content, name)
        self._orientation = _orientation(self._image)
        self.format = str(self._image.format)
        self.width, self.height = self._image.size if self._orientation < 5 else self._image.size[::-1]

    def decode(self, at_least: tuple[int, int] | None = None) -> Tensor:
        """Pixels (3, height, width), uint8 RGB.

        With `at_least` (height, width), a JPEG is decoded at a half, quarter or eighth of its size if the result is no
        smaller than that: much cheaper, but not the same pixels.
        """
        if at_least is not None and self._orientation >= 5:
            at_least = at_least[::-1]
        try:
            with _ignore_pillow_warnings():
                pixels = _pixels(self._image, self.content, at_least)
        except MemoryError:
            raise
        except Exception as error:  # Pillow's plugins raise many types
            raise BadImage(self.name, f"its {self.format} data cannot be decoded ({_first_line(error)})") from error
        return _apply_orientation(_as_planes(pixels), self._orientation)


def decode(source: bytes | np.ndarray, name: str) -> Tensor:
    """Pixels (3, height, width), uint8 RGB, of an encoded file or of an array (H, W), (H, W, 1) or (H, W, 3)."""
    return _from_array(source, name) if isinstance(source, np.ndarray) else Encoded(source, name).decode()


def _as_planes(pixels: np.ndarray) -> Tensor:
    """(H, W) or (H, W, 3) to (3, H, W) without a copy."""
    tensor = torch.from_numpy(pixels)
    return tensor.expand(3, *tensor.shape) if tensor.dim() == 2 else tensor.permute(2, 0, 1)


def _open(encoded: bytes, name: str) -> Image.Image:
    if not encoded:
        raise BadImage(name, "the file is empty")
    try:
        with _ignore_pillow_warnings():  # Pillow warns of large images, which are checked below
            image = Image.open(io.BytesIO(encoded), formats=_formats())
    except Image.DecompressionBombError as error:
        raise BadImage(name, f"refused as a decompression bomb ({_first_line(error)})") from error
    except Exception as error:  # not only UnidentifiedImageError: struct.error, SyntaxError, ValueError of bad headers
        start = encoded[:12].decode("latin-1").encode("unicode_escape").decode()
        raise BadImage(
            name, f"not an image of a known format, or incomplete in its header (it begins with {start})"
        ) from error
    width, height = image.size
    if width < 1 or height < 1:
        raise BadImage(name, f"its header claims {width} × {height} pixels")
    if width * height > LARGEST_PIXELS:
        raise BadImage(
            name,
            f"its header claims {width} × {height} pixels, more than {LARGEST_PIXELS // 10**6} million: refused as a "
            f"decompression bomb. If the image is genuine, resize it.",
        )
    return image


def _pixels(image: Image.Image, encoded: bytes, at_least: tuple[int, int] | None) -> np.ndarray:
    """(H, W, 3) uint8, or (H, W) if the image is grey."""
    if image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L"):
        factor = _shrink_factor(image.size, at_least)
        simplejpeg = _simplejpeg()
        if simplejpeg is not None:
            return _decode_with_simplejpeg(simplejpeg, image, encoded, factor)
        if factor > 1:
            image.draft(image.mode, (image.width // factor, image.height // factor))
    if image.mode in ("I;16", "I;16B", "I;16L", "I;16N", "I", "F"):
        return _to_8_bit(np.asarray(image))
    if image.mode in ("1", "L"):
        return np.array(image.convert("L"))
    return _on_white(image)


def _on_white(image: Image.Image) -> np.ndarray:
    """(H, W, 3) uint8 of an image in colour, what is transparent composited on white.

    In strips: Pillow's copies of a whole image would take up to seven times the memory of the result.
    """
    transparent = image.has_transparency_data
    image.load()
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        if transparent:
            strip = strip.convert("RGBA")
            strip = Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip)
        pixels[top : top + rows] = np.asarray(strip.convert("RGB"))
    return pixels


def _decode_with_simplejpeg(simplejpeg: Any, image: Image.Image, encoded: bytes, factor: int) -> np.ndarray:
    # The minimum is the exact size: a smaller one allows odd eighths, which decode slower than the whole image.
    height, width = -(-image.height // factor), -(-image.width // factor)
    smaller = {"min_height": height, "min_width": width, "min_factor": factor} if factor > 1 else {}
    colorspace = "RGB" if image.mode == "RGB" else "GRAY"
    pixels: np.ndarray = simplejpeg.decode_jpeg(encoded, colorspace=colorspace, **smaller)
    return pixels if image.mode == "RGB" else pixels[:, :, 0]


def _shrink_factor(size: tuple[int, int], at_least: tuple[int, int] | None) -> int:
    """The largest of 8, 4, 2 and 1 by which the image may shrink."""
    if at_least is None:
        return 1
    width, height = size
    return next((f for f in (8, 4, 2) if height // f >= at_least[0] and width // f >= at_least[1]), 1)


def _to_8_bit(values: np.ndarray) -> np.ndarray:
    """Grey values of 16 or 32 bits or floating point, scaled to 0..255 according to their type and range."""
    if not np.isfinite(values).all():
        raise ValueError("it holds NaN or infinite values")
    low, high = float(values.min()), float(values.max())
    if low < 0:
        raise ValueError(f"it holds negative values, down to {low:g}; scale it to 0..255 or 0..65535 first")
    if values.dtype.kind == "f" and high <= 1:
        return (values * 255 + 0.5).astype(np.uint8)
    if values.dtype.itemsize == 2 or 255 < high <= 65535:
        return (values.astype(np.float32) * (255 / 65535) + 0.5).astype(np.uint8)
    if high <= 255:
        return values.astype(np.uint8)
    raise ValueError(f"it holds values up to {high:g}; scale it to 0..255 or 0..65535 first")


def _from_array(values: np.ndarray, name: str) -> Tensor:
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] != 3) or 0 in values.shape:
        raise BadImage(name, f"its shape is {values.shape}; expected (height, width), optionally with 1 or 3 channels")
    if values.dtype != np.uint8:
        try:
            values = _to_8_bit(values)
        except (ValueError, TypeError) as error:
            raise BadImage(name, _first_line(error)) from error
    return _as_planes(np.array(values))  # a copy: the array may be a read-only map


def _orientation(image: Image.Image) -> int:
    if image.format not in ("JPEG", "MPO", "WEBP", "TIFF", "PNG", "AVIF"):
        return 1
    try:
        with _ignore_pillow_warnings():
            orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged metadata; the pixels may still be good
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def _apply_orientation(pixels: Tensor, orientation: int) -> Tensor:
    """Apply an EXIF orientation: 5 to 8 swap rows and columns; then each mirrors no, one or both axes."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 2)
    axes = {2: [2], 3: [1, 2], 4: [1], 6: [2], 7: [1, 2], 8: [1]}.get(orientation)
    return pixels if axes is None else pixels.flip(axes)


@contextmanager
def _ignore_pillow_warnings() -> Iterator[None]:
    """Ignore Pillow's warnings of damaged or oversized metadata. Pixels that cannot be read raise.

    `warnings.catch_warnings` replaces the process's list of filters and later restores the previous list. With two
    threads, one can restore the other's list, and every warning is ignored from then on. So this adds one filter for
    Pillow's modules to the list and removes it from the same list, whatever other threads do meanwhile. Pillow's
    warnings in other threads are ignored too while an image is decoded; filters per thread exist only in Python 3.14,
    as an option.
    """
    if getattr(sys.flags, "context_aware_warnings", False):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=_IGNORE_PILLOW[3].pattern)
            yield
        return
    filters: Any = warnings.filters  # kept: another thread's catch_warnings may replace the list
    filters.insert(0, _IGNORE_PILLOW)
    try:
        yield
    finally:
        with suppress(ValueError):  # other code has emptied the list
            filters.remove(_IGNORE_PILLOW)


@cache
def _formats() -> tuple[str, ...]:
    """The formats that this version of Pillow supports; older ones lack AVIF."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@cache
def _simplejpeg() -> ModuleType | None:
    try:
        import simplejpeg
    except ImportError:
        return None
    module: Any = simplejpeg
    return module  # type: ignore[no-any-return]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
