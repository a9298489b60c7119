"""Clients of a server under load, in a process of their own; `serving_load.py` starts them and reads what they print.

    python -m benchmarks.serving_clients steady --port 8000 --seconds 60      # connections that ask again at once
    python -m benchmarks.serving_clients overload --port 8000 --seconds 60    # ten times what the server can do
    python -m benchmarks.serving_clients mix --port 8000 --seconds 1800       # good, bad and vanishing clients

They share the machine with the server, so they do as little as they can: requests are made once, connections stay open.
The token comes from VIT_MEMORY_TOKEN, as the server's does.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.load import HOST, exchange, jpegs, request

PREDICT = "/v1/predict"
CAPACITY_CONNECTIONS = 32  # enough for full batches
MOST_CONNECTIONS = 600  # of an overload: the queue of the server (256), its batches, and answers on their way
FACTOR = 10  # an overload, as a multiple of the capacity
AFTER_S = 5.0  # in which the server must be itself again
REUSE_S = 3.0  # the server closes connections that are idle for 5 s
READY = "ready"  # printed when the load begins: on a busy machine, imports take seconds
LOST = "lost"  # the status of a request that got no answer
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Tally:
    """What came back."""

    statuses: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by status
    versions: Counter[tuple[str, frozenset[tuple[str, str]]]] = field(default_factory=Counter)  # with tasks' digests

    def add(self, status: str, seconds: float) -> None:
        """Count an answer."""
        self.statuses[status] += 1
        self.seconds.setdefault(status, []).append(seconds)

    def see_version(self, body: bytes) -> None:
        """Note which version an answer names, and the digests in it."""
        answer = json.loads(body)
        for image in answer["images"]:
            digests = frozenset((name, task["digest"]) for name, task in image["tasks"].items())
            self.versions[answer["version"], digests] += 1

    def percentiles(self, status: str) -> dict[str, float | None]:
        """Seconds until an answer of this status."""
        found = self.seconds.get(status)
        p50, p99, most = np.percentile(found, [50, 99, 100]).tolist() if found else (None, None, None)
        return {"p50_s": p50, "p99_s": p99, "max_s": most}


async def connect(port: int) -> Connection:
    """A new connection."""
    return await asyncio.open_connection(HOST, port)


async def steady(port: int, requests: Sequence[bytes], connections: int, seconds: float, tally: Tally) -> float:
    """Every connection asks again as soon as it is answered, after a refusal a tenth of a second later.

    Returns answers with status 200 per second.
    """
    start = time.perf_counter()
    answered = 0

    async def one(number: int) -> None:
        nonlocal answered
        connection = await connect(port)
        turn = number
        while (sent := time.perf_counter()) < start + seconds:
            try:
                status, body = await exchange(*connection, requests[turn % len(requests)])
            except (OSError, asyncio.IncompleteReadError):
                tally.add(LOST, time.perf_counter() - sent)
                connection = await connect(port)
                continue
            now = time.perf_counter()
            tally.add(str(status), now - sent)
            turn += connections
            if status == 200:
                answered += now < start + seconds
                tally.see_version(body)
            else:
                await asyncio.sleep(0.1)
        connection[1].close()

    await asyncio.gather(*(one(number) for number in range(connections)))
    return answered / seconds


class Flood:
    """Requests on a schedule, whatever comes back, over a bounded number of connections."""

    def __init__(self, port: int, requests: Sequence[bytes]) -> None:
        self.port, self.requests = port, requests
        self.tally = Tally()
        self.ended: list[float] = []  # when each answer of status 200 came
        self.late: list[float] = []  # seconds between the time that a request was due and its sending
        self.sent = self.unsent = self.open = 0
        self._idle: deque[tuple[Connection, float]] = deque()
        self._asking: set[asyncio.Task[None]] = set()

    async def run(self, rate: float, seconds: float) -> None:
        """Send for so long. A request that finds no connection is not sent, and counted."""
        start = time.perf_counter()
        for number in range(int(rate * seconds)):
            due = start + number / rate
            left = due - time.perf_counter()
            if left > 0 or number % 16 == 0:  # behind the schedule, answers must be read too
                await asyncio.sleep(max(0.0, left))
            if time.perf_counter() > start + seconds:
                self.unsent += int(rate * seconds) - number
                break
            if not self._idle and self.open >= MOST_CONNECTIONS:
                self.unsent += 1
                continue
            task = asyncio.create_task(self._one(number, due))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def finish(self) -> None:
        """Wait for all answers."""
        while self._asking:
            await asyncio.wait(self._asking)
        while self._idle:
            self._idle.pop()[0][1].close()

    async def _one(self, number: int, due: float) -> None:
        sent = time.perf_counter()
        connection = None
        try:
            connection = await self._connection()
            sent = time.perf_counter()
            self.late.append(sent - due)
            self.sent += 1
            status, _ = await exchange(*connection, self.requests[number % len(self.requests)])
        except (OSError, asyncio.IncompleteReadError):
            self.tally.add(LOST, time.perf_counter() - sent)
            self._drop(connection)
            return
        now = time.perf_counter()
        self.tally.add(str(status), now - sent)
        if status == 200:
            self.ended.append(now)
        self._idle.append((connection, now))

    async def _connection(self) -> Connection:
        while self._idle:
            connection, since = self._idle.pop()  # the one that was used last
            if time.perf_counter() - since < REUSE_S and not connection[0].at_eof():
                return connection
            self._drop(connection)
        self.open += 1
        return await connect(self.port)

    def _drop(self, connection: Connection | None) -> None:
        self.open -= 1
        if connection is not None:
            connection[1].close()


async def overload(port: int, requests: Sequence[bytes], seconds: float, capacity_s: float) -> dict[str, Any]:
    """Measure the capacity, offer ten times that, and see what the server does right after."""
    before, after = Tally(), Tally()
    capacity = await steady(port, requests, CAPACITY_CONNECTIONS, capacity_s, before)
    flood = Flood(port, requests)
    start = time.perf_counter()
    await flood.run(FACTOR * capacity, seconds)
    end = time.perf_counter()
    rest = asyncio.create_task(flood.finish())
    again = await steady(port, requests, CAPACITY_CONNECTIONS, AFTER_S, after)
    await rest
    late = np.percentile(flood.late, 99) if flood.late else 0.0
    left_over = sum(end <= moment < end + AFTER_S for moment in flood.ended) / AFTER_S
    return {
        "capacity_per_second": capacity,
        "offered_per_second": flood.sent / (end - start),
        "unsent": flood.unsent,
        "sent": flood.sent,
        "statuses": dict(flood.tally.statuses),
        "answered": flood.tally.percentiles("200"),
        "refused": flood.tally.percentiles("503"),
        "late_p99_s": float(late),
        "connections": flood.open,
        "after_per_second": again + left_over,
        "statuses_before": dict(before.statuses),
        "statuses_after": dict(after.statuses),
    }


async def mix(port: int, images: Sequence[bytes], seconds: float, connections: int, headers: dict[str, str]) -> Any:
    """Clients that predict, ask for attention, send bad input, and go away before they are answered."""
    good = [request(image, PREDICT, headers=headers) for image in images]
    explained = [request(image, f"{PREDICT}?tasks=task-0&explain=task-0", headers=headers) for image in images]
    bad = [
        request(images[0][:300], PREDICT, headers=headers),
        request(b"no image", PREDICT, headers=headers),
        request(images[0], f"{PREDICT}?tasks=nobody", headers=headers),
        request(images[0], f"{PREDICT}?top_k=many", headers=headers),
        request(b"{", PREDICT, headers={**headers, "Content-Type": "application/json"}),
        request(images[0], PREDICT, headers={**headers, "Authorization": "Bearer nobody"}),
    ]
    tallies = {"predict": Tally(), "explain": Tally(), "bad input": Tally()}
    vanished: Counter[str] = Counter()
    until = time.perf_counter() + seconds

    async def vanish(rng: random.Random) -> None:
        """Send all or half of a request, and close the connection."""
        _, writer = await connect(port)
        whole = rng.choice([*good, *explained])
        part = rng.choice(["body", "head", "answer"])
        writer.write({"body": whole[: len(whole) // 2], "head": whole[:20], "answer": whole}[part])
        await writer.drain()
        await asyncio.sleep(rng.random() / 20)
        writer.transport.abort() if rng.random() < 0.5 else writer.close()
        vanished[part] += 1

    async def one(number: int) -> None:
        rng = random.Random(number)
        connection = await connect(port)
        while time.perf_counter() < until:
            kind = rng.choices(["predict", "explain", "bad input", "vanish"], [70, 10, 10, 10])[0]
            if kind == "vanish":
                await vanish(rng)
                continue
            whole = rng.choice({"predict": good, "explain": explained, "bad input": bad}[kind])
            sent = time.perf_counter()
            try:
                status, body = await exchange(*connection, whole)
            except (OSError, asyncio.IncompleteReadError):
                tallies[kind].add(LOST, time.perf_counter() - sent)
                connection = await connect(port)
                continue
            tallies[kind].add(str(status), time.perf_counter() - sent)
            if kind == "predict" and status == 200:
                tallies[kind].see_version(body)
        connection[1].close()

    await asyncio.gather(*(one(number) for number in range(connections)))
    return {
        "statuses": {kind: dict(tally.statuses) for kind, tally in tallies.items()},
        "vanished": dict(vanished),
        "predict": tallies["predict"].percentiles("200"),
        "explain": tallies["explain"].percentiles("200"),
        "versions": versions_json(tallies["predict"]),
    }


def versions_json(tally: Tally) -> list[dict[str, Any]]:
    """Which digests answers of a version had, and how many answers."""
    return [
        {"version": version, "digests": dict(sorted(digests)), "images": count}
        for (version, digests), count in tally.versions.items()
    ]


async def run(asked: argparse.Namespace) -> dict[str, Any]:
    """One kind of load, and what it came to."""
    headers = {"Authorization": f"Bearer {os.environ['VIT_MEMORY_TOKEN']}"} if "VIT_MEMORY_TOKEN" in os.environ else {}
    images = jpegs(64)
    requests = [request(image, PREDICT, headers=headers) for image in images]
    print(READY, flush=True)
    if asked.load == "overload":
        return await overload(asked.port, requests, asked.seconds, asked.capacity_seconds)
    if asked.load == "mix":
        result: dict[str, Any] = await mix(asked.port, images, asked.seconds, asked.connections, headers)
        return result
    tally = Tally()
    rate = await steady(asked.port, requests, asked.connections, asked.seconds, tally)
    answered = {"per_second": rate, **tally.percentiles("200")}
    return {**answered, "statuses": dict(tally.statuses), "versions": versions_json(tally)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("load", choices=["steady", "overload", "mix"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument(
        "--capacity-seconds", type=float, default=10.0, help="to measure the capacity before an overload"
    )
    found = asyncio.run(run(parser.parse_args()))
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({**found, "processor_seconds": used.ru_utime + used.ru_stime}))


if __name__ == "__main__":
    main()
