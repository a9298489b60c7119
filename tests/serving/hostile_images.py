"""Images that somebody made to harm a server: broken, far larger than they look, or two things at once. Seeded."""

import io
import struct
import zipfile
import zlib

import numpy as np
from PIL import Image, features

FORMATS = {
    "JPEG": {},
    "progressive JPEG": {"format": "JPEG", "progressive": True},
    "PNG": {},
    "GIF": {},
    "WEBP": {},
    "lossless WEBP": {"format": "WEBP", "lossless": True},
    "BMP": {},
    "LZW TIFF": {"format": "TIFF", "compression": "tiff_lzw"},
    "deflate TIFF": {"format": "TIFF", "compression": "tiff_adobe_deflate"},
    "PPM": {},
    **({"AVIF": {}} if features.check("avif") else {}),
}


def encoded(name, size=(40, 30), mode="RGB"):
    """A picture of noise in one of the formats."""
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(file, **{"format": name, **FORMATS[name]})
    return file.getvalue()


def mutated(draw, content, most=30):
    """The content with some bytes changed, cut out or put in; never empty."""
    changed = bytearray(content)
    for _ in range(draw.choice([1, 3, most])):
        place = draw.randrange(len(changed))
        choice = draw.random()
        if choice < 0.6:
            changed[place] ^= 1 << draw.randrange(8)
        elif choice < 0.8:
            changed[place : place + 1] = draw.randbytes(draw.choice([1, 2, 8]))
        elif len(changed) > 1:
            del changed[place : place + draw.choice([1, 10, 1000])]
        if not changed:
            return content[:1]
    return bytes(changed)


def broken_jpegs(draw, count):
    """A third is cut off, the others have flipped bits, at places all over the file."""
    files = [encoded("JPEG"), encoded("progressive JPEG"), encoded("JPEG", mode="L"), encoded("JPEG", mode="CMYK")]
    for number in range(count):
        file = files[number % len(files)]
        if number % 3 == 0:
            yield file[: 1 + number * (len(file) - 1) // count]
        else:
            flipped = bytearray(file)
            for _ in range(draw.choice([1, 3, 30])):
                flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
            yield bytes(flipped)


def broken_images(draw, count):
    """The same of all formats."""
    files = [encoded(name) for name in FORMATS]
    for number in range(count):
        file = files[number % len(files)]
        yield file[: draw.randrange(1, len(file))] if number % 3 == 0 else mutated(draw, file)


def png_chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def blank_png(width, height, *, rows=None, extra=b""):
    """A PNG of black pixels, 8 bits each, that claims a size and holds as many rows of it as it is told."""
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    data = png_chunk(b"IDAT", zlib.compress(bytes((width + 1) * (height if rows is None else rows)), 9))
    return b"\x89PNG\r\n\x1a\n" + head + extra + data + png_chunk(b"IEND", b"")


def bombs():
    """Small files that claim, or become, very much."""
    zeros = zlib.compress(bytes(60_000_000), 9)
    blank = io.BytesIO()
    Image.new("L", (9000, 9000)).save(blank, "TIFF", compression="tiff_adobe_deflate")
    frames = io.BytesIO()
    Image.new("P", (8, 8)).save(frames, "GIF", save_all=True, append_images=[Image.new("P", (8, 8), 1)] * 300)
    gif, bmp, webp, tiff = (bytearray(encoded(name)) for name in ("GIF", "BMP", "lossless WEBP", "deflate TIFF"))
    gif[6:10] = struct.pack("<HH", 65535, 65535)
    bmp[18:26] = struct.pack("<ii", 2**30, 2**30)
    extended = b"VP8X" + struct.pack("<I", 10) + bytes(4) + (2**24 - 1).to_bytes(3, "little") * 2
    webp[12:12] = extended
    webp[4:8] = struct.pack("<I", len(webp) - 8)
    (directory,) = struct.unpack_from("<I", tiff, 4)
    (entries,) = struct.unpack_from("<H", tiff, directory)
    endless = bytearray(tiff)
    struct.pack_into("<I", endless, directory + 2 + 12 * entries, directory)  # the next page is the same page
    for entry in range(entries):
        place = directory + 2 + 12 * entry
        if struct.unpack_from("<H", tiff, place)[0] in (256, 257):  # width and height
            struct.pack_into("<HII", tiff, place + 2, 4, 1, 2**31 - 1)
    return {
        "PNG that claims four billion pixels each way": blank_png(2**31 - 1, 2**31 - 1, rows=0),
        "PNG of 81 million pixels": blank_png(9000, 9000),
        "PNG of 49 million pixels, which is allowed": blank_png(7000, 7000),
        "PNG of 49 million pixels without most of them": blank_png(7000, 7000, rows=3),
        "PNG with a text of 60 MB": blank_png(40, 30, extra=png_chunk(b"zTXt", b"a\0\0" + zeros)),
        "PNG with a colour profile of 60 MB": blank_png(40, 30, extra=png_chunk(b"iCCP", b"a\0\0" + zeros)),
        "PNG with more data than pixels": blank_png(4000, 1, rows=15_000),
        "PNG of twenty thousand chunks": blank_png(40, 30, extra=png_chunk(b"tEXt", b"a\0b") * 20_000),
        "TIFF of 81 million pixels": blank.getvalue(),
        "TIFF that claims more": bytes(tiff),
        "TIFF whose pages never end": bytes(endless),
        "GIF that claims a large screen": bytes(gif),
        "GIF of 301 frames": frames.getvalue(),
        "BMP that claims more": bytes(bmp),
        "WEBP that claims more": bytes(webp),
        "PPM that claims more": b"P6 60000 60000 255\n" + bytes(100),
        "PPM with a size of many digits": b"P6 " + b"9" * 5000 + b" 1 255\n",
        "long and thin": blank_png(7_000_000, 1),
        "tall and thin": blank_png(1, 7_000_000),
    }


def polyglots():
    """Files of two kinds at once, and files of other kinds."""
    jpeg, png, gif = encoded("JPEG"), encoded("PNG"), encoded("GIF")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("../../escape.txt", "out")
    page = b"<!doctype html><script>fetch('/v1/tasks')</script>"
    comment = b"\xff\xfe" + struct.pack(">H", len(page) + 2) + page
    return {
        "JPEG and zip": jpeg + archive.getvalue(),
        "zip and JPEG": archive.getvalue() + jpeg,
        "GIF and zip": gif + archive.getvalue(),
        "HTML and PNG": page + png,
        "PNG and HTML": png + page,
        "JPEG with HTML as its comment": jpeg[:2] + comment + jpeg[2:],
        "PDF and JPEG": b"%PDF-1.7\n" + jpeg,
        "JPEG and JPEG": jpeg + jpeg,
        "GIF that is JavaScript": b"GIF89a/*" + gif[8:] + b"*/=1;alert(1)",
        "SVG that reads a file": b'<!DOCTYPE s [<!ENTITY e SYSTEM "file:///etc/passwd">]><svg>&e;</svg>',
        "PostScript that runs a program": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%id) (w) file\n",
        "pickle": b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",
        "ICO of a PNG": struct.pack("<HHHBBBBHHII", 0, 1, 1, 40, 30, 0, 0, 1, 32, len(png), 22) + png,
        "RIFF that is sound": b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(28),
    }
