"""A replica as Ray Serve treats it, without Ray: tasks follow user_config, all or none; tokens stay in their places."""

import asyncio
import contextlib

import httpx
import pytest
from engine_builders import backbone, jpeg, task
from http_builders import ADMIN, IMAGE, TOKEN, bearer, bundle_in, file_of
from typer.testing import CliRunner

from vit_memory import Bundle, save_task
from vit_memory.cli import app
from vit_memory.errors import ServingError
from vit_memory.serving import ray_replica
from vit_memory.serving.ray_replica import Replica, ReplicaPlan, build_app, named_paths
from vit_memory.serving.settings import Limits, Settings
from vit_memory.serving.token_places import TokenPlace


@pytest.fixture(autouse=True)
def _tiny_backbone(monkeypatch):
    monkeypatch.setattr(ray_replica, "load_backbone", lambda name, device: backbone())


@contextlib.asynccontextmanager
async def replica_of(plan=None):
    """A replica that runs and has no tasks yet, and a client of it."""
    replica = Replica()
    replica.app = build_app(plan or ReplicaPlan("tiny"))
    async with replica.app.router.lifespan_context(replica.app):
        transport = httpx.ASGITransport(replica.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            yield replica, client


async def answering(client):
    answer = await client.post("/v1/predict", content=jpeg(), headers=IMAGE)
    assert answer.status_code == 200, answer.text
    return set(answer.json()["images"][0]["tasks"])


def test_user_config_changes_all_tasks_in_place_or_none(tmp_path):
    files = {name: str(tmp_path / f"{name}.safetensors") for name in ("pets", "birds", "child")}
    for name, file in files.items():
        save_task(task(name, parents=["pets"] if name == "child" else []), file)
    (tmp_path / "torn.safetensors").write_bytes((tmp_path / "birds.safetensors").read_bytes()[:-7])
    bad = {
        "birds.safetensors": {"tasks": [files["birds"], str(tmp_path / "nothing" / "birds.safetensors")]},
        "torn.safetensors": {"tasks": [files["birds"], str(tmp_path / "torn.safetensors")]},
        "not an absolute path": {"tasks": ["birds.safetensors"]},
        "not a bundle": {"bundle": str(tmp_path)},
        'expected {"bundle": FOLDER} or {"tasks": [FILE, …]}, found tasks, bundle': {"tasks": ["/x"], "bundle": "/x"},
        "found nothing": {},
    }

    async def scenario():
        async with replica_of() as (replica, client):
            with pytest.raises(ServingError, match="found nothing"):
                await replica.reconfigure({})  # at the start there is nothing to go on with
            await replica.reconfigure({"tasks": [files["pets"], files["child"]]})
            assert await answering(client) == {"pets", "child"}
            for reason, config in bad.items():
                await replica.reconfigure(config)
                assert await answering(client) == {"pets", "child"}
                problem = (await client.get("/v1/status")).json()["problem"]
                assert reason in problem
                assert "the tasks before it stay" in problem
                assert str(tmp_path) not in problem
            await replica.reconfigure({"tasks": [files["birds"]]})
            assert await answering(client) == {"birds"}
            assert (await client.get("/v1/status")).json()["problem"] is None

    asyncio.run(scenario())


def test_listed_tasks_are_changed_by_user_config_and_those_of_a_bundle_by_any_replica(tmp_path):
    folder = bundle_in(tmp_path / "zoo", [task("pets")])
    save_task(task("pets"), tmp_path / "pets.safetensors")

    async def scenario():
        async with replica_of() as (one, client), replica_of() as (two, other):
            await one.reconfigure({"tasks": [str(tmp_path / "pets.safetensors")]})
            refused = await client.put("/v1/tasks/birds", content=file_of("birds"))
            assert refused.status_code == 403
            assert "listed in user_config" in refused.json()["detail"]
            assert (await client.get("/v1/tasks")).json()["read_only"] is True
            for replica in (one, two):
                await replica.reconfigure({"bundle": str(folder)})
            assert (await client.get("/v1/tasks")).json()["read_only"] is False
            assert (await client.put("/v1/tasks/birds", content=file_of("birds"))).status_code == 201
            for _ in range(600):  # within a second, on a machine that is not busy
                if await answering(other) == {"pets", "birds"}:
                    break
                await asyncio.sleep(0.05)
            else:
                pytest.fail("the change did not reach the other replica")
            unloading = await other.post("/v2/repository/models/birds/unload")
            assert unloading.status_code == 403
            assert "one replica only" in unloading.json()["error"]
            # A replica that goes back to a list does not follow the folder any more.
            await two.reconfigure({"tasks": [str(tmp_path / "pets.safetensors")]})
            assert (await client.delete("/v1/tasks/birds")).status_code == 204
            await asyncio.sleep(1)
            assert await answering(other) == {"pets"}
            assert list(Bundle.open(folder).check()) == ["pets"]

    asyncio.run(scenario())


def test_a_replica_without_its_token_does_not_start(tmp_path, monkeypatch):
    monkeypatch.delenv("A_TOKEN", raising=False)
    plan = ReplicaPlan("tiny", token=TokenPlace("env", "A_TOKEN"), admin_token=TokenPlace("file", f"{tmp_path}/admin"))
    with pytest.raises(ServingError, match="has no A_TOKEN"):
        build_app(plan)
    monkeypatch.setenv("A_TOKEN", TOKEN)
    with pytest.raises(ServingError, match="admin cannot be read on this machine, No such file"):
        build_app(plan)
    (tmp_path / "admin").write_text(f"{ADMIN}\n")
    save_task(task("pets"), tmp_path / "pets.safetensors")

    async def scenario():
        async with replica_of(plan) as (replica, client):
            await replica.reconfigure({"tasks": [str(tmp_path / "pets.safetensors")]})
            assert (await client.get("/v1/tasks")).status_code == 401
            assert (await client.get("/v1/tasks", headers=bearer(TOKEN))).status_code == 200
            assert (await client.delete("/v1/tasks/pets", headers=bearer(TOKEN))).status_code == 403

    asyncio.run(scenario())


def test_what_ray_stores_and_shows_holds_no_token():
    with pytest.raises(ServingError, match="not tokens"):
        ReplicaPlan("tiny", settings=Settings(token=TOKEN))
    for text in (TOKEN, f"token:{TOKEN}", "env:", "file:relative"):
        with pytest.raises(ServingError, match="env:NAME or file:/ABSOLUTE/PATH") as raised:
            TokenPlace.parse(text, "args: token")
        assert TOKEN not in str(raised.value)
    assert str(TokenPlace.parse("env:A_TOKEN", "token")) == "env:A_TOKEN"
    assert str(TokenPlace.parse("file:/run/secrets/token", "token")) == "file:/run/secrets/token"


def test_streams_of_events_end_so_that_a_replica_can_stop(tmp_path):
    save_task(task("pets"), tmp_path / "pets.safetensors")

    async def scenario():
        plan = ReplicaPlan("tiny", settings=Settings(limits=Limits(stream_s=0.5)))
        async with replica_of(plan) as (replica, client):
            await replica.reconfigure({"tasks": [str(tmp_path / "pets.safetensors")]})
            stream = await asyncio.wait_for(client.get("/v1/events"), 30)
            assert stream.text.startswith("event: tasks\n")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "config", [None, [], {"tasks": []}, {"tasks": "/x"}, {"tasks": [1]}, {"bundle": 1}, {"x": "/x"}]
)
def test_a_malformed_user_config_is_named(config):
    with pytest.raises(ServingError, match='expected {"bundle": FOLDER} or {"tasks": \\[FILE, …\\]}'):
        named_paths(config)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--replicas", "2"], "--replicas is for --ray"),
        (["--ray", "--workers", "2"], "--workers is not for --ray: give --replicas"),
        (["--ray"], "ray is missing: pip install 'vit-memory[ray]'"),
    ],
)
def test_options_that_do_not_go_together_and_a_missing_ray_are_named(monkeypatch, tmp_path, words, message):
    monkeypatch.setattr("vit_memory.cli.ray.find_spec", lambda name: None)
    monkeypatch.setattr("vit_memory.serving.workers.end_on_signals", lambda: None)
    result = CliRunner().invoke(app, ["serve", str(tmp_path), *words])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
