"""The frame of a page: its head, its style and its end. A page refers to nothing outside itself."""

import tempfile
from pathlib import Path

from vit_memory.errors import FileError
from vit_memory.report.elements import Markup, escape
from vit_memory.report.style import STYLE


def check_writable(path: Path) -> None:
    """Raise FileError unless a file can be written at `path`; leaves nothing behind."""
    if path.is_dir():
        raise FileError(f"{path}: is a folder; expected the name of a file, such as {path / 'report.html'}.")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise FileError(f"{path}: cannot be written, {error.strerror}. Choose another place.") from error


def footer() -> Markup:
    """The last line of a page."""
    return Markup("<footer>Written by vit-memory. The page needs no network and runs no scripts.</footer>")


def html_page(title: str, body: Markup) -> str:
    """A whole HTML document."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # nothing is loaded, no script runs
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title><style>{STYLE}</style></head>
<body><main>
{body}
</main></body></html>
"""
