"""Backbones from every source, their facts and fingerprints, and what bad sources and images get."""

import copy
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from builders import ROUNDING, images, library_model, tiny_backbone, trained, worst
from vit_memory import BackboneError, ImageError, MemoryViT, Preprocessing, UnsupportedFamily, load_backbone
from vit_memory.families import bundled, families

PROCESSORS = {
    "vit": (
        {"size": {"height": 224, "width": 224}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        Preprocessing((224, 224), None, (0.5,) * 3, (0.5,) * 3, "bilinear"),
    ),
    "dinov2": (
        {
            "size": {"shortest_edge": 256},
            "crop_size": {"height": 224, "width": 224},
            "do_center_crop": True,
            "resample": 3,
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
        },
        Preprocessing(256, (224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bicubic"),
    ),
    "clip-vision": (
        {"size": 224, "crop_size": 224, "do_center_crop": True, "resample": 3, "do_normalize": False},
        Preprocessing(224, (224, 224), (0.0,) * 3, (1.0,) * 3, "bicubic"),
    ),
}


@pytest.fixture
def folder(tmp_path):
    library_model("vit")[1].save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "variant", ["vit", "deit:teacher", "dinov2-with-registers", "clip-vision:projection", "siglip-vision"]
)
def test_a_folder_gives_the_same_backbone_as_the_live_model(variant, tmp_path):
    family, library = library_model(variant)
    library.save_pretrained(tmp_path)
    loaded = load_backbone(tmp_path)
    assert loaded.fingerprint == tiny_backbone(variant).fingerprint
    task = trained(tiny_backbone(variant), "task")
    with torch.no_grad():
        said = family.library_forward(library, images())
    original = MemoryViT(loaded, [task])(images()).original
    assert said
    assert all(torch.equal(getattr(original, field), value) for field, value in said.items())


@pytest.mark.parametrize("variant", PROCESSORS)
def test_preprocessing_facts_come_from_the_models_own_processor(variant, tmp_path):
    stored, expected = PROCESSORS[variant]
    library_model(variant)[1].save_pretrained(tmp_path)
    assert load_backbone(tmp_path).preprocessing is None
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(stored))
    assert load_backbone(tmp_path).preprocessing == expected


def test_timm_models_come_by_name_and_bring_their_facts(tmp_path):
    timm = pytest.importorskip("timm", reason="timm is not installed")
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", **options).eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    facts = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 1000,
        "model_args": options,
        "pretrained_cfg": {
            "input_size": [3, 32, 32],
            "mean": [0.5] * 3,
            "std": [0.25] * 3,
            "crop_pct": 0.8,
            "interpolation": "bicubic",
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(facts))
    backbone = load_backbone(f"timm:local-dir:{tmp_path}")
    assert backbone.preprocessing == Preprocessing(40, (32, 32), (0.5,) * 3, (0.25,) * 3, "bicubic", "pillow")
    assert backbone.fingerprint == load_backbone(model).fingerprint
    with torch.no_grad():
        assert torch.equal(MemoryViT(backbone)(images()).original.logits, model(images()))


def test_a_fingerprint_knows_weights_by_role_and_not_by_library():
    """The same weights in timm's layout (one fused qkv) and in transformers' (three) are the same backbone."""
    pytest.importorskip("timm", reason="timm is not installed")
    from transformers import ViTConfig, ViTForImageClassification

    timm_backbone = tiny_backbone("timm-vit:augreg")
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    theirs = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8, layer_norm_eps=1e-6)).eval()
    other = load_backbone(theirs)
    with torch.no_grad():
        for (role, weight), (other_role, target) in zip(
            timm_backbone.roles.weights(), other.roles.weights(), strict=True
        ):
            assert role == other_role
            target.copy_(weight.reshape(target.shape))
    assert other.fingerprint == timm_backbone.fingerprint
    task = trained(timm_backbone, "task")
    here, there = (MemoryViT(backbone, [task])(images())["task"] for backbone in (timm_backbone, other))
    assert worst(here, there) <= ROUNDING


def test_a_fingerprint_changes_with_any_weight_and_with_no_cast(folder):
    backbone = load_backbone(folder)
    assert load_backbone(folder, dtype=torch.bfloat16).fingerprint == backbone.fingerprint
    assert load_backbone(folder).to(torch.float64).fingerprint == backbone.fingerprint
    weights = load_file(folder / "model.safetensors")
    key = "vit.layers.1.mlp.fc2.bias" if "vit.layers.1.mlp.fc2.bias" in weights else sorted(weights)[-3]
    weights[key][0] += 1e-6
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_backbone(folder).fingerprint != backbone.fingerprint


def test_half_precision_files_are_read_as_they_are(folder):
    weights = {key: value.half() for key, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    backbone = load_backbone(folder)
    assert backbone.dtype == torch.float32
    assert load_backbone(folder, dtype=torch.float16).fingerprint == backbone.fingerprint


def test_tasks_follow_the_model_to_another_dtype():
    library = library_model("vit")[1]
    backbone = load_backbone(library)
    model = MemoryViT(backbone, [trained(backbone, "task")])
    before = model(images())["task"]
    model.to(torch.float64)
    after = model(images().double())["task"]
    assert after.dtype == torch.float64
    assert worst(after, before) <= ROUNDING


def test_files_that_would_leave_weights_random_are_refused(folder):
    weights = load_file(folder / "model.safetensors")
    dropped = sorted(key for key in weights if "layers.2" in key or "layer.2" in key)
    save_file({k: v for k, v in weights.items() if k not in dropped}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BackboneError, match=rf"{len(dropped)} weights of ViTForImageClassification .* would be random"):
        load_backbone(folder)


def test_a_checkpoint_without_pooler_is_loaded_without_one(tmp_path):
    from transformers import ViTModel

    library = library_model("vit:pooler")[1]
    headless = ViTModel(library.config, add_pooling_layer=False).eval()
    headless.save_pretrained(tmp_path)
    assert MemoryViT(load_backbone(tmp_path))(images()).original.pooled is None


def test_sources_that_are_none_get_a_remedy(tmp_path, monkeypatch):
    with pytest.raises(BackboneError, match=r"no config.json here. A backbone folder is what save_pretrained"):
        load_backbone(tmp_path)
    (tmp_path / "bundle.json").write_text("{}")
    with pytest.raises(BackboneError, match=r"a bundle of tasks, not a backbone. vit-memory certify checks a bundle"):
        load_backbone(tmp_path)
    with pytest.raises(BackboneError, match=r"nobody/nothing: cannot be loaded. It is no folder here"):
        load_backbone("nobody/nothing")
    monkeypatch.setattr(bundled, "WEIGHTS", "elsewhere.safetensors")
    with pytest.raises(BackboneError, match="weights are missing from this installation. Reinstall vit-memory"):
        load_backbone("bundled")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackboneError, match=r"needs timm, which is not installed: pip install 'vit-memory\[timm\]'"):
        load_backbone("timm:vit_base_patch16_224")


def test_an_unknown_family_is_told_the_known_ones():
    with pytest.raises(UnsupportedFamily, match=r"torch.nn.*Linear is of no supported family") as raised:
        load_backbone(nn.Linear(2, 2))
    assert all(family.name in str(raised.value) for family in families())


def test_a_family_whose_layout_changed_says_what_is_missing():
    library = copy.deepcopy(library_model("vit")[1])
    del library.vit.layers[0].mlp.fc2
    with pytest.raises(UnsupportedFamily, match=r"ViTLayer has none of: mlp.fc2, output.dense"):
        load_backbone(library)


def test_timm_blocks_of_other_kinds_are_refused_by_name():
    pytest.importorskip("timm", reason="timm is not installed")
    from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 4}
    with pytest.raises(UnsupportedFamily, match="a block of type ParallelScalingBlock is not supported"):
        load_backbone(VisionTransformer(**sizes, block_fn=ParallelScalingBlock))


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (torch.zeros(3, 32, 32), r"images have shape \(3, 32, 32\).*add the batch axis: images\[None\]"),
        (torch.zeros(2, 1, 32, 32), r"shape \(2, 1, 32, 32\); .* reads \(B, 3, height, width\)"),
        (torch.zeros(0, 3, 32, 32), "the batch is empty"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), "images are torch.uint8; .* floating-point pixels"),
        (torch.zeros(2, 3, 4, 32), "images of 4 × 32 pixels: smaller than one patch of 8 × 8"),
        ([[0.0]], "images are a list"),
    ],
)
def test_images_that_cannot_be_read_are_refused(pixels, message):
    with pytest.raises(ImageError, match=message):
        MemoryViT(tiny_backbone())(pixels)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_images_with_non_finite_pixels_are_refused_by_number(value):
    pixels = images(4)
    pixels[2, 1, 5, 7] = value
    with pytest.raises(ImageError, match=r"images \[2\] of the batch hold NaN or infinite pixels"):
        MemoryViT(tiny_backbone())(pixels)


def test_large_finite_pixels_are_not_mistaken_for_infinite_ones():
    backbone = load_backbone(library_model("vit")[1], dtype=torch.float16)
    backbone.check_images(torch.full((2, 3, 32, 32), 6e4, dtype=torch.float16))


def test_timm_models_of_fixed_size_say_how_to_take_others():
    pytest.importorskip("timm", reason="timm is not installed")
    from timm.models.vision_transformer import VisionTransformer

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 4}
    model = MemoryViT(load_backbone(VisionTransformer(**sizes)))
    with pytest.raises(ImageError, match="takes 32 × 32 only; create it with dynamic_img_size=True"):
        model(images(1, (40, 32)))
    with pytest.raises(ImageError, match="not a multiple of the patch, 8 × 8"):
        MemoryViT(tiny_backbone("timm-vit:augreg"))(images(1, (36, 32)))


def test_the_real_backbone_of_the_shared_folder_stays_itself():
    folder = Path(__file__).resolve().parents[2] / "shared" / "weights" / "dinov2-s14-reg-fp16"
    if not folder.exists():
        pytest.skip("no real weights beside this checkout (../shared/weights)")
    from transformers import AutoModel

    library = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    backbone = load_backbone(folder)
    assert backbone.preprocessing.crop == (224, 224)
    model = MemoryViT(backbone, [trained(backbone, f"task-{i}", cells=5) for i in range(8)])
    for size in [(98, 98), (126, 84)]:
        with torch.no_grad():
            said = library(pixel_values=images(4, size)).last_hidden_state
        assert torch.equal(model(images(4, size)).original.tokens, said)
