"""Promise 1: with any tasks attached, the original output is torch.equal to the library's own forward."""

import copy

import pytest
import torch
from torch import nn

from builders import graph_shapes, images, library_model, tiny_backbone, trained, variant_params
from vit_memory import MemoryViT, load_backbone
from vit_memory.joining import PassShape, same_bits_when_joined

SHAPES = ["none", "one", "concatenation", "chain", "diamond", "mixed", "readers"]


def assert_untouched(family, library, model, batch):
    with torch.no_grad():
        said = family.library_forward(library, batch)
    original = model(batch).original
    for field, value in said.items():
        assert torch.equal(getattr(original, field), value), field
    assert said, "the judge said nothing"


@pytest.mark.parametrize("variant", variant_params())
def test_original_output_is_the_librarys_own_for_every_family_graph_and_size(variant):
    family, library = library_model(variant)
    shapes = graph_shapes(tiny_backbone(variant))
    assert sorted(shapes) == sorted(SHAPES)
    for size in [(32, 32), (48, 40)]:
        for batch in (1, 3):
            for tasks in shapes.values():
                assert_untouched(family, library, MemoryViT(tiny_backbone(variant), tasks), images(batch, size))


@pytest.mark.parametrize("variant", ["vit", "dinov2", "dinov3-vit", "clip-vision", "timm-vit:qk-norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_original_output_is_the_librarys_own_in_half_precision(variant, dtype):
    if variant.startswith("timm"):
        pytest.importorskip("timm", reason="timm is not installed")
    family, library = library_model(variant)
    library = copy.deepcopy(library).to(dtype)
    backbone = load_backbone(library)
    model = MemoryViT(backbone, graph_shapes(backbone)["mixed"])
    assert model(images().to(dtype))["fine"].dtype == dtype
    assert_untouched(family, library, model, images().to(dtype))


@pytest.mark.parametrize("variant", ["vit", "dinov2", "dinov3-vit", "siglip-vision"])
def test_original_output_follows_the_librarys_choice_of_attention(variant):
    family, library = library_model(variant)
    library = copy.deepcopy(library)
    library.set_attn_implementation("eager")
    backbone = load_backbone(library)
    assert_untouched(family, library, MemoryViT(backbone, graph_shapes(backbone)["chain"]), images())


@pytest.mark.parametrize("patch", [32, pytest.param(16, marks=pytest.mark.slow)])
def test_a_real_sized_vit_keeps_its_logits_under_16_tasks(patch):
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    library = ViTForImageClassification(ViTConfig(patch_size=patch, num_labels=1000)).eval()
    backbone = load_backbone(library)
    model = MemoryViT(backbone, [trained(backbone, f"task-{i}", cells=5) for i in range(16)])
    for batch in (1, 16):
        pixels = images(batch, (224, 224))
        with torch.no_grad():
            logits = library(pixel_values=pixels).logits
        assert torch.equal(model(pixels).original.logits, logits)


@pytest.mark.parametrize("part", ["memory", "class_token", "head_weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_broken_task_does_not_reach_the_original_output(part, value):
    family, library = library_model("vit")
    backbone = tiny_backbone()
    tasks = graph_shapes(backbone)["diamond"]
    getattr(tasks[0], part)[...] = value
    assert_untouched(family, library, MemoryViT(backbone, tasks), images())


def test_the_callers_model_is_never_changed():
    _, library = library_model("vit")
    library = copy.deepcopy(library).train()
    before = copy.deepcopy(library.state_dict())
    backbone = load_backbone(library, dtype=torch.bfloat16)
    model = MemoryViT(backbone, graph_shapes(backbone)["mixed"])
    model.train()
    model(images())
    model.to(torch.float64)
    assert library.training
    assert all(parameter.requires_grad for parameter in library.parameters())
    assert all(torch.equal(value, before[key]) for key, value in library.state_dict().items())
    assert not any(module.training for module in model.backbone.modules())


def test_a_backbone_shares_its_weights_with_the_callers_model():
    _, library = library_model("vit")
    backbone = load_backbone(library)
    theirs = {parameter.data_ptr() for parameter in library.parameters()}
    assert {parameter.data_ptr() for parameter in backbone.parameters()} == theirs


def test_products_that_change_bits_when_joined_are_made_apart():
    """A layer whose rounding depends on how many rows it gets, as some matrix products do, is found out and split."""

    class CountsRows(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1 + x.reshape(-1, x.shape[-1]).shape[0] * 1e-6)

    family, library = library_model("vit")
    library = copy.deepcopy(library)
    for layer in library.vit.layers:
        old = layer.mlp.fc2
        layer.mlp.fc2 = CountsRows(old.in_features, old.out_features)
        layer.mlp.fc2.load_state_dict(old.state_dict())
    backbone = load_backbone(library)
    model = MemoryViT(backbone, graph_shapes(backbone)["concatenation"])
    assert_untouched(family, library, model, images())
    (joined,) = model._plan._joined.values()
    first = backbone.roles.blocks[0]
    assert first.mlp[-1] not in joined
    assert first.norm1 in joined  # the plan is per product: one that splits does not split the others


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU()])
@pytest.mark.parametrize(("originals", "readers", "width"), [(17, 6, 48), (5, 1, 7), (31, 2, 64), (3, 3, 33)])
def test_an_activation_that_may_be_joined_gives_the_same_bits_for_any_values(activation, originals, readers, width):
    """What does not fill a vector is computed by the scalar function, which differs in the last bit for some values."""
    shape = PassShape(3, originals, readers, torch.float32, torch.device("cpu"), torch.get_num_threads())
    if same_bits_when_joined(activation, width, shape):
        rows = torch.randn(300, 3 * (originals + readers), width, generator=torch.Generator().manual_seed(1))
        for one in rows:
            assert torch.equal(activation(one)[: 3 * originals], activation(one[: 3 * originals]))


def test_a_module_that_hides_its_activation_is_never_joined():
    gated = nn.Sequential(nn.Linear(32, 64), nn.SiLU())
    assert not same_bits_when_joined(gated, 32, PassShape(1, 17, 1, torch.float32, torch.device("cpu"), 1))
