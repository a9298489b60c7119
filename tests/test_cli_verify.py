"""vit-memory verify: table, JSON, and exit codes."""

import json

import pytest
from typer.testing import CliRunner

from builders import library_model
from vit_memory import fused
from vit_memory.cli import app, main

FAMILIES = [
    "vit",
    "deit",
    "dinov2",
    "dinov2-with-registers",
    "dinov3-vit",
    "clip-vision",
    "siglip-vision",
    "vit-mae",
    "vit-msn",
    "timm-vit:augreg",
    "timm-vit:deit-distilled",
    "timm-vit:dinov2-registers",
    "timm-vit:clip",
    "timm-vit:qk-norm",
    "timm-vit:average-pool",
]


def run(*arguments):
    return CliRunner().invoke(app, ["verify", *arguments])


def test_all_families_are_reported_as_json():
    pytest.importorskip("timm", reason="timm is not installed")
    result = run("--all-families", "--json", "--graphs", "1", "--tasks", "4")
    assert result.exit_code == 0, result.output
    results = json.loads(result.stdout)
    assert set(FAMILIES) <= {result_of_family["family"] for result_of_family in results}
    keys = {"family", "base_identical", "worst_interference", "worst_reference_difference"}
    assert all(set(result_of_family) == keys for result_of_family in results)
    assert all(result_of_family["base_identical"] is True for result_of_family in results)
    assert all(0 < result_of_family["worst_interference"] <= 1e-5 for result_of_family in results)
    assert all(0 < result_of_family["worst_reference_difference"] <= 1e-5 for result_of_family in results)


def test_a_backbone_folder_is_verified(tmp_path):
    library_model("vit")[1].save_pretrained(tmp_path)
    result = run(str(tmp_path), "--graphs", "1")
    assert result.exit_code == 0, result.output
    assert "the original output is the library's own, bit for bit" in result.stdout


def test_half_precision_is_verified_at_its_own_rounding(tmp_path):
    library_model("vit")[1].save_pretrained(tmp_path)
    result = run(str(tmp_path), "--graphs", "1", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output


def test_a_broken_promise_is_exit_code_1(tmp_path, monkeypatch):
    library_model("vit")[1].save_pretrained(tmp_path)
    attend_readers = fused.attend_readers

    def mix_tasks(*arguments):
        read = attend_readers(*arguments)
        return read.mean(1, keepdim=True).expand_as(read)

    monkeypatch.setattr(fused, "attend_readers", mix_tasks)
    result = run(str(tmp_path), "--graphs", "1", "--json")
    assert result.exit_code == 1
    (result_of_family,) = json.loads(result.stdout)
    assert result_of_family["base_identical"] is True
    assert result_of_family["worst_interference"] > 1e-3
    assert "broken on" in result.stderr


def test_usage_errors_are_exit_code_2_and_our_errors_1(monkeypatch, capsys, tmp_path):
    assert run().exit_code == 2
    assert run("--all-families", "some/id").exit_code == 2
    monkeypatch.setattr("sys.argv", ["vit-memory", "verify", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: no config.json here.")
