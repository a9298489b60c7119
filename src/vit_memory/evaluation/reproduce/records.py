"""Records: one JSON file per training or measurement, which says everything about it.

A record has an identity (what its file name says: dataset, method, seed …), its settings (everything else that decides
the result), the result, and where it was made. A file with the same identity and other settings is never replaced and
never used: numbers of different settings do not mix.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit_memory.atomic import write_atomic
from vit_memory.errors import DamagedFile, FileError

FORMAT = "vit-memory-result/1"
_MOST_NAMED = 6  # settings that an error names
_WORDS = {"per_class": "{} per class", "seed": "seed {}"}  # numbers need a word in a file name


@dataclass(frozen=True, slots=True)
class Record:
    """One training or measurement."""

    identity: Mapping[str, Any]  # JSON values
    settings: Mapping[str, Any]
    result: Mapping[str, Any]
    made: Mapping[str, Any]  # command, commit, versions, machine, seconds, peak memory

    @property
    def kind(self) -> str:
        """What it records: training, concatenation …"""
        return str(self.identity["kind"])


class RecordFolder:
    """The records of one scale, as files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, identity: Mapping[str, Any]) -> Path:
        """The file of that identity: KIND/words-of-the-identity.json."""
        filled = {key: value for key, value in identity.items() if key != "kind" and value not in (None, (), [], "")}
        words = [_WORDS.get(key, "{}").format(value) for key, value in filled.items()]
        name = re.sub(r"[^0-9A-Za-z.]+", "-", "_".join(words)).strip("-")
        if len(name) > 120:  # some file systems allow 143 bytes
            name = f"{name[:100]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
        return self.folder / str(identity["kind"]) / f"{name}.json"

    def find(self, identity: Mapping[str, Any], settings: Mapping[str, Any]) -> Record | None:
        """The record of that identity, or None. Raises FileError if it has other settings."""
        path = self.path(identity)
        if not path.exists():
            return None
        record = read_record(path)
        wanted = _plain(settings)
        if _plain(identity) != record.identity or wanted != record.settings:
            raise FileError(
                f"{path}: has other settings than this run: {_changes(record.settings, wanted)}. Records of different "
                f"settings are not mixed: choose another --out, or remove that file to make it again."
            )
        return record

    def write(self, record: Record) -> None:
        """Write one record; an interrupted write leaves no file."""
        path = self.path(record.identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = {"identity": record.identity, "settings": record.settings, "result": record.result}
        content = {"format": FORMAT, **fields, "made": record.made}
        write_atomic(path, [json.dumps(content, indent=1, allow_nan=False).encode(), b"\n"])

    def all(self, kind: str | None = None) -> Iterator[Record]:
        """All records, or those of one kind, in the order of their names."""
        for path in sorted(self.folder.glob(f"{kind or '*'}/*.json")):
            yield read_record(path)


def read_record(path: Path) -> Record:
    """Read one file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise FileError(f"{path}: its format is {content['format']!r}; this version reads {FORMAT}.")
        return Record(content["identity"], content["settings"], content["result"], content["made"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise DamagedFile(f"{path}: not a record ({error}). Remove it to make it again.") from error


def _plain(values: Mapping[str, Any]) -> Any:
    """As it reads back from JSON: tuples become lists."""
    return json.loads(json.dumps(values))


def _changes(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    pairs = dict(_flat(found)), dict(_flat(wanted))
    changed = [key for key in sorted({*pairs[0], *pairs[1]}) if pairs[0].get(key) != pairs[1].get(key)]
    named = [f"{key} {pairs[0].get(key)!r}, now {pairs[1].get(key)!r}" for key in changed[:_MOST_NAMED]]
    more = len(changed) - len(named)
    return "; ".join(named) + (f"; and {more} more" if more else "")


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
