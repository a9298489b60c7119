"""Batches depend on the split, the transform, the order and the seed; not on workers, batch size or global state."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from data.odd_images import encoded, scene
from data.test_sources import pictures, write_folder
from vit_memory.data.images import ImageFiles
from vit_memory.data.loading import BadImages, Loader, default_workers, load_one, view_seed
from vit_memory.data.sources import open_data
from vit_memory.data.splits import Split
from vit_memory.data.transforms import EvalTransform, TrainTransform
from vit_memory.errors import DataError
from vit_memory.families.bundled import PREPROCESSING


@pytest.fixture
def split(tmp_path):
    return open_data(write_folder(tmp_path, pictures(12))).train


def concatenated(loader, **options):
    batches = list(loader.batches(**options))
    return [torch.cat([getattr(b, field) for b in batches]) for field in ("images", "targets", "indices")]


@pytest.mark.parametrize(
    "transform", [EvalTransform(PREPROCESSING), TrainTransform(PREPROCESSING)], ids=["evaluation", "training"]
)
def test_workers_and_batch_size_change_nothing(split, transform):
    order = np.random.default_rng(0).permutation(len(split))
    alone = concatenated(Loader(split, transform, batch_size=1), order=order, view=2, seed=5)
    before = torch.get_rng_state()
    for batch_size, workers in ((7, 0), (5, 2), (100, 1)):
        batches = concatenated(Loader(split, transform, batch_size, workers), order=order, view=2, seed=5)
        assert all(torch.equal(a, b) for a, b in zip(alone, batches, strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert alone[2].tolist() == order.tolist()
    assert alone[1].tolist() == split.targets[order].tolist()


def test_another_view_or_seed_is_another_augmentation_of_the_same_images(split):
    loader = Loader(split, TrainTransform(PREPROCESSING), batch_size=8)
    first, *_ = concatenated(loader, view=0, seed=0)
    assert torch.equal(first, concatenated(loader, view=0, seed=0)[0])
    for other in (concatenated(loader, view=1, seed=0)[0], concatenated(loader, view=0, seed=1)[0]):
        assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_no_two_images_views_or_seeds_share_their_randomness():
    seeds = {view_seed(s, v, p) for s in range(4) for v in range(50) for p in range(100)}
    assert len(seeds) == 4 * 50 * 100


def test_bad_images_are_logged_once_and_written_as_a_report(tmp_path):
    write_folder(tmp_path / "d", pictures(6))
    for i in range(20):
        (tmp_path / f"d/ant/bad{i}.jpg").write_bytes(b"%d" % i)
    split = open_data(tmp_path / "d").train
    bad = BadImages()
    loader = Loader(split, EvalTransform(PREPROCESSING), batch_size=4, on_bad_image="skip", bad=bad)
    for _ in range(2):
        assert sum(len(batch.targets) for batch in loader.batches()) == len(split) - len(bad)
    assert len(bad) > 5
    bad.write(tmp_path / "bad.tsv")
    lines = (tmp_path / "bad.tsv").read_text().splitlines()
    assert len(lines) == len(bad)
    assert all("bad" in line and "\tnot an image" in line for line in lines)


def test_a_bad_image_with_a_name_that_is_not_unicode_is_reported_by_its_bytes(tmp_path):
    BadImages({os.fsdecode(b"caf\xe9.jpg"): "the file is empty"}).write(tmp_path / "bad.tsv")
    assert (tmp_path / "bad.tsv").read_bytes() == b"caf\xe9.jpg\tthe file is empty\n"


@pytest.mark.parametrize("workers", [0, default_workers()])
def test_a_plan_gives_one_batch_per_group_also_of_no_groups_and_of_bad_images_only(split, tmp_path, workers):
    for name in ("x.png", "y.png"):
        (tmp_path / name).write_bytes(name.encode())
    paths = (*split.images.paths[:3], str(tmp_path / "x.png"), str(tmp_path / "y.png"))
    mixed = Split.of(ImageFiles(paths), [0] * 5)
    loader = Loader(mixed, TrainTransform(PREPROCESSING), 2, workers, "skip")
    assert list(loader.planned([])) == []
    plan = [(0, [3, 4]), (0, [0, 3]), (1, [1, 2]), (1, [4])]
    assert [batch.indices.tolist() for batch in loader.planned(plan)] == [[], [0], [1, 2], []]
    assert [batch.indices.tolist() for batch in loader.planned(plan[:1])] == [[]]
    assert [batch.indices.tolist() for batch in loader.batches()] == [[0, 1], [2]]


def test_images_that_are_all_bad_are_refused_with_the_name_of_the_first(split, tmp_path):
    for name in ("x.png", "y.png"):
        (tmp_path / name).write_bytes(name.encode())
    paths = (str(tmp_path / "x.png"), str(tmp_path / "y.png"), split.images.paths[0])

    def check(count):
        loader = Loader(Split.of(ImageFiles(paths[:count]), [0] * count), EvalTransform(PREPROCESSING), 2, 0, "skip")
        loader.check_usable("test image")

    check(3)
    with pytest.raises(DataError, match=r"not one test image can be used; the first, .*x\.png: not an image"):
        check(2)


def test_an_image_turned_by_exif_and_decoded_small_is_the_same_view_as_the_upright_one(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    big = scene(1600, 1200)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a/upright.jpg").write_bytes(encoded(big, "JPEG", quality=95))
    turned = big.transpose(Image.Transpose.ROTATE_90)
    (tmp_path / "b/turned.jpg").write_bytes(encoded(turned, "JPEG", quality=95, exif=exif))
    split = Split.of(ImageFiles((str(tmp_path / "a/upright.jpg"), str(tmp_path / "b/turned.jpg"))), [0, 1])
    for seed in range(8):
        upright, back = (load_one(split, i, TrainTransform(PREPROCESSING), seed).float() for i in (0, 1))
        assert (upright - back).abs().mean() < 4  # of 255
