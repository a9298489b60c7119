"""Tasks that cannot be built wrong, and graphs that cannot be put together wrong: every refusal by its message."""

from dataclasses import replace

import pytest
import torch

from builders import graph_shapes, images, tiny_backbone, trained
from vit_memory import BackboneMismatch, GraphError, MemoryViT, TaskError, TaskGraph, UnknownTask, new_task


def test_a_new_task_starts_as_the_paper_says():
    backbone = tiny_backbone()
    task = new_task(backbone, "pets", ["cat", "dog"], cells=50, generator=torch.Generator().manual_seed(1))
    assert torch.equal(task.class_token, backbone.initial_class_token())
    assert task.memory.shape == (3, 50, 32)
    assert abs(task.memory.std().item() - 0.02) < 2e-3
    assert not task.head_weight.any()
    assert not task.head_bias.any()
    assert task.parameters == 32 + 3 * 50 * 32 + (32 + 1) * 2
    assert new_task(backbone, "pets", ["cat"]).cells == 5


def test_a_task_starts_where_the_original_class_token_enters():
    """Reading nothing of its own, a fresh `class` task's token follows the original one: same start, same rule."""
    backbone = tiny_backbone()
    task = trained(backbone, "copy", regime="class")
    task = replace(task, class_token=backbone.initial_class_token())
    model = MemoryViT(backbone, [task])
    look = model.explain(images(1), "copy")
    assert torch.allclose(look.itself[0], look.originals["class"][0], atol=1e-6)
    assert not tiny_backbone("siglip-vision").initial_class_token().any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": ()}, "label list is empty"),
        ({"labels": ("a", "a", "b")}, "labels given twice: a"),
        ({"name": "no/slash"}, "task name 'no/slash': use 1 to 100 letters"),
        ({"name": ""}, "task name ''"),
        ({"name": "../up"}, "beginning with a letter or digit"),
        ({"regime": "lora"}, "regime 'lora' is none of head, class, memory"),
        ({"kind": "detection"}, "kind 'detection' is none of single-label"),
        ({"regime": "head"}, "regime 'head' has no class token or memory cells"),
        ({"regime": "class"}, "regime 'class' has no memory cells, 5 given"),
        ({"class_token": None}, "regime 'memory' needs a class token"),
        ({"class_token": torch.zeros(31)}, r"class_token is \(31,\) torch.float32, expected \(32,\)"),
        ({"memory": torch.zeros(2, 5, 32)}, r"memory is \(2, 5, 32\).*expected \(3, 5, 32\)"),
        ({"memory": torch.zeros(3, 5)}, r"memory is \(3, 5\)"),
        ({"head_weight": torch.zeros(2, 32)}, r"head_weight is \(2, 32\).*3 labels on"),
        ({"head_bias": torch.zeros(3, dtype=torch.long)}, "head_bias is .*int64, expected .* floating type"),
        ({"parents": ("task",)}, "extends itself"),
        ({"parents": ("x", "x")}, "parent is given twice"),
    ],
)
def test_a_task_cannot_be_built_wrong(change, message):
    with pytest.raises(TaskError, match=message):
        replace(trained(tiny_backbone(), "task"), **change)


def test_a_negative_memory_size_is_refused():
    with pytest.raises(TaskError, match="-1 memory cells; expected 0 or more per block"):
        new_task(tiny_backbone(), "task", ["a"], cells=-1)
    with pytest.raises(TaskError, match="regime 'head' has no memory cells, 3 given"):
        new_task(tiny_backbone(), "task", ["a"], cells=3, regime="head")


def test_graphs_refuse_what_does_not_go_together():
    backbone = tiny_backbone()
    a, b, c = (trained(backbone, name) for name in "abc")
    with pytest.raises(GraphError, match="two tasks are called 'a'"):
        TaskGraph([a, b, a])
    with pytest.raises(GraphError, match="task 'b' extends 'nobody', not attached"):
        TaskGraph([a, replace(b, parents=("nobody",))])
    with pytest.raises(GraphError, match=r"in a circle: .*(a → c → b|c → b → a|b → a → c)"):
        TaskGraph([replace(a, parents=("c",)), replace(b, parents=("a",)), replace(c, parents=("b",))])
    for regime in ("memory-unmasked", "propagated", "additive"):
        with pytest.raises(GraphError, match=f"regime '{regime}' and cannot be put beside others: its"):
            TaskGraph([replace(a, regime=regime)])
    with pytest.raises(GraphError, match=r"regime 'full' .* its own weights"):
        TaskGraph([new_task(backbone, "whole", ["x"], regime="full")])


def test_removing_a_task_that_others_extend_is_refused_by_name():
    graph = TaskGraph(graph_shapes(tiny_backbone())["diamond"])
    with pytest.raises(GraphError, match="task 'left' extends 'top': remove 'left' first"):
        graph.remove("top")
    assert list(graph.remove("bottom", "left")) == ["top", "right"]
    assert list(graph) == ["top", "left", "right", "bottom"], "a graph never changes"


def test_ancestors_come_parents_first_and_once():
    graph = TaskGraph(reversed(graph_shapes(tiny_backbone())["diamond"]))
    assert graph.ancestors("top") == ()
    assert graph.ancestors("bottom")[0] == "top"
    assert sorted(graph.ancestors("bottom")) == ["left", "right", "top"]
    assert sorted(graph.with_ancestors(["left", "right"])) == ["left", "right", "top"]


def test_unknown_tasks_are_refused_with_the_known_ones():
    backbone = tiny_backbone()
    model = MemoryViT(backbone, graph_shapes(backbone)["diamond"])
    with pytest.raises(
        UnknownTask, match=r"no task 'botom'. Did you mean 'bottom'\? Attached: top, left, right, bottom"
    ):
        model(images(), ["botom"])
    with pytest.raises(UnknownTask, match=r"tasks is 'top'; give a list of names: \['top'\]"):
        model(images(), "top")
    with pytest.raises(UnknownTask, match="no answer for 'top': this call asked for left"):
        model(images(), ["left"])["top"]
    with pytest.raises(UnknownTask, match="no task is attached"):
        MemoryViT(backbone).remove("top")
    assert "nobody" not in model.tasks
    assert model.tasks.get("nobody") is None


def test_a_refused_change_changes_nothing():
    backbone = tiny_backbone()
    model = MemoryViT(backbone, graph_shapes(backbone)["chain"])
    before = model(images())
    with pytest.raises(GraphError):
        model.add(trained(backbone, "new"), trained(backbone, "a"))
    with pytest.raises(GraphError):
        model.remove("c", "a")
    after = model(images())
    assert list(after) == list(before) == ["a", "b", "c"]
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_task_of_another_backbone_is_refused():
    backbone = tiny_backbone()
    task = trained(backbone, "task")
    other = replace(task, backbone=replace(task.backbone, name="google/other", fingerprint="0" * 64))
    with pytest.raises(
        BackboneMismatch, match=r"trained on google/other with fingerprint 0{12}….*same shape, other weights"
    ):
        MemoryViT(backbone, [other])
    deeper = replace(task, backbone=replace(task.backbone, heads=8))
    with pytest.raises(BackboneMismatch, match=r"width 32, 3 blocks, 8 heads.*Load .*or train the task again"):
        MemoryViT(backbone, [deeper])
