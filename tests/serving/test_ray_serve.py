"""The server on Ray Serve, two replicas on this machine: they change together, and one that dies is not missed."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from engine_builders import jpeg
from http_builders import ADMIN, TOKEN, bearer

from builders import trained
from ray_builders import START_S, alive, needs_ray, ray_environment, started
from vit_memory import Bundle, Client, load_backbone, save_task
from vit_memory.errors import RequestFailed, ServingError
from vit_memory.files.taskfile import task_bytes

pytestmark = [pytest.mark.slow, needs_ray]
DOCS = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def backbone():
    return load_backbone("bundled")


@pytest.fixture(scope="module")
def server(tmp_path_factory, backbone):
    """The command, with two replicas and tokens from the environment. The tests below use it in their order."""
    root = tmp_path_factory.mktemp("ray")
    Bundle.create(root / "zoo", backbone, [trained(backbone, "one"), trained(backbone, "two")])
    words = ("serve", root / "zoo", "--ray", "--replicas", 2, "--port", 0, "--log-format", "json")
    with started(root / "log", *words, VIT_MEMORY_TOKEN=TOKEN, VIT_MEMORY_ADMIN_TOKEN=ADMIN) as running:
        running.wait(lambda: any(event["event"] == "listening" for event in running.events()))
        running.url = next(event["url"] for event in running.events() if event["event"] == "listening")
        yield running


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def statuses(url, count=2, seconds=START_S, unlike=()):
    """What `count` replicas say of themselves, by process id; a request meets any of them."""
    end, found = time.monotonic() + seconds, {}
    while len(found) < count:
        assert time.monotonic() < end, found
        answer = httpx.get(f"{url}/v1/status", headers=bearer(TOKEN), timeout=60)
        if answer.status_code == 200 and answer.json()["pid"] not in unlike:
            found[answer.json()["pid"]] = answer.json()
    return found


def versions(url):
    return {status["version"] for status in statuses(url).values()}


def test_two_replicas_answer_and_a_token_is_needed(server):
    assert len(statuses(server.url)) == 2
    assert httpx.get(f"{server.url}/v1/tasks", timeout=60).status_code == 401
    with Client(server.url, TOKEN) as client:
        answer = client.predict(jpeg())[0]
        assert set(answer.tasks) == {"one", "two"}
        with pytest.raises(RequestFailed, match="403"):
            client.remove("two")


def test_a_change_over_http_reaches_all_replicas_in_place(server, backbone):
    before = set(statuses(server.url))
    content = task_bytes(trained(backbone, "late"))
    answer = httpx.put(f"{server.url}/v1/tasks/late", content=content, headers=bearer(ADMIN), timeout=60)
    assert answer.status_code == 201, answer.text
    end = time.monotonic() + 60
    while versions(server.url) != {answer.json()["version"]}:
        assert time.monotonic() < end
    assert set(statuses(server.url)) == before
    unloading = httpx.post(f"{server.url}/v2/repository/models/late/unload", headers=bearer(ADMIN), timeout=60)
    assert unloading.status_code == 403


class Counting(httpx.HTTPTransport):
    """Counts what a client without retries would have lost."""

    lost = 0

    def handle_request(self, request):
        try:
            response = super().handle_request(request)
        except httpx.TransportError:
            Counting.lost += 1
            raise
        Counting.lost += response.status_code != 200
        return response


@contextmanager
def load(url, clients):
    """Clients that predict all the time; their answers and errors."""
    answers, errors, stop = [], [], threading.Event()

    def ask():
        with Client(url, TOKEN, retries=30, transport=Counting()) as client:
            while not stop.is_set():
                try:
                    answers.append(round(client.predict(jpeg(), ["one"])[0]["one"].confidence, 4))
                except RequestFailed as error:
                    errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield answers, errors
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_replica_killed_under_load_costs_its_own_requests_only_and_comes_back(server):
    before = set(statuses(server.url))
    victim = min(before)
    with load(server.url, clients=4) as (answers, errors):
        server.wait(lambda: len(answers) > 20, 120)
        os.kill(victim, signal.SIGKILL)
        at_kill = len(answers)
        after = set(statuses(server.url, unlike={victim}))
        server.wait(lambda: len(answers) > at_kill + 20, 120)
    assert errors == []
    assert len(set(answers)) == 1
    assert len(after & before) == 1, "the other replica lived on"
    assert Counting.lost <= 8, f"{Counting.lost} attempts of 4 clients, each with one request at a time"


def test_sigterm_answers_what_was_asked_and_leaves_no_process_and_no_token(server):
    family = server.family()
    files = [("images", (f"{i}.jpg", jpeg(i), "image/jpeg")) for i in range(64)]
    answers, stopping = [], threading.Event()

    def ask():
        while not stopping.is_set():
            answers.append(httpx.post(f"{server.url}/v1/predict", files=files, headers=bearer(TOKEN), timeout=120))

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    server.wait(lambda: len(answers) >= 4, 120)
    stopping.set()  # each client has at most one request left, and that one is on its way
    time.sleep(0.05)
    assert any(client.is_alive() for client in clients)
    status = server.stop()
    for client in clients:
        client.join()
    assert (status, {answer.status_code for answer in answers}) == (0, {200}), server.log()[-3000:]
    assert alive(family) == []
    for secret in (TOKEN, ADMIN):
        assert server.files_with(secret) == []
        assert secret not in server.log()


# The example of docs/serving.md, deployed as `serve run FILE` does it; then with other tasks, and with bad ones.
SCRIPT = """
import copy, json, sys, time
import httpx, yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
from vit_memory.serving.ray_cluster import connected

config, port, steps, token = yaml.safe_load(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {token}"}

def seen():
    found = {}
    for _ in range(24):
        try:
            answer = httpx.get(url + "/v1/status", headers=headers, timeout=60)
        except httpx.HTTPError:
            continue
        if answer.status_code == 200:
            found[answer.json()["pid"]] = answer.json()
    return found

with connected():
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    version = None
    for step in steps:
        new = copy.deepcopy(config)
        if step is not None:
            new["applications"][0]["deployments"][0]["user_config"] = step
        _get_global_client().deploy_apps(ServeDeploySchema(**new))
        for _ in range(100):
            time.sleep(1)
            replicas = seen()
            states = {(one["version"], one["problem"]) for one in replicas.values()}
            application = serve.status().applications["vit-memory"]
            if len(replicas) == 2 and len(states) == 1 and states != {version} and application.status == "RUNNING":
                break
        version = next(iter(states), None)
        predicted = httpx.post(url + "/v1/predict", content=open(sys.argv[5], "rb").read(), headers={
            **headers, "Content-Type": "image/jpeg"}, timeout=60)
        refused = httpx.delete(url + "/v1/tasks/pets", headers={"Authorization": f"Bearer {sys.argv[6]}"}, timeout=60)
        print(json.dumps({"pids": sorted(replicas), "states": sorted(states, key=str), "status": application.status,
            "tasks": sorted(predicted.json()["images"][0]["tasks"]), "refused": [refused.status_code, refused.text]}))
        sys.stdout.flush()
    serve.shutdown()
"""


def test_user_config_changes_tasks_without_a_new_process_and_a_bad_one_changes_nothing(tmp_path, backbone, free_port):
    (example,) = [text for text in DOCS.split("```yaml\n")[1:] if "ray_serve:build" in text]
    example = example.split("```")[0].replace("/shared", str(tmp_path))
    example = example.replace("/run/secrets/vit-memory-admin", str(tmp_path / "admin"))
    (tmp_path / "admin").write_text(ADMIN)
    (tmp_path / "image.jpg").write_bytes(jpeg())
    for name in ("pets", "birds"):
        save_task(trained(backbone, name), tmp_path / f"{name}.safetensors")
    config = yaml.safe_load(example)
    named = [Path(file).stem for file in config["applications"][0]["deployments"][0]["user_config"]["tasks"]]
    steps = [
        None,
        {"tasks": [str(tmp_path / "birds.safetensors")]},
        {"tasks": [str(tmp_path / "pets.safetensors"), str(tmp_path / "nothing.safetensors")]},
        {"tasks": [str(tmp_path / "pets.safetensors")]},
    ]
    words = [example, str(free_port), json.dumps(steps), TOKEN, str(tmp_path / "image.jpg"), ADMIN]
    with ray_environment() as environment:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *words],
            env={**environment, "VIT_MEMORY_TOKEN": TOKEN},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    first, changed, bad, mended = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert first["tasks"] == sorted(named)
    assert first["refused"][0] == 403
    assert "listed in user_config" in first["refused"][1]
    assert changed["tasks"] == ["birds"]
    assert bad["tasks"] == ["birds"], "the tasks before it stay"
    ((version, problem),) = bad["states"]
    assert version == changed["states"][0][0]
    assert "nothing.safetensors: no such task file" in problem
    assert mended["tasks"] == ["pets"]
    assert mended["states"][0][1] is None
    assert first["pids"] == changed["pids"] == bad["pids"] == mended["pids"]
    assert len(first["pids"]) == 2
    assert {step["status"] for step in (first, changed, bad, mended)} == {"RUNNING"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own definitions, when it is imported
def test_what_a_configuration_file_gets_wrong_is_named_without_repeating_a_token():
    from vit_memory.serving.ray_serve import Replicas, build

    def refused(**args):
        with pytest.raises(ServingError) as raised:
            build(args)
        assert TOKEN not in str(raised.value)
        return str(raised.value)

    assert "token: env:VIT_MEMORY_TOKEN" in refused(backbone="bundled")
    assert "args: token: expected where the token is" in refused(backbone="bundled", token=TOKEN)
    assert "name the backbone" in refused(insecure=True)
    assert "replicas is not known; known are admin_token, backbone" in refused(replicas=2)
    assert "args: engine has fields of these: max_batch" in refused(backbone="x", insecure=True, engine={"batch": 1})
    assert Replicas.parse("3") == Replicas(3, 3)
    assert Replicas.parse("1-8").options(16)["autoscaling_config"]["max_replicas"] == 8
    for text in ("0", "2-1", "many"):
        with pytest.raises(ServingError, match="--replicas is"):
            Replicas.parse(text)
