"""Unusual, broken and hostile images as bytes, with the expected result."""

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image

# Left half red, right half blue; the top left quarter green. Rotated or mirrored, it is another picture.
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def scene(width: int = 64, height: int = 48) -> Image.Image:
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : width // 2] = RED
    pixels[:, width // 2 :] = BLUE
    pixels[: height // 2, : width // 2] = GREEN
    return Image.fromarray(pixels)


def encoded(image: Image.Image, file_format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def _rotated() -> bytes:
    """A rotated photo with the EXIF orientation that undoes the rotation."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(scene().transpose(Image.Transpose.ROTATE_90), "JPEG", quality=95, subsampling=0, exif=exif)


def _grey16() -> bytes:
    values = np.asarray(scene().convert("L")).astype(np.uint16) * 257
    return encoded(Image.fromarray(values), "PNG")


def _float_tiff() -> bytes:
    return encoded(Image.fromarray(np.asarray(scene().convert("L")).astype(np.float32) / 255), "TIFF")


def _transparent() -> bytes:
    image = scene().convert("RGBA")
    image.putalpha(Image.fromarray(np.where(np.arange(64)[None] < 32, 255, 0).repeat(48, 0).astype(np.uint8)))
    return encoded(image, "PNG")


def _palette_transparent() -> bytes:
    image = scene().convert("P", palette=Image.Palette.ADAPTIVE, colors=4)
    return encoded(image, "PNG", transparency=image.getpixel((63, 47)))


def _animation() -> bytes:
    return encoded(scene(), "GIF", save_all=True, append_images=[scene().transpose(Image.Transpose.ROTATE_180)])


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IEND", b"")


def _bomb() -> bytes:
    return png(60_000, 60_000, chunk(b"IDAT", zlib.compress(b"\0" * 1_000_000, 9)))


def _text_bomb() -> bytes:
    text = chunk(b"zTXt", b"k\0\0" + zlib.compress(b"a" * 80_000_000, 9))
    rows = zlib.compress(b"".join(b"\0" + bytes(3 * 4) for _ in range(4)))
    return png(4, 4, text, chunk(b"IDAT", rows))


def _nan_tiff() -> bytes:
    return encoded(Image.fromarray(np.full((8, 8), np.nan, np.float32)), "TIFF")


def _damaged_exif() -> bytes:
    whole = encoded(scene(), "JPEG", quality=95, subsampling=0)
    body = b"Exif\0\0MM\0*\xff\xff\xff\xff" + b"\xff" * 20
    return whole[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + whole[2:]


_JPEG = encoded(scene(), "JPEG", quality=95, subsampling=0)

# Viewers show all of these as `scene`; grey ones without its colours: name -> bytes.
GOOD: dict[str, Callable[[], bytes]] = {
    "plain.jpg": lambda: _JPEG,
    "progressive.jpg": lambda: encoded(scene(), "JPEG", quality=95, subsampling=0, progressive=True),
    "rotated-by-exif.jpg": _rotated,
    "cmyk.jpg": lambda: encoded(scene().convert("CMYK"), "JPEG", quality=95, subsampling=0),
    "damaged-exif.jpg": _damaged_exif,
    "png-called.jpg": lambda: encoded(scene(), "PNG"),
    "bytes-after-the-end.jpg": lambda: _JPEG + b"<?php hello ?>" * 100,
    "palette.png": lambda: encoded(scene().convert("P", palette=Image.Palette.ADAPTIVE, colors=8), "PNG"),
    "animation.gif": _animation,
    "lossless.webp": lambda: encoded(scene(), "WEBP", lossless=True),
    "plain.bmp": lambda: encoded(scene(), "BMP"),
    "deflated.tiff": lambda: encoded(scene(), "TIFF", compression="tiff_adobe_deflate"),
    "plain.ppm": lambda: encoded(scene(), "PPM"),
}
GREY: dict[str, Callable[[], bytes]] = {
    "grey.jpg": lambda: encoded(scene().convert("L"), "JPEG", quality=95),
    "16-bit.png": _grey16,
    "float.tiff": _float_tiff,
}
TRANSPARENT: dict[str, Callable[[], bytes]] = {"alpha.png": _transparent, "palette-alpha.png": _palette_transparent}

# Refused: name -> bytes and the expected reason.
BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty.jpg": (lambda: b"", "empty"),
    "cut-off.jpg": (lambda: _JPEG[:-40], "cannot be decoded"),
    "cut-off.png": (lambda: encoded(scene(), "PNG")[:120], "cannot be decoded"),
    "text.jpg": (lambda: b"this is not an image", "not an image of a known format"),
    "page.jpg": (lambda: b"<!doctype html><title>404</title>", "not an image of a known format"),
    "vector.png": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image of a known format"),
    "postscript.jpg": (
        lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "not an image of a known format",
    ),
    "header-only.png": (lambda: b"\x89PNG\r\n\x1a\n", "not an image of a known format"),
    "no-pixels.png": (lambda: png(0, 0), "not an image|claims 0"),
    "scrambled.jpg": (lambda: _JPEG[:-120] + bytes(255 - b for b in _JPEG[-120:]), "cannot be decoded"),
    "bomb.png": (_bomb, "decompression bomb"),
    "text-bomb.png": (_text_bomb, "cannot be decoded|not an image"),
    "nan.tiff": (_nan_tiff, "NaN"),
    "too-narrow.png": (lambda: encoded(Image.new("RGB", (60_000, 1)), "PNG"), "too narrow"),
}
