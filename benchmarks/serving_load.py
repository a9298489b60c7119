"""A server under load, as users start it: while its tasks change, with ten times what it can do, and for half an hour.

    python -m benchmarks.serving_load --json results/serving_load.json                # all three cases, 40 minutes
    python -m benchmarks.serving_load --hot --json results/serving_load.json          # 8 clients, 200 changes of tasks
    python -m benchmarks.serving_load --overload --json results/serving_load.json     # 10 × its capacity
    python -m benchmarks.serving_load --soak --minutes 30 --json results/serving_load.json

`vit-memory serve BUNDLE` with its defaults in a process of its own, tokens in its environment; 16 tasks of 5 cells on
the bundled backbone, JPEGs of 320 × 240 pixels. The clients are another process on the same machine
(`serving_clients.py`); its share of the processors is in each row. Changes are PUTs and DELETEs over HTTP with the
admin token.

    hot        a minute without changes, a minute with 200 of them, a minute without. `p99_ratio` is during ÷ before.
               `mixed` counts answers whose digests are not those of the version that they name.
    overload   requests on a schedule, whatever comes back. `after_ratio` is answers per second in the 5 s after the end
               ÷ those before. `unsent` are requests that found no free connection of 600, or no time.
    soak       predictions, explanations, bad input, clients that vanish, and changes. Medians of the first and of the
               last 5 minutes.
"""

import argparse
import contextlib
import http.client
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.load import HOST
from benchmarks.measure import add_rows, commit
from benchmarks.serving import TASKS, free_port, server, tasks_of
from benchmarks.serving_clients import READY
from vit_memory import Backbone, Bundle, load_backbone, new_task
from vit_memory.files.taskfile import task_bytes

ROOT = Path(__file__).parents[1]
CLIENTS, CHANGES = 8, 200
EXTRA = 4  # tasks that come and go, each with two contents
TARGETS = {"p99_ratio": 1.5}
Digests = dict[str, str]
Row = dict[str, Any]


@dataclass
class Served:
    """A running server, and how to ask it."""

    pid: int
    port: int
    token: str
    admin: str
    log: Path
    files: list[tuple[str, bytes]]  # task files that come and go
    versions: dict[str, Digests] = field(default_factory=dict)  # what every version since the start holds
    added: list[str] = field(default_factory=list)  # tasks that changes have added and not removed yet
    changes: int = 0

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        """A request with the admin token: its status, and the JSON of its answer."""
        with contextlib.closing(http.client.HTTPConnection(HOST, self.port, timeout=120)) as connection:
            connection.request(method, path, body, {"Authorization": f"Bearer {self.admin}"})
            response = connection.getresponse()
            content = response.read()
        return response.status, json.loads(content) if content else None

    def note_version(self) -> str:
        """Ask which version is served, and remember its digests."""
        status, answer = self.ask("GET", "/v1/tasks")
        if status != 200:
            raise RuntimeError(f"the server does not list its tasks: {answer}")
        self.versions[answer["version"]] = {task["name"]: task["digest"] for task in answer["tasks"]}
        return str(answer["version"])

    def change(self) -> float:
        """Add a task, or remove the older of two that were added, in turn; the seconds that it took.

        Each version stays until the next change, so that clients see it however slow the machine is.
        """
        if len(self.added) < 2:
            name, content = self.files[(self.changes + 1) // 2 % len(self.files)]
            self.added.append(name)
            method, body, expected = "PUT", content, 201
        else:
            name = self.added.pop(0)
            method, body, expected = "DELETE", None, 204
        self.changes += 1
        start = time.perf_counter()
        status, answer = self.ask(method, f"/v1/tasks/{name}", body)
        took = time.perf_counter() - start
        if status != expected:
            raise RuntimeError(f"{method} {name}: {status} {answer}")
        self.note_version()
        return took

    @contextlib.contextmanager
    def load(self, kind: str, seconds: float, *arguments: str) -> Iterator[list[Row]]:
        """Clients in a process of their own, from the start of the block; at its end the list holds what they found."""
        words = ["benchmarks.serving_clients", kind, "--port", str(self.port), "--seconds", str(seconds), *arguments]
        own = {**os.environ, "VIT_MEMORY_TOKEN": self.token}
        results: list[Row] = []
        command = [sys.executable, "-m", *words]
        clients = subprocess.Popen(command, stdout=subprocess.PIPE, env=own, text=True, cwd=ROOT)
        try:
            assert clients.stdout is not None
            if clients.stdout.readline().strip() != READY:
                raise RuntimeError(f"{words}: did not start")
            yield results
            output, _ = clients.communicate()
        finally:
            clients.kill()
            clients.wait()
        if clients.returncode:
            raise RuntimeError(f"{words}: ended with {clients.returncode}")
        results.append(json.loads(output))

    def mixed_answers(self, seen: Sequence[Row]) -> int:
        """Answers whose digests are not exactly those of the version that they name."""
        return sum(one["images"] for one in seen if self.versions.get(one["version"]) != one["digests"])


@contextlib.contextmanager
def serving(*options: str) -> Iterator[Served]:
    """A server of 16 tasks on the bundled backbone, with its defaults but for these options."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        backbone = load_backbone("bundled")
        Bundle.create(folder / "bundle", backbone, tasks_of(backbone))
        port, token, admin = free_port(), secrets.token_hex(16), secrets.token_hex(16)
        command = [sys.executable, "-m", "vit_memory", "serve", str(folder / "bundle"), "--port", str(port), *options]
        tokens = {"VIT_MEMORY_TOKEN": token, "VIT_MEMORY_ADMIN_TOKEN": admin}
        log = folder / "serve.log"
        with server(command, port, "/v2/health/ready", log, tokens) as pid:
            served = Served(pid, port, token, admin, log, list(changing_files(backbone)))
            served.note_version()
            with served.load("steady", 5.0):
                pass  # join plans, caches
            yield served


def changing_files(backbone: Backbone) -> Iterator[tuple[str, bytes]]:
    """Names and files of the tasks that come and go: a name returns with another content."""
    for shift in (0.0, 0.01):
        for number in range(EXTRA):
            extra = new_task(backbone, f"extra-{number}", ["yes", "no"], cells=5)
            yield extra.name, task_bytes(extra.map(lambda tensor, shift=shift: tensor + shift))  # type: ignore[misc]


@dataclass(frozen=True)
class Sample:
    """What a process holds at a moment."""

    seconds: float  # since the first sample
    rss_mb: float
    thread_count: int
    files: int  # open file descriptors, connections included


class Sampler:
    """Samples of a process in a thread, while used as a context, and one more at each end."""

    def __init__(self, pid: int, every_s: float) -> None:
        self._process, self._every_s = psutil.Process(pid), every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.samples: list[Sample] = []

    def __enter__(self) -> "Sampler":
        self._start = time.perf_counter()
        self._take()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._take()

    def of(self, what: str) -> list[float]:
        """One value of all samples."""
        return [getattr(sample, what) for sample in self.samples]

    def ends(self, what: str) -> dict[str, float]:
        """The first value, the largest and the last."""
        values = self.of(what)
        return {"start": values[0], "max": max(values), "end": values[-1]}

    def medians(self, what: str, window_s: float) -> dict[str, float]:
        """Medians over a time at the start and at the end, and the largest value."""
        last = self.samples[-1].seconds
        values = self.of(what)
        first = [value for value, sample in zip(values, self.samples, strict=True) if sample.seconds <= window_s]
        final = [value for value, sample in zip(values, self.samples, strict=True) if sample.seconds >= last - window_s]
        return {"first": statistics.median(first), "last": statistics.median(final), "max": max(values)}

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._take()

    def _take(self) -> None:
        process = self._process
        with process.oneshot():
            rss_mb = process.memory_info().rss / 1e6
            now = time.perf_counter() - self._start
            self.samples.append(Sample(now, rss_mb, process.num_threads(), process.num_fds()))


HELD = ("rss_mb", "thread_count", "files")


def not_answered(statuses: dict[str, int], *allowed: str) -> int:
    """Requests that got another status, or no answer."""
    return sum(count for status, count in statuses.items() if status not in allowed)


def hot(served: Served, seconds: float, changes: int) -> Row:
    """Clients that never stop, and tasks that come and go for a third of the time."""
    found: dict[str, Row] = {}
    took: list[float] = []
    with Sampler(served.pid, 1.0) as sampler:
        for phase in ("before", "during", "after"):
            with served.load("steady", seconds, "--connections", str(CLIENTS)) as results:
                start = time.perf_counter()
                for number in range(changes if phase == "during" else 0):
                    time.sleep(max(0.0, start + seconds * number / changes - time.perf_counter()))
                    took.append(served.change())
            found[phase] = results[0]
    seen = [one for phase in found.values() for one in phase["versions"]]
    times = ("per_second", "p50_s", "p99_s", "max_s")
    return {
        "case": "hot change",
        "seconds": seconds,
        "clients": CLIENTS,
        "changes": len(took),
        "change_p50_s": statistics.median(took),
        "change_max_s": max(took),
        "requests": sum(sum(phase["statuses"].values()) for phase in found.values()),
        "failed": sum(not_answered(phase["statuses"], "200") for phase in found.values()),
        "versions": len({one["version"] for one in seen}),
        "mixed": served.mixed_answers(seen),
        **{phase: {name: result[name] for name in times} for phase, result in found.items()},
        "p99_ratio": found["during"]["p99_s"] / found["before"]["p99_s"],
        "p99_ratio_after": found["after"]["p99_s"] / found["before"]["p99_s"],
        "target": TARGETS["p99_ratio"],
        **{what: sampler.ends(what) for what in HELD},
        "client_cores": sum(phase["processor_seconds"] for phase in found.values()) / (3 * seconds),
    }


def overload(served: Served, seconds: float) -> Row:
    """Ten times what the server can do: what it admits is answered, the rest is refused at once."""
    capacity_s = min(10.0, seconds)
    with (
        Sampler(served.pid, 0.5) as sampler,
        served.load("overload", seconds, "--capacity-seconds", str(capacity_s)) as results,
    ):
        pass
    (found,) = results
    statuses = found["statuses"]
    return {
        "case": "overload",
        "seconds": seconds,
        **found,
        "failed": not_answered(statuses, "200", "503"),
        "offered_ratio": found["offered_per_second"] / found["capacity_per_second"],
        "after_ratio": found["after_per_second"] / found["capacity_per_second"],
        **{what: sampler.ends(what) for what in HELD},
        "client_cores": found["processor_seconds"] / sampler.samples[-1].seconds,
    }


def soak(served: Served, minutes: float, change_every_s: float = 2.0) -> Row:
    """Every kind of request for a long time: nothing may grow."""
    seconds, sample_s = 60 * minutes, 10.0 if minutes >= 10 else 1.0
    window_s = min(300.0, seconds / 3)
    changes = 0
    with Sampler(served.pid, sample_s) as sampler, served.load("mix", seconds) as results:
        start = time.perf_counter()
        while (due := start + changes * change_every_s) < start + seconds:
            time.sleep(max(0.0, due - time.perf_counter()))
            served.change()
            changes += 1
    (found,) = results
    statuses = found["statuses"]
    failed = sum(not_answered(statuses[kind], "200") for kind in ("predict", "explain"))
    return {
        "case": "soak",
        "minutes": minutes,
        "changes": changes,
        "statuses": statuses,
        "vanished": found["vanished"],
        "failed": failed + not_answered(statuses["bad input"], "400", "401", "404", "422"),
        "mixed": served.mixed_answers(found["versions"]),
        "predict": found["predict"],
        "explain": found["explain"],
        "window_s": window_s,
        **{what: sampler.medians(what, window_s) for what in HELD},
        "client_cores": found["processor_seconds"] / seconds,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for case in ("hot", "overload", "soak"):
        parser.add_argument(f"--{case}", action="store_true", help="this case; without any, all of them")
    parser.add_argument("--json", type=Path, help="the record; rows of other cases in it are kept")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each third of hot, and of the overload")
    parser.add_argument("--changes", type=int, default=CHANGES)
    parser.add_argument("--minutes", type=float, default=30.0, help="of the soak")
    asked = parser.parse_args()
    cases = {
        "hot": lambda served: hot(served, asked.seconds, asked.changes),
        "overload": lambda served: overload(served, asked.seconds),
        "soak": lambda served: soak(served, asked.minutes),
    }
    chosen = [case for case in cases if getattr(asked, case)] or list(cases)
    for case in chosen:
        with serving() as served:
            row = {**cases[case](served), "commit": commit()}
        print(json.dumps(row, indent=2), flush=True)
        if asked.json:
            add_rows(asked.json, [row], tasks=TASKS)


if __name__ == "__main__":
    main()
