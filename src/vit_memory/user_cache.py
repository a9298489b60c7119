"""Where this package keeps what it can compute again: in the user's cache, which may be emptied at any time."""

import os
from pathlib import Path


def user_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/vit-memory`, or `~/.cache/vit-memory` where the variable is not set or not an absolute path."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "vit-memory"
