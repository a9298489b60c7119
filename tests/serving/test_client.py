"""The clients of a server, blocking and awaited: the same methods, errors that carry the server's problem."""

import asyncio
import builtins
import inspect
import io
import logging
import pickle
import subprocess
import sys

import httpx
import numpy as np
import pytest
from PIL import Image

from vit_memory import AsyncClient, Client
from vit_memory.data.decoding import decode
from vit_memory.errors import DamagedFile, FileError, RequestFailed, ServingError
from vit_memory.serving import client as client_module
from vit_memory.serving.client import LONGEST_WAIT_S, _encode

URL = "http://127.0.0.1:1"
TOKEN = "a-secret-Token_123"
FULL = {"type": "about:blank", "title": "Service Unavailable", "status": 503, "detail": "the queue is full. Try again."}


@pytest.fixture(params=["blocking", "awaited"])
def call(request):
    """Calls one method of either client, over a connection that `answer(request)` stands for."""

    def run(answer, method, *arguments, token=None, retries=0, **options):
        transport = httpx.MockTransport(answer)
        if request.param == "blocking":
            with Client(URL, token, retries=retries, transport=transport) as client:
                return getattr(client, method)(*arguments, **options)

        async def awaited():
            async with AsyncClient(URL, token, retries=retries, transport=transport) as client:
                return await getattr(client, method)(*arguments, **options)

        return asyncio.run(awaited())

    return run


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
    assert (decode(_encode(image), "sent") == decode(file.getvalue(), "plain")).all()


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
