"""The server and its own OpenAPI description agree, as schemathesis finds by asking what it allows and what it forbids.

Its command runs, as users run it, against a live server: every route with values at the edges of the description, then
with random ones, then in sequences where one answer names what the next request asks for. No answer may be a 500, and
each has a status, a content type and a shape that the description lists.
"""

import re
import subprocess
import sys

import httpx
import pytest
from http_builders import ADMIN, TOKEN, bearer, zoo
from live_server import live

from vit_memory import MemoryViT
from vit_memory.serving.app import create_app
from vit_memory.serving.settings import Settings

pytestmark = pytest.mark.slow
pytest.importorskip("schemathesis", minversion="4.32", reason="schemathesis is not installed, or too old")

CONFIG = """
[generation]
max-examples = 12
deterministic = true
database = "none"
no-shrink = true

[dictionaries.names]
values = ["pets", "parts", "height", "child", "plain"]

[parameters]
"path.name" = { dictionary = "names", probability = 0.5 }

# What the description cannot say: which bytes are an image, which text is base64, and which names there are. A request
# may allow so little time that no answer comes.
[[operations]]
include-path = "/v1/predict"
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", 504]
checks.positive_data_acceptance.expected-statuses = ["2xx", 404, 413, 422, 504]

# Random bytes are never a task file.
[[operations]]
include-method = "PUT"
checks.positive_data_acceptance.enabled = false

# A shape must fit its data and its task.
[[operations]]
include-path-regex = "/infer$"
checks.positive_data_acceptance.enabled = false
"""
REQUESTS = 500  # at least; about as many come of these settings


def test_every_answer_is_as_the_description_says(tmp_path):
    from engine_builders import backbone

    app = create_app(MemoryViT(backbone(), zoo()), Settings(TOKEN, ADMIN))
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    with live(app) as url:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--no-color", "--seed", "1"]
        command += ["--header", f"Authorization: Bearer {ADMIN}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        counted = re.findall(
            r'^vit_memory_requests_total\{method="(\w+)",route="([^"]+)",status="(\d+)"\} ([\d.]+)',
            httpx.get(f"{url}/metrics", headers=bearer(TOKEN)).text,
            flags=re.MULTILINE,
        )
    asked = {(method.lower(), route) for method, route, _, _ in counted}
    described = {(method, path) for path, operations in app.openapi()["paths"].items() for method in operations}
    assert described <= asked, "every route was tried"
    assert sum(float(count) for *_, count in counted) > REQUESTS
    assert {status for _, _, status, _ in counted} >= {"200", "400", "404", "405"}
    assert not [row for row in counted if row[2] == "500"]
