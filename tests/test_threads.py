"""One model, many threads: no change is lost, and every call works on one version of the task set."""

import copy
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from builders import ROUNDING, images, tiny_backbone, trained, variant_params, worst
from vit_memory import MemoryViT, TaskGraph, UnknownTask

WRITERS, EACH = 4, 20


@pytest.fixture
def restless():
    """Threads take turns after every few instructions, so that whatever can come between does."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def test_no_change_is_lost_and_no_call_fails_while_threads_add_remove_call_and_explain(restless):
    backbone = tiny_backbone()
    lasting = trained(backbone, "lasting", cells=3)
    small, large = (trained(backbone, "swapped", cells=cells, parents=[lasting]) for cells in (1, 6))
    tasks = [[trained(backbone, f"task-{w}-{i}", cells=1) for i in range(EACH)] for w in range(WRITERS)]
    model = MemoryViT(backbone, [lasting, small])
    picture = images(1)
    trunk = model.trunk(picture)
    alone = model(picture, ["lasting"])["lasting"]
    done = threading.Event()
    start = threading.Barrier(WRITERS + 4)

    def write(own):
        start.wait()
        for task in own:
            model.add(task)
        for task in own[::2]:
            model.remove(task.name)

    def swap():
        start.wait()
        for task in (large, small) * EACH:
            model.remove("swapped")
            model.add(task)

    def call(ask):
        start.wait()
        calls = 0
        while not done.is_set():
            outputs = ask()
            assert worst(outputs["lasting"], alone) <= ROUNDING
            calls += 1
        return calls

    def explain():
        start.wait()
        while not done.is_set():
            try:
                look = model.explain(picture, "swapped")
            except UnknownTask:  # just removed
                continue
            assert look.memory.shape[-1] in (1, 6)
            torch.testing.assert_close(look.total(), torch.ones_like(look.total()), rtol=0, atol=1e-5)

    with ThreadPoolExecutor(WRITERS + 4) as pool:
        callers = [
            pool.submit(explain),
            pool.submit(call, lambda: model(picture, ["lasting"])),
            pool.submit(call, lambda: model.read(trunk)),
        ]
        writers = [pool.submit(write, own) for own in tasks] + [pool.submit(swap)]
        try:
            for writer in writers:
                writer.result()
        finally:
            done.set()
        for caller in callers:
            caller.result()
    assert set(model.tasks) == {"lasting", "swapped"} | {task.name for own in tasks for task in own[1::2]}
    assert list(model.read(trunk)) == list(model.tasks)


def test_a_call_in_the_middle_of_a_removal_neither_waits_nor_disturbs_it(monkeypatch):
    backbone = tiny_backbone()
    model = MemoryViT(backbone, [trained(backbone, name) for name in ("first", "second", "third")])
    trunk = model.trunk(images(1))
    model.read(trunk, ["first", "second"])
    looked_up = TaskGraph.__contains__
    calls = []

    def interrupted(graph, name):  # the removal asks which tasks stay
        if not calls:
            calls.append(threading.Thread(target=model.read, args=(trunk, ["third"]), daemon=True))
            calls[0].start()
            calls[0].join(timeout=60)
            assert not calls[0].is_alive(), "the call waits for the removal"
        return looked_up(graph, name)

    monkeypatch.setattr(TaskGraph, "__contains__", interrupted)
    model.remove("first")
    assert calls
    assert list(model.tasks) == ["second", "third"]


def test_explain_works_on_the_tasks_it_began_with(monkeypatch):
    backbone = tiny_backbone()
    model = MemoryViT(backbone, [trained(backbone, "task", cells=2)])
    check = backbone.check_images

    def swapped_meanwhile(given):
        model.remove("task")
        model.add(trained(backbone, "task", cells=7))
        return check(given)

    monkeypatch.setattr(backbone, "check_images", swapped_meanwhile)
    look = model.explain(images(1), "task")
    assert look.memory.shape[-1] == 2
    torch.testing.assert_close(look.total(), torch.ones_like(look.total()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("variant", variant_params(quick=("vit", "dinov3-vit", "clip-vision", "timm-vit:augreg")))
def test_a_copy_of_a_model_answers_alike_and_changes_apart(duplicate, variant):
    backbone = tiny_backbone(variant)
    model = MemoryViT(backbone, [trained(backbone, "task")])
    expected = model(images())["task"]
    twin = duplicate(model)
    assert torch.equal(twin(images())["task"], expected)
    twin.add(trained(backbone, "more"))
    twin.remove("task")
    assert (list(model.tasks), list(twin.tasks)) == (["task"], ["more"])
