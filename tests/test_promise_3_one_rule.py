"""Promise 3: the fast passes agree with the dense reference, and the reference says what the paper's table says."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from builders import ROUNDING, graph_shapes, images, library_model, tiny_backbone, trained, variant_params, worst
from vit_memory import MemoryViT, TaskError, TaskGraph
from vit_memory.reference import dense_forward, rule
from vit_memory.standalone import StandaloneModel


@pytest.mark.parametrize("variant", variant_params())
def test_both_passes_agree_with_the_dense_reference(variant):
    backbone = tiny_backbone(variant)
    for tasks in graph_shapes(backbone).values():
        model = MemoryViT(backbone, tasks)
        for size in [(32, 32), (48, 40)]:
            batch = images(3, size)
            fused, read, dense = model(batch), model.read(model.trunk(batch)), dense_forward(backbone, tasks, batch)
            assert list(fused) == list(read) == list(dense)
            for name in fused:
                assert worst(fused[name], dense[name]) <= ROUNDING
                assert worst(read[name], dense[name]) <= ROUNDING


def readers():
    """Any learned reader: gains, any rank of any projections, any read-out; at least one of these."""
    projections = st.lists(st.sampled_from(["q", "k", "v", "o", "fc1", "fc2"]), min_size=1, unique=True)
    parts = {
        "gains": st.booleans(),
        "rank": st.none() | st.integers(1, 9),
        "projections": projections.map(tuple),
        "read_out": st.sampled_from(["final", "patches", "blocks:2", "blocks:3+patches"]),
    }
    return st.fixed_dictionaries(parts).filter(lambda r: r["gains"] or r["rank"] or r["read_out"] != "final")


@st.composite
def task_lists(draw):
    """Any acyclic graph of up to seven tasks: every regime, sizes 0 to 20, any parents among the earlier ones."""
    backbone = tiny_backbone()
    tasks = []
    for i in range(draw(st.integers(1, 7))):
        regime = draw(st.sampled_from(["memory", "class", "head", "reader", "reader"]))
        cells = draw(st.integers(0, 20)) if regime in ("memory", "reader") else None
        parents = [task.name for task in tasks if draw(st.booleans())]
        reader = draw(readers()) if regime == "reader" else {}
        tasks.append(trained(backbone, f"task-{i}", regime=regime, cells=cells, parents=parents, **reader))
    return draw(st.permutations(tasks))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tasks=task_lists(), batch=st.integers(1, 4), size=st.sampled_from([(32, 32), (40, 32), (56, 64)]), data=st.data()
)
def test_promises_1_to_3_hold_for_any_graph(tasks, batch, size, data):
    family, library = library_model("vit")
    backbone = tiny_backbone()
    pixels = images(batch, size)
    model = MemoryViT(backbone, tasks)
    asked = data.draw(st.lists(st.sampled_from([task.name for task in tasks]), unique=True))
    outputs = model(pixels, asked)
    dense = dense_forward(backbone, tasks, pixels)
    with torch.no_grad():
        said = family.library_forward(library, pixels)
    assert torch.equal(outputs.original.logits, said["logits"])
    assert list(outputs) == asked
    for name in asked:
        assert worst(outputs[name], dense[name]) <= ROUNDING


def test_the_mask_is_the_papers_table():
    """Two patches and the class token; C1 with one cell, C2 (extends C1) with two, C3 beside them with one."""
    backbone = tiny_backbone()
    tasks = [
        trained(backbone, "C1", cells=1),
        trained(backbone, "C2", cells=2, parents=["C1"]),
        trained(backbone, "C3", cells=1),
    ]
    # columns: INP INP CLS | C1 C2 C3 | M1 M2 M2 M3
    table = """
        1 1 1  0 0 0  0 0 0 0
        1 1 1  0 0 0  0 0 0 0
        1 1 1  0 0 0  0 0 0 0
        1 1 1  1 0 0  1 0 0 0
        1 1 1  1 1 0  1 1 1 0
        1 1 1  0 0 1  0 0 0 1
    """
    expected = torch.tensor([[bool(int(x)) for x in row.split()] for row in table.strip().splitlines()])
    assert torch.equal(rule(3, tasks, TaskGraph(tasks))[:6], expected)


def test_raw_memory_skips_the_norm_in_every_pass():
    backbone = tiny_backbone()
    normed = trained(backbone, "task", cells=4)
    raw = replace(normed, raw_memory=True)
    outputs = MemoryViT(backbone, [raw])(images())
    assert worst(outputs["task"], dense_forward(backbone, [raw], images())["task"]) <= ROUNDING
    assert worst(outputs["task"], MemoryViT(backbone, [normed])(images())["task"]) > 1e-2


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("regime", ["memory-unmasked", "propagated", "additive"])
def test_a_standalone_model_is_the_dense_rule_without_a_mask(regime, raw):
    backbone = tiny_backbone()
    task = replace(trained(backbone, "task", cells=3, regime=regime), raw_memory=raw)
    ours, dense = StandaloneModel(backbone, task)(images()), dense_forward(backbone, [task], images())
    assert worst(ours["task"], dense["task"]) <= ROUNDING
    assert worst(ours.original.logits, dense.original.logits) <= ROUNDING


@pytest.mark.parametrize("regime", ["memory-unmasked", "propagated", "additive"])
def test_unmasked_regimes_change_the_original_output_and_each_other(regime):
    backbone = tiny_backbone()
    one, two = (trained(backbone, name, cells=3, regime=regime) for name in ("one", "two"))
    plain = MemoryViT(backbone)(images()).original.logits
    alone, together = dense_forward(backbone, [one], images()), dense_forward(backbone, [one, two], images())
    assert worst(alone.original.logits, plain) > 1e-2
    assert worst(alone["one"], together["one"]) > 1e-2


def test_the_three_ways_to_treat_cells_differ_where_they_should():
    """One block: fresh, handed-on and added-to cells are the same thing. Three: they are three."""
    backbone = tiny_backbone()
    base = trained(backbone, "task", cells=3)
    logits = {
        regime: dense_forward(backbone, [replace(base, regime=regime)], images())["task"]
        for regime in ("memory-unmasked", "propagated", "additive")
    }
    assert worst(logits["propagated"], logits["additive"]) > 1e-2
    assert worst(logits["propagated"], logits["memory-unmasked"]) > 1e-2
    memory = base.memory.clone()
    memory[1:] = 0
    nothing_added = replace(base, memory=memory)
    handed_on, added = (
        dense_forward(backbone, [replace(nothing_added, regime=regime)], images())["task"]
        for regime in ("propagated", "additive")
    )
    assert torch.equal(handed_on, added)


def test_regimes_that_follow_different_rules_are_not_computed_together():
    backbone = tiny_backbone()
    tasks = [trained(backbone, "masked"), trained(backbone, "open", regime="memory-unmasked")]
    with pytest.raises(TaskError, match="one sequence follows one rule"):
        dense_forward(backbone, tasks, images())
