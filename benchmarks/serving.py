"""What serving costs: a bare loop, the engine, the HTTP server, and LitServe, on the same images in the same run.

    pip install litserve                  # the peer; left out and named where it is missing
    python -m benchmarks.serving --json results/serving.json

16 tasks of 5 cells on the bundled backbone, and on a ViT-B/32 with random weights; JPEGs of 320 × 240 pixels, decoded
by the same process. Rounds of a few seconds each take turns, so that a drift of the machine meets all sides. Images per
second of

    bare       decode 16 images in the threads that the engine has, then model(batch), over and over
    engine     the engine, 64 images asked for at a time
    http       `vit-memory serve`, 32 connections that ask again at once
    litserve   LitServe with the plain backbone and one linear head, batches of 16, 32 connections
    litserve16 the same with sixteen passes of the plain backbone: one model per task

then seconds until an answer (50th and 99th percentile) at half of what the server can do. The load generator's share of
the processors is in each row. Two cores run everything, so over HTTP the server has less than all of them. A server is
stopped (SIGSTOP) while another side is measured: LitServe's processes poll, and two idle ones take 18 % of a core.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.load import HOST, jpegs
from benchmarks.measure import add_rows, commit
from vit_memory import Backbone, Bundle, MemoryViT, load_backbone, new_task
from vit_memory.data.decoding import decode
from vit_memory.data.loading import default_workers
from vit_memory.data.transforms import EvalTransform
from vit_memory.parallel import ChunkThreads, chunk_slices
from vit_memory.serving.engine import Engine

TASKS, BATCH, WAITING, CONNECTIONS, CLASSES = 16, 16, 64, 32, 10
BACKBONES = ("bundled", "vit-b32")
NOT_INSTALLED = "not installed"
TARGETS = {"engine": ("bare", 0.95), "http": ("engine", 0.9)}


def backbone_source(name: str, folder: Path) -> str:
    """What `load_backbone` loads: a ViT-B/32 with random weights is written to the folder first."""
    if name == "bundled":
        return name
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    torch.manual_seed(0)
    ViTModel(ViTConfig(patch_size=32), add_pooling_layer=False).save_pretrained(folder / name)
    ViTImageProcessor().save_pretrained(folder / name)
    return str(folder / name)


def litserve_version() -> str:
    """For the record, which says so where the peer was left out."""
    try:
        return version("litserve")
    except PackageNotFoundError:
        return NOT_INSTALLED


def tasks_of(backbone: Backbone) -> list[Any]:
    """Tasks with five cells."""
    labels = [str(label) for label in range(CLASSES)]
    return [new_task(backbone, f"task-{i}", labels, cells=5) for i in range(TASKS)]


class Bare:
    """A loop without a server: decode in threads, then the model in threads, as the engine does both."""

    def __init__(self, model: MemoryViT, files: list[bytes]) -> None:
        assert model.backbone.preprocessing is not None
        self.model, self.files = model, files
        self.transform = EvalTransform(model.backbone.preprocessing)
        self.pool = ChunkThreads(model.backbone.device, torch.get_num_threads())
        self.decoders = ThreadPoolExecutor(max(1, default_workers()), initializer=lambda: torch.set_num_threads(1))

    def measure(self, seconds: float) -> dict[str, Any]:
        """Images per second."""
        count, start = 0, time.perf_counter()
        with self.pool:
            while time.perf_counter() - start < seconds:
                files = [self.files[(count + i) % len(self.files)] for i in range(BATCH)]
                self.answer(torch.stack(list(self.decoders.map(self.read, files))))
                count += BATCH
        return {"per_second": count / (time.perf_counter() - start)}

    def read(self, file: bytes) -> torch.Tensor:
        """As the engine reads an image."""
        return self.transform.normalised(self.transform(decode(file, "image"))[None])[0]

    def answer(self, images: torch.Tensor) -> None:
        """One pass; every answer is taken out, as a server must."""

        def chunk(where: slice) -> list[list[float]]:
            with torch.no_grad():
                outputs = self.model(images[where])
            return [outputs[name].float().tolist() for name in outputs]

        self.pool.map(chunk, list(chunk_slices(len(images), self.pool.threads)))


def measure_engine(model: MemoryViT, files: list[bytes], seconds: float) -> dict[str, Any]:
    """Images per second of an engine that never waits for work."""

    async def run() -> float:
        async with Engine(model) as engine:
            await _settle(engine, files)
            count, start = 0, time.perf_counter()

            async def one() -> None:
                nonlocal count
                while time.perf_counter() - start < seconds:
                    await engine.predict(files[count % len(files)])
                    count += 1

            await asyncio.gather(*(one() for _ in range(WAITING)))
            return count / (time.perf_counter() - start)

    return {"per_second": asyncio.run(run())}


async def _settle(engine: Engine, files: list[bytes]) -> None:
    """Wait until what is prepared in idle moments is prepared: that is done once per version, not per image."""
    await asyncio.gather(*(engine.predict(file) for file in files[:WAITING]))
    for _ in range(600):
        if engine.stats.cost is not None:
            return
        await asyncio.sleep(0.1)


@contextlib.contextmanager
def server(
    command: list[str], port: int, ready: str, log: Path, variables: Mapping[str, str] | None = None
) -> Iterator[int]:
    """A server in a process of its own, ready to answer, with these variables in its environment; its process id."""
    own = {**os.environ, **(variables or {})}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=own)
    try:
        for _ in range(1200):
            if process.poll() is not None:
                raise RuntimeError(f"{command}: ended with {process.returncode}: {log.read_text()[-2000:]}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://{HOST}:{port}{ready}", timeout=1).close()
                break
            time.sleep(0.1)
        yield process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # LitServe's workers are in its process group
            os.killpg(process.pid, signal.SIGCONT)  # a stopped process would not notice
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def awake(pid: int) -> Iterator[None]:
    """Let the processes of a server run for as long as this takes; they are stopped before and after."""
    os.killpg(pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(pid, signal.SIGSTOP)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind((HOST, 0))
        return int(one.getsockname()[1])


def load(pid: int, port: int, seconds: float, *arguments: str) -> dict[str, Any]:
    """What a load generator in a process of its own measured on a server that is woken up for it."""
    command = [sys.executable, "-m", "benchmarks.load", "--port", str(port), "--seconds", str(seconds), *arguments]
    with awake(pid):
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(printed)
    if set(found["statuses"]) - {"200"}:
        raise RuntimeError(f"not every request was answered: {found['statuses']}")
    return found


def measure(name: str, folder: Path, rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    """A row per side: median images per second, and the ratio to its target's side within the same round."""
    source = backbone_source(name, folder)
    backbone = load_backbone(source)
    model = MemoryViT(backbone, tasks_of(backbone))
    files = jpegs(64)
    Bundle.create(folder / "bundle", backbone, list(model.tasks.values()))
    sides: dict[str, Callable[[], dict[str, Any]]] = {
        "bare": lambda: bare.measure(seconds),
        "engine": lambda: measure_engine(model, files, seconds),
    }
    bare = Bare(model, files)
    with contextlib.ExitStack() as running:

        def start(command: list[str], port: int, ready: str, log: str) -> int:
            pid = running.enter_context(server([sys.executable, "-m", *command], port, ready, folder / log))
            os.killpg(pid, signal.SIGSTOP)
            return pid

        port = free_port()
        words = ["serve", str(folder / "bundle"), "--backbone", source, "--port", str(port), "--log-level", "warning"]
        pid = start(["vit_memory", *words], port, "/v2/health/ready", "serve.log")
        connections = ("--connections", str(CONNECTIONS))
        sides["http"] = lambda: load(pid, port, seconds, *connections)
        if litserve_version() == NOT_INSTALLED:
            print("litserve is not installed: left out", file=sys.stderr)
        else:
            form = ("--path", "/predict", "--form", "image", *connections)
            for passes in (1, TASKS):
                side, own = "litserve" if passes == 1 else f"litserve{passes}", free_port()
                command = ["benchmarks.litserve_peer", source, str(own), str(passes)]
                peer = start(command, own, "/health", f"{side}.log")
                sides[side] = partial(load, peer, own, seconds, *form)
        for warm_up in sides.values():
            warm_up()  # join plans, caches, connections
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for number in range(rounds):
            order = list(sides) if number % 2 else list(reversed(sides))
            for side in order:
                found[side].append(sides[side]())
        for side, results in found.items():
            yield _row(name, side, results, found)
        half = statistics.median(result["per_second"] for result in found["http"]) / 2
        paced = [load(pid, port, 2 * seconds, "--rate", f"{half:.2f}") for _ in range(rounds)]
        yield {
            "case": f"{name}, half load",
            "per_second": half,
            "p50_s": statistics.median(one["p50_s"] for one in paced),
            "p99_s": statistics.median(one["p99_s"] for one in paced),
            "rounds": rounds,
            "commit": commit(),
        }


def _row(name: str, side: str, results: list[dict[str, Any]], found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    rates = [result["per_second"] for result in results]
    row: dict[str, Any] = {"case": f"{name}, {side}", "per_second": statistics.median(rates), "rounds": len(rates)}
    if side in TARGETS:
        other, target = TARGETS[side]
        ratios = [one / before["per_second"] for one, before in zip(rates, found[other], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        row |= {"over": other, "ratio": statistics.median(ratios), "spread": [low, high], "target": target}
    if "processor_seconds" in results[0]:
        row["load_generator_cores"] = statistics.median(r["processor_seconds"] / r["seconds"] for r in results)
    return {**row, "commit": commit()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the record; rows of other cases in it are kept")
    parser.add_argument("--backbones", nargs="+", default=list(BACKBONES), choices=BACKBONES)
    parser.add_argument("--rounds", type=int, default=6, help="two or more: their spread is part of the result")
    parser.add_argument("--seconds", type=float, default=6.0, help="of one side in one round")
    asked = parser.parse_args()
    if asked.rounds < 2:
        parser.error("--rounds is below 2; quartiles need two rounds or more")
    for name in asked.backbones:
        with tempfile.TemporaryDirectory() as folder:
            rows = []
            for row in measure(name, Path(folder), asked.rounds, asked.seconds):
                rows.append(row)
                facts = {key: value for key, value in row.items() if key not in ("case", "commit")}
                print(f"{row['case']:24}", json.dumps(facts), flush=True)
        if asked.json:
            peer = litserve_version()
            add_rows(asked.json, rows, tasks=TASKS, batch=BATCH, connections=CONNECTIONS, litserve=peer)


if __name__ == "__main__":
    main()
