"""CONTRIBUTING.md names files that exist, so that a renamed file is renamed there too."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_file_that_contributing_names_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.(?:py|md))`", text))
    assert len(named) > 30
    missing = [
        name for name in sorted(named) if not any((ROOT / base / name).exists() for base in ("", "src/vit_memory"))
    ]
    assert missing == []
