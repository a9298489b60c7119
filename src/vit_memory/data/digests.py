"""Digests of whole files, remembered from one command to the next.

Two files are the same image where their digests are equal, so every byte counts: scans and other uncompressed files may
differ in their middle only. Reading ten thousand photographs takes seconds, so digests are remembered in the user's
cache folder, by the file's path, size, times and inode; where one of these has changed, the file is read again. Where
the database cannot be used (locked, damaged, on a read-only disk), files are read and nothing else changes.
"""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from vit_memory.user_cache import user_cache_folder

try:
    import sqlite3
except ImportError:  # Python can be built without it
    sqlite3 = None  # type: ignore[assignment]

# Reading and hashing let other threads run, and disks answer several at once; more threads wait for one another.
_THREADS = min(16, 2 * (os.cpu_count() or 1))
_AT_ONCE = 4096  # files whose digests are looked up, computed and remembered together
_MOST_READ = 2**20  # bytes of a file that are held at a time
# Times have a grain: a file may be written twice within it, and look unchanged. git waits as well.
_SETTLED_NS = 2_000_000_000
_LOCK_WAIT_S = 2.0
_BETWEEN_MESSAGES_S = 10.0  # where reading takes long
_DAY_S = 24 * 3600
_KEPT_DAYS = 90  # after its last use
_TOUCHED_DAYS = 7  # a use is noted if the last noted one is so long ago: most commands then only read
_TABLE = """CREATE TABLE IF NOT EXISTS digests
    (path BLOB PRIMARY KEY, stamp TEXT, digest BLOB, used INTEGER) WITHOUT ROWID"""  # used: in days since 1970
_In = TypeVar("_In")
_Out = TypeVar("_Out")
log = logging.getLogger(__name__)


def content_digest(content: bytes | memoryview) -> bytes:
    """Eight bytes that follow the content. SHA-256: processors have it, and it was twice as fast as BLAKE2 here."""
    return hashlib.sha256(content).digest()[:8]


def file_digests(paths: Sequence[str]) -> tuple[bytes, ...]:
    """The digest of every file's content, in order; of a file that cannot be read, a digest of its path."""
    digests: list[bytes] = []
    next_message = time.monotonic() + _BETWEEN_MESSAGES_S
    with ThreadPoolExecutor(_THREADS) as pool, closing(_Memory()) as memory:
        for first in range(0, len(paths), _AT_ONCE):
            digests += _digests(paths[first : first + _AT_ONCE], pool, memory)
            if time.monotonic() > next_message:
                log.info("read %d of %d files to find copies; remembered for the next time", len(digests), len(paths))
                next_message = time.monotonic() + _BETWEEN_MESSAGES_S
    return tuple(digests)


def file_digest(path: str) -> bytes:
    """The digest of one file's content, always read anew."""
    return _hash(path)[0]


def _digests(paths: Sequence[str], pool: ThreadPoolExecutor, memory: "_Memory") -> list[bytes]:
    stamps = _mapped(pool, _stamp_of, paths, 256)
    known = memory.find(stamps)
    missing = [i for i in range(len(paths)) if i not in known]
    hashed = dict(zip(missing, _mapped(pool, _hash, [paths[i] for i in missing], 16), strict=True))
    rows = []
    for i, (digest, stamp) in hashed.items():
        file = stamps[i]
        if file is not None and stamp is not None:
            rows.append((file[0], stamp, digest))
    memory.add(rows)
    return [known[i] if i in known else hashed[i][0] for i in range(len(paths))]


def _mapped(pool: ThreadPoolExecutor, work: Callable[[_In], _Out], values: Sequence[_In], at_once: int) -> list[_Out]:
    """Results in order. Several to a thread at a time: handing over one costs as much as asking for a file's size."""
    parts = (values[i : i + at_once] for i in range(0, len(values), at_once))
    return [result for part in pool.map(lambda part: [work(value) for value in part], parts) for result in part]


def _stamp_of(path: str) -> tuple[bytes, str] | None:
    """The absolute path and what changes with the content; None if there is no such file."""
    try:
        # Not through pathlib, which takes longer than all the rest of a file whose digest is remembered.
        return os.fsencode(os.path.abspath(path)), _stamp(os.stat(path))  # noqa: PTH100, PTH116
    except (OSError, ValueError):  # ValueError: no file can have this name
        return None


def _stamp(status: os.stat_result) -> str:
    """Size, times and inode. The second time is set by the system alone, so a copied time stamp deceives nobody."""
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def _hash(path: str) -> tuple[bytes, str | None]:
    """The digest of a file's content, and the stamp it may be remembered by, if it may."""
    try:
        with Path(path).open("rb", buffering=0) as file:
            now, before = time.time_ns(), os.fstat(file.fileno())
            sha256 = hashlib.sha256()
            length = max(1, min(before.st_size, _MOST_READ))  # reading makes room for all it may get
            while part := file.read(length):
                sha256.update(part)
            after = os.fstat(file.fileno())
    except (OSError, ValueError):  # a bad file; it is reported where it is decoded
        return content_digest(b"unreadable\0" + path.encode("utf-8", "surrogatepass")), None
    settled = max(before.st_mtime_ns, before.st_ctime_ns) < now - _SETTLED_NS
    stamp = _stamp(before)
    return sha256.digest()[:8], stamp if settled and stamp == _stamp(after) else None


class _Memory:
    """Digests by path and stamp, in SQLite. Where the database fails, nothing is found in it or added to it."""

    def __init__(self) -> None:
        self.today = int(time.time() // _DAY_S)
        self.database: Any = None
        self.writable, self.cleaned = True, False
        try:
            self.path = user_cache_folder() / "digests-1.sqlite"  # another number for another table
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
            log.debug("digests are not remembered: %s", error)
            return
        if sqlite3 is not None:
            with self._reading():
                self.database = sqlite3.connect(self.path, timeout=_LOCK_WAIT_S)
                self.database.execute(_TABLE)

    def find(self, stamps: Sequence[tuple[bytes, str] | None]) -> dict[int, bytes]:
        """The digests of those files that are remembered with this stamp, by their places."""
        known: dict[int, bytes] = {}
        used = []
        if self.database is None:
            return known
        with self._reading():
            self.database.execute("BEGIN")  # so that the file is locked once, not for every question
            for i, file in enumerate(stamps):
                if file is None:
                    continue
                rows = self.database.execute("SELECT stamp, digest, used FROM digests WHERE path = ?", file[:1])
                for stamp, digest, day in rows.fetchall():
                    if stamp == file[1] and isinstance(digest, bytes) and len(digest) == 8:
                        known[i] = digest
                        if not isinstance(day, int) or abs(self.today - day) >= _TOUCHED_DAYS:
                            used.append((self.today, file[0]))
            self.database.rollback()
        self._write("UPDATE digests SET used = ? WHERE path = ?", used)
        return known

    def add(self, rows: Sequence[tuple[bytes, str, bytes]]) -> None:
        """Remember digests by path and stamp; those that were not used for long are dropped."""
        if rows and not self.cleaned:
            self._write("DELETE FROM digests WHERE used < ?", [(self.today - _KEPT_DAYS,)])
            self.cleaned = True
        self._write("INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?)", [(*row, self.today) for row in rows])

    def _write(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """All of it or nothing; after a failure (a read-only or full disk, a lock that is not given up) no more."""
        if self.database is None or not self.writable or not rows:
            return
        with self._reading():
            try:
                with self.database:
                    self.database.executemany(statement, rows)
            except sqlite3.OperationalError as error:
                log.debug("%s: no more digests are remembered: %s", self.path, error)
                self.writable = False

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Give up on the database where it fails, and remove it where it is damaged: the next command makes another."""
        try:
            yield
        except sqlite3.Error as error:
            log.debug("%s: digests are not remembered: %s", self.path, error)
            self.close()
            # Of this class itself and no subclass: these bytes are not a database. A locked one is an OperationalError.
            if type(error) is sqlite3.DatabaseError:
                with suppress(OSError):
                    self.path.unlink()
                    self.path.with_name(self.path.name + "-journal").unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the file."""
        database, self.database = self.database, None
        if database is not None:
            database.close()
