"""vit-memory demo with few images: three tasks, one extending another, and a page of results."""

import re
from types import SimpleNamespace

import numpy as np
from typer.testing import CliRunner

from vit_memory import MemoryViT, load_backbone, load_task
from vit_memory.cli import app
from vit_memory.demo import run
from vit_memory.demo.images import draw_images
from vit_memory.training.recipe import Recipe


def test_the_demo_writes_three_task_files_and_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "TRAIN", 40)
    monkeypatch.setattr(run, "VALIDATION", 10)
    monkeypatch.setattr(run, "TEST", 30)
    monkeypatch.setattr(run, "_RECIPE", Recipe(steps=6, batch=20, augment="none", learning_rates=(0.3,)))
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.exception
    assert "original output bit-identical    yes" in result.output
    assert {path.name for path in tmp_path.iterdir()} == {
        "index.html",
        "digit.safetensors",
        "traits.safetensors",
        "ink.safetensors",
    }
    tasks = [load_task(tmp_path / f"{name}.safetensors") for name in ("digit", "traits", "ink")]
    assert [task.kind for task in tasks] == ["single-label", "multi-label", "regression"]
    assert tasks[2].parents == ("digit",)
    assert MemoryViT(load_backbone("bundled"), tasks).tasks.ancestors("ink") == ("digit",)
    page = (tmp_path / "index.html").read_text()
    assert page.count("<figure>") == 24
    assert not re.search(r'(src|href)="(?!data:)', page)  # nothing to fetch
    assert all(f"<b>{name}</b>" in page for name in ("digit", "traits", "ink"))


def test_images_share_no_digit_and_no_part_of_a_photograph(monkeypatch):
    import sklearn.datasets

    # Blank digits that are their own number, on photographs whose colours encode the cell.
    photograph = np.zeros((426, 640, 3), np.uint8)
    for column in range(5):
        for row in range(3):
            photograph[row * 142 : (row + 1) * 142, column * 128 : (column + 1) * 128, :2] = (
                40 * column + 40,
                60 * row + 60,
            )
    digits = SimpleNamespace(images=np.zeros((200, 8, 8)), target=np.arange(200))
    monkeypatch.setattr(sklearn.datasets, "load_digits", lambda: digits)
    monkeypatch.setattr(sklearn.datasets, "load_sample_image", lambda name: photograph)
    sets = draw_images(100, 50, 50)
    numbers = [set(part.digit.tolist()) for part in sets]
    parts = [{tuple(colour) for colour in part.pixels.reshape(-1, 3).tolist()} for part in sets]
    for contents, sizes in ((numbers, [100, 50, 50]), (parts, [9, 3, 3])):
        assert [len(one) for one in contents] == sizes
        assert not contents[0] & contents[1] | contents[0] & contents[2] | contents[1] & contents[2]


def test_images_are_the_same_every_time():
    first, again = draw_images(30, 20, 20), draw_images(30, 20, 20)
    for a, b in zip(first, again, strict=True):
        assert np.array_equal(a.pixels, b.pixels)
        assert set(a.background.tolist()) == {0, 1}
