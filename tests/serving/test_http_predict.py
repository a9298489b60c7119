"""POST /v1/predict: the model's own answers, however an image is sent, and every image's error in its own place."""

import base64
import io
import json
import threading
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_builders import PREPROCESSING, as_input, backbone, jpeg, model_of, task
from http_builders import IMAGE, as_json, check_problem, client_of, fits, predict, zoo
from PIL import Image

from vit_memory import MemoryViT
from vit_memory.data.decoding import Encoded
from vit_memory.predictions import predictions
from vit_memory.serving import predict_routes
from vit_memory.serving.openapi import SCHEMAS
from vit_memory.serving.options import EngineOptions


@pytest.fixture(scope="module")
def client():
    with client_of() as client:
        yield client


def answers(response):
    assert response.status_code == 200, response.text
    return response.json()["images"]


def test_every_kind_of_task_answers_what_the_model_says(client):
    (image,) = answers(predict(client, jpeg(3)))
    model = MemoryViT(backbone(), zoo())
    outputs = model(as_input(jpeg(3)))
    expected = {name: next(predictions(model.tasks[name], outputs[name])) for name in outputs}
    assert list(image["tasks"]) == list(expected)
    pets = image["tasks"]["pets"]
    assert pets["label"] == expected["pets"].label
    assert pets["confidence"] == pytest.approx(expected["pets"].confidence, abs=1e-5)
    assert sum(one["probability"] for one in pets["top"]) == pytest.approx(1, abs=1e-5)
    parts = image["tasks"]["parts"]
    assert {one["label"]: one["probability"] for one in parts["labels"]} == pytest.approx(
        dict(expected["parts"].present), abs=1e-5
    )
    assert len(parts["top"]) == 3
    assert all(one["threshold"] == 0.5 for one in parts["top"])
    assert image["tasks"]["height"]["values"] == pytest.approx(dict(expected["height"].values), abs=1e-4)
    assert {name: one["digest"] for name, one in image["tasks"].items()} == {t.name: t.digest for t in zoo()}
    probability = outputs.original.logits.softmax(-1)[0]
    assert image["original"]["top"][0]["label"] == str(int(probability.argmax()))
    assert image["original"]["top"][0]["probability"] == pytest.approx(float(probability.max()), abs=1e-5)
    assert image["original"]["feature_size"] == backbone().width


def test_all_three_forms_of_a_body_give_the_same_answer(client):
    options = {"tasks": ["pets", "child"], "top_k": 1}
    query = {"tasks": "pets,child", "top_k": "1"}
    text = base64.b64encode(jpeg(5)).decode()
    sent = [
        client.post("/v1/predict", content=jpeg(5), headers=IMAGE, params=query),
        client.post("/v1/predict", content=jpeg(5), headers={"content-type": "application/octet-stream"}, params=query),
        client.post("/v1/predict", files={"image": ("image", jpeg(5))}, data={"tasks": "pets,child", "top_k": "1"}),
        client.post("/v1/predict", files={"file": ("image", jpeg(5))}, params={"tasks": ["pets", "child"], "top_k": 1}),
        client.post("/v1/predict", json=as_json(jpeg(5), **options)),
        client.post("/v1/predict", json={"images": [{"name": "image", "data": text}]}, params=query),
        client.post("/v1/predict", json={"images": ["data:image/jpeg;base64," + text], **options}),
    ]
    tasks = [answers(response)[0]["tasks"] for response in sent]
    assert list(tasks[0]) == ["pets", "child"]
    assert len(tasks[0]["child"]["top"]) == 1
    for other in tasks[1:]:
        assert other == tasks[0]


def test_options_in_the_body_come_before_those_in_the_query(client):
    response = client.post("/v1/predict", json=as_json(jpeg(), tasks=["child"]), params={"tasks": "pets", "top_k": 2})
    (image,) = answers(response)
    assert list(image["tasks"]) == ["child"]
    assert len(image["tasks"]["child"]["top"]) == 2


def test_a_whole_number_may_be_written_with_a_decimal_point(client):
    (image,) = answers(client.post("/v1/predict", json=as_json(jpeg(), tasks=["child"], top_k=2.0)))
    assert len(image["tasks"]["child"]["top"]) == 2
    check_problem(client.post("/v1/predict", json=as_json(jpeg(), top_k=2.5)), 400)


def test_a_request_may_ask_for_the_original_output_alone(client):
    (image,) = answers(predict(client, params={"tasks": "", "check_original": "true"}))
    assert image["tasks"] == {}
    assert image["original"]["identical"] is True
    assert answers(predict(client))[0]["original"]["identical"] is None


def test_one_bad_image_of_several_gets_its_own_error_in_its_own_place(client):
    sent = [("a.jpg", jpeg(1)), ("broken.jpg", jpeg(2)[:200]), ("b.jpg", jpeg(3)), ("text.jpg", b"no image")]
    response = client.post("/v1/predict", files=[("images", part) for part in sent])
    images = answers(response)
    assert [image["name"] for image in images] == ["a.jpg", "broken.jpg", "b.jpg", "text.jpg"]
    assert ["tasks" in image for image in images] == [True, False, True, False]
    for image in (images[1], images[3]):
        assert image["error"]["status"] == 422
        assert image["error"]["instance"] == response.headers["x-request-id"]
        assert image["name"] in image["error"]["detail"]
    alone = answers(predict(client, jpeg(3)))[0]["tasks"]["pets"]
    assert images[2]["tasks"]["pets"]["label"] == alone["label"]
    assert images[2]["tasks"]["pets"]["confidence"] == pytest.approx(alone["confidence"], abs=1e-5)
    mixed = client.post("/v1/predict", json={"images": ["%%%", *as_json(jpeg())["images"]]})
    assert [image.get("error", {}).get("status") for image in answers(mixed)] == [422, None]


@pytest.mark.parametrize("content", [b"no image", jpeg()[:100], b"\x89PNG\r\n\x1a\n", b"GIF89a" + bytes(20)])
def test_a_single_bad_image_is_a_422(client, content):
    check_problem(predict(client, content), 422)
    assert predict(client).status_code == 200


def test_an_image_with_more_pixels_than_allowed_is_a_422_before_it_is_decoded(client):
    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    size = (7500).to_bytes(4, "big") * 2
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size + b"\x08\x02\0\0\0") + chunk(b"IDAT", zlib.compress(bytes(99)))
    assert "7500 × 7500" in check_problem(predict(client, bomb), 422)["detail"]


def picture(width, height):
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue()


# How a task's images are preprocessed, the size of an image, and why it is refused.
SIZES = {
    "narrow, resized by its shorter side": ({"resize": 256, "crop": (32, 32)}, (10, 15_000), "resized to 384000 × 256"),
    "large, without a fixed size": ({"resize": None}, (1025, 1024), "more than the limit of 1048576"),
    "long, resized by its shorter side": ({"resize": 64}, (65, 20_000), "more than the limit of 1048576"),
    "smaller than a patch": ({"resize": None}, (40, 3), "3 × 40 pixels after preprocessing: smaller than one patch"),
}


@pytest.mark.parametrize("case", SIZES)
def test_an_image_of_a_size_that_is_not_taken_is_a_422_before_it_is_decoded(case, monkeypatch):
    changes, size, reason = SIZES[case]
    model = MemoryViT(backbone(), [task("odd", replace(PREPROCESSING, **changes)), task("pets")])
    with client_of(model) as client:
        assert list(answers(predict(client, picture(40, 30)))[0]["tasks"]) == ["odd", "pets"]
        content = picture(*size)
        with monkeypatch.context() as patched:
            patched.setattr(Encoded, "decode", None)
            assert reason in check_problem(predict(client, content, params={"tasks": "odd"}), 422)["detail"]
        assert client.get("/v1/status").json()["refused"] == {"bad image": 1}
        assert predict(client).status_code == 200


def test_a_limit_of_pixels_below_the_size_of_the_model_refuses_no_small_image():
    with client_of(model_of("one"), engine=EngineOptions(max_pixels=900)) as client:
        assert predict(client, picture(30, 30)).status_code == 200, "it is resized to 32 × 32"
        check_problem(predict(client, picture(31, 30)), 422)


def test_attention_is_explained_block_by_block_and_sums_to_one(client):
    (image,) = answers(predict(client, params={"explain": "child,pets", "tasks": "child"}))
    assert list(image["explanations"]) == ["child", "pets"]
    explained = image["explanations"]["child"]
    attention = MemoryViT(backbone(), zoo()).explain(as_input(jpeg())[0], "child")
    assert explained["grid"] == list(attention.patches.shape[-2:])
    assert len(explained["blocks"]) == backbone().depth
    for block, patches in zip(explained["blocks"], attention.patches.mean(1).flatten(1), strict=True):
        torch.testing.assert_close(torch.tensor(block["patches"]), patches, rtol=0, atol=2e-5)
        parts = [block["memory"], block["itself"], block["originals"]]
        parts += [*block["ancestors"].values(), *block["ancestor_memory"].values(), *block["patches"]]
        assert sum(parts) == pytest.approx(1, abs=1e-3)
        assert set(block["ancestors"]) == set(block["ancestor_memory"]) == {"pets"}


def test_more_explanations_than_allowed_are_refused_before_an_image_is_decoded(client):
    images = [jpeg(i) for i in range(33)]
    body = as_json(*images, explain=["child", "pets"])
    record = check_problem(client.post("/v1/predict", json=body), 400)
    assert (record["limit"], "2 tasks to explain for 33 images are 66" in record["detail"]) == (64, True)
    assert client.get("/v1/tasks").json()["limits"]["max_explained"] == 64
    allowed = as_json(*images[:32], explain=["child", "pets", "pets"], tasks=[])
    assert all(len(image["explanations"]) == 2 for image in answers(client.post("/v1/predict", json=allowed)))


@pytest.mark.parametrize(
    ("images", "options", "in_a_thread"),
    [(1, {}, False), (1, {"explain": "child"}, False), (64, {}, True), (1, {"tasks": "wide"}, True)],
)
def test_large_answers_are_built_beside_the_event_loop(monkeypatch, images, options, in_a_thread):
    threads = []
    build = predict_routes.answer_json

    def watched(*arguments):
        threads.append(threading.current_thread().name)
        return build(*arguments)

    monkeypatch.setattr(predict_routes, "answer_json", watched)
    wide = task("wide", kind="multi-label", labels=[str(i) for i in range(6000)])
    with client_of(MemoryViT(backbone(), [*zoo()[:4], wide])) as client:
        options = {"tasks": "pets,parts,height,child", **options}
        files = [("image", (f"{i}.jpg", jpeg(i))) for i in range(images)]
        assert len(answers(client.post("/v1/predict", files=files, params=options))) == images
    assert {name.startswith("asyncio_") for name in threads} == {in_a_thread}


def test_a_task_without_attention_of_its_own_is_a_400(client):
    assert "regime 'head'" in check_problem(predict(client, params={"explain": "plain"}), 400)["detail"]


def test_an_unknown_task_is_a_404_that_names_the_known_ones(client):
    record = check_problem(predict(client, params={"tasks": "pet"}), 404)
    assert "Did you mean 'pets'?" in record["detail"]
    assert record["tasks"] == ["pets", "parts", "height", "child", "plain"]
    check_problem(predict(client, params={"explain": "nobody"}), 404)


def test_all_images_of_a_request_and_its_digests_are_of_one_version(client):
    response = client.post("/v1/predict", json=as_json(*(jpeg(i) for i in range(5)), tasks=["pets"]))
    assert response.json()["version"] == client.get("/v1/tasks").json()["version"]
    assert len({image["tasks"]["pets"]["digest"] for image in answers(response)}) == 1


def test_a_task_that_computes_nan_is_answered_with_null_and_says_so():
    def broken(name, **options):
        one = task(name, **options)
        return replace(one, head_bias=torch.full_like(one.head_bias, float("nan")))

    model = MemoryViT(
        backbone(),
        [broken("one"), broken("many", kind="multi-label"), broken("value", kind="regression"), task("fine")],
    )
    with client_of(model) as client:
        tasks = answers(predict(client))[0]["tasks"]
    assert tasks["one"] | {"digest": ""} == {
        "kind": "single-label", "digest": "", "label": None, "confidence": None, "top": [], "not_a_number": True,
    }  # fmt: skip
    assert tasks["many"]["labels"] == []
    assert tasks["value"]["values"] == {"a": None, "b": None, "c": None}
    assert [tasks[name].get("not_a_number", False) for name in tasks] == [True, True, True, False]


def test_answers_have_the_shapes_that_the_description_promises(client):
    both = [("image", ("a.jpg", jpeg())), ("image", ("b.jpg", b"no image"))]
    response = client.post("/v1/predict", files=both, data={"explain": "child"})
    fits(response.json(), SCHEMAS["Prediction"], SCHEMAS)
    fits(client.get("/v1/tasks").json(), SCHEMAS["Tasks"], SCHEMAS)
    fits(client.get("/v1/tasks/child").json(), SCHEMAS["Task"], SCHEMAS)
    fits(client.get("/v1/tasks/nobody").json(), SCHEMAS["Problem"], SCHEMAS)


def test_names_of_images_are_cleaned_and_never_break_an_answer(client):
    data = base64.b64encode(b"no image").decode()
    names = ["../../etc/passwd", "C:\\photos\\cat.jpg", "a\nb", "", "x" * 900]
    body = json.dumps({"images": [{"name": name, "data": data} for name in names]})
    response = client.post("/v1/predict", content=body, headers={"content-type": "application/json"})
    assert [image["name"] for image in answers(response)] == ["passwd", "cat.jpg", "ab", "image 4", "x" * 200]


def test_probabilities_survive_extreme_logits():
    one = task("one")
    huge = replace(one, head_bias=torch.tensor([1e30, -1e30, 0.0]))
    many = replace(task("many", kind="multi-label"), head_bias=torch.tensor([1e30, -1e30, 0.0]))
    with client_of(MemoryViT(backbone(), [huge, many])) as client, np.errstate(over="raise", invalid="raise"):
        tasks = answers(predict(client))[0]["tasks"]
    assert tasks["one"]["label"] == "a"
    assert tasks["one"]["confidence"] == 1.0
    assert [one["label"] for one in tasks["many"]["labels"]][:1] == ["a"]


def test_an_empty_task_set_is_served():
    with client_of(model_of()) as client:
        assert answers(predict(client))[0]["tasks"] == {}
        check_problem(predict(client, params={"tasks": "pets"}), 404)
