"""What the commands with --ray share."""

import os
from importlib.util import find_spec

import typer


def require_ray() -> None:
    """Refuse to go on without Ray; before it is imported, because it reads its variables then."""
    if find_spec("ray") is None:
        raise typer.BadParameter("ray is missing: pip install 'vit-memory[ray]'")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # a log with lines left out is none
