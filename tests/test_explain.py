"""Where a class token looked: every weight is accounted for, and named after what it fell on."""

import pytest
import torch

from builders import graph_shapes, images, tiny_backbone, trained, variant_params
from vit_memory import MemoryViT, TaskError


@pytest.mark.parametrize("variant", variant_params())
def test_everything_looked_at_sums_to_one(variant):
    backbone = tiny_backbone(variant)
    model = MemoryViT(backbone, graph_shapes(backbone)["diamond"])
    look = model.explain(images(1, (48, 40))[0], "bottom")
    assert look.patches.shape == (3, 4, 6, 5)
    assert look.memory.shape == (3, 4, 1)
    assert sorted(look.ancestors) == ["left", "right", "top"]
    assert {name: part.shape[-1] for name, part in look.ancestor_memory.items()} == {"top": 2, "left": 5, "right": 0}
    assert len(look.originals) == len(backbone.roles.prefix)
    torch.testing.assert_close(look.total(), torch.ones(3, 4), rtol=0, atol=1e-5)


def test_parts_are_named_after_what_they_are():
    """Cells made to shout are found where they were put: in the task's own memory, or in the ancestor's."""
    backbone = tiny_backbone("dinov2-with-registers")
    parent, child = trained(backbone, "parent", cells=3), trained(backbone, "child", cells=2, parents=["parent"])
    other = trained(backbone, "other", cells=9, parents=["parent"])
    model = MemoryViT(backbone, [child, other, parent])
    before = model.explain(images(1), "child")
    parent.memory[:, 1] *= -7
    after = MemoryViT(backbone, [child, other, parent]).explain(images(1), "child")
    first = {part: getattr(after, part)[0] - getattr(before, part)[0] for part in ("memory", "itself")}
    moved = (after.ancestor_memory["parent"] - before.ancestor_memory["parent"])[0].abs().sum(0)
    assert moved.argmax() == 1
    assert all(change.abs().max() > 0 for change in first.values()), "one softmax over all"
    assert list(after.originals) == ["class", "register 1", "register 2", "register 3"]


def test_a_task_without_a_class_token_has_nothing_to_explain():
    backbone = tiny_backbone()
    model = MemoryViT(backbone, graph_shapes(backbone)["mixed"])
    with pytest.raises(TaskError, match="task 'plain' is of regime 'head': it has no class token of its own"):
        model.explain(images(1), "plain")
    with pytest.raises(TaskError, match="explain takes one image, 2 given"):
        model.explain(images(2), "fine")
