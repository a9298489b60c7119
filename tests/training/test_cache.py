"""Promise 5, repeatable: what is trained from stored trunks is what is trained live; a store is never used wrongly."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from data.test_sources import pictures, write_folder
from training.test_sweep import FACTS, READER, assert_same_weights, backbone, coloured, fresh  # noqa: F401 - a fixture
from vit_memory import load_backbone
from vit_memory.data.images import ImageArray, ImageFiles
from vit_memory.data.loading import Loader, default_workers
from vit_memory.data.splits import Split
from vit_memory.data.transforms import TrainTransform
from vit_memory.errors import DataError, TrainingError, TrainingStopped
from vit_memory.training import cache as cache_module
from vit_memory.training import row_formats
from vit_memory.training.batches import LOADER_BATCH
from vit_memory.training.cache import Cache, choose_storage
from vit_memory.training.callbacks import Callbacks
from vit_memory.training.fit import fit
from vit_memory.training.locks import exclusive
from vit_memory.training.options import TrainingOptions
from vit_memory.training.recipe import Recipe
from vit_memory.training.stores import DiskSpace, bytes_on_disk, list_stores
from vit_memory.training.trunk_store import TrunkStore

RECIPE = Recipe(steps=14, batch=8, chunk=5, views=2, learning_rates=(0.1, 0.3), evaluate_every=7)


def train(backbone, cache, recipe=RECIPE):  # noqa: F811
    tasks = [
        fresh(backbone, 3),
        fresh(backbone, regime="class"),
        fresh(backbone, regime="head"),
        fresh(backbone, **READER),  # with a read-out of the patches, which are stored too
    ]
    return fit(backbone, tasks, coloured(20, 1), coloured(12, 2), recipe, options=TrainingOptions(cache=cache))


@pytest.mark.parametrize("mode", ["ram", "disk"])
@pytest.mark.parametrize("augment", ["inception", "none"])
def test_stored_and_live_training_of_the_same_views_give_the_same_weights(backbone, tmp_path, mode, augment):  # noqa: F811
    recipe = replace(RECIPE, augment=augment)
    live = train(backbone, Cache("off"), recipe)
    stored = train(backbone, Cache(mode, "float32", tmp_path), recipe)
    assert (live.storage, stored.storage) == ("off", mode)
    for a, b in zip(live.settings, stored.settings, strict=True):
        assert_same_weights(a.task, b.task, atol=1e-5)
        assert a.score == b.score


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_stores_train_close_by(backbone, tmp_path, dtype):  # noqa: F811
    live, stored = train(backbone, Cache("off")), train(backbone, Cache("ram", dtype))
    for a, b in zip(live.settings, stored.settings, strict=True):
        assert_same_weights(a.task, b.task, atol=2e-2)
    assert not torch.equal(live.settings[0].task.head_weight, stored.settings[0].task.head_weight)  # it was used


def store(backbone, folder, *, split=None, seed=0, facts=FACTS, views=2, dtype="float16", limit=None):  # noqa: F811
    split = split or coloured(20, 1)
    loader = Loader(split, TrainTransform(facts), 5, on_bad_image="skip")
    return TrunkStore(backbone, loader, views, seed, Cache("disk", dtype, folder, limit), range(len(split)))


def content(kept):
    return [(kept.folder / name).read_bytes() for name in ("trunks.bin", "features.bin", "done.bin")]


def passes(monkeypatch):
    """The batches that went through the backbone from here on."""
    seen = []
    run = row_formats.run_trunk

    def counted(roles, images, **rest):
        seen.append(len(images))
        return run(roles, images, **rest)

    monkeypatch.setattr(row_formats, "run_trunk", counted)
    return seen


def stop_after(groups):
    left = [groups]

    def stop():
        left[0] -= 1
        if left[0] < 0:
            raise TrainingStopped("now")

    return stop


def test_a_store_that_was_interrupted_is_continued_to_the_same_bits(backbone, tmp_path, monkeypatch):  # noqa: F811
    whole = store(backbone, tmp_path / "whole").open(disk=True)
    whole.fill()
    with pytest.raises(TrainingStopped):
        store(backbone, tmp_path / "cut").open(disk=True).fill(check_stop=stop_after(3))
    again = store(backbone, tmp_path / "cut")
    assert bytes_on_disk(again.folder) > 0
    again.open(disk=True)
    seen = passes(monkeypatch)
    reports = []
    again.fill(reports.append)
    assert seen == [5] * 5  # of eight batches, three were there
    assert reports == [20, 25, 30, 35, 40]
    assert content(again) == content(whole)
    seen.clear()
    store(backbone, tmp_path / "cut").open(disk=True).fill()
    assert seen == []


def test_a_training_that_waits_for_another_to_fill_a_store_can_be_stopped(backbone, tmp_path):  # noqa: F811
    kept = store(backbone, tmp_path).open(disk=True)
    with exclusive(kept.folder / "store.lock"), pytest.raises(TrainingStopped):
        store(backbone, tmp_path).open(disk=True).fill(check_stop=stop_after(2))
    kept.fill()
    assert kept.tensors.done.all()


@pytest.mark.parametrize("name", ["trunks.bin", "features.bin", "done.bin"])
def test_a_store_whose_file_is_short_or_missing_starts_empty(backbone, tmp_path, name):  # noqa: F811
    kept = store(backbone, tmp_path).open(disk=True)
    kept.fill()
    before = content(kept)
    for harm in (lambda file: file.write_bytes(file.read_bytes()[:-1]), lambda file: file.unlink()):
        harm(kept.folder / name)
        again = store(backbone, tmp_path).open(disk=True)
        assert not again.tensors.done.any()
        again.fill()
        assert content(again) == before


def test_whatever_changes_a_trunk_names_another_store(backbone, tmp_path):  # noqa: F811
    other_backbone = type(backbone)(backbone.model, backbone.family, "other", FACTS)
    other_backbone._fingerprint = "another"
    reordered = coloured(20, 1).select(range(19, -1, -1))
    folders = [
        store(backbone, tmp_path).folder,
        store(other_backbone, tmp_path).folder,
        store(backbone, tmp_path, split=coloured(20, 3)).folder,
        store(backbone, tmp_path, split=reordered).folder,
        store(backbone, tmp_path, seed=1).folder,
        store(backbone, tmp_path, views=3).folder,
        store(backbone, tmp_path, dtype="float32").folder,
        store(backbone, tmp_path, facts=FACTS.at(48)).folder,
    ]
    assert len(set(folders)) == len(folders)
    assert store(backbone, tmp_path).folder == folders[0]


def test_what_does_not_fit_is_refused_with_the_numbers_and_auto_goes_elsewhere(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(cache_module, "free_memory", lambda: 10 * 10**9)

    def chosen(mode, need, reads=1000, **space):
        gigabytes = {"free": 20, "own": 0, "unused": 0, "in_use": 0, "limit": 100, **space}
        in_bytes = {name: int(value * 10**9) for name, value in gigabytes.items()}
        return choose_storage(Cache(mode, folder=tmp_path), need * 10**9, DiskSpace(**in_bytes), reads, 100)

    with pytest.raises(
        TrainingError, match=r"memory does not hold 9\.0 GB of trunks .* 10\.0 GB memory, 20\.0 GB disk"
    ):
        chosen("ram", 9)
    with pytest.raises(TrainingError, match=r"does not hold 21\.0 GB .*--views.*--cache off"):
        chosen("disk", 21)
    assert chosen("disk", 21, own=5) == "disk"
    assert chosen("disk", 21, unused=5) == "disk"
    assert chosen("auto", 4) == "ram"
    assert chosen("auto", 9) == "disk"
    assert chosen("auto", 15) == "off"
    assert chosen("auto", 15, unused=10) == "disk"
    assert chosen("auto", 1, reads=100) == "off"  # every view is seen once: storing would only cost
    assert chosen("off", 1) == "off"
    # What stores in use by others have of the limit is gone; what the wanted and the unused ones have is not.
    assert chosen("disk", 9, limit=9, own=3, unused=6) == "disk"
    with pytest.raises(TrainingError, match=r"does not allow 9\.0 GB .*limit of all stores: 9\.0 GB, .* use 500 MB"):
        chosen("disk", 9, limit=9, in_use=0.5)
    assert chosen("auto", 4, limit=3) == "ram"
    caplog.clear()
    assert chosen("auto", 9, limit=8) == "off"
    assert "nothing is stored: there is no room for 9.0 GB" in caplog.text
    assert "limit of all stores: 8.0 GB" in caplog.text


def test_bad_images_are_left_out_of_a_store_and_reported_each_time(backbone, tmp_path):  # noqa: F811
    pixels = np.random.default_rng(0).random((12, 32, 32, 3)).astype(np.float32)
    pixels[5, 0, 0, 0] = np.nan
    split = Split.of(ImageArray.whole("noise", pixels), np.arange(12) % 3)
    results = [
        fit(
            backbone,
            [fresh(backbone)],
            split,
            coloured(12, 2),
            replace(RECIPE, learning_rates=(0.1,)),
            options=TrainingOptions(cache=cache, on_bad_image="skip"),
        )
        for cache in (Cache("off"), Cache("disk", "float32", tmp_path), Cache("disk", "float32", tmp_path))
    ]
    assert [list(result.bad_images.reasons) for result in results] == [["noise[5]"]] * 3
    for result in results[1:]:
        assert_same_weights(result.best.task, results[0].best.task, atol=1e-5)
    assert all(info.complete for info in list_stores(tmp_path))
    assert sorted(info.rows_left_out for info in list_stores(tmp_path)) == [0, 2]  # two views of one image


def some_bad(count, bad):
    """Grey pictures as an array, the listed ones not a number."""
    pixels = np.random.default_rng(0).random((count, 32, 32, 3)).astype(np.float32)
    pixels[list(bad), 0, 0, 0] = np.nan
    return Split.of(ImageArray.whole("noise", pixels), np.arange(count) % 3)


def test_a_store_whose_last_batch_holds_only_bad_images_is_used_a_second_time(backbone, tmp_path):  # noqa: F811
    split = some_bad(LOADER_BATCH + 2, [LOADER_BATCH, LOADER_BATCH + 1])
    digests = [
        fit(
            backbone,
            [fresh(backbone)],
            split,
            coloured(12, 2),
            replace(RECIPE, learning_rates=(0.1,)),
            options=TrainingOptions(
                cache=Cache("disk", folder=tmp_path), on_bad_image="skip", workers=default_workers()
            ),
        ).best.task.digest
        for _ in range(2)
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("mode", ["off", "ram", "disk"])
@pytest.mark.parametrize("part", ["training", "validation"])
def test_images_that_are_all_bad_are_refused_by_the_name_of_the_first(backbone, tmp_path, mode, part):  # noqa: F811
    good, bad = coloured(12, 1), some_bad(12, range(12))
    splits = (bad, good) if part == "training" else (good, bad)
    with pytest.raises(DataError, match=rf"not one {part} image can be used; the first, noise\[0\]: it holds NaN"):
        fit(
            backbone,
            [fresh(backbone)],
            *splits,
            RECIPE,
            options=TrainingOptions(cache=Cache(mode, folder=tmp_path), on_bad_image="skip"),
        )


@pytest.mark.parametrize("part", ["training", "validation"])
def test_images_that_vanish_during_a_training_end_it(backbone, tmp_path, part):  # noqa: F811
    paths = sorted(write_folder(tmp_path, pictures(4)).glob("*/*.png"))
    split = Split.of(ImageFiles(tuple(map(str, paths))), np.arange(12) % 3)

    def vanish(progress):
        for path in paths:
            path.unlink(missing_ok=True)

    recipe = Recipe(steps=50, batch=4, learning_rates=(0.1,), views=None, evaluate_every=20)
    splits = (split, coloured(6, 2)) if part == "training" else (coloured(12, 1), split)
    with pytest.raises(DataError, match=rf"not one {part} image can be used; the first, .*png: cannot be read"):
        fit(
            backbone,
            [fresh(backbone)],
            *splits,
            recipe,
            options=TrainingOptions(on_bad_image="skip"),
            callbacks=Callbacks(vanish),
        )


@pytest.mark.parametrize("kept_in", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("computed_in", [torch.float16, torch.bfloat16, torch.float32])
def test_values_beyond_range_stay_finite_and_others_as_they_are(backbone, monkeypatch, computed_in, kept_in):  # noqa: F811
    half = load_backbone(backbone.model, preprocessing=FACTS, dtype=computed_in)
    largest = torch.finfo(computed_in).max
    extremes = torch.tensor([largest, -largest, math.inf, -math.inf, 70_000.0, -70_000.0]).to(computed_in)
    run, computed = row_formats.run_trunk, []

    def extreme(roles, images, **rest):
        trunk = run(roles, images, **rest)
        for block in (*trunk.keys, *trunk.values):
            block.view(len(images), -1)[:, :6] = extremes
        computed.append(torch.stack([torch.stack(pair, 1) for pair in zip(trunk.keys, trunk.values, strict=True)], 1))
        return trunk

    kept = store(half, None, dtype=kept_in).open(disk=False)
    monkeypatch.setattr(row_formats, "run_trunk", extreme)
    kept.fill()
    trunk = kept.encoding(torch.arange(kept.rows))
    read = torch.stack([torch.stack(pair, 1) for pair in zip(trunk.keys, trunk.values, strict=True)], 1)
    before = torch.cat(computed)
    for stored in (kept.tensors.parts["trunks.bin"], read):  # on disk, and cast back to what the backbone computes in
        assert stored.isfinite().all()
        assert torch.equal(stored.sign(), before.to(stored.dtype).sign())
    ordinary = before.abs() < 60_000
    assert ordinary.float().mean() > 0.9
    assert torch.equal(kept.tensors.parts["trunks.bin"][ordinary], before.to(kept.dtype)[ordinary])
    assert (kept.tensors.parts["trunks.bin"][~ordinary].double().abs() >= 60_000).all()


def test_a_store_describes_itself_in_its_folder(backbone, tmp_path):  # noqa: F811
    kept = store(backbone, tmp_path).open(disk=True)
    about = json.loads((kept.folder / "store.json").read_text())
    assert (about["images"], about["views"], about["kept_in"]) == (20, 2, "torch.float16")


def test_what_cannot_be_stored_is_refused(backbone):  # noqa: F811
    with pytest.raises(TrainingError, match="every epoch has new views"):
        train(backbone, Cache("ram"), replace(RECIPE, views=None))
    with pytest.raises(TrainingError, match="cache mode is 'tape'"):
        Cache("tape")
