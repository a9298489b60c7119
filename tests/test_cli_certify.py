"""vit-memory certify: files, exit codes, and --check."""

import json

import pytest
from typer.testing import CliRunner

from certified import write_world
from vit_memory import fused
from vit_memory.cli import app
from vit_memory.errors import DamagedFile, DataError, FileError


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("root"))


def run(*words):
    return CliRunner().invoke(app, ["certify", *map(str, words)])


def test_a_certificate_is_written_and_checks_out(root, tmp_path):
    out = tmp_path / "audit.json"
    result = run(root / "zoo", "--data", root / "photos", "--images", 4, "--batch", 2, "--out", out)
    assert result.exit_code == 0, (result.output, result.exception)
    content = json.loads(out.read_text())
    assert content["passed"] is True
    assert content["sha256"] in result.stdout
    assert content["sha256"] in out.with_suffix(".html").read_text(encoding="utf-8")
    assert result.stdout.count("passed") == 6
    assert "passed  original output         images: 4, batches: 2" in result.stdout
    assert result.stderr.count("checking: ") == 6
    again = run("--check", out)
    assert again.exit_code == 0, (again.output, again.exception)
    assert "the content matches its SHA-256" in again.stdout
    assert "everything is as it was" in again.stdout

    other = run("--check", out, root / "kinds.safetensors", "--data", root / "photos")
    assert other.exit_code == 1
    assert "task weight: is in the certificate, but was not given" in other.stderr
    (root / "zoo").rename(root / "elsewhere")
    lost = run("--check", out)
    (root / "elsewhere").rename(root / "zoo")
    assert f"{root / 'zoo'}: named by the certificate, but not found" in str(lost.exception)
    out.write_text(out.read_text().replace('"batch": 2', '"batch": 4'))
    assert isinstance(run("--check", out).exception, DamagedFile)


def test_half_precision_is_certified_at_its_own_rounding(root, tmp_path):
    out = tmp_path / "half.json"
    words = (root / "zoo", "--data", root / "photos", "--images", 2, "--dtype", "bfloat16", "--out", out)
    result = run(*words)
    assert result.exit_code == 0, (result.output, result.exception)
    assert json.loads(out.read_text())["request"]["dtype"] == "bfloat16"


def test_a_failed_check_is_exit_code_1_and_named_and_still_written(root, tmp_path, monkeypatch):
    attend = fused.attend_readers
    monkeypatch.setattr(fused, "attend_readers", lambda *a: attend(*a).mean(1, keepdim=True).expand_as(attend(*a)))
    out = tmp_path / "failed.json"
    result = run(root / "zoo", "--data", root / "photos", "--images", 2, "--out", out)
    assert result.exit_code == 1
    assert "FAILED  alone and in company" in result.stdout
    assert "alone and in company: kinds: " in result.stderr
    assert json.loads(out.read_text())["passed"] is False
    assert "FAILED" in out.with_suffix(".html").read_text(encoding="utf-8")
    monkeypatch.undo()
    again = run("--check", out)
    assert again.exit_code == 1
    assert "the certificate itself is of failed checks" in again.stderr


def test_usage_errors_are_exit_code_2_and_leave_no_file(root, tmp_path):
    out = tmp_path / "none.json"
    assert run("--out", out).exit_code == 2
    assert run(root / "zoo", "--out", out).exit_code == 2
    assert run(root / "zoo", "--data", root / "photos", "--out", tmp_path / "page.html").exit_code == 2
    refused = run("--check", out, "--images", 3)
    assert refused.exit_code == 2
    assert "--images: not with --check" in refused.output
    assert isinstance(run("--check", out).exception, FileError)
    assert isinstance(run(root / "zoo", "--data", tmp_path / "nothing", "--out", out).exception, DataError)
    assert list(tmp_path.iterdir()) == []
