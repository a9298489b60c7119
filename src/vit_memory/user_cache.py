"""The user's cache folder, for files that can be computed again. It may be deleted at any time."""

import os
from pathlib import Path


def user_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/vit-memory`, or `~/.cache/vit-memory` if the variable is not set to an absolute path."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "vit-memory"
