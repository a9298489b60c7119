"""vit-memory serve: what it refuses, where tokens come from and never go, how it ends, and several processes."""

import os
import signal
import socket
import threading
import time

import httpx
import psutil
import pytest
from command_server import START_S, started, wait
from engine_builders import jpeg, model_of
from http_builders import ADMIN, IMAGE, TOKEN, bearer, client_of
from typer.testing import CliRunner

from builders import trained
from vit_memory import Bundle, load_backbone, save_task
from vit_memory.cli import app
from vit_memory.errors import ServingError
from vit_memory.files.taskfile import task_bytes
from vit_memory.serving import server, workers
from vit_memory.serving.app import create_app
from vit_memory.serving.server import ServePlan
from vit_memory.serving.settings import Settings

FOLLOW_S = 20  # for a worker to follow a change: within a second on a machine that is not busy


@pytest.fixture(scope="module")
def backbone():
    return load_backbone("bundled")


@pytest.fixture
def folder(tmp_path, backbone):
    Bundle.create(tmp_path / "zoo", backbone, [trained(backbone, "one"), trained(backbone, "two")])
    return tmp_path / "zoo"


def command_lines(pid):
    process = psutil.Process(pid)
    return [" ".join(one.cmdline()) for one in (process, *process.children(recursive=True))]


@pytest.fixture
def plan_of(monkeypatch, folder):
    """The plan that the command makes of some words; nothing is started."""
    plans = []
    monkeypatch.setattr(server, "run", plans.append)
    monkeypatch.setattr(workers, "end_on_signals", lambda: None)
    for variable in ("VIT_MEMORY_TOKEN", "VIT_MEMORY_ADMIN_TOKEN"):
        monkeypatch.delenv(variable, raising=False)

    def make(*words, **options):
        result = CliRunner().invoke(app, ["serve", str(folder), *map(str, words)], **options)
        if isinstance(result.exception, ServingError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return plans.pop()

    return make


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_listening_for_other_machines_without_a_token_is_refused_unless_insecure(plan_of, host):
    with pytest.raises(ServingError, match="can be reached from other machines"):
        plan_of("--host", host)
    with pytest.raises(ServingError, match="--insecure"):
        plan_of("--host", host, "--admin-token", ADMIN)  # everybody could still predict
    assert plan_of("--host", host, "--insecure").host == host
    assert plan_of("--host", host, "--token", TOKEN).host == host
    assert plan_of("--host", "127.0.0.1").settings.token is None


def test_pages_of_all_sites_may_call_only_a_server_with_a_token(plan_of):
    for words in ([], ["--admin-token", ADMIN], ["--insecure"], ["--cors", "https://a.example"]):
        with pytest.raises(ServingError, match="Set a token"):
            plan_of("--cors", "*", *words)
    with pytest.raises(ServingError, match="Set a token"):
        create_app(model_of("one"), Settings(cors=("*",)))
    assert plan_of("--cors", "*", "--token", TOKEN).settings.cors == ("*",)
    page = {**IMAGE, "origin": "https://any.example"}
    with client_of(model_of("one"), cors=("*",), tokens=(TOKEN, None)) as client:
        posted = client.post("/v1/predict", content=jpeg(), headers={**page, **bearer(TOKEN)})
        assert (posted.status_code, posted.headers["access-control-allow-origin"]) == (200, "*")
        assert client.post("/v1/predict", content=jpeg(), headers=page).status_code == 401


def test_tokens_come_from_options_stdin_files_or_the_environment(plan_of, tmp_path, monkeypatch):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "admin").write_text(ADMIN)
    found = [
        plan_of("--token", TOKEN, "--admin-token", ADMIN),
        plan_of("--token", "-", "--admin-token", "-", input=f"{TOKEN}\n{ADMIN}\n"),
        plan_of("--token-file", tmp_path / "token", "--admin-token-file", tmp_path / "admin"),
    ]
    monkeypatch.setenv("VIT_MEMORY_TOKEN", TOKEN)
    monkeypatch.setenv("VIT_MEMORY_ADMIN_TOKEN", ADMIN)
    found.append(plan_of())
    assert {(plan.settings.token, plan.settings.admin_token) for plan in found} == {(TOKEN, ADMIN)}
    assert TOKEN not in repr(found[0])
    for words in (["--token", ""], ["--token", "a b"], ["--token", "ä"]):
        result = CliRunner().invoke(app, ["serve", str(tmp_path / "zoo"), *map(str, words)])
        assert result.exit_code == 2, words


@pytest.mark.parametrize("option", ["--token", "--admin-token"])
def test_a_token_and_a_file_of_it_are_refused_together(tmp_path, folder, option):
    """In a process of its own, where a token of the command line moves to the environment."""
    (tmp_path / "file").write_text(TOKEN)
    with started(tmp_path, folder, option, "x", f"{option}-file", tmp_path / "file") as running:
        assert running.process.wait(START_S) == 2
        assert f"{option} and {option}-file are both given; give one." in running.log()


def test_options_reach_the_server(plan_of, folder, tmp_path):
    plan = plan_of(
        "--max-batch", 4, "--max-wait-ms", 7, "--max-queue", 9, "--timeout-s", 3, "--max-pixels", 1000, "--threads", 2,
        "--max-body-mb", 0.5, "--max-images", 5, "--read-only", "--cors", "https://a.example", "--workers", 3,
        "--port", 1234, "--backbone", "other", "--log-format", "json",
    )  # fmt: skip
    engine, limits = plan.settings.engine, plan.settings.limits
    assert (engine.max_batch, engine.max_wait_ms, engine.max_queue, engine.timeout_s) == (4, 7, 9, 3)
    assert (engine.max_pixels, engine.threads) == (1000, 2)
    assert (limits.max_body_bytes, limits.max_images) == (2**19, 5)
    assert (plan.settings.read_only, plan.settings.cors) == (True, ("https://a.example",))
    assert (plan.workers, plan.port, plan.backbone, plan.log_format) == (3, 1234, "other", "json")
    assert (plan.sources, plan.folder) == ((folder,), folder)
    with pytest.raises(ServingError, match="no such bundle or task file"):
        ServePlan((tmp_path / "nothing",))
    with pytest.raises(ServingError, match="serve one bundle, or any number of task files"):
        ServePlan((folder, tmp_path / "nothing"))
    with pytest.raises(ServingError, match="keeps its own changes"):
        ServePlan((folder,), bundle_folder=tmp_path / "other")


def test_a_port_in_use_is_told_before_anything_is_loaded(folder, monkeypatch):
    monkeypatch.setattr(server, "end_on_signals", lambda: None)
    monkeypatch.setattr(server, "configure_logs", lambda *arguments: None)
    monkeypatch.setattr(server, "build_app", lambda plan: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServingError, match=f"cannot listen on 127.0.0.1, port {port}: Address already in use"):
            server.run(ServePlan((folder,), Settings(), port=port))


def test_a_token_of_the_command_line_is_out_of_sight_and_sigterm_loses_no_answer(tmp_path, folder, backbone):
    """One process, because each start takes seconds."""
    slow = ("--max-wait-ms", "4000", "--max-batch", "64")
    with started(tmp_path, folder, "--token", TOKEN, f"--admin-token={ADMIN}", *slow) as running:
        url = running.ready().url
        for line in command_lines(running.process.pid):
            assert TOKEN not in line
            assert ADMIN not in line
        assert httpx.get(f"{url}/v1/tasks").status_code == 401
        late = task_bytes(trained(backbone, "late"))
        assert httpx.put(f"{url}/v1/tasks/late", content=late, headers=bearer(ADMIN), timeout=60).status_code == 201
        answers = []

        def ask():
            answers.append(
                httpx.post(f"{url}/v1/predict", content=jpeg(), headers={**IMAGE, **bearer(TOKEN)}, timeout=60)
            )

        asking = [threading.Thread(target=ask) for _ in range(3)]
        for one in asking:
            one.start()
        wait(lambda: httpx.get(f"{url}/v1/status", headers=bearer(TOKEN)).json()["waiting"] == 3, 20)
        with httpx.stream("GET", f"{url}/v1/events", headers=bearer(TOKEN)):  # a stream does not hold it up
            assert running.stop() == 0
        for one in asking:
            one.join(30)
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert {*answers[0].json()["images"][0]["tasks"]} == {"one", "two", "late"}
        assert running.events()[-1]["event"] == "stopped"
        for secret in (TOKEN, ADMIN, "Traceback"):
            assert secret not in running.log()
    assert [entry.name for entry in Bundle.open(folder).entries] == ["one", "two", "late"]


def test_a_change_through_one_of_two_workers_reaches_the_other(tmp_path, backbone):
    """Task files are served; their changes are kept in a folder, and are there after a restart."""
    for name in ("one", "two"):
        save_task(trained(backbone, name), tmp_path / f"{name}.safetensors")
    files = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    words = (*files, "--bundle-dir", tmp_path / "kept", "--workers", "2")
    with started(tmp_path, *words) as running:
        url = running.ready(2).url

        def versions():
            """Of every worker that answers, over a new connection each time."""
            found = {}
            end = time.monotonic() + 20
            while len(found) < 2:
                status = httpx.get(f"{url}/v1/status").json()
                found[status["pid"]] = status["version"]
                assert time.monotonic() < end, "one worker never answers"
            return found

        assert len(set(versions().values())) == 1
        for name in ("a", "b", "c"):
            response = httpx.put(f"{url}/v1/tasks/{name}", content=task_bytes(trained(backbone, name)), timeout=60)
            assert response.status_code == 201
            version = response.json()["version"]
            wait(lambda version=version: set(versions().values()) == {version}, FOLLOW_S)
        assert httpx.post(f"{url}/v2/repository/models/a/unload").status_code == 200
        wait(lambda: {*versions().values()}.isdisjoint({version}), FOLLOW_S)  # unloaded everywhere
        assert len(set(versions().values())) == 1
        assert "vit_memory_tasks" in httpx.get(f"{url}/metrics").text
        (first, *_) = versions()
        os.kill(first, signal.SIGKILL)
        wait(lambda: running.count("ready") == 3, START_S)
        assert first not in versions(), "a worker that died was replaced"
        assert len(set(versions().values())) == 1, "its replacement serves what the other serves"
        assert running.stop() == 0
    assert [entry.name for entry in Bundle.open(tmp_path / "kept").entries] == ["one", "two", "a", "b", "c"]


@pytest.mark.slow
def test_a_worker_that_cannot_be_replaced_does_not_end_the_others(tmp_path, folder):
    with started(tmp_path, folder, "--workers", "2") as running:
        url = running.ready(2).url
        (folder / "tasks" / "one.safetensors").write_bytes(b"damaged")
        os.kill(httpx.get(f"{url}/v1/status").json()["pid"], signal.SIGKILL)
        wait(lambda: running.log().count("starting another") >= 2, START_S)
        assert httpx.get(f"{url}/v1/status").status_code == 200
        assert running.stop() == 0


@pytest.mark.slow
def test_workers_that_cannot_start_end_the_command_with_the_reason(tmp_path, folder):
    (folder / "tasks" / "one.safetensors").write_bytes(b"damaged")
    with started(tmp_path, folder, "--workers", "2") as running:
        assert running.process.wait(START_S) == 1
        assert "one.safetensors" in running.log()
        assert "Traceback" not in running.log()
