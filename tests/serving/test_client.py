"""The clients of a server, blocking and awaited: the same methods, errors that carry the server's problem."""

import asyncio
import builtins
import doctest
import inspect
import io
import logging
import pickle
import subprocess
import sys
from dataclasses import replace

import httpx
import numpy as np
import pytest
import torch
from engine_builders import as_input, backbone, jpeg, task
from live_server import live
from PIL import Image

from builders import ROUNDING, trained_branch
from vit_memory import AsyncClient, Client, MemoryViT, save_branch, save_task
from vit_memory.data.decoding import decode
from vit_memory.errors import DamagedFile, FileError, RequestFailed, ServingError, UnknownTask
from vit_memory.serving import client as client_module
from vit_memory.serving.app import create_app
from vit_memory.serving.client import LONGEST_WAIT_S
from vit_memory.serving.client_uploads import encode_image
from vit_memory.serving.settings import Settings
from vit_memory.serving.task_set import TaskSet

URL = "http://127.0.0.1:1"
TOKEN, ADMIN = "a-secret-Token_123", "another-secret-456"
FULL = {"type": "about:blank", "title": "Service Unavailable", "status": 503, "detail": "the queue is full. Try again."}


@pytest.fixture(params=["blocking", "awaited"])
def call_at(request):
    """Calls one method of either client of the server at an address."""

    def run(url, method, *arguments, token=None, retries=0, transport=None, **options):
        if request.param == "blocking":
            with Client(url, token, retries=retries, transport=transport) as client:
                return getattr(client, method)(*arguments, **options)

        async def awaited():
            async with AsyncClient(url, token, retries=retries, transport=transport) as client:
                return await getattr(client, method)(*arguments, **options)

        return asyncio.run(awaited())

    return run


@pytest.fixture
def call(call_at):
    """Calls one method of either client, over a connection that `answer(request)` stands for."""
    return lambda answer, *arguments, **options: call_at(
        URL, *arguments, transport=httpx.MockTransport(answer), **options
    )


@pytest.fixture(scope="module")
def model():
    pets = task("pets", labels=["cat", "dog"])
    cats = replace(pets, head_bias=torch.tensor([100.0, 0.0]))  # says cat to every image
    others = [task("breeds", parents=["pets"]), task("parts", kind="multi-label", labels=list("abcdefgh"))]
    return MemoryViT(backbone(), [cats, *others, task("height", kind="regression", labels=["height"])])


@pytest.fixture(scope="module")
def url(model):
    with live(create_app(model, Settings(token=TOKEN, admin_token=ADMIN))) as url:
        yield url


@pytest.fixture
def waits(monkeypatch):
    """The waits of a client, which take no time here: an awaited one leaves its event loop to others."""
    seconds = []

    def block(wait):
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        seconds.append(wait)

    async def sleep(wait):
        seconds.append(wait)

    monkeypatch.setattr(client_module.time, "sleep", block)
    monkeypatch.setattr(client_module.asyncio, "sleep", sleep)
    return seconds


def problem(status, title, detail, **fields):
    return {"type": "about:blank", "title": title, "status": status, "detail": detail, "instance": "id-7", **fields}


def test_a_refusal_raises_the_problem_of_the_server(call):
    body = problem(404, "Not Found", "no task 'pet'. Attached: pets.", known=["pets"])
    with pytest.raises(RequestFailed, match="404 Not Found: no task 'pet'. Attached: pets.") as raised:
        call(lambda _: httpx.Response(404, json=body), "remove", "pet")
    error = raised.value
    assert (error.status, error.title, error.detail) == (404, "Not Found", "no task 'pet'. Attached: pets.")
    assert error.problem["known"] == ["pets"]
    assert error.request_id == "id-7"
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.status, copy.problem, str(copy)) == (404, error.problem, str(error))


@pytest.mark.parametrize("body", ["", "<html>Bad Gateway</html>", "[1]", '{"title": 3, "status": "x"}'])
def test_a_refusal_by_something_else_on_the_way_is_the_same_error(call, body):
    with pytest.raises(RequestFailed) as raised:
        call(lambda _: httpx.Response(502, text=body), "status")
    assert raised.value.status == 502


@pytest.mark.parametrize("body", ["no JSON", "[]", "{}", '{"version": 1, "images": [{"name": "a"}]}'])
def test_an_answer_that_is_none_is_an_error_of_the_same_kind(call, body):
    with pytest.raises(RequestFailed, match="not an answer that this client knows"):
        call(lambda _: httpx.Response(200, text=body), "predict", b"image")


def test_a_server_that_is_not_there_or_too_slow_is_told_without_a_status(call):
    def fail(error):
        def answer(request):
            raise error("the reason", request=request)

        return answer

    for error, message in (
        (httpx.ConnectError, "no answer: GET .*/v1/status: the reason"),
        (httpx.ReadTimeout, "timed out"),
    ):
        with pytest.raises(RequestFailed, match=message) as raised:
            call(fail(error), "status")
        assert raised.value.status is None


def test_a_full_queue_is_asked_again_after_its_wait_and_only_as_often_as_asked(call, waits):
    answers = iter([503, 503, 200])

    def answer(request):
        assert request.read().count(b"content of the image") == 1  # the body is whole each time
        status = next(answers)
        if status == 503:
            return httpx.Response(503, json=FULL, headers={"Retry-After": "3"})
        return httpx.Response(200, json={"version": "v", "images": [], "request_id": "r", "seconds": 0.1})

    assert len(call(answer, "predict", b"content of the image", retries=5)) == 0
    assert waits == [3, 3]
    waits.clear()
    for retries in (0, 2):
        count = []
        with pytest.raises(RequestFailed, match="503 Service Unavailable: the queue is full"):
            call(lambda _, count=count: (count.append(1), httpx.Response(503, json=FULL))[1], "tasks", retries=retries)
        assert len(count) == retries + 1
    assert waits == [1, 1]  # without Retry-After


@pytest.mark.parametrize(
    ("header", "wait"), [("100000", LONGEST_WAIT_S), ("-1", 1), ("Wed, 21 Oct 2026 07:28:00 GMT", 1), ("²", 1)]
)
def test_no_server_can_make_a_client_wait_for_long(call, waits, header, wait):
    def answer(_):
        return httpx.Response(503, json=FULL, headers=[(b"Retry-After", header.encode("latin-1"))])

    with pytest.raises(RequestFailed):
        call(answer, "status", retries=1)
    assert waits == [wait]


def test_other_refusals_are_not_repeated(call, waits):
    count = []
    with pytest.raises(RequestFailed):
        call(lambda _: (count.append(1), httpx.Response(504, json={}))[1], "status", retries=9)
    assert len(count) == 1
    assert waits == []


@pytest.mark.parametrize("lost", [httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError, 500, 502])
def test_a_prediction_whose_server_was_lost_is_sent_again_and_a_change_is_not(call, waits, lost):
    """As a proxy answers for a process that was killed: in plain text, or not at all."""
    requests = []

    def answer(request):
        requests.append(request)
        if len(requests) % 3 == 0:
            return httpx.Response(200, json={"version": "v", "images": [], "request_id": "r", "seconds": 0.1})
        if isinstance(lost, int):
            return httpx.Response(lost, text="Internal Server Error")
        raise lost("the reason")

    assert len(call(answer, "predict", b"content of the image", retries=5)) == 0
    assert (len(requests), waits) == (3, [1, 1])
    with pytest.raises(RequestFailed):
        call(answer, "predict", b"content of the image")
    requests.clear()
    with pytest.raises(RequestFailed):
        call(answer, "remove", "pets", retries=5)
    assert len(requests) == 1


def test_a_failure_that_the_server_itself_reports_is_not_repeated(call, waits):
    count = []
    failed = httpx.Response(500, json={"status": 500, "title": "Internal Server Error", "detail": "its log has it."})
    with pytest.raises(RequestFailed, match="its log has it"):
        call(lambda _: (count.append(1), failed)[1], "predict", b"content of the image", retries=5)
    assert (len(count), waits) == (1, [])


def test_the_token_is_sent_and_appears_nowhere_else(call, caplog):
    caplog.set_level(logging.DEBUG)
    seen = []

    def answer(request):
        seen.append(request.headers["Authorization"])
        return httpx.Response(401, json=problem(401, "Unauthorized", "the token is not valid."))

    with pytest.raises(RequestFailed) as raised:
        call(answer, "status", token=TOKEN)
    assert seen == [f"Bearer {TOKEN}"]
    assert TOKEN not in f"{raised.value} {raised.value!r} {raised.value.problem} {caplog.text}"
    assert TOKEN not in repr(Client(URL, TOKEN))
    with pytest.raises(ServingError) as raised:
        Client(URL, TOKEN + "\n")
    assert TOKEN not in str(raised.value)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://user:password@host", ""])
def test_an_address_that_is_none_or_holds_a_password_is_refused_without_repeating_it(url):
    with pytest.raises(ServingError) as raised:
        Client(url)
    assert "password@" not in str(raised.value)


def test_both_clients_have_the_same_methods_with_the_same_arguments():
    def methods(kind):
        names = [name for name in dir(kind) if not name.startswith("_") and name != "close"]
        return {name: (str(inspect.signature(getattr(kind, name))), getattr(kind, name).__doc__) for name in names}

    assert methods(Client) == methods(AsyncClient)
    assert set(methods(Client)) == {"predict", "tasks", "add", "remove", "status"}
    assert all(doc for _, doc in methods(Client).values())


def test_a_client_needs_neither_torch_nor_httpx_before_it_is_made_and_names_the_extra(monkeypatch):
    code = (
        "import sys, vit_memory; vit_memory.Client; print([m for m in ('torch', 'PIL', 'httpx') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    real_import = builtins.__import__

    def without_httpx(name, *arguments):
        if name == "httpx":
            raise ImportError(name)
        return real_import(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_httpx)
    for kind in (Client, AsyncClient):
        with pytest.raises(ServingError, match=r"pip install 'vit-memory\[serve\]'"):
            kind(URL)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "F"])
def test_an_image_of_pillow_arrives_with_its_own_pixels(mode):
    rng = np.random.default_rng(0)
    exif = Image.Exif()
    exif[0x0112] = 6  # an orientation that was not applied: the pixels in hand are what counts
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (20, 30, 3), dtype=np.uint8)).save(file, "TIFF", exif=exif)
    image = Image.open(file)
    if mode == "I;16":
        image = Image.fromarray(rng.integers(0, 65535, (20, 30), dtype=np.uint16))
    elif mode == "F":
        image = Image.fromarray(rng.random((20, 30), dtype=np.float32))
    elif mode != "RGB":
        image = image.convert(mode)
    plain, file = Image.frombytes(image.mode, image.size, image.tobytes()), io.BytesIO()
    if mode == "P":
        plain.putpalette(image.getpalette())
    plain.save(file, "TIFF")
    assert (decode(encode_image(image), "sent") == decode(file.getvalue(), "plain")).all()


def test_what_is_no_image_or_no_task_is_refused_before_anything_is_sent(call, tmp_path):
    def never(_):
        raise AssertionError("sent")

    with pytest.raises(FileError, match="missing.jpg: cannot be read, No such file"):
        call(never, "predict", tmp_path / "missing.jpg")
    with pytest.raises(ServingError, match="image 2 is a int; expected a path"):
        call(never, "predict", [b"", 3])
    with pytest.raises(ServingError, match=r"give a list: \['pets'\]"):
        call(never, "predict", b"", "pets")
    (tmp_path / "broken.safetensors").write_bytes(b"no task file at all")
    with pytest.raises(DamagedFile, match="broken.safetensors"):
        call(never, "add", tmp_path / "broken.safetensors")


def test_predictions_are_those_of_the_model_for_paths_bytes_and_images_of_pillow(call_at, url, model, tmp_path):
    (tmp_path / "cat.jpg").write_bytes(jpeg(1))
    images = [tmp_path / "cat.jpg", str(tmp_path / "cat.jpg"), jpeg(1), Image.open(io.BytesIO(jpeg(1)))]
    answers = call_at(url, "predict", images, token=TOKEN, top_k=3, check_original=True)
    assert [answer.name for answer in answers] == ["cat.jpg", "cat.jpg", "image 3", "image 4"]
    outputs = model(as_input(jpeg(1)))
    assert len(answers) == 4
    assert answers.version == TaskSet.of(model).version
    for answer in answers:
        assert set(answer.tasks) == {"pets", "breeds", "parts", "height"}
        chances = outputs["breeds"][0].softmax(-1)
        assert answer["breeds"].label == "abc"[chances.argmax()]
        assert answer["breeds"].confidence == pytest.approx(float(chances.max()), abs=ROUNDING)
        assert list(answer["breeds"].top.values()) == sorted(answer["breeds"].top.values(), reverse=True)
        assert answer["height"].values["height"] == pytest.approx(float(outputs["height"]), abs=ROUNDING)
        present = {
            label: float(p) for label, p in zip("abcdefgh", outputs["parts"][0].sigmoid(), strict=True) if p >= 0.5
        }
        assert answer["parts"].labels == pytest.approx(present, abs=ROUNDING)
        assert len(answer["parts"].top) == 3
        assert answer["pets"].digest == model.tasks["pets"].digest
        assert answer.original.identical
        assert answer.batch >= 1
        assert set(answer.stages_ms) == {"decode", "queue", "compute"}
        with pytest.raises(UnknownTask, match="no answer for 'nothing': this call asked for pets"):
            answer["nothing"]


def test_a_call_names_its_tasks_and_what_to_explain(call_at, url):
    (answer,) = call_at(url, "predict", jpeg(1), ["height", "pets"], token=TOKEN, explain=["breeds"])
    assert list(answer.tasks) == ["height", "pets"]
    attention = answer.explanations["breeds"]
    for block in attention.blocks:
        parts = (*block.patches, block.memory, block.itself, block.originals)
        assert sum(parts) + sum(block.ancestors.values()) + sum(block.ancestor_memory.values()) == pytest.approx(
            1, abs=1e-3
        )
        assert len(block.patches) == attention.grid[0] * attention.grid[1]
        assert set(block.ancestors) == {"pets"}
    (answer,) = call_at(url, "predict", jpeg(1), [], token=TOKEN)
    assert answer.tasks == {}
    assert answer.original.feature_size == backbone().width


def test_one_bad_image_of_several_raises_where_it_is_used_and_a_single_one_at_once(call_at, url):
    good, bad = call_at(url, "predict", [jpeg(1), b"no image"], ["pets"], token=TOKEN)
    assert good["pets"].label == "cat"
    assert bad.error.status == 422
    with pytest.raises(RequestFailed, match="422 .*image 2: not an image of a known format"):
        bad["pets"]
    with pytest.raises(RequestFailed, match="image 1: not an image of a known format") as raised:
        call_at(url, "predict", b"no image", token=TOKEN)
    assert raised.value.status == 422


def test_tasks_are_added_replaced_and_removed_as_values_and_as_files(call_at, url, tmp_path):
    first, second = task("added", cells=1), task("added", cells=2)
    save_task(second, tmp_path / "second.safetensors")
    info = call_at(url, "add", first, token=ADMIN)
    assert (info.name, info.digest, info.labels) == ("added", first.digest, first.labels)
    assert call_at(url, "tasks", token=TOKEN)["added"] == info
    with pytest.raises(RequestFailed, match="has the digest") as raised:
        call_at(url, "add", tmp_path / "second.safetensors", token=ADMIN)
    assert raised.value.status == 409
    with pytest.raises(RequestFailed, match="409"):
        call_at(url, "add", second, token=ADMIN, if_match=second.digest)
    assert call_at(url, "add", second, token=ADMIN, if_match=first.digest).digest == second.digest
    assert call_at(url, "add", first, token=ADMIN, replace=True).digest == first.digest
    with pytest.raises(RequestFailed, match="409"):
        call_at(url, "remove", "added", token=ADMIN, if_match=second.digest)
    assert call_at(url, "predict", jpeg(1), ["added"], token=TOKEN)[0]["added"].digest == first.digest
    call_at(url, "remove", "added", token=ADMIN, if_match=first.digest)
    with pytest.raises(UnknownTask, match="the server has no task 'added'; it has: pets"):
        call_at(url, "tasks", token=TOKEN)["added"]
    with pytest.raises(RequestFailed, match="404 Not Found: no task 'added'"):
        call_at(url, "remove", "added", token=ADMIN)


def test_a_branch_is_added_before_its_task_and_removed_after_it(call_at, url, tmp_path):
    branch = trained_branch(backbone(), "twig", blocks=1, rank=2)
    save_branch(branch, tmp_path / "twig.safetensors")
    for source in (branch, tmp_path / "twig.safetensors"):
        assert call_at(url, "add", source, token=ADMIN) is None
        assert call_at(url, "add", task("leaf", branch=branch), token=ADMIN).branch == "twig"
        assert call_at(url, "tasks", token=TOKEN).branches == {"twig": branch.digest}
        with pytest.raises(RequestFailed, match="leaf"):
            call_at(url, "remove", "twig", branch=True, token=ADMIN)
        call_at(url, "remove", "leaf", token=ADMIN)
        call_at(url, "remove", "twig", branch=True, token=ADMIN)


def test_tokens_decide_and_the_status_counts(call_at, url):
    for token, status in ((None, 401), ("wrong", 401)):
        with pytest.raises(RequestFailed) as raised:
            call_at(url, "predict", jpeg(1), token=token)
        assert raised.value.status == status
    with pytest.raises(RequestFailed, match="needs the admin token") as raised:
        call_at(url, "remove", "pets", token=TOKEN)
    assert raised.value.status == 403
    before = call_at(url, "status", token=TOKEN)
    call_at(url, "predict", [jpeg(i) for i in range(3)], token=TOKEN)
    after = call_at(url, "status", token=TOKEN)
    assert after["version"] == call_at(url, "tasks", token=TOKEN).version
    assert after["images"] - before["images"] == 3


def test_the_example_of_the_client_runs(url):
    names = {"url": url, "image": jpeg(1), "Client": lambda address: Client(address, TOKEN)}
    (example,) = doctest.DocTestFinder(recurse=False).find(Client, "Client", globs=names)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
