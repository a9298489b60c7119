"""Malformed input: a problem with the right status, as the description lists it, never a 500; the next is served."""

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest
from engine_builders import PREPROCESSING, jpeg
from http_builders import IMAGE, as_json, bundle_in, check_problem, client_of, file_of, predict

from builders import tiny_backbone, trained
from vit_memory.files.container import container_bytes, read_container
from vit_memory.files.taskfile import task_bytes
from vit_memory.serving.logs import configure_logs
from vit_memory.serving.predict_body import PredictJson

JSON = {"content-type": "application/json"}
FORM = {"content-type": "multipart/form-data; boundary=b"}
PART = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n--b--\r\n'
PREDICT = ("POST", "/v1/predict", "/v1/predict")
TASK = ("PUT", "/v1/tasks/new", "/v1/tasks/{name}")


def form(field=b"image", file_name=b'; filename="a.jpg"', content=b"x"):
    return PART % (field, file_name, content)


OPEN_FORM = form()[: -len("--b--\r\n")]  # more parts may follow
# What is wrong, the status it gets, and the request: (method, path, route), body, headers, query.
CASES = {
    "json cut off": (400, PREDICT, b'{"images": [', JSON, {}),
    "json that is no object": (400, PREDICT, b"[1, 2]", JSON, {}),
    "json null": (400, PREDICT, b"null", JSON, {}),
    "json empty": (400, PREDICT, b"", JSON, {}),
    "json not utf-8": (400, PREDICT, b'{"images": ["\xff"]}', JSON, {}),
    "json nested deeply": (400, PREDICT, b"[" * 100_000, JSON, {}),
    "json with a key twice": (400, PREDICT, b'{"images": ["eA=="], "images": ["eA=="]}', JSON, {}),
    "json with NaN": (400, PREDICT, b'{"images": ["eA=="], "timeout_s": NaN}', JSON, {}),
    "json with half a character": (400, PREDICT, b'{"images": ["eA=="], "tasks": ["\\ud800"]}', JSON, {}),
    "json without images": (400, PREDICT, b'{"tasks": ["pets"]}', JSON, {}),
    "no image in the list": (400, PREDICT, b'{"images": []}', JSON, {}),
    "an image that is a number": (400, PREDICT, b'{"images": [1]}', JSON, {}),
    "an option that nobody knows": (400, PREDICT, b'{"images": ["eA=="], "topk": 3}', JSON, {}),
    "top_k as text": (400, PREDICT, b'{"images": ["eA=="], "top_k": "3"}', JSON, {}),
    "tasks as a number": (400, PREDICT, b'{"images": ["eA=="], "tasks": 3}', JSON, {}),
    "a huge number": (400, PREDICT, b'{"images": ["eA=="], "top_k": ' + b"9" * 5000 + b"}", JSON, {}),
    "a query that nobody knows": (400, PREDICT, jpeg(), IMAGE, {"topk": "3"}),
    "top_k of nothing": (400, PREDICT, jpeg(), IMAGE, {"top_k": "0"}),
    "top_k in words": (400, PREDICT, jpeg(), IMAGE, {"top_k": "five"}),
    "a timeout in the past": (400, PREDICT, jpeg(), IMAGE, {"timeout_s": "-1"}),
    "a timeout without end": (400, PREDICT, jpeg(), IMAGE, {"timeout_s": "inf"}),
    "a truth that is none": (400, PREDICT, jpeg(), IMAGE, {"check_original": "perhaps"}),
    "an empty image": (400, PREDICT, b"", IMAGE, {}),
    "base64 that is none": (422, PREDICT, b'{"images": ["%%%"]}', JSON, {}),
    "a form without a boundary": (400, PREDICT, form(), {"content-type": "multipart/form-data"}, {}),
    "a form that is none": (400, PREDICT, b"\x00\x01 no form", FORM, {}),
    "a form cut off": (400, PREDICT, form()[:-20], FORM, {}),
    "a form with a part without a name": (400, PREDICT, form().replace(b"name=", b"nome="), FORM, {}),
    "a form with a field that is no text": (400, PREDICT, OPEN_FORM + form(b"tasks", b"", b"\xff"), FORM, {}),
    "too many fields in a form": (413, PREDICT, OPEN_FORM.replace(b"file", b"") * 65 + form(), FORM, {}),
    "a form without an image": (400, PREDICT, form(b"tasks", b"", b"pets"), FORM, {}),
    "a file in an unknown field": (400, PREDICT, form(b"picture"), FORM, {}),
    "a text instead of a file": (400, PREDICT, form(b"image", b""), FORM, {}),
    "an unknown field": (400, PREDICT, OPEN_FORM + form(b"topk", b"", b"3"), FORM, {}),
    "a field of a megabyte": (413, PREDICT, form(b"tasks", b"", b"x" * 2**20), FORM, {}),
    "a form with an image that is none": (422, PREDICT, form(), FORM, {}),
    "an unknown task": (404, PREDICT, jpeg(), IMAGE, {"tasks": "nobody"}),
    "a name with folders": (404, PREDICT, jpeg(), IMAGE, {"tasks": "../../etc/passwd"}),
    "a type that is not taken": (415, PREDICT, b"a=b", {"content-type": "application/x-www-form-urlencoded"}, {}),
    "a compressed body": (415, PREDICT, jpeg(), {**IMAGE, "content-encoding": "gzip"}, {}),
    "no type": (415, PREDICT, b"a=b", {}, {}),
    "too many images in json": (413, PREDICT, json.dumps(as_json(*[b"x"] * 65)).encode(), JSON, {}),
    "too many images in a form": (413, PREDICT, OPEN_FORM * 65 + form(), FORM, {}),
    "a task file that is empty": (400, TASK, b"", {}, {}),
    "a task file that is text": (400, TASK, b"hello, this is no task file", {}, {}),
    "a pickle": (400, TASK, b"PK\x03\x04" + b"\xff" * 100, {}, {}),
    "a header that claims too much": (400, TASK, (2**62).to_bytes(8, "little") + b"{}", {}, {}),
    "a task file cut off": (400, TASK, file_of("new")[:-10], {}, {}),
    "a task file with a flipped bit": (400, TASK, file_of("new")[:-1] + b"\x01", {}, {}),
    "a file of another name": (400, TASK, file_of("other"), {}, {}),
    "a name that is a folder": (400, ("PUT", "/v1/tasks/%2E%2E", TASK[2]), file_of("new"), {}, {}),
    "a name with a null": (400, ("PUT", "/v1/tasks/a%00b", TASK[2]), file_of("new"), {}, {}),
    "a name that is too long": (400, ("PUT", "/v1/tasks/" + "x" * 101, TASK[2]), file_of("new"), {}, {}),
    "a name that leads elsewhere": (404, ("PUT", "/v1/tasks/..%2F..%2Fetc%2Fpasswd", None), file_of("new"), {}, {}),
    "a guard that is none": (400, TASK, file_of("new"), {"if-match": "abc"}, {}),
    "a guard that fails": (409, TASK, file_of("new"), {"if-match": '"abc"'}, {}),
    "a parent that is not there": (409, TASK, file_of("new", parents=["nobody"]), {}, {}),
    "removing what others extend": (409, ("DELETE", "/v1/tasks/pets", TASK[2]), b"", {}, {}),
    "removing what is not there": (404, ("DELETE", "/v1/tasks/nobody", TASK[2]), b"", {}, {}),
    "an unknown branch": (404, ("GET", "/v1/branches/nobody", "/v1/branches/{name}"), b"", {}, {}),
    "a file of an unknown task": (404, ("GET", "/v1/tasks/nobody/file", "/v1/tasks/{name}/file"), b"", {}, {}),
    "a task instead of a branch": (400, ("PUT", "/v1/branches/new", "/v1/branches/{name}"), file_of("new"), {}, {}),
    "a slash too many": (404, ("GET", "/v1/tasks/", None), b"", {}, {}),
    "an unknown route": (404, ("GET", "/v1/nothing", None), b"", {}, {}),
    "a wrong method": (405, ("PATCH", "/v1/tasks/pets", None), b"", {}, {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with client_of(bundle_in(tmp_path_factory.mktemp("http") / "zoo")) as client:
        yield client


@pytest.mark.parametrize("case", CASES)
def test_malformed_input_gets_its_status_and_the_next_request_is_served(client, case):
    status, (method, path, route), body, headers, query = CASES[case]
    before = client.get("/v1/tasks").json()
    response = client.request(method, path, content=body, headers=headers, params=query)
    record = check_problem(response, status)
    if route is not None:
        described = client.get("/openapi.json").json()["paths"][route][method.lower()]["responses"]
        assert str(status) in described, "the description lists every status"
    folder = client.app.state.server.settings.bundle_folder
    assert str(folder.parent) not in record["detail"], "no paths of the server's machine"
    assert client.get("/v1/tasks").json() == before
    assert predict(client).status_code == 200


MANY = {
    "images": b'{"images": [' + b"1," * 30_000 + b"1]}",
    "images of a body that is parsed in a thread": b'{"images": [' + b"1," * 2**20 + b"1]}",
    "names of tasks": b'{"images": ["eA=="], "tasks": "' + b"pets," * 30_000 + b'"}',
    "tasks to explain": json.dumps({"images": ["eA=="], "explain": ["child"] * 30_000}).encode(),
    "unknown keys": json.dumps({str(i): 0 for i in range(30_000)}).encode(),
    "groups": b'{"images": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
}


@pytest.mark.parametrize("case", MANY)
def test_a_body_of_too_many_items_is_refused_before_they_become_objects(client, case, monkeypatch):
    monkeypatch.setattr(PredictJson, "model_validate", None)
    record = check_problem(client.post("/v1/predict", content=MANY[case], headers=JSON), 400)
    assert "values or 11024 lists; send at most 64 images" in record["detail"]


@pytest.mark.parametrize("body", [{"tasks": ["x" * 2**19]}, {"explain": "x" * 2**19}, {"x" * 2**19: 1}])
def test_a_long_text_in_place_of_a_name_is_refused_without_being_compared_or_repeated(client, body):
    response = client.post("/v1/predict", json={"images": ["eA=="], **body})
    check_problem(response, 400)
    assert len(response.content) < 2000


def test_as_many_images_as_allowed_with_names_and_types_are_no_too_many_items(client):
    image = {"name": "a, b [1].jpg", "data": "data:image/jpeg;base64," + as_json(jpeg())["images"][0]}
    response = client.post("/v1/predict", json={"images": [image] * 64, "tasks": ["pets"]})
    assert [one["name"] for one in response.json()["images"]] == ["a, b [1].jpg"] * 64


def test_a_wrong_method_is_told_all_methods_of_the_path(client):
    assert client.patch("/v1/tasks/pets").headers["allow"] == "GET, PUT, DELETE"
    assert client.options("/v1/predict").headers["allow"] == "POST"
    assert client.delete("/page/nothing.js").headers["allow"] == "GET, HEAD"


def test_a_malformed_form_adds_no_line_of_a_library_to_the_log(client, caplog):
    configure_logs("json")
    check_problem(client.post("/v1/predict", content=b"no form", headers=FORM), 400)
    assert [record.name for record in caplog.records] == []


def test_a_task_of_another_backbone_is_a_409_without_paths(client):
    stranger = task_bytes(trained(tiny_backbone("dinov2"), "stranger"))
    record = check_problem(client.put("/v1/tasks/stranger", content=stranger), 409)
    assert "was trained on" in record["detail"]
    assert check_problem(client.get("/v1/tasks/stranger"), 404)


def hostile_file(change):
    """A task file that is whole, with a checksum of its own, and whose description was changed."""
    metadata, tensors = read_container(Path("new"), bytearray(file_of("new")))
    description = json.loads(metadata["task"])
    text = change(description) or json.dumps(description)
    return b"".join(container_bytes({**metadata, "task": text}, tensors))


def preprocessing(**values):
    return lambda description: description.update(preprocessing={**asdict(PREPROCESSING), **values})


NESTED = "[" * 100_000 + "]" * 100_000
HOSTILE = {
    "a number beyond all": lambda d: json.dumps(d).replace('"metrics": {}', '"metrics": {"x": 1e999}'),
    "a record nested deeply": lambda d: json.dumps(d).replace('"metrics": {}', f'"metrics": {{"x": {NESTED}}}'),
    "an image size in words": preprocessing(resize="large"),
    "an image size of a million": preprocessing(resize=10**6),
    "an image size of three": preprocessing(crop=[1, 2, 3]),
    "a mean in words": preprocessing(mean=["a", "b", "c"]),
    "a deviation of zero": preprocessing(std=[1, 0, 1]),
    "an interpolation that nobody knows": preprocessing(interpolation="magic"),
    "labels that are numbers": lambda d: d.update(labels=[1, 2, 3]),
    "a label twice": lambda d: d.update(labels=["a", "a", "b"]),
    "a name with folders": lambda d: d.update(name="../../new"),
    "a parent that is itself": lambda d: d.update(parents=[{"name": "new", "digest": None}]),
    "another number of blocks": lambda d: d["backbone"].update(depth=10**9),
    "half a character": lambda d: d.update(created="\ud800"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_whole_file_with_a_hostile_description_is_refused_and_changes_nothing(client, case):
    before = client.get("/v1/tasks").json()
    response = client.put("/v1/tasks/new", content=hostile_file(HOSTILE[case]))
    check_problem(response, 409 if case == "another number of blocks" and "trained on" in response.text else 400)
    assert client.get("/v1/tasks").json() == before
    assert predict(client).status_code == 200


def test_a_changed_description_that_is_harmless_is_taken(client):
    assert client.put("/v1/tasks/new", content=hostile_file(preprocessing(resize=[48, 48]))).status_code == 201
    assert predict(client).status_code == 200
    assert client.delete("/v1/tasks/new").status_code == 204


def test_mutated_bodies_of_every_kind_are_never_a_500(client):
    draw = random.Random(0)
    seeds = [
        (PREDICT, json.dumps(as_json(jpeg(), tasks=["pets"], explain=["child"])).encode(), JSON),
        (PREDICT, form(content=jpeg()), FORM),
        (PREDICT, jpeg(), IMAGE),
        (TASK, file_of("new"), {}),
        (("PUT", "/v1/branches/new", None), file_of("new"), {}),
    ]
    for _ in range(300):
        (method, path, _), body, headers = draw.choice(seeds)
        mutated = bytearray(body)
        for _ in range(draw.choice([1, 3, 30])):
            place = draw.randrange(len(mutated))
            if draw.random() < 0.3:
                del mutated[place : place + draw.choice([1, 10, 1000])]
            else:
                mutated[place : place + 1] = draw.randbytes(draw.choice([1, 1, 8]))
            if not mutated:
                break
        response = client.request(method, path, content=bytes(mutated), headers=headers)
        assert response.status_code in (200, 201, 400, 404, 409, 413, 415, 422), response.text
        if response.status_code == 201:  # a mutation that changed nothing but text
            assert client.delete(path).status_code == 204
    assert predict(client).status_code == 200


def test_a_bug_of_ours_is_a_500_without_a_traceback_and_the_next_request_is_served(client, monkeypatch, caplog):
    def broken(*arguments):
        raise ZeroDivisionError("a secret of the server")

    with monkeypatch.context() as patched:
        patched.setattr("vit_memory.serving.predict_routes.answer_json", broken)
        response = predict(client)
    assert "secret" not in check_problem(response, 500)["detail"]
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.fields["request_id"] == response.headers["x-request-id"]
    assert predict(client).status_code == 200
