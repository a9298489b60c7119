"""Digests cover every byte of a file, and a cached digest is never used for another content."""

import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.odd_images import encoded
from vit_memory.data import digests
from vit_memory.data.digests import content_digest, file_digest, file_digests
from vit_memory.data.images import ImageRows
from vit_memory.data.sources import open_data


def scan(seed):
    """A scanned page, uncompressed: white margins all around, something different in the middle."""
    pixels = np.full((200, 200, 3), 255, np.uint8)
    pixels[90:110, 50:150] = np.random.default_rng(seed).integers(0, 256, (20, 100, 3), np.uint8)
    return encoded(Image.fromarray(pixels), "BMP")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The database of a user who has none yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/vit-memory/digests-1.sqlite"


@pytest.fixture
def new_files(tmp_path, cache):
    """Twenty files, just written."""
    paths = [str(tmp_path / f"{i}.bin") for i in range(20)]
    for i, path in enumerate(paths):
        Path(path).write_bytes(b"%d" % i * 1000)
    return paths


@pytest.fixture
def files(new_files, monkeypatch):
    """Twenty files that count as written long ago."""
    monkeypatch.setattr(digests, "_MIN_AGE_NS", -(10**15))
    return new_files


@pytest.fixture
def read(monkeypatch):
    """The paths of the files that are read, as a list that grows."""
    paths = []
    real = digests._hash
    monkeypatch.setattr(digests, "_hash", lambda path: paths.append(path) or real(path))
    return paths


def expected(paths):
    return tuple(content_digest(Path(path).read_bytes()) for path in paths)


def test_uncompressed_images_with_equal_margins_are_different_images(tmp_path, cache):
    for i in range(20):
        path = tmp_path / "pages" / ("odd" if i % 2 else "even") / f"{i}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(scan(i))
    data = open_data(tmp_path / "pages")
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 12, "validation": 4, "test": 4}
    assert len({digest for split in data.splits.values() for digest in split.digests}) == 20


def test_a_file_and_a_table_of_the_same_bytes_have_the_same_digest(tmp_path):
    (tmp_path / "a.bmp").write_bytes(scan(0))
    rows = ImageRows("table", [{"bytes": scan(0), "path": None}], np.arange(1))
    assert file_digest(str(tmp_path / "a.bmp")) == rows.digest(0) == file_digests([str(tmp_path / "a.bmp")])[0]


def test_files_are_read_once_and_again_when_they_change(files, read):
    assert file_digests(files) == expected(files)
    assert sorted(read) == sorted(files)
    read.clear()
    assert file_digests(files[::-1]) == expected(files[::-1])
    assert read == []
    # The same size and, by a tool that restores it, the same time of change.
    before = Path(files[3]).stat()
    content = bytearray(Path(files[3]).read_bytes())
    content[500] ^= 1
    Path(files[3]).write_bytes(content)
    os.utime(files[3], ns=(before.st_atime_ns, before.st_mtime_ns))
    Path(files[4]).write_bytes(b"longer" * 1000)
    Path(files[5]).replace(files[6])
    left = [path for path in files if path != files[5]]
    assert file_digests(left) == expected(left)
    assert set(read) == {files[3], files[4], files[6]}


def test_a_relative_path_is_cached_by_its_absolute_path(files, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/0.bin").write_bytes(b"another")
    monkeypatch.chdir(tmp_path)
    first = file_digests(["0.bin"])
    monkeypatch.chdir(tmp_path / "other")
    assert file_digests(["0.bin"]) == (content_digest(b"another"),) != first


def test_a_file_that_was_just_written_is_not_cached(new_files, read):
    os.utime(new_files[0], ns=(0, 0))  # mtime can be copied from another file, so ctime counts too
    for _ in range(2):
        assert file_digests(new_files) == expected(new_files)
    assert len(read) == 2 * len(new_files)


def test_files_that_cannot_be_read_have_digests_of_their_names(tmp_path, cache):
    (tmp_path / "folder.jpg").mkdir()
    names = ["missing.jpg", "folder.jpg", "n\0ul.jpg", "lone\ud800.jpg", "x" * 5000]
    digests = file_digests([str(tmp_path / name) for name in names])
    assert len(set(digests)) == len(names)


def lock(cache):
    file_digests([])  # makes the table
    other = sqlite3.connect(cache, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    return other


def damage(cache):
    file_digests([])
    content = bytearray(cache.read_bytes())
    content[100:] = os.urandom(len(content) - 100)
    cache.write_bytes(content)


def folder_instead(cache):
    cache.mkdir(parents=True)


def file_instead_of_folder(cache):
    cache.parent.parent.mkdir()
    cache.parent.write_bytes(b"")


def garbage(cache):
    cache.parent.mkdir(parents=True)
    cache.write_bytes(b"this is not a database" * 100)


def another_table(cache):
    cache.parent.mkdir(parents=True)
    with sqlite3.connect(cache) as other:
        other.execute("CREATE TABLE digests (something INTEGER)")
    other.close()


@pytest.mark.parametrize(
    "break_database", [lock, damage, garbage, folder_instead, file_instead_of_folder, another_table]
)
def test_a_database_that_cannot_be_used_costs_time_and_nothing_else(files, cache, monkeypatch, break_database):
    monkeypatch.setattr(digests, "_LOCK_WAIT_S", 0.05)
    connection = break_database(cache)
    assert file_digests(files) == expected(files)
    assert file_digests(files) == expected(files)
    if connection is not None:
        connection.close()


def test_without_a_home_or_sqlite_files_are_read(files, cache, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name, value in (("sqlite3", None), ("user_cache_folder", no_home)):
        with monkeypatch.context() as patch:
            patch.setattr(digests, name, value)
            assert file_digests(files) == expected(files)
    assert not cache.exists()


@pytest.mark.parametrize("break_database", [damage, garbage])
def test_a_damaged_database_is_replaced(files, cache, read, break_database):
    break_database(cache)
    for _ in range(2):  # the first deletes it, the second creates a new one
        file_digests(files)
    read.clear()
    assert file_digests(files) == expected(files)
    assert read == []


def test_a_database_that_can_only_be_read_is_read(files, cache, read, monkeypatch):
    file_digests(files)
    with sqlite3.connect(cache) as other:
        other.execute("UPDATE digests SET used = used - 30")  # so that this use would be written
    other.close()
    read.clear()
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda path, **options: connect(f"file:{path}?mode=ro", uri=True, **options)
    )
    monkeypatch.setattr(digests, "_BATCH", 7)
    assert file_digests(files) == expected(files)
    assert read == []


def test_entries_not_used_for_long_are_deleted_and_used_ones_stay(files, cache):
    def cached_paths():
        with sqlite3.connect(cache) as other:
            paths = {os.fsdecode(path) for (path,) in other.execute("SELECT path FROM digests")}
        other.close()
        return paths

    def age(days):
        with sqlite3.connect(cache) as other:
            other.execute("UPDATE digests SET used = used - ?", (days,))
        other.close()

    file_digests(files[:10])
    age(60)
    file_digests(files[:5])
    age(60)
    file_digests(files[10:])
    assert cached_paths() == {*files[:5], *files[10:]}


def test_concurrent_commands_get_the_same_digests(files, read):
    with ThreadPoolExecutor(8) as pool:  # each with a connection of its own, as processes have
        results = list(pool.map(lambda _: file_digests(files), range(24)))
    assert set(results) == {expected(files)}
    read.clear()
    assert file_digests(files) == expected(files)
    assert read == []
