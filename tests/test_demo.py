"""vit-memory demo, made small: three tasks, one built on another, and a page that tells the truth about them."""

import re

import numpy as np
from typer.testing import CliRunner

from vit_memory import MemoryViT, Task, load_backbone
from vit_memory.cli import app
from vit_memory.evaluation import demo
from vit_memory.evaluation.scenes import draw_scenes
from vit_memory.training.recipe import Recipe


def test_the_demo_leaves_three_tasks_that_answer_and_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "TRAIN", 40)
    monkeypatch.setattr(demo, "VALIDATION", 10)
    monkeypatch.setattr(demo, "TEST", 30)
    monkeypatch.setattr(demo, "_RECIPE", Recipe(steps=6, batch=20, augment="none", learning_rates=(0.3,)))
    said = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert said.exit_code == 0, said.exception
    assert "original output bit-identical    yes" in said.output
    assert {path.name for path in tmp_path.iterdir()} == {
        "index.html",
        "digit.safetensors",
        "place.safetensors",
        "parity.safetensors",
    }
    tasks = [Task.load(tmp_path / f"{name}.safetensors") for name in ("digit", "place", "parity")]
    assert tasks[2].parents == ("digit",)
    assert MemoryViT(load_backbone("bundled"), tasks).tasks.ancestors("parity") == ("digit",)
    page = (tmp_path / "index.html").read_text()
    assert page.count("<figure>") == 24
    assert not re.search(r'(src|href)="(?!data:)', page)  # nothing to fetch
    assert all(f"<b>{name}</b>" in page for name in ("digit", "place", "parity"))


def test_scenes_share_no_digit_and_no_part_of_a_photograph():
    train, validation, test = draw_scenes(30, 20, 20)
    assert [len(part.digit) for part in (train, validation, test)] == [30, 20, 20]
    assert train.pixels.shape == (30, 64, 64, 3)
    again = draw_scenes(30, 20, 20)[2]
    assert np.array_equal(again.pixels, test.pixels)
    assert not np.array_equal(train.pixels[:20], test.pixels)
    assert {0, 1} == set(train.place.tolist())
