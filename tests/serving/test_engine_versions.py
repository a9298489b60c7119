"""Tasks come and go while the engine runs: every request sees one version, and none is lost."""

import asyncio
import gc
import weakref

import pytest
import torch
from engine_builders import HeldPasses, as_input, backbone, jpeg, model_of, task, until

from builders import ROUNDING, trained_branch, worst
from vit_memory import BackboneMismatch, GraphError, MemoryViT, load_backbone, new_task
from vit_memory.errors import EngineClosed, ServingError
from vit_memory.serving import model_thread
from vit_memory.serving.engine import Engine, EngineOptions, Observer
from vit_memory.serving.task_set import TaskSet


@pytest.fixture
def passes(monkeypatch):
    return HeldPasses(monkeypatch)


def test_a_request_sees_one_version_from_start_to_end(passes):
    old, new = task("swapped", cells=2), task("swapped", cells=6)
    model = MemoryViT(backbone(), [task("lasting"), old])

    async def run():
        async with Engine(model, EngineOptions(max_wait_ms=0)) as engine:
            before = engine.task_set
            passes.hold()
            computing = asyncio.ensure_future(engine.predict(jpeg(0)))
            await passes.entered()
            waiting = asyncio.ensure_future(engine.predict(jpeg(0)))
            await until(lambda: len(engine._queue._ready) == 1)
            change = asyncio.ensure_future(engine.replace(lambda v: v.with_tasks([new], replace=True)))
            passes.release()
            after = await change
            later, pinned = await asyncio.gather(engine.predict(jpeg(0)), engine.predict(jpeg(0), task_set=before))
            return before, after, [await computing, await waiting, pinned], later

    before, after, of_old, of_new = asyncio.run(run())
    assert before.version != after.version
    for answer, version, content in [*((a, before, old) for a in of_old), (of_new, after, new)]:
        assert (answer.version, answer.digests["swapped"]) == (version.version, content.digest)
        expected = MemoryViT(backbone(), [content])(as_input(jpeg(0)))
        assert worst(answer.outputs["swapped"], expected["swapped"][0]) <= ROUNDING
    assert list(after.tasks) == ["lasting", "swapped"]  # in its place


def test_requests_of_two_versions_share_a_pass_where_one_version_has_the_tasks_of_both(passes):
    lasting, extra = task("lasting", cells=2), task("extra", cells=3)
    alone, both = (TaskSet.of(MemoryViT(backbone(), tasks)) for tasks in ([lasting], [lasting, extra]))
    replaced = both.with_tasks([task("lasting", cells=6)], replace=True)

    async def run(*versions):
        """The answers to one request of each version, which are all waiting when the model begins, and the passes."""
        async with Engine(MemoryViT(backbone(), [lasting]), EngineOptions(max_wait_ms=0)) as engine:
            passes.hold()
            first = asyncio.ensure_future(engine.predict(jpeg(9)))
            await passes.entered()
            asked = [asyncio.ensure_future(engine.predict(jpeg(i), task_set=v)) for i, v in enumerate(versions)]
            await until(lambda: len(engine._queue._ready) == len(versions))
            passes.release()
            await first
            return await asyncio.gather(*asked), engine.stats.passes - 1

    for versions, expected in (
        ((alone, both, alone), 1),
        ((both, alone), 1),
        ((alone, alone, both), 1),
        ((both, replaced), 2),
        ((alone, replaced, both), 2),
    ):
        answers, count = asyncio.run(run(*versions))
        assert count == expected
        for i, (answer, version) in enumerate(zip(answers, versions, strict=True)):
            assert (answer.version, answer.digests) == (version.version, dict(version.digests))
            assert list(answer.outputs) == list(version.tasks)
            expected_outputs = version.model(as_input(jpeg(i)))
            for name, output in answer.outputs.items():
                assert worst(output, expected_outputs[name][0]) <= ROUNDING


def test_adding_and_removing_tasks_while_requests_run_loses_and_fails_none():
    changing = [task(f"task-{i}", cells=i % 4) for i in range(8)]
    expected = {t.name: MemoryViT(backbone(), [t])(as_input(jpeg(0)))[t.name][0] for t in changing}
    lasting = model_of("lasting")
    expected["lasting"] = lasting(as_input(jpeg(0)))["lasting"][0]
    versions = {}

    async def run():
        done = False
        answers = []

        async def ask(engine):
            while not done:
                answers.append(await engine.predict(jpeg(0)))

        class Record(Observer):
            def changed(self, task_set):
                versions[task_set.version] = dict(task_set.digests)

        async with Engine(lasting, EngineOptions(max_batch=4), observe=Record()) as engine:
            versions[engine.task_set.version] = dict(engine.task_set.digests)
            clients = [asyncio.ensure_future(ask(engine)) for _ in range(6)]
            for _ in range(2):
                await asyncio.gather(*(engine.add([t]) for t in changing))
                await asyncio.gather(*(engine.remove([t.name]) for t in changing))
            done = True
            await asyncio.gather(*clients)
            assert list(engine.task_set.tasks) == ["lasting"]
            assert engine.stats.changes == 4 * len(changing)
            assert (engine.stats.refused, engine.stats.answered) == ({}, len(answers))
        return answers

    answers = asyncio.run(run())
    assert len({answer.version for answer in answers}) > 4
    for answer in answers:
        assert answer.digests == versions[answer.version]
        assert list(answer.outputs) == list(answer.digests)
        assert all(worst(output, expected[name]) <= ROUNDING for name, output in answer.outputs.items())


@pytest.mark.parametrize("images", [1, 48])
def test_an_old_version_is_released_when_its_last_request_is_answered(passes, images):
    async def run():
        async with Engine(model_of("first"), EngineOptions(max_batch=16, max_wait_ms=0, threads=2)) as engine:
            await engine.predict(jpeg(0))
            old = weakref.ref(engine.task_set.model)
            await until(lambda: not engine._model_thread._plan.has_work)  # nothing else passes through its hands
            passes.hold()
            last = asyncio.ensure_future(engine.predict(jpeg(0), explain=["first"], check_original=True))
            others = [asyncio.ensure_future(engine.predict(jpeg(0))) for _ in range(images - 1)]
            await passes.entered()
            await until(lambda: len(engine._queue._ready) >= images - 33)  # decoded: full batches follow
            change = asyncio.ensure_future(engine.replace(lambda v: v.with_only([task("second")])))
            await asyncio.sleep(0.05)
            assert old() is not None
            passes.release()
            await change
            answer = await last
            await asyncio.gather(*others)
            others.clear()
            await until(lambda: old() is None)  # without another request to push it out
            return answer

    gc.collect()
    gc.disable()  # freed by itself, not by the collector
    try:
        assert list(asyncio.run(run()).outputs) == ["first"]
    finally:
        gc.enable()


def test_a_change_that_fails_leaves_the_version_as_it_was(passes):
    stranger = load_backbone("bundled")
    other = MemoryViT(stranger)

    def fail():
        raise OSError("disk full")

    async def run():
        async with Engine(model_of("a")) as engine:
            before = engine.task_set
            with pytest.raises(GraphError, match="two tasks are called 'a'"):
                await engine.add([task("b"), task("a")])
            with pytest.raises(BackboneMismatch):
                await engine.add([new_task(stranger, "c", ["x", "y"])])
            with pytest.raises(ServingError, match="another backbone"):
                await engine.replace(lambda _: TaskSet.of(other))
            with pytest.raises(OSError, match="disk full"):
                await engine.replace(lambda v: v.with_tasks([task("b")]), fail)
            passes.fail = RuntimeError("cannot be computed")
            with pytest.raises(RuntimeError, match="cannot be computed"):
                await engine.add([task("b")])
            assert engine.task_set is before
            assert (engine.stats.changes, list((await engine.predict(jpeg())).outputs)) == (0, ["a"])

    asyncio.run(run())


def test_a_saved_change_is_served_also_if_its_caller_is_gone(passes):
    async def run():
        saved = []
        async with Engine(model_of("a")) as engine:
            passes.hold()
            change = asyncio.ensure_future(
                engine.replace(lambda v: v.with_tasks([task("b")]), lambda: saved.append("b"))
            )
            await passes.entered()
            change.cancel()
            passes.release()
            await until(lambda: list(engine.task_set.tasks) == ["a", "b"])
            assert saved == ["b"]
        with pytest.raises(EngineClosed):
            await engine.add([task("c")])

    asyncio.run(run())


def test_a_version_is_named_by_its_content_however_it_was_made():
    branch = trained_branch(backbone(), "branch", blocks=1)
    one, two = task("one"), task("two", branch=branch)
    version = TaskSet.of(MemoryViT(backbone(), [one, two], [branch])).version
    assert version == TaskSet.of(MemoryViT(backbone(), [two, one], [branch])).version
    assert version == TaskSet.of(MemoryViT(backbone())).with_tasks([one, two], [branch]).version
    smaller_images = task("one", backbone().preprocessing.at(64))
    assert smaller_images.digest == one.digest  # so a digest alone does not say that the answers are the same
    others = [[one], [task("one", cells=1), two], [smaller_images, two]]
    assert len({version} | {TaskSet.of(MemoryViT(backbone(), tasks, [branch])).version for tasks in others}) == 4
    assert len(version) == 16
    int(version, 16)


def test_the_model_given_to_an_engine_stays_the_callers_own():
    model = model_of("a", "b")

    async def run():
        async with Engine(model) as engine:
            model.remove("a")
            await engine.remove(["b"])
            return await engine.predict(jpeg())

    assert list(asyncio.run(run()).outputs) == ["a"]
    assert list(model.tasks) == ["b"]


def test_new_shapes_are_proved_between_passes_and_change_no_bit_of_the_original_output(monkeypatch):
    from vit_memory import joining

    proofs = []
    prove = joining.same_bits_when_joined

    def recorded(module, width, shape):
        proofs.append((shape.batch, shape.readers))
        return prove(module, width, shape)

    monkeypatch.setattr(joining, "same_bits_when_joined", recorded)

    async def run():
        async with Engine(model_of("a", "b", "c"), EngineOptions(max_batch=2)) as engine:
            answers = [await engine.predict(jpeg(0), check_original=True)]
            await until(lambda: not engine._model_thread._plan.has_work)
            # Two images are one chunk or two, as the threads of this machine compute them faster.
            assert {(1, 3)} <= {shape for shape in proofs if shape[1] == 3} <= {(1, 3), (2, 3)}
            known = len(proofs)
            answers += [await engine.predict(jpeg(0), check_original=True)]
            assert len(proofs) == known
            assert worst(answers[0].outputs["a"], answers[1].outputs["a"]) <= ROUNDING
            assert torch.equal(answers[0].original.feature, answers[1].original.feature)
            assert all(answer.original.identical for answer in answers)

    asyncio.run(run())


def test_the_cost_of_a_pass_is_measured_once_per_version_in_quiet_moments(monkeypatch):
    passes = HeldPasses(monkeypatch)
    monkeypatch.setattr(model_thread, "_QUIET", 0.01)

    async def run():
        async with Engine(model_of("a", "b")) as engine:
            await until(lambda: engine.stats.cost is not None)
            assert 0.1 < engine.stats.cost < 100
            change = asyncio.ensure_future(engine.remove(["a"]))
            await until(lambda: engine.stats.cost is None)
            await change
            await until(lambda: engine.stats.cost is not None)
            known = len(passes.batches)
            await asyncio.sleep(0.1)
            assert len(passes.batches) == known
            assert engine.stats.passes == 0

    asyncio.run(run())
