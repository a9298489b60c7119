"""The README is executed: its Python runs, its commands exist."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from vit_memory import backbone as backbone_module
from vit_memory.cli import app
from vit_memory.families.tiny import randomised

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.inference import tables  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    return [text for found, text in fenced if found == language]


def test_the_python_example_runs(monkeypatch):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_labels=9)
    library = randomised(ViTForImageClassification(config))
    monkeypatch.setattr(backbone_module, "_load", lambda source: library)  # stands in for the download
    (example,) = blocks("python")
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    outputs = names["outputs"]
    assert tuple(outputs["breeds"].shape) == (8, 3)
    assert tuple(outputs.original.logits.shape) == (8, 9)
    assert torch.isfinite(outputs["pets"]).all()


def test_the_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"^make (\S+)", README, flags=re.MULTILINE)
    assert named == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in named)


COMMANDS = re.findall(r"^vit-memory ([^#\n]+)", "\n".join(blocks("")), flags=re.MULTILINE)


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_exist_and_take_these_options(line):
    words = line.split()
    name = words[:2] if words[0] == "bundle" else words[:1]
    told = CliRunner().invoke(app, [*name, "--help"])
    assert told.exit_code == 0
    assert all(word in told.output for word in words if word.startswith("--"))


def test_the_cost_tables_are_the_measured_ones():
    record = json.loads((ROOT / "results" / "inference.json").read_text())
    assert [table for table in tables(record) if table not in README] == []
    assert all(row["original_equal"] for row in record["rows"])


def test_the_training_table_is_the_measured_one():
    record = json.loads((ROOT / "results" / "training.json").read_text())
    cells = re.findall(r"^\|(?: [^|]+ \|)+ ([\d.]*) ?\| ([\d.]*) ?\|$", README, flags=re.MULTILINE)
    for row in record["rows"]:
        if not row["case"].startswith("memory"):
            said = f"{row['ratio']:.3f}" if row["ratio"] < 0.1 else f"{row['ratio']:.2f}"
            assert said in [cell[row["case"].endswith("-batch128")] for cell in cells], row["case"]
        else:
            assert any(f"{row['ratio']:.{digits}f} times" in README for digits in (1, 2)), row["case"]


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_local_links_lead_somewhere(link):
    assert (ROOT / link).exists()
