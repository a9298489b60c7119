"""The Open Inference Protocol v2: Triton's own client works, and bad tensors get a 400 that says why."""

import base64
import gzip
import json
import struct
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
import tritonclient.http as triton
from engine_builders import PREPROCESSING, as_input, jpeg, model_of, task
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import live
from tritonclient.utils import InferenceServerException

from builders import ROUNDING
from vit_memory import MemoryViT
from vit_memory.serving.app import create_app
from vit_memory.serving.inference_tensors import InputLimits, parse_request
from vit_memory.serving.problems import ProblemError
from vit_memory.serving.settings import Limits, Settings

TOKENS = {"token": "predict-token", "admin_token": "admin-token"}


@pytest.fixture(scope="module")
def model():
    model = model_of("pets", "birds")
    model.add(task("breeds", parents=["pets"], labels=["é", "b"]), task("parts", kind="multi-label"))
    model.add(task("height", kind="regression", labels=["height"]))
    return model


@pytest.fixture(scope="module")
def server(model):
    app = create_app(model, Settings(limits=Limits(max_images=8, max_body_bytes=2**20)))
    with live(app) as url:
        yield SimpleNamespace(url=url, state=app.state.server)


@pytest.fixture(scope="module")
def client(server):
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        yield client


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url) as http:
        yield http


def expected(model, name, images):
    return model(torch.cat([as_input(image) for image in images]), [name])[name]


def close(values, tensor):
    assert values.dtype == np.float32
    assert values.shape == tuple(tensor.shape)
    assert np.abs(values - tensor.numpy()).max() < ROUNDING


def files(*images, binary=True, shape=None):
    tensor = triton.InferInput("image", shape or [len(images)], "BYTES")
    content = images if binary else [base64.b64encode(image) for image in images]
    return [tensor.set_data_from_numpy(np.array(content, dtype=object).reshape(tensor.shape()), binary_data=binary)]


def test_tritonclient_sees_the_server_and_its_models(client, model):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("pets")
    assert not client.is_model_ready("nothing")
    assert client.get_server_metadata()["name"] == "vit-memory"
    assert {"binary_tensor_data", "model_repository"} <= set(client.get_server_metadata()["extensions"])
    assert client.get_model_metadata("pets") == {
        "name": "pets",
        "versions": [model.tasks["pets"].digest],
        "platform": "vit-memory",
        "inputs": [
            {"name": "image", "datatype": "BYTES", "shape": [-1]},
            {"name": "pixels", "datatype": "FP32", "shape": [-1, 3, *PREPROCESSING.resize]},
        ],
        "outputs": [
            {"name": "logits", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "label", "datatype": "BYTES", "shape": [-1]},
        ],
    }
    assert [output["name"] for output in client.get_model_metadata("parts")["outputs"]] == ["logits"]
    assert [output["name"] for output in client.get_model_metadata("height")["outputs"]] == ["values"]
    config = client.get_model_config("breeds")
    assert json.loads(config["parameters"]["labels"]["string_value"]) == ["é", "b"]
    assert [tensor["dims"] for tensor in config["input"]] == [[-1], [-1, 3, 32, 32]]


@pytest.mark.parametrize("binary_input", [True, False])
@pytest.mark.parametrize("binary_output", [None, True, False])
@pytest.mark.parametrize("count", [1, 5])
def test_tritonclient_infers_encoded_images_as_the_model_does(client, model, binary_input, binary_output, count):
    images = [jpeg(i) for i in range(count)]
    outputs = None
    if binary_output is not None:
        outputs = [triton.InferRequestedOutput(name, binary_data=binary_output) for name in ("label", "logits")]
    result = client.infer("pets", files(*images, binary=binary_input), outputs=outputs, request_id="mine")
    logits = expected(model, "pets", images)
    close(result.as_numpy("logits"), logits)
    labels = [label.decode() if isinstance(label, bytes) else label for label in result.as_numpy("label")]
    assert labels == [model.tasks["pets"].labels[i] for i in logits.argmax(1)]
    answer = result.get_response()
    assert answer["id"] == "mine"
    assert (answer["model_name"], answer["model_version"]) == ("pets", model.tasks["pets"].digest)


@pytest.mark.parametrize("binary", [True, False])
def test_tritonclient_infers_a_float_tensor_as_the_model_does(client, model, binary):
    pixels = torch.cat([as_input(jpeg(i)) for i in range(3)]).numpy()
    tensor = triton.InferInput("pixels", list(pixels.shape), "FP32").set_data_from_numpy(pixels, binary_data=binary)
    close(client.infer("breeds", [tensor]).as_numpy("logits"), expected(model, "breeds", [jpeg(i) for i in range(3)]))


def test_tasks_of_every_kind_answer_also_in_columns_compressed_by_version_and_at_once(client, model):
    image = jpeg(3)
    close(client.infer("parts", files(image)).as_numpy("logits"), expected(model, "parts", [image]))
    close(client.infer("height", files(image)).as_numpy("values"), expected(model, "height", [image]))
    column = client.infer("pets", files(image, jpeg(4), shape=[2, 1])).as_numpy("logits")
    close(column, expected(model, "pets", [image, jpeg(4)]))
    for algorithm in ("gzip", "deflate"):
        packed = client.infer("pets", files(image), request_compression_algorithm=algorithm)
        close(packed.as_numpy("logits"), expected(model, "pets", [image]))
    by_version = client.infer("pets", files(image), model_version=model.tasks["pets"].digest, timeout=30_000_000)
    close(by_version.as_numpy("logits"), expected(model, "pets", [image]))
    waiting = [client.async_infer("birds", files(jpeg(i))) for i in range(4)]
    for i, answer in enumerate(waiting):
        close(answer.get_result().as_numpy("logits"), expected(model, "birds", [jpeg(i)]))


def test_the_best_classes_come_as_triton_writes_them(client, model):
    output = triton.InferRequestedOutput("logits", class_count=2)
    classes = client.infer("pets", files(jpeg(0), jpeg(1)), outputs=[output]).as_numpy("logits")
    assert classes.shape == (2, 2)
    for row, logits in zip(classes, expected(model, "pets", [jpeg(0), jpeg(1)]), strict=True):
        for text, i in zip(row, logits.argsort(descending=True), strict=False):
            value, index, label = text.decode().split(":")
            assert (int(index), label) == (int(i), model.tasks["pets"].labels[i])
            assert float(value) == pytest.approx(float(logits[i]), abs=ROUNDING)


def test_unloading_keeps_a_task_and_loading_serves_it_again(client, model):
    def states():
        return {entry["name"]: entry["state"] for entry in client.get_model_repository_index()}

    assert set(states().values()) == {"READY"}
    with pytest.raises(InferenceServerException, match="breeds"):
        client.unload_model("pets")  # breeds extends it
    client.unload_model("birds")
    assert states()["birds"] == "UNAVAILABLE"
    assert not client.is_model_ready("birds")
    with pytest.raises(InferenceServerException, match="task 'birds' is unloaded"):
        client.infer("birds", files(jpeg(0)))
    client.load_model("birds")
    close(client.infer("birds", files(jpeg(0))).as_numpy("logits"), expected(model, "birds", [jpeg(0)]))

    client.unload_model("pets", unload_dependents=True)
    assert {name for name, state in states().items() if state == "UNAVAILABLE"} == {"pets", "breeds"}
    client.load_model("breeds")  # and what it extends
    assert set(states().values()) == {"READY"}
    with pytest.raises(InferenceServerException, match="load takes no parameters"):
        client.load_model("birds", config="{}")


def test_errors_reach_tritonclient_with_our_message(client):
    for call, status, message in (
        (lambda: client.infer("pet", files(jpeg())), "404", "no task 'pet'.*pets"),
        (lambda: client.infer("pets", files(b"no image")), "422", "image 0: not an image of a known format"),
        (lambda: client.infer("pets", files(jpeg(), jpeg()[:200])), "422", "image 1: "),
        (lambda: client.infer("pets", files(*[jpeg()] * 9)), "400", "9 images, at most 8"),
        (lambda: client.infer("pets", files(jpeg()), model_version="1"), "404", "has version"),
        (lambda: client.infer("pets", files(jpeg()), timeout=1), "504", "no answer within 1e-06 s"),
        (
            lambda: client.infer("parts", files(jpeg()), outputs=[triton.InferRequestedOutput("label")]),
            "400",
            "no output 'label'; it has: logits",
        ),
        (client.get_log_settings, "404", "no such route"),
        (lambda: client.unload_model("nothing"), "404", "no task 'nothing'"),
    ):
        with pytest.raises(InferenceServerException, match=message) as raised:
            call()
        assert raised.value.status() == status


def image_input(**changes):
    data = [base64.b64encode(jpeg()).decode()]
    return {"name": "image", "datatype": "BYTES", "shape": [1], "data": data, **changes}


def pixel_input(**changes):
    return {"name": "pixels", "datatype": "FP32", "shape": [1, 3, 32, 32], "data": [0.0] * 3072, **changes}


def binary_body(tensor, content, *, size=None, length=None, **request):
    """A request with binary data: its body and its headers."""
    entry = {key: value for key, value in tensor.items() if key != "data"}
    entry["parameters"] = {"binary_data_size": len(content) if size is None else size}
    header = json.dumps({"inputs": [entry], **request}).encode()
    return header + content, {"Inference-Header-Content-Length": str(len(header) if length is None else length)}


def element(content, length=None):
    return struct.pack("<I", len(content) if length is None else length) + content


def nested(depth):
    return b"[" * depth + b"]" * depth


FLOATS = np.zeros(3072, "<f4").tobytes()
JSON_FAULTS = {
    "no inputs": ({}, "'inputs' must be a list"),
    "inputs are no list": ({"inputs": 3}, "'inputs' must be a list"),
    "an input is no object": ({"inputs": [3]}, "'inputs' must be a list of JSON objects"),
    "no input": ({"inputs": []}, "0 inputs; expected one"),
    "two inputs": ({"inputs": [image_input(), pixel_input()]}, "2 inputs; expected one"),
    "unknown name": ({"inputs": [image_input(name="x")]}, "called 'x'; expected 'image' or 'pixels'"),
    "name is a list": ({"inputs": [image_input(name=[])]}, "expected 'image' or 'pixels'"),
    "wrong datatype": ({"inputs": [image_input(datatype="FP32")]}, "datatype 'FP32', expected BYTES"),
    "numbers and a long text": (
        {"inputs": [pixel_input(data=[0.0] * 3071 + ["x" * 60_000])]},
        "must hold 3072 numbers",
    ),
    "half precision": ({"inputs": [pixel_input(datatype="FP16")]}, "datatype 'FP16', expected FP32"),
    "no datatype": ({"inputs": [image_input(datatype=None)]}, "expected BYTES"),
    "no shape": ({"inputs": [image_input(shape=None)]}, "'shape' must be a list of whole numbers"),
    "shape of texts": ({"inputs": [image_input(shape=["1"])]}, "'shape' must be a list of whole numbers"),
    "shape of truth": ({"inputs": [image_input(shape=[True])]}, "'shape' must be a list of whole numbers"),
    "empty shape": ({"inputs": [image_input(shape=[])]}, "expected [n] or [n, 1]"),
    "no images": ({"inputs": [image_input(shape=[0], data=[])]}, "with n of 1 or more"),
    "negative shape": ({"inputs": [image_input(shape=[-1])]}, "with n of 1 or more"),
    "too many axes": ({"inputs": [image_input(shape=[1, 1, 1])]}, "expected [n] or [n, 1]"),
    "wrong size": ({"inputs": [pixel_input(shape=[1, 3, 64, 48])]}, "expected [n, 3, 32, 32]"),
    "four channels": ({"inputs": [pixel_input(shape=[1, 4, 32, 32])]}, "expected [n, 3, 32, 32]"),
    "too many images": ({"inputs": [image_input(shape=[10**9])]}, "1000000000 images, at most 8"),
    "huge shape": ({"inputs": [pixel_input(shape=[10**400, 3, 32, 32])]}, "at most 8"),
    "no data": ({"inputs": [image_input(data=None)]}, "neither a list 'data' nor"),
    "data is a text": ({"inputs": [image_input(data="abc")]}, "neither a list 'data' nor"),
    "fewer data than the shape": ({"inputs": [image_input(shape=[2])]}, "must hold 2 texts"),
    "data of numbers": ({"inputs": [image_input(data=[3])]}, "must hold 1 texts"),
    "not base64": ({"inputs": [image_input(data=["%%%"])]}, "in base64"),
    "base64 beyond ascii": ({"inputs": [image_input(data=["ä"])]}, "in base64"),
    "too few numbers": ({"inputs": [pixel_input(data=[0.0] * 3071)]}, "must hold 3072 numbers"),
    "numbers as texts": ({"inputs": [pixel_input(data=["0"] * 3072)]}, "must hold 3072 numbers"),
    "numbers missing": ({"inputs": [pixel_input(data=[None] * 3072)]}, "must hold 3072 numbers"),
    "ragged rows": ({"inputs": [pixel_input(data=[[[[0.0] * 31] + [[0.0] * 32] * 31] * 3])]}, "must hold 3072 numbers"),
    "other nesting": ({"inputs": [pixel_input(data=np.zeros((3, 1024)).tolist())]}, "must hold 3072 numbers"),
    "integers beyond 64 bits": ({"inputs": [pixel_input(data=[10**30] * 3072)]}, "must hold 3072 numbers"),
    "parameters are no object": ({"inputs": [image_input(parameters=[])]}, "'parameters' must be a JSON object"),
    "shared memory": ({"inputs": [image_input(parameters={"shared_memory_region": "x"})]}, "shared memory is not"),
    "data twice": ({"inputs": [image_input(parameters={"binary_data_size": 0})]}, "expected one of them"),
    "negative binary size": ({"inputs": [image_input(parameters={"binary_data_size": -4})]}, "a whole number of 0"),
    "binary size without data": (
        {"inputs": [{**pixel_input(parameters={"binary_data_size": 12288}), "data": None}]},
        "expected one of them",
    ),
    "outputs are no list": ({"inputs": [image_input()], "outputs": {}}, "'outputs' must be a list"),
    "output without a name": ({"inputs": [image_input()], "outputs": [{}]}, "has no name"),
    "unknown output": ({"inputs": [image_input()], "outputs": [{"name": "x"}]}, "no output 'x'; it has: logits, label"),
    "output twice": ({"inputs": [image_input()], "outputs": [{"name": "label"}] * 2}, "asked for twice"),
    "classes of labels": (
        {"inputs": [image_input()], "outputs": [{"name": "label", "parameters": {"classification": 2}}]},
        "cannot be classified",
    ),
    "classes below 0": (
        {"inputs": [image_input()], "outputs": [{"name": "logits", "parameters": {"classification": -1}}]},
        "a whole number of 0 or more",
    ),
    "binary is a word": (
        {"inputs": [image_input()], "outputs": [{"name": "label", "parameters": {"binary_data": "yes"}}]},
        "must be true or false",
    ),
    "id is a number": ({"inputs": [image_input()], "id": 3}, "id must be a text"),
    "long id": ({"inputs": [image_input()], "id": "x" * 257}, "id must be a text"),
    "timeout is a word": ({"inputs": [image_input()], "parameters": {"timeout": "1"}}, "'timeout' must be a whole"),
}


@pytest.mark.parametrize("fault", JSON_FAULTS)
def test_malformed_tensors_are_refused_with_400_and_the_reason(http, fault):
    body, message = JSON_FAULTS[fault]
    response = http.post("/v2/models/pets/infer", content=json.dumps(body))
    assert (response.status_code, list(response.json())) == (400, ["error"])
    assert message in response.json()["error"]


BODY_FAULTS = {
    "empty": (b"", {}, "not valid JSON"),
    "not JSON": (b"{", {}, "not valid JSON"),
    "no object": (b"[]", {}, "not a JSON object"),
    "not text": (b"\xff\xfe", {}, "not valid JSON"),
    "key twice": (b'{"inputs": 1, "inputs": 2}', {}, "given twice"),
    "not a number": (b'{"inputs": NaN}', {}, "NaN is not valid JSON"),
    "nested deeply": (b'{"inputs": ' + nested(50_000) + b"}", {}, "not valid JSON"),
    "too many lists": (b'{"inputs": [' + b"[]," * 200_000 + b"[]]}", {}, "more than"),
    "many values": (b'{"inputs": [' + b"0," * 400_000 + b"0]}", {}, "'inputs' must be a list of JSON objects"),
    "length is no number": (b"{}", {"Inference-Header-Content-Length": "x"}, "Inference-Header-Content-Length is 'x'"),
    "negative length": (b"{}", {"Inference-Header-Content-Length": "-1"}, "Inference-Header-Content-Length is '-1'"),
    "length beyond the body": (b"{}", {"Inference-Header-Content-Length": "3"}, "which has 2 bytes"),
    "length of many digits": (b"{}", {"Inference-Header-Content-Length": "9" * 5000}, "which has 2 bytes"),
    "length in other digits": (b"{}", {"Inference-Header-Content-Length": "²"}, "Inference-Header-Content-Length"),
    "image longer than the data": (*binary_body(image_input(), element(b"abc", 4)), "claims 4 bytes, 3 are left"),
    "image of four gigabytes": (*binary_body(image_input(), element(b"abc", 2**32 - 1)), "claims 4294967295 bytes"),
    "data end in a length": (*binary_body(image_input(shape=[2]), element(b"abc") + b"\1\0"), "end within the length"),
    "fewer images than the shape": (*binary_body(image_input(shape=[2]), element(b"abc")), "hold 1 images"),
    "more images than the shape": (*binary_body(image_input(), element(b"a") * 2), "in 5 of 10 bytes"),
    "no bytes": (*binary_body(image_input(), b""), "hold 0 images"),
    "size beyond the body": (*binary_body(image_input(), element(b"a"), size=100), "binary_data_size is 100, but 5"),
    "size below the body": (*binary_body(image_input(), element(b"a") + b"!", size=5), "1 bytes after the JSON belong"),
    "size is a fraction": (*binary_body(image_input(), b"", size=0.5), "a whole number"),
    "float bytes missing": (*binary_body(pixel_input(), FLOATS[:-1]), "12287 bytes, expected 12288"),
    "float bytes too many": (*binary_body(pixel_input(), FLOATS + b"\0" * 4), "12292 bytes, expected 12288"),
    "not gzip": (b"{}", {"Content-Encoding": "gzip"}, "the body is not gzip"),
    "gzip cut off": (gzip.compress(b"{}" * 1000)[:-9], {"Content-Encoding": "gzip"}, "cut off"),
}


@pytest.mark.parametrize("fault", BODY_FAULTS)
def test_malformed_bodies_are_refused_with_400_and_the_reason(http, fault):
    content, headers, message = BODY_FAULTS[fault]
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    response = http.post("/v2/models/pets/infer", content=content, headers=raw)
    assert (response.status_code, list(response.json())) == (400, ["error"])
    assert message in response.json()["error"]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
PARTS = ("name", "datatype", "shape", "data", "parameters")
PARAMETERS = st.dictionaries(st.sampled_from(["binary_data_size", "shared_memory_region", "timeout"]), JSON_VALUES)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    tensor=st.sampled_from([image_input(), pixel_input(shape=[1, 3, 2, 2], data=[0.5] * 12)]),
    changes=st.dictionaries(st.sampled_from(PARTS), JSON_VALUES | st.lists(st.integers(-2, 40)) | PARAMETERS),
    more=st.dictionaries(st.sampled_from(["id", "outputs", "parameters"]), JSON_VALUES | PARAMETERS),
    content=st.binary(max_size=40),
    length=st.none() | st.integers(-1, 400).map(str),
)
def test_no_request_gets_anything_but_images_or_a_400(tensor, changes, more, content, length):
    body = json.dumps({"inputs": [{**tensor, **changes}], **more}).encode() + content
    status = 400
    try:
        assert 1 <= len(parse_request(body, length, InputLimits(8, (2, 2))).images) <= 8
    except ProblemError as error:
        status = error.status
    assert status == 400


def test_what_is_too_large_or_not_finite_is_refused_by_its_own_status(http):
    bomb = gzip.compress(b" " * 2**21)
    for content, headers, status, message in (
        (b" " * (2**20 + 1), {}, 413, "1048577 bytes"),
        (bomb, {"Content-Encoding": "gzip"}, 413, "more than 1048576 bytes when decompressed"),
        (b"{}", {"Content-Encoding": "br"}, 415, "expected gzip, deflate or none"),
        (*binary_body(pixel_input(), np.full(3072, np.nan, "<f4").tobytes()), 422, "NaN or infinite"),
        (json.dumps({"inputs": [pixel_input(data=[1e300] * 3072)]}).encode(), {}, 422, "NaN or infinite"),
    ):
        response = http.post("/v2/models/pets/infer", content=content, headers=headers)
        assert response.status_code == status
        assert message in response.json()["error"]


def test_what_a_compressed_body_may_become_counts_as_held_and_is_given_back(server, http, monkeypatch):
    packed = gzip.compress(json.dumps({"inputs": [image_input()]}).encode())
    assert http.post("/v2/models/pets/infer", content=packed, headers={"Content-Encoding": "gzip"}).is_success
    monkeypatch.setattr(server.state.bodies, "limit", 2 * len(packed))
    response = http.post("/v2/models/pets/infer", content=packed, headers={"Content-Encoding": "gzip"})
    assert response.status_code == 503
    assert server.state.bodies.used == 0


def test_a_task_that_computes_no_number_says_so_in_json_and_in_binary(model):
    broken = task("broken")
    broken = broken.map(lambda tensor: tensor * float("nan"))
    with live(create_app(MemoryViT(model.backbone, [broken, model.tasks["birds"]]))) as url:
        answer = httpx.post(f"{url}/v2/models/broken/infer", json={"inputs": [image_input()]}).json()
        assert [(output["name"], output["data"]) for output in answer["outputs"]] == [
            ("logits", [None] * 3),
            ("label", [""]),
        ]
        with triton.InferenceServerClient(url.removeprefix("http://")) as client:
            assert np.isnan(client.infer("broken", files(jpeg())).as_numpy("logits")).all()
            close(client.infer("birds", files(jpeg())).as_numpy("logits"), expected(model, "birds", [jpeg()]))


def test_tokens_hold_for_these_routes_too_and_refusals_have_their_form(model):
    app = create_app(MemoryViT(model.backbone, model.tasks.values()), Settings(**TOKENS))
    with live(app) as url, triton.InferenceServerClient(url.removeprefix("http://")) as client:
        predict, admin = ({"Authorization": f"Bearer {token}"} for token in TOKENS.values())
        assert client.is_server_live()
        assert client.is_server_ready()
        with pytest.raises(InferenceServerException, match="needs a token") as raised:
            client.infer("pets", files(jpeg()))
        assert raised.value.status() == "401"
        with pytest.raises(InferenceServerException, match="needs the admin token") as raised:
            client.unload_model("birds", headers=predict)
        assert raised.value.status() == "403"
        client.infer("pets", files(jpeg()), headers=predict)
        client.unload_model("birds", headers=admin)


def test_a_full_queue_is_503_with_retry_after(server, http, monkeypatch):
    monkeypatch.setattr(server.state.engine._queue, "_max_waiting", 0)
    response = http.post("/v2/models/pets/infer", json={"inputs": [image_input()]})
    assert response.status_code == 503
    assert int(response.headers["Retry-After"]) >= 1
    assert "Try again" in response.json()["error"]


def test_requests_of_these_routes_are_counted_by_their_patterns(http, client):
    client.infer("pets", files(jpeg()))
    for name in ("a", "b", "c"):
        http.get(f"/v2/models/{name}")
        http.get(f"/v2/{name}/unknown")
    text = http.get("/metrics").text
    assert 'vit_memory_requests_total{method="POST",route="/v2/models/{name}/infer",status="200"}' in text
    assert 'vit_memory_requests_total{method="GET",route="/v2/models/{name}",status="404"}' in text
    assert 'route="unknown",status="404"} ' in text
    assert "/v2/models/a" not in text
    assert 'vit_memory_task_images_total{task="pets"}' in text
    assert "process_resident_memory_bytes{" in text


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_a_wrong_method_is_a_405_that_names_the_right_one(http, method):
    response = http.request(method, "/v2/models/pets/infer")
    assert (response.status_code, response.headers["Allow"]) == (405, "POST")
    assert response.headers["Content-Type"] == "application/json"
    assert method == "HEAD" or "takes POST" in response.json()["error"]


def test_what_is_refused_before_any_route_has_the_form_of_the_protocol(server, http, monkeypatch):
    monkeypatch.setattr(server.state, "requests", server.state.settings.limits.max_requests)
    response = http.get("/v2/models/pets")
    assert (response.status_code, list(response.json())) == (503, ["error"])
    assert list(http.get("/v1/tasks").json())[:2] == ["type", "title"]


def test_a_bug_of_ours_is_a_500_in_the_form_of_the_protocol(http, monkeypatch, caplog):
    def broken(*arguments):
        raise ZeroDivisionError("a secret of the server")

    monkeypatch.setattr("vit_memory.serving.inference_protocol.metadata_of", broken)
    response = http.get("/v2/models/pets")
    assert (response.status_code, list(response.json())) == (500, ["error"])
    assert "secret" not in response.text
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.fields["request_id"] == response.headers["x-request-id"]
