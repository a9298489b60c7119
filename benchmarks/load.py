"""A load generator that costs little: requests made once, sent over connections that stay open, answers barely read.

    python -m benchmarks.load --port 8000 --seconds 10 --connections 32              # as fast as the server answers
    python -m benchmarks.load --port 8000 --seconds 10 --rate 40                     # 40 requests per second
    python -m benchmarks.load --port 8000 --seconds 10 --form image --path /predict  # the image as a field of a form

It runs in a process of its own on the machine of the server, so what it costs is taken from the server; its processor
time is part of what it prints. Only servers on this machine are asked.
"""

import argparse
import asyncio
import io
import json
import random
import resource
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

HOST, BOUNDARY = "127.0.0.1", "a-boundary-that-no-image-holds"
_NO_HEADERS: Mapping[str, str] = {}


def jpegs(count: int, size: tuple[int, int] = (320, 240), seed: int = 0) -> list[bytes]:
    """Images of soft blots, compressed as photographs are."""
    rng = np.random.default_rng(seed)
    files = []
    for _ in range(count):
        blots = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
        file = io.BytesIO()
        blots.resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def request(image: bytes, path: str, form: str | None = None, headers: Mapping[str, str] = _NO_HEADERS) -> bytes:
    """A whole HTTP request."""
    body, content_type = image, "image/jpeg"
    if form is not None:
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{form}"; filename="image.jpg"\r\n\r\n'
        body, content_type = head.encode() + image + f"\r\n--{BOUNDARY}--\r\n".encode(), "multipart/form-data"
        content_type += f"; boundary={BOUNDARY}"
    all_headers = {"Host": HOST, "Content-Type": content_type, "Content-Length": str(len(body)), **headers}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in all_headers.items())]
    return "\r\n".join([*lines, "\r\n"]).encode() + body


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, whole: bytes) -> tuple[int, bytes]:
    """Send a whole request; the status and the body of the answer."""
    writer.write(whole)
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return int(head[9:12]), await reader.readexactly(int(length[15:]))


class Load:
    """Connections to a server, and what came back."""

    def __init__(self, port: int, requests: Sequence[bytes]) -> None:
        self.port, self.requests = port, requests
        self.statuses: Counter[int] = Counter()
        self.seconds: list[float] = []  # of answers with status 200

    async def saturate(self, connections: int, until: float) -> None:
        """Every connection asks again as soon as it is answered."""

        async def one(number: int) -> None:
            reader, writer = await asyncio.open_connection(HOST, self.port)
            turn = number
            while time.perf_counter() < until:
                await self._ask(reader, writer, turn)
                turn += connections
            writer.close()

        await asyncio.gather(*(one(number) for number in range(connections)))

    async def pace(self, rate: float, until: float, seed: int = 0) -> None:
        """Requests at random times, whatever the server does; a connection that is idle takes the next one."""
        rng = random.Random(seed)
        idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        asking: set[asyncio.Task[None]] = set()

        async def one(turn: int, due: float) -> None:
            connection = idle.pop() if idle else await asyncio.open_connection(HOST, self.port)
            await self._ask(*connection, turn, due)
            idle.append(connection)

        due, turn = time.perf_counter(), 0
        while due < until:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            task = asyncio.create_task(one(turn, due))
            asking.add(task)
            task.add_done_callback(asking.discard)
            due, turn = due + rng.expovariate(rate), turn + 1
        await asyncio.gather(*asking)
        for _, writer in idle:
            writer.close()

    async def _ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, turn: int, due: float | None = None
    ) -> None:
        """`due` is when the request should have been sent: waiting for that is part of the time that it takes."""
        start = time.perf_counter() if due is None else due
        status, _ = await exchange(reader, writer, self.requests[turn % len(self.requests)])
        self.statuses[status] += 1
        if status == 200:
            self.seconds.append(time.perf_counter() - start)


async def run(asked: argparse.Namespace) -> dict[str, Any]:
    """The load, and what it came to."""
    load = Load(asked.port, [request(image, asked.path, asked.form) for image in jpegs(asked.images)])
    start = time.perf_counter()
    until = start + asked.seconds
    if asked.rate is None:
        await load.saturate(asked.connections, until)
    else:
        await load.pace(asked.rate, until)
    took = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_SELF)
    percentiles = np.percentile(load.seconds, [50, 99]).tolist() if load.seconds else [None, None]
    return {
        "per_second": len(load.seconds) / took,
        "p50_s": percentiles[0],
        "p99_s": percentiles[1],
        "statuses": {str(status): count for status, count in sorted(load.statuses.items())},
        "seconds": took,
        "processor_seconds": used.ru_utime + used.ru_stime,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", default="/v1/predict")
    parser.add_argument("--form", help="send the image as this field of a form")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--rate", type=float, help="requests per second, at random times")
    parser.add_argument("--images", type=int, default=64, help="different images")
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
