"""TensorBoard event files: its own reader reads back what a run logged."""

import builtins
import json
import logging

import pytest
from typer.testing import CliRunner

from vit_memory.cli import app
from vit_memory.training import tensorboard_events as events

CURVES = {"loss": [(2, 1.5), (4, 0.75)], "validation accuracy": [(2, 0.5), (4, 0.625)]}


def scalars(folder):
    """What TensorBoard shows of a folder: for every tag, pairs of step and value."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = accumulators.EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_reads_back_every_scalar_once_when_a_run_is_written_again(tmp_path):
    for _ in range(2):
        events.write_events(tmp_path, "0", 1_700_000_000.5, CURVES)
        assert scalars(tmp_path) == CURVES


def test_a_resumed_run_shows_each_evaluation_once(tmp_path):
    words = ["train", "digits", "--name", "digit", "--out", str(tmp_path), "--steps", "4", "--evaluate-every", "2"]
    words += ["--per-class", "4", "--memory", "5", "--lr", "0.3", "--views", "1", "--cache", "ram"]
    for more in ([], ["--resume"]):
        result = CliRunner().invoke(app, [*words, *more])
        assert result.exit_code == 0, result.exception
        (setting,) = (tmp_path / "tensorboard").iterdir()
        logged = {row["step"]: row for row in map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())}
        assert scalars(setting) == {
            "loss": [(step, pytest.approx(logged[step]["losses"][0])) for step in (2, 4)],
            "validation accuracy": [(step, pytest.approx(logged[step]["scores"][0])) for step in (2, 4)],
        }


def test_without_tensorboard_nothing_is_written_and_the_log_names_the_extra_once(tmp_path, monkeypatch, caplog):
    real_import = builtins.__import__

    def import_without_tensorboard(name, *arguments, **options):
        if name.startswith("tensorboard"):
            raise ImportError(name)
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", import_without_tensorboard)
    events._log_missing_package.cache_clear()
    with caplog.at_level(logging.INFO, logger="vit_memory"):
        for setting in ("0", "1"):
            events.write_events(tmp_path / setting, setting, 1_700_000_000.5, CURVES)
    assert caplog.text.count("pip install 'vit-memory[tensorboard]'") == 1
    assert not list(tmp_path.iterdir())
