"""Paths inside the unpacked archives of named datasets."""

from pathlib import Path


def first_existing(folder: Path, *candidates: str) -> Path:
    """The first candidate that exists in `folder`; raises FileNotFoundError with the first one if none does."""
    for candidate in candidates:
        if (folder / candidate).exists():
            return folder / candidate
    raise FileNotFoundError(2, "missing", str(folder / candidates[0]))


def text_lines(path: Path) -> list[str]:
    """The lines of a text file, stripped, without empty ones."""
    return [line.strip() for line in path.read_text().splitlines() if line.strip()]
