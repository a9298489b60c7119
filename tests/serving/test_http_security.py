"""Who may do what, and what answers, logs and pages give away: nothing that they should not."""

import hmac
import io
import json
import logging
import re
from contextlib import contextmanager

import pytest
from engine_builders import jpeg, model_of
from http_builders import ADMIN, IMAGE, TOKEN, bearer, check_problem, client_of, file_of, predict

from vit_memory.serving import security
from vit_memory.serving.logs import JsonFormatter, TextFormatter
from vit_memory.serving.security import SECURITY_HEADERS, is_loopback
from vit_memory.serving.settings import Settings

READS = ("/v1/tasks", "/v1/tasks/one", "/v1/tasks/one/file", "/v1/status", "/metrics", "/v2/models/one")
PUBLIC = ("/", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready")


def change(client, **options):
    response = client.put("/v1/tasks/late", content=file_of("late"), **options)
    if response.status_code == 201:
        assert client.delete("/v1/tasks/late", **options).status_code == 204
    return response


@contextmanager
def logged(formatter):
    """All that the package logs meanwhile, as text."""
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(formatter)
    logger = logging.getLogger("vit_memory")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# Settings, the token that is sent, and the statuses of predicting, reading and changing.
ACCESS = {
    "no tokens": ((None, None), None, (200, 200, 201)),
    "token, none sent": ((TOKEN, None), None, (401, 401, 401)),
    "token, a wrong one sent": ((TOKEN, None), "wrong", (401, 401, 401)),
    "token, a beginning of it sent": ((TOKEN, None), TOKEN[:-1], (401, 401, 401)),
    "token, sent": ((TOKEN, None), TOKEN, (200, 200, 403)),
    "both, none sent": ((TOKEN, ADMIN), None, (401, 401, 401)),
    "both, a wrong one sent": ((TOKEN, ADMIN), "wrong", (401, 401, 401)),
    "both, token sent": ((TOKEN, ADMIN), TOKEN, (200, 200, 403)),
    "both, admin token sent": ((TOKEN, ADMIN), ADMIN, (200, 200, 201)),
    "admin token alone, none sent": ((None, ADMIN), None, (200, 200, 401)),
    "admin token alone, a wrong one sent": ((None, ADMIN), "wrong", (401, 401, 401)),
    "admin token alone, sent": ((None, ADMIN), ADMIN, (200, 200, 201)),
}


@pytest.mark.parametrize("case", ACCESS)
def test_tokens_decide_who_may_predict_read_and_change(case):
    settings, token, (predicting, reading, changing) = ACCESS[case]
    with client_of(model_of("one"), sent=token, tokens=settings) as client:
        assert predict(client).status_code == predicting
        assert {client.get(path).status_code for path in READS} == {reading}
        response = change(client)
        assert response.status_code == changing
        unloading = client.post("/v2/repository/models/one/unload").status_code
        assert unloading == (200 if changing == 201 else changing)
        assert {client.get(path).status_code for path in PUBLIC} == {200}
        if changing == 401:
            assert check_problem(response, 401)
            assert response.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize(
    "header", ["Basic YTpi", "Bearer", "Bearer ", f"bearer{TOKEN}", TOKEN, f"Token {TOKEN}", "Bearer \xff"]
)
def test_a_malformed_authorization_is_a_401(header):
    with client_of(model_of("one"), tokens=(TOKEN, None)) as client:
        check_problem(predict(client, jpeg()), 401)
        response = client.get("/v1/tasks", headers={"authorization": header.encode("latin-1")})
        check_problem(response, 401)


def test_tokens_are_compared_in_constant_time(monkeypatch):
    compared = []
    equal = hmac.compare_digest

    def compare(a, b):
        compared.append((len(a), len(b)))
        return equal(a, b)

    monkeypatch.setattr(security.hmac, "compare_digest", compare)
    with client_of(model_of("one"), tokens=(TOKEN, ADMIN)) as client:
        for token in (TOKEN, ADMIN, "x", "x" * 1000):
            client.get("/v1/status", headers=bearer(token))
    assert len(compared) >= 4
    assert set(compared) == {(32, 32)}, "hashes, so that the length of a token does not show either"


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_logs_hold_no_tokens_and_no_image_content(formatter):
    with logged(formatter) as lines, client_of(model_of("one"), tokens=(TOKEN, ADMIN)) as client:
        for token in (TOKEN, ADMIN, "a-wrong-Token"):
            headers = {**IMAGE, **bearer(token)}
            client.post("/v1/predict", content=jpeg(), headers=headers, params={"tasks": "one"})
            client.post("/v1/predict", content=b"SECRET IMAGE", headers=headers)
            client.put("/v1/tasks/late", content=b"SECRET FILE", headers=bearer(token))
            client.get(f"/v1/{token}", headers=bearer(token))
    text = lines.getvalue()
    assert "/v1/predict" in text
    for secret in (TOKEN, ADMIN, "a-wrong-Token", "SECRET", "tasks=one"):
        assert secret not in text
    assert TOKEN not in repr(Settings(token=TOKEN, admin_token=ADMIN))
    assert ADMIN not in repr(Settings(token=TOKEN, admin_token=ADMIN))


def test_a_json_log_has_a_line_per_request_with_id_route_status_and_milliseconds():
    with logged(JsonFormatter()) as lines, client_of(model_of("one")) as client:
        client.get("/v1/tasks/one", headers={"x-request-id": "my.id_1-2"})
        both = [("image", ("a.jpg", jpeg())), ("image", ("b.jpg", jpeg()))]
        client.post("/v1/predict", files=both)
        client.get("/nothing%01here%0D%0Astatus: 200")
    records = [json.loads(line) for line in lines.getvalue().splitlines()]
    found, predicted, unknown = [record for record in records if record["event"] == "request"]
    assert (found["request_id"], found["route"], found["status"]) == ("my.id_1-2", "/v1/tasks/{name}", 200)
    assert found["ms"] > 0
    assert (predicted["route"], predicted["method"], predicted["images"]) == ("/v1/predict", "POST", 2)
    assert predicted["bytes_in"] > 2 * len(jpeg())
    assert (unknown["route"], unknown["status"]) == ("unknown", 404)
    assert {record["event"] for record in records} >= {"ready", "stopped"}


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-1.2_3", True), ("x" * 64, True), ("x" * 65, False), ("a b", False), ("a\x7fb", False), ("", False)],
)
def test_a_request_id_is_echoed_if_it_is_harmless_and_made_otherwise(given, kept):
    with client_of(model_of("one")) as client:
        response = client.get("/v1/tasks/nobody", headers={"x-request-id": given})
    returned = response.headers["x-request-id"]
    assert (returned == given) is kept
    assert re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", returned)
    assert response.json()["instance"] == returned


def test_every_answer_has_security_headers():
    with client_of(model_of("one"), tokens=(TOKEN, None)) as client:
        for path in (*PUBLIC, "/v1/tasks", "/nothing", "/page/nothing.js"):
            response = client.get(path)
            missing = {name for name in SECURITY_HEADERS if name not in response.headers}
            assert missing == set(), path
            assert "default-src 'none'" in response.headers["content-security-policy"]


def test_the_docs_page_loads_nothing_from_elsewhere_and_names_every_route():
    with client_of(model_of("one")) as client:
        page = client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert re.findall(r"https?://|<script|@import|url\(", page.text + client.get("/docs.css").text) == []
        for path in client.get("/openapi.json").json()["paths"]:
            assert f" {path}</code>" in page.text


def test_a_server_without_a_token_answers_to_its_own_names_only():
    with client_of(model_of("one"), allowed_hosts=("localhost", "127.0.0.1", "::1")) as client:
        for host in ("localhost", "LocalHost:8000", "127.0.0.1:8000", "[::1]:8000"):
            assert client.get("/v1/tasks", headers={"host": host}).status_code == 200
        for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "[", ""):
            check_problem(client.get("/v1/tasks", headers={"host": host}), 403)


def test_pages_of_other_sites_cannot_use_a_server_without_a_token():
    with client_of(model_of("one")) as client:
        for origin in ("http://evil.example", "null", "http://testserver.evil.example", "http://[", "http://[::1"):
            other = {**IMAGE, "origin": origin}
            check_problem(client.post("/v1/predict", content=jpeg(), headers=other), 403)
            check_problem(client.delete("/v1/tasks/one", headers={"origin": origin}), 403)
        own = {**IMAGE, "origin": "http://testserver"}
        assert client.post("/v1/predict", content=jpeg(), headers=own).status_code == 200


def test_cors_is_off_unless_an_origin_is_allowed():
    asked = {"origin": "https://a.example", "access-control-request-method": "PUT",
             "access-control-request-headers": "authorization,if-match"}  # fmt: skip
    with client_of(model_of("one")) as client:
        assert client.options("/v1/tasks/one", headers=asked).status_code == 405
        assert (
            "access-control-allow-origin"
            not in client.get("/v1/tasks", headers={"origin": "https://a.example"}).headers
        )
    with client_of(model_of("one"), cors=("https://a.example",)) as client:
        allowed = client.options("/v1/tasks/one", headers=asked)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        posted = client.post("/v1/predict", content=jpeg(), headers={**IMAGE, "origin": "https://a.example"})
        assert posted.status_code == 200
        assert posted.headers["access-control-allow-origin"] == "https://a.example"
        problem = client.get("/v1/tasks/nobody", headers={"origin": "https://a.example"})
        assert problem.headers["access-control-allow-origin"] == "https://a.example", "a page can read problems, too"
        other = client.post("/v1/predict", content=jpeg(), headers={**IMAGE, "origin": "https://b.example"})
        assert other.status_code == 403


def test_only_addresses_of_this_machine_are_loopback():
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.168.0.1", "example.org", "", "localhost.x"))
