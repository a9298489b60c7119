"""Prometheus metrics of a server: right counts, few series, and the sum of all workers."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from vit_memory import Bundle, load_backbone
from vit_memory.serving.answers import Answer, OriginalAnswer
from vit_memory.serving.metrics import FOLDER_VARIABLE, FURTHER_TASKS, MOST_TASKS, Metrics, share_between_workers
from vit_memory.serving.stats import EngineStats


def task_set(*names):
    """A version of the task set, without a model: metrics read its name and its tasks only."""
    return SimpleNamespace(version=" ".join(names), digests=dict.fromkeys(names, "…"))


def answer(*tasks, decode=0.004, queue=0.02, compute=0.3):
    """An answer as the engine gives it; metrics read its stages and its tasks only."""
    original = OriginalAnswer(torch.zeros(1), None, None)
    stages = {"decode": decode, "queue": queue, "compute": compute}
    return Answer("v", dict.fromkeys(tasks, torch.zeros(1)), {}, {}, original, 1, stages)


def samples(metrics):
    """Everything that is exposed, as {(name, *label values): value}; values in the order of their labels' names."""
    text, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    families = text_string_to_metric_families(text.decode())
    return {(s.name, *(v for k, v in s.labels.items() if k != "pid")): s.value for f in families for s in f.samples}


def series(metrics, name):
    return {key[1:]: value for key, value in samples(metrics).items() if key[0] == name}


@pytest.fixture
def metrics():
    metrics = Metrics()
    metrics.watch(task_set("pets", "birds"), lambda: replace(NO_STATS, waiting=7, running=9, cost=1.25))
    return metrics


NO_STATS = EngineStats(
    version="",
    waiting=0,
    running=0,
    admitted=0,
    answered=0,
    refused={},
    passes=0,
    images=0,
    compute_seconds=0.0,
    last_batch=0,
    largest_batch=0,
    changes=0,
    cost=None,
    uptime=0.0,
)


def test_images_are_counted_by_stage_task_and_batch(metrics):
    for _ in range(3):
        metrics.answered(answer("pets", "birds"))
    metrics.answered(answer("pets"))
    metrics.computed(3, 2, 0.3)
    metrics.computed(1, 1, 0.1)
    metrics.refused("queue full")
    shown = samples(metrics)
    assert shown["vit_memory_task_images_total", "pets"] == 4
    assert shown["vit_memory_task_images_total", "birds"] == 3
    assert shown["vit_memory_stage_seconds_sum", "compute"] == pytest.approx(1.2)
    assert shown["vit_memory_stage_seconds_count", "queue"] == 4
    assert shown["vit_memory_stage_seconds_bucket", "0.005", "decode"] == 4
    assert shown["vit_memory_stage_seconds_bucket", "0.0025", "decode"] == 0
    assert shown["vit_memory_batch_images_bucket", "2.0"] == 1
    assert shown["vit_memory_batch_images_sum",] == 4
    assert shown["vit_memory_refused_images_total", "queue_full"] == 1
    assert shown["vit_memory_queue_images",] == 7
    assert shown["vit_memory_running_images",] == 9
    assert shown["vit_memory_pass_cost_ratio",] == 1.25


def test_the_version_and_the_memory_of_the_process_are_shown(metrics):
    new = task_set("pets")
    metrics.changed(new)
    assert series(metrics, "vit_memory_task_set_info") == {(new.version,): 1}
    assert series(metrics, "vit_memory_tasks") == {(): 1}
    assert series(metrics, "process_resident_memory_bytes")[()] > 10e6
    assert series(metrics, "process_threads")[()] >= 1


def test_the_series_of_a_removed_task_go_away_and_do_not_come_back_with_late_answers(metrics):
    metrics.answered(answer("pets", "birds"))
    metrics.changed(task_set("birds"))
    assert series(metrics, "vit_memory_task_images_total") == {("birds",): 1}
    metrics.answered(answer("pets", "birds"))  # admitted before the change
    assert series(metrics, "vit_memory_task_images_total") == {("birds",): 2, (FURTHER_TASKS,): 1}


def test_two_hundred_changes_leave_as_many_series_as_there_were(metrics):
    metrics.answered(answer("pets", "birds"))
    before = len(samples(metrics))
    more, fewer = task_set("pets", "birds", "third"), task_set("pets", "birds")
    for _ in range(100):
        metrics.changed(more)
        metrics.answered(answer("third"))
        metrics.changed(fewer)
    assert len(samples(metrics)) == before


def test_requests_are_counted_by_route_and_status_and_strange_methods_together(metrics):
    for status in (200, 200, 503):
        metrics.request("POST", "/v1/predict", status, 0.02)
    for i in range(50):
        metrics.request(f"STRANGE{i}", "unknown", 404, 0.001)
    metrics.request("GET", "/v1/events", 200, 600.0)
    assert series(metrics, "vit_memory_requests_total") == {
        ("POST", "/v1/predict", "200"): 2,
        ("POST", "/v1/predict", "503"): 1,
        ("other", "unknown", "404"): 50,
        ("GET", "/v1/events", "200"): 1,
    }
    assert set(series(metrics, "vit_memory_request_seconds_count")) == {("/v1/predict",), ("unknown",)}


WORKER = """
import sys
sys.path.insert(0, {tests!r})
from serving.test_server_metrics import *
metrics = Metrics()
queue = 0
metrics.watch(task_set("pets", "birds"), lambda: replace(NO_STATS, waiting=queue))
for line in sys.stdin:
    exec(line)
    print(json.dumps([[list(key), value] for key, value in samples(metrics).items()]), flush=True)
"""


class Worker:
    """A process with metrics of its own, that runs lines of code and tells what a scrape of it gives."""

    def __init__(self, folder):
        code = WORKER.format(tests=os.path.dirname(os.path.dirname(__file__)))  # noqa: PTH120
        environment = {**os.environ, FOLDER_VARIABLE: str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return {tuple(key): value for key, value in json.loads(self.process.stdout.readline())}

    def kill(self):
        self.process.kill()
        self.process.communicate()


def test_workers_add_up_whichever_is_asked_and_the_dead_keep_their_counts_but_not_their_queues(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, "")  # restored afterwards
    share_between_workers(tmp_path / "metrics")
    monkeypatch.undo()
    workers = [Worker(tmp_path / "metrics") for _ in range(2)]
    try:
        workers[0].run("metrics.answered(answer('pets', 'birds')); metrics.request('GET', '/v2', 200, 0.1)")
        workers[0].run("queue = 5; metrics.request('GET', '/v2', 200, 0.1)")
        shown = workers[1].run("queue = 2; metrics.answered(answer('pets'))")
        assert shown["vit_memory_task_images_total", "pets"] == 2
        assert shown["vit_memory_task_images_total", "birds"] == 1
        assert shown["vit_memory_stage_seconds_count", "compute"] == 2
        assert shown["vit_memory_requests_total", "GET", "/v2", "200"] == 2
        assert shown["vit_memory_queue_images",] == 7
        version = task_set("pets", "birds").version
        assert shown["vit_memory_task_set_info", version] == 1

        shown = workers[1].run("metrics.changed(task_set('pets'))")
        assert ("vit_memory_task_images_total", "birds") not in shown
        assert {key[1] for key in shown if key[0] == "vit_memory_task_set_info"} == {
            version,  # of the worker that did not follow yet
            task_set("pets").version,
        }

        workers[0].process.kill()
        os.waitid(os.P_PID, workers[0].process.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the table
        shown = workers[1].run("queue = 3")
        assert shown["vit_memory_task_images_total", "pets"] == 2
        assert shown["vit_memory_queue_images",] == 3
        assert {key[1] for key in shown if key[0] == "vit_memory_task_set_info"} == {task_set("pets").version}
        assert not list((tmp_path / "metrics").glob(f"*{workers[0].process.pid}.json"))
    finally:
        for worker in workers:
            worker.kill()


def test_a_worker_shows_a_new_task_after_as_many_names_as_may_have_series(tmp_path):
    share = tmp_path / "metrics"
    share.mkdir()
    worker = Worker(share)
    try:
        one = "metrics.changed(task_set(f't{i}')); metrics.answered(answer(f't{i}'))"
        worker.run(f"for i in range({MOST_TASKS}): {one}")
        shown = worker.run("metrics.changed(task_set('new')); metrics.answered(answer('new'))")
        assert {key[1]: value for key, value in shown.items() if key[0] == "vit_memory_task_images_total"} == {"new": 1}
        shown = worker.run("metrics.changed(task_set('t7')); metrics.answered(answer('t7'))")
        assert shown["vit_memory_task_images_total", "t7"] == 2, "a counter does not go back"
    finally:
        worker.kill()


@pytest.mark.slow
def test_a_server_with_workers_counts_every_request_and_unloads_in_all_of_them(tmp_path):
    from engine_builders import jpeg

    from builders import trained  # here, because the small workers above do not need it

    bundled = load_backbone("bundled")
    Bundle.create(tmp_path / "zoo", bundled, [trained(bundled, name, cells=1) for name in ("pets", "birds")])
    command = [sys.executable, "-m", "vit_memory", "serve", str(tmp_path / "zoo")]
    options = ["--port", "0", "--workers", "2", "--threads", "1", "--log-format", "json"]
    server = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    try:
        url = next(line["url"] for line in map(json.loads, server.stderr) if "url" in line)
        drain = threading.Thread(target=server.stderr.read)
        drain.start()

        def shown():
            """A scrape over a connection of its own, so that any worker may answer."""
            families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=60).text)
            return [sample for family in families for sample in family.samples]

        def until(condition):
            end = time.monotonic() + 120
            while not condition():
                assert time.monotonic() < end
                time.sleep(0.05)

        def answers():
            with suppress(httpx.ConnectError):  # bound, and not listening before the first worker is ready
                return httpx.get(f"{url}/v2/health/ready").is_success

        def workers():
            return {s.labels["pid"]: s.labels["version"] for s in shown() if s.name == "vit_memory_task_set_info"}

        def images(task):
            return sum(s.value for s in shown() if s.name.endswith("task_images_total") and s.labels["task"] == task)

        until(answers)
        until(lambda: len(workers()) == 2)
        image = {"content": jpeg(), "headers": {"Content-Type": "image/jpeg"}, "timeout": 60}
        for _ in range(12):
            httpx.post(f"{url}/v1/predict", **image).raise_for_status()
        assert [images("pets") for _ in range(6)] == [12] * 6
        assert images("birds") == 12

        httpx.post(f"{url}/v2/repository/models/birds/unload", timeout=60).raise_for_status()
        before = workers()
        until(lambda: len(set(workers().values())) == 1 and images("birds") == 0)
        assert workers().keys() == before.keys()
        assert [httpx.get(f"{url}/v2/models/birds/ready", timeout=60).status_code for _ in range(12)] == [404] * 12
        assert images("pets") == 12

        victim = int(next(iter(workers())))
        os.kill(victim, signal.SIGKILL)
        until(lambda: str(victim) not in workers() and len(workers()) == 2)
        assert images("pets") == 12  # what it counted is not lost
    finally:
        server.terminate()
        assert server.wait(60) == 0
        drain.join()
        server.stderr.close()
