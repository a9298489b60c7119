"""Free memory and disk space, and sizes as people write them (20GB)."""

import re
import shutil
from pathlib import Path

import psutil

_UNITS = {"B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def free_memory() -> int:
    """Bytes of memory available on the system, or in the container if that is less."""
    free = int(psutil.virtual_memory().available)
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(0, free)


def free_disk(folder: Path) -> int:
    """Bytes free where the folder is or would be."""
    return shutil.disk_usage(_existing(folder)).free


def disk_size(folder: Path) -> int:
    """Bytes of the whole disk where the folder is or would be."""
    return shutil.disk_usage(_existing(folder)).total


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())


def size(count: int) -> str:
    """Bytes as text: 1.5 GB, 20 MB, 3 kB."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def parse_size(text: str) -> int:
    """Bytes from text such as 20GB, 500 MB, 1.5T or 64GiB. Raises ValueError.

    >>> parse_size("1.5GB")
    1500000000
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(iB|B)?|B)", text.strip(), re.IGNORECASE)
    if match is None and text.strip() != "0":
        raise ValueError(f"{text!r}: expected a number with a unit, such as 20GB or 500MB.")
    if match is None:
        return 0
    number, letter, ending = match.groups(default="B")
    units = _BINARY_UNITS if ending.lower() == "ib" else _UNITS
    return int(float(number) * units[letter.upper()])
