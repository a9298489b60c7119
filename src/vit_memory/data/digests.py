"""Digests of whole files, cached between commands.

Two files are the same image if their digests are equal. The digest covers every byte, because uncompressed files such
as scans may differ only in their middle. Reading ten thousand photographs takes seconds, so digests are cached in the
user's cache folder, by the file's path, size, times and inode; if one of these has changed, the file is read again. If
the database cannot be used (locked, damaged, on a read-only disk), all files are read and the result is the same.
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

# Reading and hashing release the GIL, and disks serve several reads at once; more threads were not faster.
_THREADS = min(16, 2 * (os.cpu_count() or 1))
_BATCH = 4096  # files per database transaction
_READ_BYTES = 2**20  # of a file at a time
# File times are coarse: a file written twice in quick succession can keep its times, so young files are not cached.
# git has the same rule.
_MIN_AGE_NS = 2_000_000_000
_LOCK_WAIT_S = 2.0
_PROGRESS_INTERVAL_S = 10.0
_DAY_S = 24 * 3600
_KEPT_DAYS = 90  # after an entry's last use
_USE_INTERVAL_DAYS = 7  # the last use is updated at most this often, so most commands only read
_TABLE = """CREATE TABLE IF NOT EXISTS digests
    (path BLOB PRIMARY KEY, stamp TEXT, digest BLOB, used INTEGER) WITHOUT ROWID"""  # used: in days since 1970
_In = TypeVar("_In")
_Out = TypeVar("_Out")
log = logging.getLogger(__name__)


def content_digest(content: bytes | memoryview) -> bytes:
    """Eight bytes of SHA-256, which processors support; measured twice as fast as BLAKE2."""
    return hashlib.sha256(content).digest()[:8]


def file_digests(paths: Sequence[str]) -> tuple[bytes, ...]:
    """The digest of every file's content, in order; for a file that cannot be read, a digest of its path."""
    digests: list[bytes] = []
    next_progress = time.monotonic() + _PROGRESS_INTERVAL_S
    with ThreadPoolExecutor(_THREADS) as pool, closing(_DigestCache()) as cache:
        for first in range(0, len(paths), _BATCH):
            digests += _digests(paths[first : first + _BATCH], pool, cache)
            if time.monotonic() > next_progress:
                log.info(
                    "read %d of %d files to find duplicates; cached for the next command",
                    len(digests),
                    len(paths),
                )
                next_progress = time.monotonic() + _PROGRESS_INTERVAL_S
    return tuple(digests)


def file_digest(path: str) -> bytes:
    """The digest of one file's content, without the cache."""
    return _hash(path)[0]


def _digests(paths: Sequence[str], pool: ThreadPoolExecutor, cache: "_DigestCache") -> list[bytes]:
    stamps = _map(pool, _path_and_stamp, paths, 256)
    cached = cache.find(stamps)
    missing = [i for i in range(len(paths)) if i not in cached]
    hashed = dict(zip(missing, _map(pool, _hash, [paths[i] for i in missing], 16), strict=True))
    rows = []
    for i, (digest, stamp) in hashed.items():
        file = stamps[i]
        if file is not None and stamp is not None:
            rows.append((file[0], stamp, digest))
    cache.add(rows)
    return [cached[i] if i in cached else hashed[i][0] for i in range(len(paths))]


def _map(pool: ThreadPoolExecutor, function: Callable[[_In], _Out], values: Sequence[_In], size: int) -> list[_Out]:
    """Results in order, computed in chunks of `size`: passing one value to a thread costs as much as one `stat`."""
    chunks = (values[i : i + size] for i in range(0, len(values), size))
    return [result for results in pool.map(lambda chunk: [function(v) for v in chunk], chunks) for result in results]


def _path_and_stamp(path: str) -> tuple[bytes, str] | None:
    """The absolute path and the stamp of a file; None if there is no such file."""
    try:
        # Not with pathlib, which takes longer than the rest of the work for a cached file.
        return os.fsencode(os.path.abspath(path)), _stamp(os.stat(path))  # noqa: PTH100, PTH116
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return None


def _stamp(status: os.stat_result) -> str:
    """Size, times and inode. Only the system sets ctime, so a restored mtime does not hide a change."""
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def _hash(path: str) -> tuple[bytes, str | None]:
    """The digest of a file's content, and its stamp; None if the digest must not be cached."""
    try:
        with Path(path).open("rb", buffering=0) as file:
            now, before = time.time_ns(), os.fstat(file.fileno())
            sha256 = hashlib.sha256()
            length = max(1, min(before.st_size, _READ_BYTES))  # read() allocates this much
            while chunk := file.read(length):
                sha256.update(chunk)
            after = os.fstat(file.fileno())
    except (OSError, ValueError):  # a bad image is reported when it is decoded
        return content_digest(b"unreadable\0" + path.encode("utf-8", "surrogatepass")), None
    old_enough = max(before.st_mtime_ns, before.st_ctime_ns) < now - _MIN_AGE_NS
    stamp = _stamp(before)
    return sha256.digest()[:8], stamp if old_enough and stamp == _stamp(after) else None


class _DigestCache:
    """Digests by path and stamp, in SQLite. If the database fails, nothing is found in it or added to it."""

    def __init__(self) -> None:
        self.today = int(time.time() // _DAY_S)
        self.database: Any = None
        self.writable, self.cleaned = True, False
        try:
            self.path = user_cache_folder() / "digests-1.sqlite"  # the number is the version of the table
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
            log.debug("digests are not cached: %s", error)
            return
        if sqlite3 is not None:
            with self._disable_on_error():
                self.database = sqlite3.connect(self.path, timeout=_LOCK_WAIT_S)
                self.database.execute(_TABLE)

    def find(self, stamps: Sequence[tuple[bytes, str] | None]) -> dict[int, bytes]:
        """The digests of the files that are cached with this stamp, by index."""
        cached: dict[int, bytes] = {}
        used = []
        if self.database is None:
            return cached
        with self._disable_on_error():
            self.database.execute("BEGIN")  # locks the file once, not for every query
            for i, file in enumerate(stamps):
                if file is None:
                    continue
                rows = self.database.execute("SELECT stamp, digest, used FROM digests WHERE path = ?", file[:1])
                for stamp, digest, day in rows.fetchall():
                    if stamp == file[1] and isinstance(digest, bytes) and len(digest) == 8:
                        cached[i] = digest
                        if not isinstance(day, int) or abs(self.today - day) >= _USE_INTERVAL_DAYS:
                            used.append((self.today, file[0]))
            self.database.rollback()
        self._write("UPDATE digests SET used = ? WHERE path = ?", used)
        return cached

    def add(self, rows: Sequence[tuple[bytes, str, bytes]]) -> None:
        """Add (path, stamp, digest) rows, and delete those that have not been used for long."""
        if rows and not self.cleaned:
            self._write("DELETE FROM digests WHERE used < ?", [(self.today - _KEPT_DAYS,)])
            self.cleaned = True
        self._write("INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?)", [(*row, self.today) for row in rows])

    def _write(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Write all rows or none; after a failure (a read-only or full disk, a locked database) write no more."""
        if self.database is None or not self.writable or not rows:
            return
        with self._disable_on_error():
            try:
                with self.database:
                    self.database.executemany(statement, rows)
            except sqlite3.OperationalError as error:
                log.debug("%s: no more digests are cached: %s", self.path, error)
                self.writable = False

    @contextmanager
    def _disable_on_error(self) -> Iterator[None]:
        """Close the database if it fails, and delete it if it is damaged: the next command creates a new one."""
        try:
            yield
        except sqlite3.Error as error:
            log.debug("%s: digests are not cached: %s", self.path, error)
            self.close()
            # The class itself, no subclass: the file is not a database. A locked database raises OperationalError.
            if type(error) is sqlite3.DatabaseError:
                with suppress(OSError):
                    self.path.unlink()
                    self.path.with_name(self.path.name + "-journal").unlink(missing_ok=True)

    def close(self) -> None:
        """Close the database."""
        database, self.database = self.database, None
        if database is not None:
            database.close()
