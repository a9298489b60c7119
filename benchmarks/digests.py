"""What it costs to tell files apart by their whole content, the first time and when digests are remembered.

    python -m benchmarks.digests --json out.json

Ten thousand files of random bytes, about as large as JPEGs, in one folder that is deleted afterwards. `ends` is the
earlier way, for comparison: size, first 16 and last 4 kB, eight threads. `first` reads all of every file and writes the
database of digests, `second` finds all of them in it. `warm`: the files are in the system's page cache; `cold`: the
system was asked to drop them before (POSIX_FADV_DONTNEED), so they come from the disk. Ways are measured in turn, round
after round; `files_per_s` is the median over the rounds, with its quartiles.
"""

import argparse
import hashlib
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.measure import commit, seconds, write
from vit_memory.data.digests import file_digests
from vit_memory.user_cache import user_cache_folder

_SETTLED_S = 2.5  # a digest of a file that was written a moment ago is not remembered


def ends(path: str) -> bytes:
    """The earlier digest: of a file's size, first 16 and last 4 kB."""
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(16 * 1024)
        file.seek(max(16 * 1024, size - 4 * 1024))
        return hashlib.sha256(size.to_bytes(8, "little") + head + file.read(4 * 1024)).digest()[:8]


def all_ends(paths: list[str]) -> tuple[bytes, ...]:
    """Of all files, as it was done."""
    with ThreadPoolExecutor(8) as pool:
        return tuple(pool.map(ends, paths))


def forget() -> None:
    """Remove the database of digests."""
    for file in user_cache_folder().glob("digests-*"):
        file.unlink()


def drop(paths: list[str]) -> None:
    """Ask the system to drop files from its page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def make_files(folder: Path, count: int, kilobytes: int) -> list[str]:
    """Random bytes; sizes between half and one and a half times the mean."""
    chance = random.Random(0)
    paths = [str(folder / f"{i:05}.jpg") for i in range(count)]
    for path in paths:
        Path(path).write_bytes(chance.randbytes(chance.randint(kilobytes * 500, kilobytes * 1500)))
    os.sync()  # what is not on disk yet cannot be dropped
    time.sleep(_SETTLED_S)
    return paths


def measure(paths: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of every way, in every round."""

    def first() -> None:
        forget()
        file_digests(paths)

    ways: dict[str, Callable[[], object]] = {
        "ends": lambda: all_ends(paths),
        "first": first,
        "second": lambda: file_digests(paths),
    }
    taken: dict[str, list[float]] = {f"{way}-{state}": [] for state in ("warm", "cold") for way in ways}
    for way in ways.values():
        way()  # warm-up
    for _ in range(rounds):
        for state in ("warm", "cold"):
            for name, way in ways.items():
                if state == "cold":
                    drop(paths)
                taken[f"{name}-{state}"].append(seconds(way))
        first()  # reads all of them, so that the next round is warm again
    return taken


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--count", type=int, default=10_000, help="files")
    parser.add_argument("--kilobytes", type=int, default=100, help="mean size of a file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--folder", type=Path, help="where the files are made  [default: the system's temporary folder]"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        paths = make_files(Path(folder), asked.count, asked.kilobytes)
        size = sum(Path(path).stat().st_size for path in paths) / len(paths)
        taken = measure(paths, asked.rounds)
        database = sum(file.stat().st_size for file in user_cache_folder().glob("digests-*"))
    rows: list[dict[str, object]] = []
    print(f"{'case':14} {'seconds':>8} {'files/s':>9}  {'quartiles':>17}")
    for case, times in taken.items():
        rates = [len(paths) / each for each in times]
        low, middle, high = statistics.quantiles(rates, n=4) if len(rates) > 1 else (rates[0],) * 3
        print(f"{case:14} {statistics.median(times):8.3f} {middle:9.0f}  {low:8.0f}-{high:8.0f}")
        rows.append(
            {
                "case": case,
                "seconds": statistics.median(times),
                "files_per_s": middle,
                "spread": (low, high),
                "repeats": len(times),
                "commit": commit(),
            }
        )
    if asked.json:
        write(asked.json, rows, files=len(paths), file_kb=size / 1000, database_kb=database / 1000)
    else:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
