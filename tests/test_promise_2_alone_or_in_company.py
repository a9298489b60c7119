"""Promise 2: a task's output does not depend on unrelated tasks, and a broken task spoils no other."""

import math

import pytest
import torch

from builders import ROUNDING, graph_shapes, images, tiny_backbone, trained, variant_params, worst
from vit_memory import MemoryViT
from vit_memory.reading import Readers, place_cells, project_cells, read
from vit_memory.snapshot import lay_out_tasks


@pytest.mark.parametrize("variant", variant_params())
def test_a_task_answers_in_company_as_it_does_alone(variant):
    backbone = tiny_backbone(variant)
    for tasks in graph_shapes(backbone).values():
        crowd = [trained(backbone, f"stranger-{i}", cells=i) for i in range(4)]
        together = MemoryViT(backbone, [*crowd[:2], *tasks, *crowd[2:]])
        outputs = together(images(3))
        for task in tasks:
            family = [together.tasks[name] for name in together.tasks.with_ancestors([task.name])]
            alone = MemoryViT(backbone, family)(images(3), [task.name])
            assert worst(outputs[task.name], alone[task.name]) <= ROUNDING


def test_asking_for_some_tasks_answers_for_those_alone():
    backbone = tiny_backbone()
    model = MemoryViT(backbone, [*graph_shapes(backbone)["diamond"], trained(backbone, "other")])
    everything, some = model(images()), model(images(), ["left"])
    assert list(some) == ["left"]
    assert worst(some["left"], everything["left"]) <= ROUNDING
    readers = model._select(["left"]).readers
    assert sorted(readers.layout.names) == ["left", "top"]


@pytest.mark.parametrize("part", ["memory", "class_token", "head_weight", "head_bias"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_broken_task_spoils_its_own_answer_and_its_descendants_and_no_other(part, value):
    backbone = tiny_backbone()
    tasks = [*graph_shapes(backbone)["diamond"], *graph_shapes(backbone)["concatenation"]]
    sound = MemoryViT(backbone, tasks)(images())
    broken = {task.name: task for task in tasks}["left"]
    clean = getattr(broken, part).clone()
    getattr(broken, part)[...] = value
    outputs = MemoryViT(backbone, tasks)(images())
    getattr(broken, part)[...] = clean
    reached = {"left"} if part.startswith("head") else {"left", "bottom"}
    for name in sound:
        if name in reached:
            changed = worst(outputs[name], sound[name])
            assert math.isnan(changed) or changed > ROUNDING
        else:
            assert torch.equal(outputs[name], sound[name])


@pytest.mark.parametrize("part", ["gains", "q.lora_A", "q.lora_B", "o.lora_A", "o.lora_B"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_broken_reader_spoils_its_own_answer_and_its_descendants_and_no_other(part, value):
    backbone = tiny_backbone()
    tasks = [*graph_shapes(backbone)["readers"], *graph_shapes(backbone)["concatenation"]]
    sound = MemoryViT(backbone, tasks)(images())
    tensor = dict({task.name: task for task in tasks}["both"].reader.tensors())[part]
    clean = tensor.clone()
    tensor[...] = value
    outputs = MemoryViT(backbone, tasks)(images())
    tensor[...] = clean
    for name in sound:
        if name in ("both", "child"):
            changed = worst(outputs[name], sound[name])
            assert math.isnan(changed) or changed > ROUNDING
        else:
            assert torch.equal(outputs[name], sound[name])
    assert torch.equal(outputs.original.logits, sound.original.logits)


def test_a_task_has_no_gradient_with_respect_to_unrelated_tasks():
    backbone = tiny_backbone()
    roles = backbone.roles
    model = MemoryViT(backbone, [*graph_shapes(backbone)["diamond"], trained(backbone, "stranger", cells=4)])
    names = list(model.tasks)
    layout = lay_out_tasks(model.tasks, names, torch.device("cpu"))
    tokens = {name: model.tasks[name].class_token.clone().requires_grad_() for name in layout.names}
    memory = {name: model.tasks[name].memory.clone().requires_grad_() for name in layout.names}
    blocks = []
    for i, block in enumerate(roles.blocks):
        cells = torch.cat([memory[name][i] for name in layout.names])
        blocks.append(place_cells(layout, *project_cells(roles, block, cells)))
    readers = Readers(layout, torch.stack([tokens[name] for name in layout.names]), tuple(blocks))
    (features,) = read(roles, readers, model.trunk(images()))
    for name in names:
        loss = features[:, layout.names.index(name)].square().sum()
        leaves = [*tokens.values(), *memory.values()]
        grads = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        related = {name, *model.tasks.ancestors(name)}
        for other, grad in zip([*tokens, *memory], grads, strict=True):
            present = grad is not None and bool((grad != 0).any())
            assert present == (other in related and (grad is None or grad.numel() > 0)), (name, other)


def test_a_thousand_tasks_cost_a_thousand_tokens_and_no_pairs():
    """Nothing in the pass grows with T × T: one group, and products whose sizes are those of one task each."""
    backbone = tiny_backbone()
    model = MemoryViT(backbone, [trained(backbone, f"task-{i}", cells=5) for i in range(1000)])
    outputs = model(images(1))
    assert len(outputs) == 1000
    (group,) = model._select(None).readers.layout.groups
    assert group.ancestors.numel() == 0
    assert tuple(group.cells.shape) == (1000, 5)


def test_a_long_chain_is_read_in_bounded_pieces():
    backbone = tiny_backbone()
    chain = [trained(backbone, "task-0", cells=1)]
    for i in range(1, 150):
        chain.append(trained(backbone, f"task-{i}", cells=1, parents=[f"task-{i - 1}"]))
    model = MemoryViT(backbone, chain)
    groups = model._select(None).readers.layout.groups
    assert max(group.ancestors.numel() for group in groups) <= 4096
    last = model(images(1))["task-149"]
    assert worst(last, model(images(1), ["task-149"])["task-149"]) <= ROUNDING


def test_calls_keep_the_task_set_they_started_with():
    backbone = tiny_backbone()
    model = MemoryViT(backbone, graph_shapes(backbone)["chain"])
    before = model._snapshot
    model.add(trained(backbone, "late"))
    model.remove("c")
    assert sorted(before.graph) == ["a", "b", "c"]
    assert sorted(model.tasks) == ["a", "b", "late"]
    assert list(model(images())) == ["a", "b", "late"]
