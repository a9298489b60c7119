"""Limits over a real connection: sizes while a body arrives, time, room in the queue, and clients that go away."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest
from engine_builders import HeldPasses, backbone, jpeg, model_of
from http_builders import IMAGE, check_problem, zoo
from live_server import live

from vit_memory import MemoryViT
from vit_memory.serving import connections
from vit_memory.serving.app import create_app
from vit_memory.serving.options import EngineOptions
from vit_memory.serving.settings import Limits, Settings

MAX_BODY = 20_000
# An image waits for others for a minute: the queue stays as full as a test makes it.
PATIENT = EngineOptions(max_wait_ms=60_000, max_batch=64, max_queue=2, timeout_s=60)


@contextlib.contextmanager
def serving(engine=None, **limits):
    """The address of a server, and its state."""
    settings = Settings(limits=Limits(max_body_bytes=MAX_BODY, **limits), engine=engine or EngineOptions())
    app = create_app(MemoryViT(backbone(), zoo()), settings)
    with live(app) as url:
        yield url, app.state.server


@pytest.fixture(scope="module")
def server():
    with serving(body_timeout_s=2) as (url, state):
        yield url, state


def predict(url, content=None, **options):
    return httpx.post(f"{url}/v1/predict", content=jpeg() if content is None else content, headers=IMAGE, **options)


def connect(url):
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), timeout=30)


def head(**headers):
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\n{lines}\r\n".encode()


def answer_of(connection):
    """The status and the body that come over a connection."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    top, _, body = received.partition(b"\r\n\r\n")
    length = int(next(line for line in top.lower().split(b"\r\n") if line.startswith(b"content-length")).split(b":")[1])
    while len(body) < length:
        body += connection.recv(65536)
    return int(top.split()[1]), body


def until(condition):
    end = time.monotonic() + 60  # a busy machine may leave a thread waiting
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_announced_length_above_the_limit_is_refused_before_a_byte_is_read(server):
    with connect(server[0]) as connection:
        connection.sendall(head(Content_Length=10**15, Expect="100-continue"))
        status, body = answer_of(connection)  # without 100 Continue, so a client sends nothing
    assert (status, json.loads(body)["limit"]) == (413, MAX_BODY)


def test_a_chunked_body_is_refused_when_it_passes_the_limit_and_never_kept(server):
    url, state = server
    highest = 0
    with connect(url) as connection:
        connection.sendall(head(Transfer_Encoding="chunked"))
        for _ in range(1000):  # 16 MB of a body that may have 20 kB
            connection.sendall(b"4000\r\n" + bytes(16384) + b"\r\n")
            highest = max(highest, state.bodies.used)
        connection.sendall(b"0\r\n\r\n")
        assert answer_of(connection)[0] == 413
    assert highest <= MAX_BODY
    until(lambda: state.bodies.used == 0)
    assert predict(url).status_code == 200


def test_a_length_that_lies_hurts_nobody_else(server):
    url, state = server
    image = jpeg()
    with connect(url) as short:  # says more than it sends, then hangs up
        short.sendall(head(Content_Length=len(image) + 1000) + image)
    with connect(url) as long:  # sends more than it says: the rest is no request
        long.sendall(head(Content_Length=100) + image)
        assert answer_of(long)[0] in (400, 422)
    until(lambda: state.bodies.used == 0)
    assert predict(url).status_code == 200


def test_a_body_that_arrives_too_slowly_is_a_408(server):
    with connect(server[0]) as connection:
        connection.sendall(head(Content_Length=1000) + b"x")
        assert answer_of(connection)[0] == 408
    assert predict(server[0]).status_code == 200


def test_bodies_of_all_requests_together_have_a_limit():
    with serving(max_bodies_bytes=15_000) as (url, state), connect(url) as slow:
        slow.sendall(head(Content_Length=14_900) + bytes(14_000))
        until(lambda: state.bodies.used == 14_000)
        check_problem(predict(url, bytes(1500)), 503)
        slow.close()
        until(lambda: state.bodies.used == 0)
        assert predict(url).status_code == 200


def test_a_full_queue_is_a_503_at_once_with_retry_after_and_the_admitted_are_answered(monkeypatch):
    passes = HeldPasses(monkeypatch)
    with serving(EngineOptions(max_queue=2, max_wait_ms=0)) as (url, state):
        passes.hold()
        answers = []
        clients = []
        for waiting in (0, 1, 2):  # the first is with the model
            clients.append(threading.Thread(target=lambda: answers.append(predict(url, timeout=60).status_code)))
            clients[-1].start()
            until(lambda: passes.batches and state.engine.stats.waiting == waiting)  # noqa: B023 - called at once
        started = time.monotonic()
        check_problem(predict(url), 503)
        both = [("image", ("a.jpg", jpeg())), ("image", ("b.jpg", jpeg()))]
        check_problem(httpx.post(f"{url}/v1/predict", files=both), 503)
        assert time.monotonic() - started < 10
        passes.release()
        for client in clients:
            client.join(30)
        assert answers == [200, 200, 200]
        assert predict(url).status_code == 200


def test_a_request_past_its_deadline_is_a_504_and_never_computed():
    with serving(PATIENT) as (url, state):
        check_problem(predict(url, params={"timeout_s": "0.3"}), 504)
        assert state.engine.stats.refused == {"deadline": 1}
        assert state.engine.stats.passes == 0


def test_a_client_that_disconnects_has_its_request_dropped_before_the_model():
    with serving(PATIENT) as (url, state):
        for _ in range(3):
            with connect(url) as connection:
                connection.sendall(head(Content_Length=len(jpeg())) + jpeg())
                until(lambda: state.engine.stats.waiting == 1)
            until(lambda: state.engine.stats.waiting == 0)
        assert state.engine.stats.refused == {"cancelled": 3}
        assert state.engine.stats.passes == 0
        assert state.bodies.used == 0


def test_more_requests_at_once_than_allowed_are_a_503_but_a_busy_server_is_still_alive():
    with serving(PATIENT, max_requests=1) as (url, state), connect(url) as connection:
        connection.sendall(head(Content_Length=len(jpeg())) + jpeg())
        until(lambda: state.engine.stats.waiting == 1)
        check_problem(httpx.get(f"{url}/v1/tasks"), 503)
        assert httpx.get(f"{url}/v2/health/live").status_code == 200


def test_headers_have_a_limit_and_a_time_and_large_bodies_have_neither(monkeypatch):
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 1.0)
    app = create_app(MemoryViT(backbone(), zoo()))
    with live(app, http=connections.GuardedConnection) as url:
        for endless in (b"X: " + b"x" * 200_000, b"X: x\r\n" * 30_000, b"x" * 200_000):
            with connect(url) as connection, contextlib.suppress(ConnectionError):  # it may be closed meanwhile
                connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n" + endless)
                assert connection.recv(65536).startswith(b"HTTP/1.1 400")
        with connect(url) as connection:
            connection.sendall(b"GET / HTT")
            started = time.monotonic()
            assert connection.recv(65536) == b"", "closed without an answer"
            assert 0.5 < time.monotonic() - started < 20
        with httpx.Client(base_url=url) as client:  # one connection, kept
            for _ in range(3):
                assert client.post("/v1/predict", content=bytes(5_000_000), headers=IMAGE).status_code == 422
                assert client.get("/v1/tasks").status_code == 200
            time.sleep(1.5)
            assert client.get("/v1/tasks").status_code == 200


ASKED = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
UNREAD = head(Content_Length=10**9)
# What a client sends, the statuses it gets, and what it sends afterwards, in pieces with pauses.
HELD = {
    "the beginning of a second head": (ASKED, [200], [b"G"]),
    "an empty line": (ASKED, [200], [b"\r\n"]),
    "a head that never ends": (ASKED, [200], [b"GET / HTTP/1.1\r\nX: ", *[b"x"] * 100]),
    "the beginning of a head after many requests": (ASKED * 3, [200] * 3, [b"GET"]),
    "a body that nobody reads": (UNREAD, [413], [b"x"] * 100),
    "an end of a body that nobody reads": (head(Content_Length=MAX_BODY + 1), [413], [bytes(MAX_BODY + 1)]),
}


@pytest.mark.parametrize("case", HELD)
def test_a_client_that_does_not_finish_cannot_hold_a_connection_after_an_answer(case, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 1.0)
    first, statuses, later = HELD[case]
    settings = Settings(limits=Limits(max_body_bytes=MAX_BODY))
    with live(create_app(model_of("one"), settings), http=connections.GuardedConnection) as url:
        with connect(url) as connection:
            connection.sendall(first)
            received = b""
            while received.count(b"HTTP/1.1 ") < len(statuses) or not received.endswith(b"}"):
                received += connection.recv(65536)
            assert [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]] == statuses
            started = time.monotonic()
            connection.settimeout(0.2)
            with contextlib.suppress(ConnectionError):  # it was closed while the client still sent
                for piece in later:
                    connection.sendall(piece)
                    with contextlib.suppress(TimeoutError):
                        assert connection.recv(65536) == b""
                        break
                connection.settimeout(15)
                assert connection.recv(65536) == b""
            assert time.monotonic() - started < 15
        assert httpx.get(f"{url}/v2/health/live").status_code == 200


def test_a_client_that_does_not_read_its_answer_cannot_hold_it_in_memory(monkeypatch):
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.5)
    monkeypatch.setattr("vit_memory.serving.task_routes.task_bytes", lambda task: bytes(50_000_000))
    with live(create_app(model_of("one")), http=connections.GuardedConnection) as url:
        with connect(url) as connection:
            connection.sendall(b"GET /v1/tasks/one/file HTTP/1.1\r\nHost: x\r\n\r\n")
            time.sleep(4)
            received = 0
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(2**20):
                    received += len(part)
            assert received < 50_000_000, "the rest was dropped"
        with httpx.stream("GET", f"{url}/v1/tasks/one/file") as slow:  # one that reads, with pauses, gets it all
            received = 0
            for part in slow.iter_raw(5_000_000):
                received += len(part)
                time.sleep(0.2)
            assert received == 50_000_000


def test_a_request_that_is_cut_off_by_a_stop_gets_a_problem(monkeypatch):
    async def predict(*_, **__):
        raise asyncio.CancelledError

    with serving() as (url, state):
        monkeypatch.setattr(state.engine, "predict", predict)
        check_problem(httpx.post(f"{url}/v1/predict", content=jpeg(), headers=IMAGE), 503)


def test_the_beginning_of_a_second_request_does_not_end_the_first(monkeypatch):
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.5)
    app = create_app(model_of("one"), Settings(engine=PATIENT))
    with live(app, http=connections.GuardedConnection) as url, connect(url) as connection:
        slow = head(Content_Length=len(jpeg())).replace(b"/v1/predict", b"/v1/predict?timeout_s=2") + jpeg()
        connection.sendall(slow + b"G")
        assert answer_of(connection)[0] == 504
        assert connection.recv(65536) == b"", "closed, since the second one never came"


def test_events_tell_of_every_change_and_have_a_limit():
    with serving(max_listeners=1) as (url, state):
        with httpx.stream("GET", f"{url}/v1/events") as stream:
            lines = stream.iter_lines()
            assert next(lines) == "event: tasks"
            first = next(line for line in lines if line.startswith("data:"))
            check_problem(httpx.get(f"{url}/v1/events"), 503)
            assert httpx.delete(f"{url}/v1/tasks/child").status_code == 204
            second = next(line for line in lines if line.startswith("data:"))
        assert json.loads(first[5:])["version"] != json.loads(second[5:])["version"]
        assert json.loads(second[5:])["version"] == state.engine.task_set.version
        until(lambda: state.listeners == 0)
