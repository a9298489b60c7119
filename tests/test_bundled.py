"""The backbone in the box: there after installation, small, and what its card says."""

import json
import sys
from importlib.resources import files
from pathlib import Path

import torch

from builders import images
from vit_memory import MemoryViT, load_backbone, new_task

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.probe import HELD_OUT, table  # noqa: E402

CARD = files("vit_memory.families").joinpath("bundled.md").read_text(encoding="utf-8")
PROBE = json.loads((ROOT / "results/probe.json").read_text())


def test_it_loads_without_any_library_of_models_and_answers_for_tasks_untouched():
    backbone = load_backbone("bundled")
    assert (backbone.width, backbone.depth, backbone.heads) == (256, 6, 4)
    task = new_task(backbone, "pets", ["cat", "dog"])
    pixels = images(3, (64, 64))
    outputs = MemoryViT(backbone, [task])(pixels)
    with torch.no_grad():
        assert torch.equal(outputs.original.tokens, backbone.model(pixels))
    assert outputs["pets"].shape == (3, 2)
    assert outputs.original.feature.std() > 0.1  # trained, not a constant


def test_it_is_as_small_as_its_card_says():
    weights = files("vit_memory.families").joinpath("bundled.safetensors")
    size = len(weights.read_bytes())
    assert size <= 12e6
    assert f"{size / 1e6:.1f} MB in float16" in CARD
    parameters = sum(weight.numel() for weight in load_backbone("bundled").model.parameters())
    assert f"{parameters / 1e6:.1f} million parameters" in CARD


def test_the_card_shows_the_measured_table_of_these_weights():
    assert PROBE["fingerprint"] == load_backbone("bundled").fingerprint
    assert table(PROBE["rows"]) in CARD
    made = json.loads((ROOT / "results/bundled.json").read_text())
    assert f"{made['images']:,}".replace(",", " ") in CARD
    assert made["recipe"]["steps"] == 1900


def test_what_it_knows_is_far_above_raw_pixels_and_an_untrained_one_on_every_pack():
    rows = {row["case"]: row for row in PROBE["rows"]}
    assert set(HELD_OUT) < set(rows)
    for row in rows.values():
        assert row["interval"][0] > row["untrained"], row
        assert row["token"] > row["pixels"], row
        # With as many numbers as there are pixels to read, at least ten points more are right.
        assert row["tokens"] > row["pixels"] + 0.1, row
