"""Prometheus metrics of a server: what its engine and its routes tell, for one process or for several workers.

A server with workers sets PROMETHEUS_MULTIPROC_DIR (`share_between_workers`) before they start; each then keeps its
counters in files of that folder, and whichever worker is asked adds all of them up. Counters and histograms are exact
then, those of workers that died included. Gauges of the other workers are as of their last request or pass. Labels have
few values: routes by their patterns, tasks while they are attached, workers while they live.
"""

import json
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from vit_memory.serving.answers import Answer
from vit_memory.serving.stats import EngineStats, Observer, Refusal
from vit_memory.serving.task_set import TaskSet

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
STAGES = ("decode", "queue", "compute")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
MOST_TASKS = 1000  # with series of their own; the images of further ones are counted together
FURTHER_TASKS = "(further tasks)"  # no task can be called so
STREAMS = ("/v1/events",)  # last until the client or the server ends them


def share_between_workers(folder: Path) -> None:
    """Have the processes that this one starts keep their metrics in a new, empty folder, together."""
    folder.mkdir(parents=True)
    os.environ[FOLDER_VARIABLE] = str(folder)


class Metrics(Observer):
    """The metrics of one process; an observer of its engine."""

    def __init__(self) -> None:
        self._folder = Path(os.environ[FOLDER_VARIABLE]) if FOLDER_VARIABLE in os.environ else None
        self._registry = None if self._folder is not None else CollectorRegistry()  # workers: the folder is it
        self._stats: Callable[[], EngineStats] | None = None
        self._attached: frozenset[str] = frozenset()
        self._tasks: dict[str, Counter] = {}  # attached ones with series of their own
        self._lock = threading.Lock()
        self._workers = _Workers(self._folder)
        in_all: dict[str, Any] = {"registry": self._registry}
        live_sum: dict[str, Any] = {"multiprocess_mode": "livesum", **in_all}
        self._waiting = Gauge("vit_memory_queue_images", "Images that wait for the model.", **live_sum)
        self._running = Gauge("vit_memory_running_images", "Images admitted and not answered yet.", **live_sum)
        self._cost = Gauge(
            "vit_memory_pass_cost_ratio",
            "Seconds of a pass with all tasks, as a multiple of the plain backbone's; 0 before it is measured.",
            multiprocess_mode="livemax",
            **in_all,
        )
        self._batches = Histogram("vit_memory_batch_images", "Images per pass.", buckets=BATCHES, **in_all)
        stages = Histogram(
            "vit_memory_stage_seconds", "Seconds of an image in a stage.", ["stage"], buckets=SECONDS, **in_all
        )
        self._stages = {stage: stages.labels(stage) for stage in STAGES}
        refused = Counter("vit_memory_refused_images", "Images without an answer.", ["reason"], **in_all)
        self._refused = {reason: refused.labels(reason.replace(" ", "_")) for reason in get_args(Refusal)}
        self._task_images = Counter("vit_memory_task_images", "Images answered by a task.", ["task"], **in_all)
        self._changes = Counter("vit_memory_task_set_changes", "Changes of the task set, by worker.", **in_all)
        self._requests = Counter(
            "vit_memory_requests", "Requests by route and status.", ["route", "method", "status"], **in_all
        )
        self._request_seconds = Histogram(
            "vit_memory_request_seconds",
            "Seconds of a request.",
            ["route"],
            buckets=SECONDS,
            **in_all,
        )
        if self._registry is not None:
            self._registry.register(self._workers)

    def watch(self, task_set: TaskSet, stats: Callable[[], EngineStats]) -> None:
        """Begin with this version of the task set, and ask `stats` for queue lengths."""
        self._stats = stats
        self._show(task_set)

    # Called by the engine, on its event loop.

    def answered(self, answer: Answer) -> None:
        """Count an answered image: its stages, and each of its tasks."""
        for stage, seconds in answer.stages.items():
            self._stages[stage].observe(seconds)
        for task in answer.outputs:
            self._counter(task).inc()
        self._update_gauges()

    def refused(self, reason: Refusal) -> None:
        """Count an image without an answer."""
        self._refused[reason].inc()
        self._update_gauges()

    def computed(self, images: int, tasks: int, seconds: float) -> None:
        """Count a pass."""
        self._batches.observe(images)

    def changed(self, task_set: TaskSet) -> None:
        """Show another version; the series of tasks that are gone go too."""
        self._changes.inc()
        self._show(task_set)

    # Called by the server.

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answered request. `route` is the route's pattern, so that there are few."""
        self._requests.labels(route, method if method in METHODS else "other", str(status)).inc()
        if route not in STREAMS:
            self._request_seconds.labels(route).observe(seconds)
        self._update_gauges()

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """All metrics as text, in the format that the header Accept asks for, and its content type."""
        self._update_gauges()
        encode, content_type = choose_encoder(accept or "")
        if self._folder is None:
            assert self._registry is not None
            return encode(self._registry), content_type
        registry = CollectorRegistry()
        registry.register(self._workers)  # first: it forgets gauges of workers that died
        registry.register(_SharedMetrics(self._folder, lambda: self._attached))
        return encode(registry), content_type

    def _show(self, task_set: TaskSet) -> None:
        with self._lock:
            self._attached = frozenset(task_set.digests)
            for task in self._tasks.keys() - self._attached:
                del self._tasks[task]  # the limit is for tasks that are attached, not for all names since the start
                # The files of workers cannot forget a series. They keep about 150 bytes of each, and a task that
                # returns goes on counting, as a Prometheus counter must. `_SharedMetrics` leaves it out until then.
                if self._folder is None:
                    self._task_images.remove(task)
        self._workers.show(task_set.version, len(task_set.digests))

    def _counter(self, task: str) -> Counter:
        counter = self._tasks.get(task)
        if counter is not None:
            return counter
        with self._lock:
            # An image of an earlier version may still name a task that is gone: it makes no series again.
            if task not in self._attached or len(self._tasks) >= MOST_TASKS:
                return self._task_images.labels(FURTHER_TASKS)
            return self._tasks.setdefault(task, self._task_images.labels(task))

    def _update_gauges(self) -> None:
        if self._stats is not None:
            stats = self._stats()
            self._waiting.set(stats.waiting)
            self._running.set(stats.running)
            self._cost.set(stats.cost or 0.0)


class _Workers(Collector):
    """The processes of a server: their versions, memory and processor time, each under its process id.

    Workers leave a file each in the shared folder, so that one can tell of all. prometheus_client's own metrics of a
    process do not know workers; these have their names, and the process id as a label.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._own = {"pid": os.getpid(), "started": psutil.Process().create_time(), "version": "", "tasks": 0}

    def show(self, version: str, tasks: int) -> None:
        """Say which version this worker serves."""
        self._own |= {"version": version, "tasks": tasks}
        if self._folder is not None:
            path = self._folder / f"worker_{os.getpid()}.json"
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(self._own), encoding="utf-8")
            partial.replace(path)

    def collect(self) -> Iterator[Metric]:
        """Called by a registry."""
        info = GaugeMetricFamily("vit_memory_task_set_info", "The version served.", labels=["pid", "version"])
        tasks = GaugeMetricFamily("vit_memory_tasks", "Tasks attached.", labels=["pid"])
        memory = GaugeMetricFamily("process_resident_memory_bytes", "Memory in use.", labels=["pid"])
        processor = CounterMetricFamily("process_cpu_seconds", "Processor time.", labels=["pid"])
        threads = GaugeMetricFamily("process_threads", "Threads.", labels=["pid"])
        files = GaugeMetricFamily("process_open_fds", "Open file descriptors.", labels=["pid"])
        start = GaugeMetricFamily("process_start_time_seconds", "Start, in seconds since 1970.", labels=["pid"])
        for process, worker in self._living():
            pid = [str(process.pid)]
            try:
                with process.oneshot():
                    used, times = process.memory_info().rss, process.cpu_times()
                    thread_count, descriptors = process.num_threads(), _open_files(process)
            except psutil.Error:  # it ended just now
                continue
            info.add_metric([*pid, str(worker["version"])], 1)
            tasks.add_metric(pid, worker["tasks"])
            memory.add_metric(pid, used)
            processor.add_metric(pid, times.user + times.system)
            threads.add_metric(pid, thread_count)
            start.add_metric(pid, worker["started"])
            if descriptors is not None:
                files.add_metric(pid, descriptors)
        yield from (info, tasks, memory, processor, threads, files, start)

    def _living(self) -> Iterator[tuple[Any, Mapping[str, Any]]]:
        if self._folder is None:
            yield psutil.Process(), self._own
            return
        for path in sorted(self._folder.glob("worker_*.json")):
            with suppress(FileNotFoundError):  # another worker was asked at the same time, and removed it
                worker = json.loads(path.read_bytes())
                process = _process(worker["pid"], worker["started"])
                if process is not None:
                    yield process, worker
                    continue
                mark_process_dead(worker["pid"], str(self._folder))  # type: ignore[no-untyped-call]
                path.unlink()


def _process(pid: int, started: float) -> Any:
    """A process that lives and began then; None if it has ended, also if another one has its number now."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < 1
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


class _SharedMetrics(Collector):
    """The metrics that all workers keep in their folder, added up, without the tasks that are gone."""

    def __init__(self, folder: Path, attached: Callable[[], Iterable[str]]) -> None:
        self._folder, self._attached = folder, attached

    def collect(self) -> Iterator[Metric]:
        """Called by a registry."""
        shown = {*self._attached(), FURTHER_TASKS}
        for metric in self._read():
            metric.samples = [sample for sample in metric.samples if sample.labels.get("task", FURTHER_TASKS) in shown]
            yield metric

    def _read(self) -> Iterable[Metric]:
        attempts = 5
        while True:
            try:
                return list(MultiProcessCollector(None, str(self._folder)).collect())  # type: ignore[no-untyped-call]
            except (struct.error, OSError):  # a worker that starts or ends makes or removes a file just now
                attempts -= 1
                if not attempts:
                    raise
                time.sleep(0.01)


def _open_files(process: Any) -> int | None:
    """File descriptors; None where the system does not count them."""
    return process.num_fds() if hasattr(process, "num_fds") else None
