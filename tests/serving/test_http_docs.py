"""docs/serving.md is executed: its curl lines against a server, its commands and its lists against the program."""

import io
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from engine_builders import backbone, jpeg, task
from http_builders import TOKEN, bundle_in
from live_server import live
from PIL import Image
from typer.testing import CliRunner

from vit_memory import save_task
from vit_memory.cli import app
from vit_memory.serving.app import create_app
from vit_memory.serving.settings import Limits, Settings

DOCS = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", DOCS, flags=re.MULTILINE | re.DOTALL)
PLAIN = "\n".join(text for language, text in BLOCKS if not language)
CURL = [line.partition("  #")[0].strip() for line in PLAIN.splitlines() if line.startswith("curl ")]
STATUS = {"If-Match": "409"}  # another digest than the one in the text


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_lines_work(tmp_path):
    tasks = [task("pets", labels=["cat", "dog"]), task("parts", kind="multi-label")]
    served = create_app(bundle_in(tmp_path / "zoo", tasks), Settings(token=TOKEN, admin_token="x"), backbone=backbone())
    with live(create_app(bundle_in(tmp_path / "open", tasks), backbone=backbone())) as url, live(served) as guarded:
        for name in ("cat.jpg", "dog.jpg"):
            (tmp_path / name).write_bytes(jpeg(len(name)))
        save_task(task("birds"), tmp_path / "birds.safetensors")
        statuses = []
        for line in CURL:
            command = line.replace("http://127.0.0.1:8000", guarded if "Authorization" in line else url)
            command = f"{command} -sS -w '%{{stderr}}%{{http_code}}'"
            variables = {"VIT_MEMORY_TOKEN": TOKEN, "PATH": "/usr/bin:/bin"}
            done = subprocess.run(
                ["bash", "-c", command], cwd=tmp_path, env=variables, capture_output=True, text=True, check=True
            )
            expected = next((status for word, status in STATUS.items() if word in line), "2")
            assert done.stderr.startswith(expected), (line, done)
            statuses.append(done.stderr)
    assert len(statuses) > 10
    assert {"200", "201", "204", "409"} <= set(statuses)


def test_the_python_examples_run(tmp_path, monkeypatch):
    pets = task("pets", labels=["cat", "dog"])
    tasks = [pets, task("height", kind="regression", labels=["height"])]
    (tmp_path / "cat.jpg").write_bytes(jpeg(1))
    save_task(task("birds"), tmp_path / "birds.safetensors")
    monkeypatch.chdir(tmp_path)
    with live(create_app(bundle_in(tmp_path / "zoo", tasks), backbone=backbone())) as url:
        examples = [text for language, text in BLOCKS if language == "python"]
        for example in examples:
            code = example.replace("http://127.0.0.1:8000", url).replace("127.0.0.1:8000", url.removeprefix("http://"))
            code = code.replace('token="…"', "token=None")
            picture = Image.open(io.BytesIO(jpeg(2)))
            exec(compile(code, "serving.md", "exec"), {"image_bytes": jpeg(1), "pil_image": picture, "pets": pets})
    assert len(examples) == 2


def test_the_commands_take_the_options_that_are_told():
    described = {name: CliRunner().invoke(app, [name, "--help"]).output for name in ("serve", "predict")}
    lines = [line.partition("  #")[0] for line in PLAIN.splitlines() if line.startswith("vit-memory ")]
    assert {line.split()[1] for line in lines} == {"serve", "predict"}
    for line in lines:
        for option in re.findall(r" (--[a-z-]+)", line):
            assert f"{option} " in described[line.split()[1]], line
    told = set(re.findall(r"`(--[a-z-]+)", DOCS))
    assert [option for option in sorted(told) if f"{option} " not in "".join(described.values())] == []


def test_the_limits_that_are_told_are_the_defaults():
    limits, engine = Limits(), Settings().engine
    rows = dict(re.findall(r"^\| `(--[a-z-]+)`[^|]*\| ([^|]+?) \|", DOCS, flags=re.MULTILINE))
    assert rows["--max-body-mb"] == str(limits.max_body_bytes // 2**20)
    assert rows["--max-images"] == str(limits.max_images)
    assert rows["--max-pixels"] == f"{engine.max_pixels // 10**6} million"
    assert rows["--max-queue"] == str(engine.max_queue)
    assert rows["--timeout-s"] == f"{engine.timeout_s:g}"
    for fact in (
        f"{limits.max_explained} explanations in a request",
        f"{limits.max_file_bytes // 2**20} MB for a task file",
        f"{limits.max_bodies_bytes // 2**30} GB for all bodies",
        f"{limits.max_requests} requests at once",
        f"{limits.body_timeout_s:g} s for a client",
        f"{limits.max_listeners} streams",
        f"up to {limits.max_timeout_s:g} s",
    ):
        assert fact in DOCS


def test_every_status_that_is_described_is_told_and_no_other(tmp_path):
    description = create_app(bundle_in(tmp_path / "zoo"), backbone=backbone()).openapi()
    described = {
        status
        for path, operations in description["paths"].items()
        for operation in operations.values()
        for status in operation["responses"]
        if path.startswith("/v1")
    }
    told = set(re.findall(r"^\| (\d{3}) \|", DOCS, flags=re.MULTILINE))
    assert told - {"405"} == {status for status in described if status >= "400"}
