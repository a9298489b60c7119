"""From a file's bytes to RGB pixels, whatever the file is, or a BadImage that says why not.

Every odd kind ends as 8-bit RGB the way a viewer shows it: turned as its EXIF says, palettes looked up, CMYK converted,
16-bit scaled, what is transparent laid on white, animations at their first frame. `simplejpeg` decodes ordinary JPEGs
three times as fast as Pillow, to the same pixels, where it is installed.
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

# Only formats that Pillow decodes by itself: no EPS, which runs Ghostscript, and nothing that reads other files.
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF")
_ENDINGS = "jpg jpeg jpe jfif mpo png gif webp avif bmp tif tiff ppm pgm pbm pnm"
EXTENSIONS = frozenset(f".{ending}" for ending in _ENDINGS.split())
LARGEST_PIXELS = 100_000_000  # 300 MB of RGB; a few kilobytes of PNG can claim a thousand times that
_ORIENTATION = 0x0112
# An entry of warnings.filters for all of Pillow's modules; the comment in its pattern makes it unlike anyone else's.
_IGNORE_PILLOW = ("ignore", None, Warning, re.compile(r"PIL\.(?#vit_memory)"), 0)


class Encoded:
    """An encoded image whose head has been read: what it is and how large it is shown."""

    def __init__(self, content: bytes, name: str) -> None:
        self.content, self.name = content, name
        self._image = _open(content, name)
        self._turn = _orientation(self._image)
        self.format = str(self._image.format)
        self.width, self.height = self._image.size if self._turn < 5 else self._image.size[::-1]

    def decode(self, at_least: tuple[int, int] | None = None) -> Tensor:
        """Pixels (3, height, width), uint8 RGB.

        `at_least` (height, width) allows a JPEG to be decoded at a half, quarter or eighth of its size, as long as the
        result is no smaller than that: much cheaper, not the same pixels. The caller knows whether that will do.
        """
        if at_least is not None and self._turn >= 5:
            at_least = at_least[::-1]
        try:
            with _ignore_pillow_warnings():
                pixels = _pixels(self._image, self.content, at_least)
        except MemoryError:
            raise
        except Exception as error:  # Pillow's plugins raise whatever their parsing ran into
            raise BadImage(self.name, f"its {self.format} data cannot be decoded ({_said(error)})") from error
        return _turned(_as_planes(pixels), self._turn)


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
        with _ignore_pillow_warnings():  # of the size too, which is judged below
            image = Image.open(io.BytesIO(encoded), formats=_formats())
    except Image.DecompressionBombError as error:
        raise BadImage(name, f"refused as a decompression bomb ({_said(error)})") from error
    except Exception as error:  # not only UnidentifiedImageError: struct.error, SyntaxError, ValueError of bad headers
        begins = encoded[:12].decode("latin-1").encode("unicode_escape").decode()
        raise BadImage(
            name, f"not an image of a known format, or cut off in its head (it begins with {begins})"
        ) from error
    width, height = image.size
    if width < 1 or height < 1:
        raise BadImage(name, f"it claims {width} × {height} pixels")
    if width * height > LARGEST_PIXELS:
        raise BadImage(
            name,
            f"it claims {width} × {height} pixels, more than {LARGEST_PIXELS // 10**6} million: refused as a "
            f"decompression bomb. Make it smaller if it is real.",
        )
    return image


def _pixels(image: Image.Image, encoded: bytes, at_least: tuple[int, int] | None) -> np.ndarray:
    """(H, W, 3) uint8, or (H, W) where the image is grey."""
    jpeg = image.format in ("JPEG", "MPO")
    if jpeg and image.mode in ("RGB", "L"):
        factor = _shrink(image.size, at_least)
        fast = _simplejpeg()
        if fast is not None:
            # min_height and min_width would allow odd eighths, which decode slower than the whole picture.
            height, width = -(-image.height // factor), -(-image.width // factor)
            shrunk = {"min_height": height, "min_width": width, "min_factor": factor} if factor > 1 else {}
            space = "RGB" if image.mode == "RGB" else "GRAY"
            decoded: np.ndarray = fast.decode_jpeg(encoded, colorspace=space, **shrunk)
            return decoded if image.mode == "RGB" else decoded[:, :, 0]
        if factor > 1:
            image.draft(image.mode, (image.width // factor, image.height // factor))
    if image.mode in ("I;16", "I;16B", "I;16L", "I;16N", "I", "F"):
        return _to_8_bit(np.asarray(image))
    if image.mode in ("1", "L"):
        return np.array(image.convert("L"))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(paper, image)
    return np.array(image.convert("RGB"))


def _shrink(size: tuple[int, int], at_least: tuple[int, int] | None) -> int:
    """The largest of 8, 4, 2 and 1 by which the image may shrink."""
    if at_least is None:
        return 1
    width, height = size
    return next((f for f in (8, 4, 2) if height // f >= at_least[0] and width // f >= at_least[1]), 1)


def _to_8_bit(values: np.ndarray) -> np.ndarray:
    """Grey values of 16 or 32 bits or floating point, scaled by what their range can only mean."""
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
            raise BadImage(name, _said(error)) from error
    return _as_planes(np.array(values))  # a copy: the array may be a read-only map


def _orientation(image: Image.Image) -> int:
    if image.format not in ("JPEG", "MPO", "WEBP", "TIFF", "PNG", "AVIF"):
        return 1
    try:
        with _ignore_pillow_warnings():
            turn = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged metadata says nothing; the pixels may still be good
        return 1
    return turn if isinstance(turn, int) and 1 <= turn <= 8 else 1


def _turned(pixels: Tensor, orientation: int) -> Tensor:
    """Undo what EXIF says the camera did: 5 to 8 swap rows and columns, then each is a mirroring of both axes."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 2)
    axes = {2: [2], 3: [1, 2], 4: [1], 6: [2], 7: [1, 2], 8: [1]}.get(orientation)
    return pixels if axes is None else pixels.flip(axes)


@contextmanager
def _ignore_pillow_warnings() -> Iterator[None]:
    """Ignore what Pillow warns of: damaged or oversized metadata. Pixels that cannot be read raise.

    `warnings.catch_warnings` replaces the whole process's list of filters and later puts back the list it saw; of two
    threads that decode at once, one can put back the other's, and everything is ignored from then on. So a single
    filter for Pillow's modules is put into the list and taken out of the same list: nothing of it stays, whatever other
    threads do meanwhile. While an image is decoded, what Pillow warns of in other threads is ignored too; only
    Python 3.14 has filters for one thread, and not unless it is asked to.
    """
    if getattr(sys.flags, "context_aware_warnings", False):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=_IGNORE_PILLOW[3].pattern)
            yield
        return
    filters: Any = warnings.filters  # remembered: another thread's catch_warnings may put another list in its place
    filters.insert(0, _IGNORE_PILLOW)
    try:
        yield
    finally:
        with suppress(ValueError):  # somebody has emptied the list
            filters.remove(_IGNORE_PILLOW)


@cache
def _formats() -> tuple[str, ...]:
    """Those that this Pillow has: AVIF is young."""
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


def _said(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
