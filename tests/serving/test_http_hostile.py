"""A thousand hostile requests to one server, as users start it: it refuses them and goes on answering."""

import http.client
import json
from collections import Counter
from contextlib import closing
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from command_server import started
from engine_builders import jpeg
from hostile_requests import NEW_TASK, hostile_requests
from http_builders import IMAGE

from builders import trained
from vit_memory import Bundle, load_backbone
from vit_memory.files.taskfile import task_bytes

pytestmark = pytest.mark.slow
ANSWER_S = 120  # on a busy machine
LARGEST_GROWTH = 2**31  # bytes; a picture of 49 million pixels is allowed, and 60 MB that were never asked for are not
GOOD_EVERY = 20  # hostile requests


def ask(url, request):
    """The status and the body of the answer. Paths and headers are sent as they are; httpx would put them right."""
    with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=ANSWER_S)) as connection:
        connection.request(request.method, request.path, request.body, request.headers)
        response = connection.getresponse()
        return response.status, response.read()


def logged_levels(log):
    """Levels of the server's own lines; libtiff writes lines about damaged files too, which are no JSON."""
    return {json.loads(line)["level"] for line in log.splitlines() if line.startswith("{")}


@pytest.fixture(scope="module")
def backbone():
    return load_backbone("bundled")


@pytest.fixture
def url_and_server(tmp_path, backbone):
    tasks = [trained(backbone, "pets"), trained(backbone, "parts", kind="multi-label")]
    Bundle.create(tmp_path / "zoo", backbone, tasks)
    with started(tmp_path, tmp_path / "zoo") as server:
        yield server.ready().url, server


def good_answer(url):
    """What the server says to a good request, without times."""
    response = httpx.post(f"{url}/v1/predict", content=jpeg(1), headers=IMAGE, timeout=ANSWER_S)
    assert response.status_code == 200, response.text
    answer = response.json()
    tasks = answer["images"][0]["tasks"]
    chances = [one["probability"] for name in sorted(tasks) for one in tasks[name]["top"]]
    return answer["version"], {name: task["digest"] for name, task in tasks.items()}, chances


def check_good_answer(url, before):
    version, digests, chances = good_answer(url)
    assert (version, digests) == before[:2]
    assert chances == pytest.approx(before[2], abs=1e-4)


def test_a_thousand_hostile_requests_are_refused_and_the_next_good_one_is_answered(url_and_server, backbone):
    url, server = url_and_server
    process = psutil.Process(server.process.pid)
    before, memory = good_answer(url), process.memory_info().rss
    counts = Counter()
    for number, request in enumerate(hostile_requests(task_bytes(trained(backbone, "new")))):
        where = f"number {number}, {request.kind}: {request.what}"
        try:
            status, body = ask(url, request)
        except (OSError, http.client.HTTPException) as error:
            pytest.fail(f"{where}: no answer ({error!r})\n{server.log()[-3000:]}")
        assert status in request.statuses, f"{where}: {status} {body[:500]}\n{server.log()[-3000:]}"
        assert b"Traceback" not in body, where
        counts[request.kind, status] += 1
        if request.path == NEW_TASK and status in (200, 201):
            answer = httpx.post(f"{url}/v1/predict", content=jpeg(), headers=IMAGE, timeout=ANSWER_S)
            assert answer.status_code == 200, f"{where}: taken, but then {answer.text}"
            assert httpx.delete(f"{url}{NEW_TASK}", timeout=ANSWER_S).status_code == 204, where
        assert server.process.poll() is None, f"{where}: the server ended"
        if number % GOOD_EVERY == 0:
            check_good_answer(url, before)
    check_good_answer(url, before)
    assert counts.total() == 1000
    refused = {kind for (kind, status), _ in counts.items() if status >= 400}
    assert len(refused) == 10, "of every kind, something is refused"
    assert process.memory_info().rss < memory + LARGEST_GROWTH
    assert "raceback" not in server.log()
    assert logged_levels(server.log()) <= {"info", "warning"}
    assert server.stop() == 0
