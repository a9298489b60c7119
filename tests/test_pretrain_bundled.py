"""The script that made the bundled backbone: it can be stopped, and it never saw what it is judged by."""

import hashlib
import importlib.util
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from builders import SHARED
from vit_memory.families.bundled import BundledViT

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("pretrain_bundled", ROOT / "scripts/pretrain_bundled.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["pretrain_bundled"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["pretrain_bundled"]


def lessons(script, **changes):
    rng = np.random.default_rng(0)
    material = script.Material(
        digests=[hashlib.sha256(bytes([i])).hexdigest() for i in range(12)],
        pixels=torch.from_numpy(rng.integers(0, 256, (12, 3, 72, 72), np.uint8)),
        labels=torch.tensor([-1, 0, 1, 2] * 3),
        groups=torch.tensor([0, 0, 1]),
    )
    classes = rng.standard_normal((12, 384)).astype(np.float16)
    maps = rng.standard_normal((12, 49, 384)).astype(np.float16)
    recipe = replace(script.Recipe(), steps=4, batch=4, warmup=2, **changes)
    return script.Lessons(material, (classes, maps), recipe)


@pytest.fixture
def small(script, monkeypatch):
    """The same script around a smaller student."""
    monkeypatch.setattr(script, "BundledViT", partial(BundledViT, width=32, depth=2, hidden=64, stem=(8, 8, 16)))


class Stopped(Exception):  # noqa: N818
    pass


def test_pretraining_stopped_and_resumed_ends_with_the_same_weights(script, small, tmp_path):
    given = lessons(script)
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    whole = script.train(given, tmp_path / "whole", resume=False, checkpoint_every=2)

    real = given.step

    def stop_at_3(step):
        if step == 3:
            raise Stopped
        return real(step)

    given.step = stop_at_3
    with pytest.raises(Stopped):
        script.train(given, tmp_path / "stopped", resume=False, checkpoint_every=2)
    given.step = real
    resumed = script.train(given, tmp_path / "stopped", resume=True, checkpoint_every=2)
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


def test_a_checkpoint_of_another_recipe_is_refused(script, small, tmp_path):
    script.train(lessons(script), tmp_path, resume=False)
    with pytest.raises(SystemExit, match="another recipe or other images"):
        script.train(lessons(script, seed=1), tmp_path, resume=True)


@pytest.mark.skipif(SHARED is None, reason="no real images beside this checkout (../shared/data)")
def test_the_bundled_backbone_never_saw_a_test_image_nor_a_held_out_pack(script):
    import pyarrow.parquet as pq

    facts = json.loads((ROOT / "results/bundled.json").read_text())
    seen = script.training_files(SHARED)
    # The set whose digest stands in the record of the shipped weights is the set checked here ...
    assert hashlib.sha256("".join(seen).encode()).hexdigest() == facts["images_digest"]
    shipped = ROOT / "src/vit_memory/families/bundled.safetensors"
    assert hashlib.sha256(shipped.read_bytes()).hexdigest() == facts["weights_sha256"]
    # ... and neither its files nor its pixels are in any test split, nor anywhere in a held-out pack.
    pixels = {script.pixel_digest(encoded) for encoded, _ in seen.values()}
    judged = 0
    for pack in (*script.TRAIN_PACKS, *script.HELD_OUT):
        for split in ("test",) if pack in script.TRAIN_PACKS else ("train", "test"):
            for cell in pq.read_table(SHARED / "data" / pack / f"{split}.parquet")["image"].to_pylist():
                assert hashlib.sha256(cell["bytes"]).hexdigest() not in seen, (pack, split, cell["path"])
                assert script.pixel_digest(cell["bytes"]) not in pixels, (pack, split, cell["path"])
                judged += 1
    assert judged == 8130
