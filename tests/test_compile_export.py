"""torch.compile and torch.export take the model whole, for any batch, and agree with eager."""

import pytest
import torch

from builders import ROUNDING, graph_shapes, images, tiny_backbone, variant_params, worst
from test_branches import crossing_graph
from vit_memory import MemoryViT, Outputs

pytestmark = pytest.mark.filterwarnings("ignore")  # the compilers warn about themselves


def assert_agree(outputs, eager):
    assert isinstance(outputs, Outputs)
    assert list(outputs) == list(eager)
    assert worst(outputs.original.tokens, eager.original.tokens) <= ROUNDING
    for name in eager:
        assert worst(outputs[name], eager[name]) <= ROUNDING


def assert_exports(model):
    batch = {"images": {0: torch.export.Dim("batch", min=1, max=64)}}
    exported = torch.export.export(model, (images(2),), dynamic_shapes=batch).module()
    for size in (1, 5):
        assert_agree(exported(images(size)), model(images(size)))


# Plain layers, rotary positions, and one projection for q, k and v with gated MLPs: all that an update has to fit into.
WITH_BRANCHES = ("vit", "dinov3-vit", "timm-vit:dinov2-registers")


@pytest.mark.parametrize("variant", variant_params(quick=("vit",)))
def test_every_family_exports_and_compiles_as_one_graph_before_its_first_call(variant):
    """Memory, gains and low-rank updates; for some, three branches, all regimes, and extension across trunks."""
    backbone = tiny_backbone(variant)
    graph = crossing_graph(backbone) if variant in WITH_BRANCHES else (graph_shapes(backbone)["readers"][:3],)
    assert_exports(MemoryViT(backbone, *graph))
    torch._dynamo.reset()
    model = MemoryViT(backbone, *graph)
    assert_agree(torch.compile(model, fullgraph=True, backend="aot_eager")(images(3)), model(images(3)))


@pytest.mark.parametrize("variant", ["vit", pytest.param("dinov3-vit", marks=pytest.mark.slow)])
def test_readers_of_every_kind_export_with_a_dynamic_batch(variant):
    backbone = tiny_backbone(variant)
    assert_exports(MemoryViT(backbone, [*graph_shapes(backbone)["readers"], *graph_shapes(backbone)["mixed"][2:]]))


@pytest.mark.slow
@pytest.mark.parametrize("tasks", ["none", "mixed", "readers"])
def test_compile_takes_any_graph_and_any_batch(tasks):
    torch._dynamo.reset()
    backbone = tiny_backbone()
    model = MemoryViT(backbone, graph_shapes(backbone)[tasks])
    compiled = torch.compile(model, fullgraph=True)
    for batch in (2, 5, 1):
        assert_agree(compiled(images(batch)), model(images(batch)))


def test_a_trace_leaves_nothing_behind_in_the_model():
    backbone = tiny_backbone()
    model = MemoryViT(backbone, graph_shapes(backbone)["chain"])
    torch.export.export(model, (images(2),))
    assert not model._snapshot.selections
    assert not model._snapshot.prepared
    assert torch.isfinite(model(images())["c"]).all()
