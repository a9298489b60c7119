"""Tasks that come and go over HTTP: guarded by digests, kept in the bundle folder, seen by every process."""

import threading
import time

import pytest
from engine_builders import backbone, model_of, task
from fastapi.testclient import TestClient
from http_builders import bundle_in, check_problem, client_of, file_of, predict

from builders import trained_branch
from vit_memory import Bundle, FileError, load_task
from vit_memory.files import manifest
from vit_memory.files.branchfile import branch_bytes
from vit_memory.files.taskfile import task_bytes, task_from_bytes
from vit_memory.serving import task_routes
from vit_memory.serving.app import create_app
from vit_memory.serving.task_store import TaskStore


@pytest.fixture
def folder(tmp_path):
    return bundle_in(tmp_path / "zoo")


def names(client):
    return [one["name"] for one in client.get("/v1/tasks").json()["tasks"]]


def stored(folder):
    return {entry.name: Bundle.open(folder).task(entry.name).digest for entry in Bundle.open(folder).entries}


def until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_task_is_added_replaced_and_removed_while_others_answer(folder):
    with client_of(folder) as client:
        before = predict(client).json()
        added = client.put("/v1/tasks/late", content=file_of("late"))
        assert added.status_code == 201
        assert added.headers["location"] == "/v1/tasks/late"
        assert added.headers["etag"] == f'"{task("late").digest}"'
        answer = predict(client).json()
        assert answer["version"] == added.json()["version"] != before["version"]
        assert answer["images"][0]["tasks"]["late"]["digest"] == task("late").digest
        replaced = client.put("/v1/tasks/late", content=file_of("late", shift=0.1))
        assert replaced.status_code == 200
        assert replaced.json()["digest"] != added.json()["digest"]
        assert names(client) == ["pets", "parts", "height", "child", "plain", "late"]
        assert client.delete("/v1/tasks/late").status_code == 204
        assert predict(client).json()["version"] == before["version"]
        check_problem(client.delete("/v1/tasks/late"), 404)


def test_what_was_put_is_there_after_a_restart_and_what_was_removed_is_not(folder):
    with client_of(folder) as client:
        assert client.put("/v1/tasks/late", content=file_of("late", shift=0.1)).status_code == 201
        assert client.put("/v1/tasks/parts", content=file_of("parts", shift=0.2, kind="multi-label")).status_code == 200
        assert client.delete("/v1/tasks/child").status_code == 204
        version = client.get("/v1/tasks").json()["version"]
        answers = predict(client).json()["images"][0]["tasks"]
    Bundle.open(folder).check()
    with client_of(folder) as client:
        assert client.get("/v1/tasks").json()["version"] == version
        assert names(client) == ["pets", "parts", "height", "plain", "late"]
        assert predict(client).json()["images"][0]["tasks"] == answers


def test_a_downloaded_file_is_the_task(folder, tmp_path):
    with client_of(folder) as client:
        for name, options in {"pets": {"labels": ["cat", "dog"]}, "plain": {"regime": "head"}}.items():
            response = client.get(f"/v1/tasks/{name}/file")
            assert response.headers["etag"] == f'"{task(name, **options).digest}"'
            (tmp_path / f"{name}.safetensors").write_bytes(response.content)
            assert load_task(tmp_path / f"{name}.safetensors").digest == task(name, **options).digest
        half = task("half").map(lambda tensor: tensor.half())
        assert client.put("/v1/tasks/half", content=task_bytes(half)).status_code == 201
        assert client.get("/v1/tasks/half/file").content == task_bytes(half), "it stays float16"
        assert client.get("/v1/tasks/half").json()["size_bytes"] < len(task_bytes(half))


def digest_of(file):
    return task_from_bytes(bytearray(file), "one").digest


def test_a_file_that_is_replaced_during_its_download_has_the_digest_of_what_is_sent(monkeypatch):
    old, new = file_of("one"), file_of("one", shift=0.1)
    write = task_routes.task_bytes
    with client_of(model_of("one")) as client:

        def write_slowly(item):
            monkeypatch.setattr(task_routes, "task_bytes", write)  # the upload writes the file, too
            assert client.put("/v1/tasks/one", content=new).status_code == 200
            return write(item)

        monkeypatch.setattr(task_routes, "task_bytes", write_slowly)
        during, after = (client.get("/v1/tasks/one/file") for _ in range(2))
        etags = [response.headers["etag"] for response in (during, after)]
        # Not the bytes: a file holds the second in which its task was made, and the model's was made before.
        sent, expected = (
            [digest_of(file) for file in files] for files in ((during.content, after.content), (old, new))
        )
        assert sent == expected
        assert etags == [f'"{digest}"' for digest in expected]
        assert client.get("/v1/tasks/one").headers["etag"] == etags[1]


def test_the_bytes_of_an_upload_count_as_held_until_its_task_is_served(monkeypatch):
    put = TaskStore.put
    held = []
    with client_of(model_of("one")) as client:
        bodies = client.app.state.server.bodies

        async def watched(store, *arguments):
            held.append(bodies.used)
            return await put(store, *arguments)

        monkeypatch.setattr(TaskStore, "put", watched)
        late = file_of("late")
        assert client.put("/v1/tasks/late", content=late).status_code == 201
        assert held == [len(late)]
        assert bodies.used == 0


def test_if_match_and_if_none_match_guard_against_lost_updates(folder):
    with client_of(folder) as client:
        digest = client.get("/v1/tasks/pets").headers["etag"]
        new = file_of("pets", labels=["cat", "dog"], shift=0.1)
        for refused in ('"0000"', '"0000", W/"1111"'):
            record = check_problem(client.put("/v1/tasks/pets", content=new, headers={"if-match": refused}), 409)
            assert f'"{record["digest"]}"' == digest, "the problem says what is there"
        check_problem(client.put("/v1/tasks/pets", content=new, headers={"if-none-match": "*"}), 409)
        check_problem(client.put("/v1/tasks/new", content=file_of("new"), headers={"if-match": "*"}), 409)
        assert client.get("/v1/tasks/pets").headers["etag"] == digest
        for i, accepted in enumerate(("{}", '"0000", {}', "*")):
            new = file_of("pets", labels=["cat", "dog"], shift=0.1 + i)
            response = client.put("/v1/tasks/pets", content=new, headers={"if-match": accepted.format(digest)})
            assert response.status_code == 200
            assert response.headers["etag"] != digest
            digest = response.headers["etag"]
        created = client.put("/v1/tasks/new", content=file_of("new"), headers={"if-none-match": "*"})
        assert created.status_code == 201
        check_problem(client.delete("/v1/tasks/new", headers={"if-match": digest}), 409)
        assert client.delete("/v1/tasks/new", headers={"if-match": created.headers["etag"]}).status_code == 204


def test_of_two_replacements_with_one_digest_exactly_one_succeeds(folder):
    with client_of(folder) as client:
        digest = client.get("/v1/tasks/parts").headers["etag"]
        contents = [file_of("parts", shift=shift, kind="multi-label") for shift in (0.1, 0.2, 0.3, 0.4)]
        statuses = []

        def replace(content):
            response = client.put("/v1/tasks/parts", content=content, headers={"if-match": digest})
            statuses.append(response.status_code)

        clients = [threading.Thread(target=replace, args=(content,)) for content in contents]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        assert sorted(statuses) == [200, 409, 409, 409]


def test_a_task_that_others_extend_is_replaced_only_by_one_they_can_read(folder):
    with client_of(folder) as client:
        pinned = task("pinned", parents=[task("pets", labels=["cat", "dog"])])
        assert client.put("/v1/tasks/pinned", content=task_bytes(pinned)).status_code == 201
        other = file_of("pets", labels=["cat", "dog"], shift=0.1)
        assert "trained again since" in check_problem(client.put("/v1/tasks/pets", content=other), 409)["detail"]
        assert stored(folder)["pets"] == task("pets", labels=["cat", "dog"]).digest


def test_branches_come_and_go_with_the_tasks_that_stand_on_them(folder):
    branch = trained_branch(backbone(), "birds", blocks=2)
    standing = task("wings", branch=branch)
    with client_of(folder) as client:
        check_problem(client.put("/v1/tasks/wings", content=task_bytes(standing)), 409)
        added = client.put("/v1/branches/birds", content=branch_bytes(branch))
        assert added.status_code == 201
        assert added.headers["location"] == "/v1/branches/birds"
        assert added.json()["blocks"] == 2
        assert client.put("/v1/tasks/wings", content=task_bytes(standing)).json()["branch"] == "birds"
        assert "wings" in predict(client).json()["images"][0]["tasks"]
        assert client.get("/v1/branches/birds/file").content == branch_bytes(branch)
        assert [one["name"] for one in client.get("/v1/tasks").json()["branches"]] == ["birds"]
        check_problem(client.delete("/v1/branches/birds"), 409)
    with client_of(folder) as client:
        assert client.delete("/v1/tasks/wings").status_code == 204
        assert client.delete("/v1/branches/birds").status_code == 204
        check_problem(client.get("/v1/branches/birds"), 404)
    assert Bundle.open(folder).branch_entries == ()


def test_a_read_only_server_forbids_every_change(folder):
    with client_of(folder, read_only=True) as client:
        assert client.get("/v1/tasks").json()["read_only"] is True
        for method, path in (
            ("PUT", "/v1/tasks/late"),
            ("DELETE", "/v1/tasks/child"),
            ("PUT", "/v1/branches/b"),
            ("POST", "/v2/repository/models/child/unload"),
        ):
            response = client.request(method, path, content=file_of("late"))
            assert response.status_code == 403, path
            assert "--read-only" in response.text
        assert client.get("/v1/tasks/child/file").status_code == 200
    assert "late" not in stored(folder)


def test_a_change_that_cannot_be_written_is_a_503_and_was_never_served(folder, monkeypatch):
    def full(path, chunks):
        raise FileError(f"{path}: cannot be written, No space left on device. The old file, if any, is unchanged.")

    with client_of(folder) as client:
        version = client.get("/v1/tasks").json()["version"]
        with monkeypatch.context() as patched:
            patched.setattr(manifest, "write_atomic", full)
            record = check_problem(client.put("/v1/tasks/late", content=file_of("late")), 503)
            check_problem(client.delete("/v1/tasks/child"), 503)
        assert "No space left" in record["detail"]
        assert str(folder.parent) not in record["detail"]
        assert client.get("/v1/tasks").json()["version"] == version
        assert client.put("/v1/tasks/late", content=file_of("late")).status_code == 201
    assert "late" in stored(folder)


def test_without_a_folder_changes_are_kept_in_memory():
    with client_of(model_of("one")) as client:
        late = file_of("late")
        assert client.get("/v1/tasks").json()["persistent"] is False
        assert client.put("/v1/tasks/late", content=late).status_code == 201
        assert names(client) == ["one", "late"]
        assert client.get("/v1/tasks/late/file").content == late


def test_two_servers_of_one_folder_lose_no_update_and_follow_each_other_within_a_second(folder):
    with client_of(folder) as one, client_of(folder) as other:
        statuses = []

        def write(client, prefix):
            for i in range(6):
                name = f"{prefix}{i}"
                statuses.append(client.put(f"/v1/tasks/{name}", content=file_of(name)).status_code)

        writers = [threading.Thread(target=write, args=pair) for pair in ((one, "a"), (other, "b"), (one, "c"))]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert statuses == [201] * 18
        expected = {*(f"{prefix}{i}" for prefix in "abc" for i in range(6))}
        assert expected < set(stored(folder))
        until(lambda: set(names(one)) == set(names(other)) == set(stored(folder)), seconds=1)
        assert one.delete("/v1/tasks/b3").status_code == 204, "either may change what the other added"
        until(lambda: "b3" not in predict(other).json()["images"][0]["tasks"], seconds=1)
        assert len({client.get("/v1/tasks").json()["version"] for client in (one, other)}) == 1


def test_a_change_by_another_program_is_followed_and_a_damaged_one_is_not(folder, caplog):
    with client_of(folder) as client:
        Bundle.open(folder).add([task("late")])
        until(lambda: "late" in names(client), seconds=1)
        version = client.get("/v1/tasks").json()["version"]
        whole = (folder / "bundle.json").read_text()
        (folder / "bundle.json").write_text(whole[:-20])
        until(lambda: "cannot be served" in caplog.text, seconds=5)
        assert predict(client).json()["version"] == version
        time.sleep(1)
        assert caplog.text.count("cannot be served") == 1, "told once, not at every look"
        (folder / "bundle.json").write_text(whole)
        Bundle.open(folder).remove(["late"])
        until(lambda: "late" not in names(client), seconds=1)


def test_a_change_made_while_a_server_starts_is_served_and_not_undone_by_its_own(folder):
    app = create_app(folder, backbone=backbone())
    Bundle.open(folder).add([task("meanwhile")])  # the folder was read, the server does not answer yet
    with TestClient(app) as client:
        assert "meanwhile" in names(client)
        assert client.put("/v1/tasks/late", content=file_of("late")).status_code == 201
    assert {"meanwhile", "late"} < set(stored(folder))


def test_a_change_of_a_folder_that_cannot_be_read_is_refused_as_the_servers_fault(folder):
    with client_of(folder) as client:
        (folder / "bundle.json").write_text("{")
        for response in (client.put("/v1/tasks/late", content=file_of("late")), client.delete("/v1/tasks/child")):
            assert "the bundle folder cannot be read" in check_problem(response, 503)["detail"]
        assert "child" in names(client)


def test_a_process_that_starts_later_serves_what_the_others_serve(folder, tmp_path):
    with client_of(folder, run_folder=tmp_path) as one:
        assert one.post("/v2/repository/models/child/unload").status_code == 200
        with client_of(folder, run_folder=tmp_path) as other:
            assert other.get("/v1/tasks").json()["unloaded"] == ["child"]
            assert "child" not in predict(other).json()["images"][0]["tasks"]


def test_a_process_that_follows_another_does_not_undo_what_that_one_does_meanwhile(folder, tmp_path, monkeypatch):
    with client_of(folder, run_folder=tmp_path) as one, client_of(folder, run_folder=tmp_path) as other:
        store = other.app.state.server.store
        replace = store._engine.replace

        async def slow_replace(*arguments):
            if one.get("/v1/tasks").json()["unloaded"]:
                assert one.post("/v2/repository/models/child/load").status_code == 200
            return await replace(*arguments)

        monkeypatch.setattr(store._engine, "replace", slow_replace)
        assert one.post("/v2/repository/models/child/unload").status_code == 200
        until(lambda: not one.get("/v1/tasks").json()["unloaded"], seconds=5)
        time.sleep(1)
        for client in (one, other):
            assert client.get("/v1/tasks").json()["unloaded"] == []
            assert "child" in predict(client).json()["images"][0]["tasks"]


def test_an_unloaded_task_is_kept_and_not_served(folder):
    with client_of(folder) as client:
        check = client.post("/v2/repository/models/pets/unload")
        assert check.status_code == 409, "child extends it"
        assert client.post("/v2/repository/models/child/unload").status_code == 200
        assert "child" not in predict(client).json()["images"][0]["tasks"]
        assert client.get("/v1/tasks").json()["unloaded"] == ["child"]
        assert "child" in stored(folder)
        assert client.put("/v1/tasks/late", content=file_of("late")).status_code == 201, "others may change meanwhile"
        assert "child" not in names(client)
        assert client.post("/v2/repository/models/child/load").status_code == 200
        assert "child" in predict(client).json()["images"][0]["tasks"]
        assert client.post("/v2/repository/models/child/unload").status_code == 200
        assert client.delete("/v1/tasks/child").status_code == 204
    assert "child" not in stored(folder)
