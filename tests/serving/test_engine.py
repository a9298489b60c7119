"""The serving engine answers as the model does alone, whatever shares the batch."""

import asyncio
from dataclasses import replace

import pytest
import torch
from engine_builders import PREPROCESSING, HeldPasses, as_input, backbone, jpeg, model_of, task, until

from builders import ROUNDING, trained_branch, worst
from vit_memory import Bundle, MemoryViT, TaskError, UnknownTask, load_backbone, new_task, save_task
from vit_memory.serving.engine import Engine, EngineOptions
from vit_memory.serving.task_set import TaskSet


@pytest.fixture
def passes(monkeypatch):
    return HeldPasses(monkeypatch)


def mixed_model():
    """Tasks of all kinds, on the trunk and on a branch, trained at three preprocessings, two of one image size."""
    branch = trained_branch(backbone(), "branch", blocks=2, rank=2)
    larger, brighter = PREPROCESSING.at(64), replace(PREPROCESSING, mean=(0.1, 0.1, 0.1))
    parent = task("parent", cells=2)
    tasks = [
        parent,
        task("child", cells=3, parents=[parent], kind="multi-label"),
        task("plain", regime="head"),
        task("reader", regime="reader", rank=2, gains=True),
        task("on-branch", branch=branch),
        task("larger", larger, kind="regression"),
        task("brighter", brighter),
        task("larger-too", larger, regime="class"),
    ]
    return MemoryViT(backbone(), tasks, [branch])


def test_an_answer_is_that_of_the_model_alone_whatever_shares_the_batch():
    model = mixed_model()
    names = list(model.tasks)
    other_version = TaskSet.of(model_of("parent", cells=7))
    asked = [None, *([name] for name in names), ["larger", "parent", "brighter"], [], names[::-1], ["child", "plain"]]
    asked += [None, ["parent"], None]

    async def run():
        async with Engine(model, EngineOptions(max_batch=5)) as engine:
            return await asyncio.gather(
                *(engine.predict(jpeg(i), tasks) for i, tasks in enumerate(asked)),
                *(engine.predict(jpeg(i), task_set=other_version) for i in range(3)),
                *(engine.predict(as_input(jpeg(i))[0], ["parent", "larger"]) for i in range(3)),
            )

    answers = asyncio.run(run())
    assert max(answer.batch for answer in answers) == 5
    for i, tasks in enumerate(asked):
        answer = answers[i]
        assert list(answer.outputs) == (names if tasks is None else tasks)
        for name, output in answer.outputs.items():
            image = as_input(jpeg(i), model.tasks[name].record.preprocessing or PREPROCESSING)
            assert worst(output, model(image, [name])[name][0]) <= ROUNDING
            assert output.dtype == torch.float32
        alone = "larger" if tasks in (["larger"], ["larger-too"]) else "brighter" if tasks == ["brighter"] else "parent"
        image = as_input(jpeg(i), model.tasks[alone].record.preprocessing or PREPROCESSING)
        assert worst(answer.original.feature, model(image, []).original.feature[0]) <= ROUNDING
        assert worst(answer.original.logits, model(image, []).original.logits[0]) <= ROUNDING
    for i, answer in enumerate(answers[len(asked) :][:3]):
        assert worst(answer.outputs["parent"], other_version.model(as_input(jpeg(i)))["parent"][0]) <= ROUNDING
    for i, answer in enumerate(answers[-3:]):  # a tensor is as normalised as it will be
        expected = model(as_input(jpeg(i)))
        assert all(worst(answer.outputs[name], expected[name][0]) <= ROUNDING for name in ("parent", "larger"))


def test_requests_that_arrive_while_the_model_computes_form_one_batch(passes):
    async def run():
        async with Engine(model_of("a", "b"), EngineOptions(max_wait_ms=0)) as engine:
            passes.hold()
            first = asyncio.ensure_future(engine.predict(jpeg(0)))
            await passes.entered()
            others = [asyncio.ensure_future(engine.predict(jpeg(i), ["ab"[i % 2]])) for i in range(7)]
            await until(lambda: len(engine._queue._ready) == 7)
            passes.release()
            answers = await asyncio.gather(first, *others)
            assert passes.batches == [1, 7]
            assert [answer.batch for answer in answers] == [1] + 7 * [7]
            assert engine.stats.passes == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("threads", "expected"),
    [(2, [8, 8, 8, 8]), (4, [8, 8])],  # each of two chunks uses two of four threads: none is free
    ids=["two threads", "four threads"],
)
def test_a_thread_that_is_free_begins_the_next_full_batch_while_another_still_computes(passes, threads, expected):
    model = model_of("a", "b")

    async def run():
        async with Engine(model, EngineOptions(max_batch=16, max_wait_ms=30_000, threads=threads)) as engine:
            await asyncio.gather(*(engine.predict(jpeg()) for _ in range(16)))
            thread = engine._model_thread
            await until(lambda: not thread._plan.has_work and not thread._threads.should_compare)
            passes.hold(calls=1)
            asked = [asyncio.ensure_future(engine.predict(jpeg(i), ["ab"[i % 2]])) for i in range(48)]
            await until(lambda: len(passes.batches) == len(expected))  # one is held
            await asyncio.sleep(0.05)
            begun = list(passes.batches)
            passes.release()
            return begun, await asyncio.gather(*asked)

    begun, answers = asyncio.run(run())
    assert begun == expected  # no third batch: what is begun can no longer be given up
    assert [answer.batch for answer in answers] == [16] * 48
    for i, answer in enumerate(answers):
        assert worst(answer.outputs["ab"[i % 2]], model(as_input(jpeg(i)))["ab"[i % 2]][0]) <= ROUNDING


def test_an_idle_model_waits_for_a_batch_to_fill_and_no_longer_than_it_may(passes):
    async def run(max_batch, max_wait_ms):
        async with Engine(model_of("a"), EngineOptions(max_batch=max_batch, max_wait_ms=max_wait_ms)) as engine:
            passes.batches.clear()
            await asyncio.gather(*(engine.predict(jpeg(i)) for i in range(4)))  # within its 30 seconds
            return list(passes.batches)

    assert asyncio.run(run(max_batch=4, max_wait_ms=1e6)) == [4]  # full: at once
    assert sum(asyncio.run(run(max_batch=5, max_wait_ms=1))) == 4  # not full: after a millisecond


def test_a_task_that_is_nan_spoils_only_its_own_answer():
    sound = model_of("sound")
    broken = task("broken").map(lambda tensor: torch.full_like(tensor, torch.nan))
    model = MemoryViT(backbone(), [task("sound"), broken])

    async def run():
        async with Engine(model) as engine:
            return await asyncio.gather(*(engine.predict(jpeg(i), check_original=True) for i in range(4)))

    for i, answer in enumerate(asyncio.run(run())):
        assert bool(answer.outputs["broken"].isnan().all())
        assert worst(answer.outputs["sound"], sound(as_input(jpeg(i)))["sound"][0]) <= ROUNDING
        assert answer.original.identical


def test_check_original_compares_with_the_librarys_own_forward_of_the_same_batch(passes, monkeypatch):
    family = type(backbone().family)
    forward, seen = family.library_forward, []

    def recorded(self, model, images):
        seen.append(images.clone())
        output = forward(self, model, images)
        if spoiled:
            number = next(iter(output.values())).view(-1)[:1]
            number.copy_(number.nextafter(torch.tensor(1e9)))
        return output

    monkeypatch.setattr(family, "library_forward", recorded)

    async def run():
        async with Engine(model_of("a", "b"), EngineOptions(max_batch=3, max_wait_ms=1e6)) as engine:
            seen.clear()
            return await asyncio.gather(*(engine.predict(jpeg(i), check_original=i < 2) for i in range(3)))

    spoiled = False
    assert [answer.original.identical for answer in asyncio.run(run())] == [True, True, None]
    (batch,) = seen
    assert len(batch) == 3
    assert {image.sum().item() for image in batch} == {as_input(jpeg(i)).sum().item() for i in range(3)}
    spoiled = True  # by one bit of one number
    assert [answer.original.identical for answer in asyncio.run(run())] == [False, False, None]


def test_an_explanation_is_that_of_the_model(passes):
    model = mixed_model()

    async def run():
        async with Engine(model) as engine:
            passes.batches.clear()
            return await asyncio.gather(
                engine.predict(jpeg(1), ["parent"], explain=["child", "larger", "on-branch"]),
                engine.predict(jpeg(2), explain=["reader"]),
                engine.predict(jpeg(3)),
            )

    first, second, third = asyncio.run(run())
    assert (list(first.outputs), set(first.explanations)) == (["parent"], {"child", "larger", "on-branch"})
    assert (list(second.explanations), list(third.explanations)) == (["reader"], [])
    for answer, seed in ((first, 1), (second, 2)):
        for name, explanation in answer.explanations.items():
            image = as_input(jpeg(seed), model.tasks[name].record.preprocessing or PREPROCESSING)
            expected = model.explain(image, name)
            assert worst(explanation.patches, expected.patches) <= ROUNDING
            assert worst(explanation.memory.sum(-1), expected.memory.sum(-1)) <= ROUNDING
            assert list(explanation.ancestors) == list(expected.ancestors)


def test_a_request_that_makes_no_sense_is_refused_before_anything_is_computed(passes):
    async def run():
        async with Engine(mixed_model()) as engine:
            passes.batches.clear()
            with pytest.raises(UnknownTask, match="no task 'chld'. Did you mean 'child'?"):
                await engine.predict(jpeg(), ["chld"])
            with pytest.raises(UnknownTask, match="tasks is 'child'; give a list"):
                await engine.predict(jpeg(), "child")
            with pytest.raises(TaskError, match="'plain' is of regime 'head'"):
                await engine.predict(jpeg(), explain=["plain"])
            assert (passes.batches, engine.stats.admitted, engine.stats.waiting) == ([], 0, 0)

    asyncio.run(run())


def test_it_opens_a_bundle_a_folder_a_task_file_and_a_backbone_without_tasks(tmp_path):
    bundled = load_backbone("bundled")
    pets = new_task(bundled, "pets", ["cat", "dog"])
    bundle = Bundle.create(tmp_path / "bundle", bundled, [pets])
    save_task(pets, tmp_path / "pets.safetensors")

    async def run(source):
        async with Engine(source) as engine:
            return await engine.predict(jpeg())

    expected = MemoryViT(bundled, [pets])(as_input(jpeg(), bundled.preprocessing))
    for source in (bundle, str(tmp_path / "bundle"), tmp_path / "pets.safetensors", MemoryViT(bundled, [pets])):
        answer = asyncio.run(run(source))
        assert answer.digests == {"pets": pets.digest}
        assert worst(answer.outputs["pets"], expected["pets"][0]) <= ROUNDING
    empty = asyncio.run(run(MemoryViT(bundled)))
    assert (empty.outputs, empty.original.logits) == ({}, None)
    assert worst(empty.original.feature, expected.original.feature[0]) <= ROUNDING
