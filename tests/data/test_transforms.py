"""Evaluation equals the library's own preprocessing; training views equal torchvision's augmentations."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from vit_memory import load_backbone
from vit_memory.data.decoding import Encoded, decode
from vit_memory.data.resizing import resize
from vit_memory.data.transforms import EvalTransform, TrainTransform, normalised
from vit_memory.errors import DataError
from vit_memory.families.bundled import PREPROCESSING
from vit_memory.families.transformers_layout import read_preprocessing
from vit_memory.preprocessing import Preprocessing

SIZES = [(300, 500), (257, 255), (64, 64), (480, 333), (1000, 200), (31, 47)]  # (width, height): odd halves, upscaling


def photo(width, height, seed=0):
    """Smooth shapes with fine grain: both show a wrong resampling."""
    rng = np.random.default_rng((seed, width, height))
    coarse = Image.fromarray(rng.integers(0, 256, (9, 11, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    grain = rng.integers(-20, 21, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(coarse).astype(int) + grain, 0, 255).astype(np.uint8))


def pixels_of(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


PROCESSORS = {
    "vit": ("ViTImageProcessor", {}),
    "deit": ("DeiTImageProcessor", {}),
    "dinov2": ("BitImageProcessor", {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}}),
    "dinov3": ("DINOv3ViTImageProcessor", {"size": {"height": 224, "width": 224}}),
    "clip": ("CLIPImageProcessor", {}),
    "siglip": ("SiglipImageProcessor", {}),
    "odd crop": ("BitImageProcessor", {"size": {"shortest_edge": 101}, "crop_size": {"height": 98, "width": 98}}),
    "crop beyond": ("BitImageProcessor", {"size": {"shortest_edge": 64}, "crop_size": {"height": 91, "width": 91}}),
}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", PROCESSORS)
def test_evaluation_equals_the_image_processor_of_transformers(name, size, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torchvision")
    cls, options = PROCESSORS[name]
    processor = getattr(transformers, cls)(**options)
    processor.save_pretrained(tmp_path)
    evaluation = EvalTransform(read_preprocessing(str(tmp_path)))
    image = photo(*size)
    expected = processor(image, return_tensors="pt")["pixel_values"][0]
    ours = evaluation.normalised(evaluation(pixels_of(image))[None])[0]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("model", ["vit_tiny_patch16_224", "vit_small_patch14_dinov2.lvd142m"])
def test_evaluation_equals_the_transform_of_timm(model, size):
    timm = pytest.importorskip("timm")
    pytest.importorskip("torchvision")
    timm_model = timm.create_model(model, depth=1, embed_dim=32, num_heads=2)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(timm_model), is_training=False)
    evaluation = EvalTransform(load_backbone(timm_model).preprocessing)
    image = photo(*size)
    ours = evaluation.normalised(evaluation(pixels_of(image))[None])[0]
    torch.testing.assert_close(ours, transform(image), rtol=0, atol=1e-5)


def test_another_image_size_keeps_the_proportion_of_resize_and_crop():
    preprocessing = Preprocessing(256, (224, 224), (0.5,) * 3, (0.5,) * 3, "bicubic")
    assert preprocessing.at(98) == replace(preprocessing, resize=112, crop=(98, 98))
    exact = replace(preprocessing, resize=(224, 224), crop=None)
    assert exact.at(98) == replace(exact, resize=(98, 98))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_training_crops_are_those_of_torchvision_to_the_bit(interpolation):
    v2 = pytest.importorskip("torchvision.transforms.v2")
    preprocessing = replace(PREPROCESSING, interpolation=interpolation)
    training = TrainTransform(preprocessing, flip=False)
    pixels = pixels_of(photo(300, 200))
    for seed in range(20):
        box = training._random_box(200, 300, np.random.default_rng(seed))
        mode = v2.InterpolationMode(interpolation)
        expected = v2.functional.resized_crop(
            pixels, box.top, box.left, box.height, box.width, [64, 64], mode, antialias=True
        )
        assert torch.equal(training(pixels, seed), expected)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_pillow_and_torch_resize_to_the_same_statistics(interpolation):
    pixels = pixels_of(photo(300, 200))
    by = {name: resize(pixels, (64, 96), interpolation, name).float() for name in ("torch", "pillow")}
    difference = (by["torch"] - by["pillow"]).abs()
    assert difference.max() <= 2  # levels of 255
    assert difference.mean() < 0.05
    for statistic in (torch.mean, torch.std):
        assert abs(statistic(by["torch"]) - statistic(by["pillow"])) < 0.05


@pytest.mark.parametrize("area", [(0.08, 1.0), (0.5, 1.0)])
def test_inception_crops_are_drawn_as_torchvision_draws_them(area):
    transforms = pytest.importorskip("torchvision.transforms")
    training = TrainTransform(PREPROCESSING, area=area)
    ours = [training._random_box(300, 400, np.random.default_rng(seed)) for seed in range(4000)]
    ours = np.array([(box.top, box.left, box.height, box.width) for box in ours])
    image = torch.empty(3, 300, 400)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draw = transforms.RandomResizedCrop.get_params
        theirs = np.array([draw(image, area, (3 / 4, 4 / 3)) for _ in range(4000)])
    for statistic in (np.mean, np.std):
        np.testing.assert_allclose(statistic(ours, 0), statistic(theirs, 0), atol=5)  # pixels
    shares = ours[:, 2] * ours[:, 3] / (300 * 400)
    assert shares.min() >= area[0] * 0.97
    assert shares.max() <= 1


def test_a_view_is_decided_by_its_seed_alone():
    pixels = pixels_of(photo(120, 90))
    pytest.importorskip("torchvision")
    for training in (
        TrainTransform(PREPROCESSING),
        TrainTransform(PREPROCESSING, augment="pad-crop"),
        TrainTransform(PREPROCESSING, augment="randaugment"),
    ):
        before = torch.get_rng_state()
        first = training(pixels, 3)
        torch.rand(5)
        assert torch.equal(training(pixels, 3), first)
        assert not torch.equal(training(pixels, 4), first)
        torch.set_rng_state(before)
        training(pixels, 5)
        assert torch.equal(torch.get_rng_state(), before)  # the global generator is not used
        assert first.shape == (3, 64, 64)
        assert first.dtype == torch.uint8


def test_views_without_augmentation_equal_the_evaluation():
    pixels = pixels_of(photo(120, 90))
    none = TrainTransform(PREPROCESSING, augment="none")
    assert torch.equal(none(pixels, 7), EvalTransform(PREPROCESSING)(pixels))


def test_half_of_the_views_are_mirrored_and_pad_crops_shift_by_at_most_the_padding():
    preprocessing = replace(PREPROCESSING, resize=(32, 32), crop=None)
    pixels = torch.zeros(3, 32, 32, dtype=torch.uint8)
    pixels[:, 16, 8] = 255  # one bright point
    points = [
        TrainTransform(preprocessing, augment="pad-crop")(pixels, seed)[0].nonzero()[0].tolist() for seed in range(600)
    ]
    rows, columns = np.array(points).T
    assert set(rows.tolist()) == set(range(12, 21))
    assert set(columns.tolist()) == set(range(4, 13)) | {31 - c for c in range(4, 13)}
    assert 0.42 < (columns > 15).mean() < 0.58


def test_decoding_smaller_gives_the_same_view_but_for_fine_grain():
    from data.odd_images import encoded

    smooth = photo(11, 9).resize((1024, 800), Image.Resampling.BICUBIC)
    file = encoded(smooth, "JPEG", quality=95)
    training = TrainTransform(PREPROCESSING, area=(0.5, 1.0))
    for seed in range(6):
        small = Encoded(file, "photo").decode(training.min_decode_size(800, 1024, seed))
        assert small.shape[1] < 800
        difference = training(small, seed, (800, 1024)).float() - training(decode(file, "photo"), seed).float()
        assert difference.abs().mean() < 5  # of 255: the box moves by up to half a decoded pixel


def test_normalising_bytes_is_normalising_their_share_of_255():
    bytes_ = torch.arange(256, dtype=torch.uint8).expand(1, 3, 1, 256)
    torch.testing.assert_close(normalised(bytes_, PREPROCESSING), normalised(bytes_ / 255, PREPROCESSING))


def test_an_impossible_transform_is_refused_when_it_is_built():
    with pytest.raises(DataError, match="augment is 'mixup'; expected one of inception, randaugment, pad-crop, none"):
        TrainTransform(PREPROCESSING, augment="mixup")
    with pytest.raises(DataError, match="area is"):
        TrainTransform(PREPROCESSING, area=(0.0, 1.0))
    with pytest.raises(DataError, match=r"many sizes.*--image-size"):
        TrainTransform(replace(PREPROCESSING, crop=None))(pixels_of(photo(50, 40)), 0)
