"""What an engine refuses, drops or loses: a full queue, given-up requests, bad images, failed passes, its end."""

import asyncio
import threading
import time

import pytest
import torch
from engine_builders import HeldPasses, as_input, jpeg, model_of, until

from builders import ROUNDING, worst
from vit_memory import BadImage, ImageError
from vit_memory.errors import DeadlinePassed, EngineClosed, QueueFull, ServingError
from vit_memory.parallel import ChunkThreads
from vit_memory.serving.engine import Engine, EngineOptions, Observer


@pytest.fixture
def passes(monkeypatch):
    return HeldPasses(monkeypatch)


class Refusals(Observer):
    def __init__(self):
        self.reasons = []

    def refused(self, reason):
        self.reasons.append(reason)


def test_a_full_queue_refuses_at_once_and_takes_requests_again_when_there_is_room(passes):
    async def run():
        async with Engine(model_of("a"), EngineOptions(max_batch=2, max_wait_ms=0, max_queue=3)) as engine:
            passes.hold()
            first = asyncio.ensure_future(engine.predict(jpeg(0)))
            await passes.entered()
            waiting = [asyncio.ensure_future(engine.predict(jpeg(i))) for i in range(3)]
            await asyncio.sleep(0)  # they are admitted, decoded or not
            started = time.monotonic()
            with pytest.raises(QueueFull, match="cat.jpg: 3 images wait for the model"):
                await engine.predict(jpeg(9), name="cat.jpg")
            assert time.monotonic() - started < 5  # the model is held
            assert (engine.stats.waiting, engine.stats.running) == (3, 4)
            passes.release()
            await asyncio.gather(first, *waiting)
            await asyncio.gather(*(engine.predict(jpeg(i)) for i in range(3)))
            assert engine.stats.refused == {"queue full": 1}

    asyncio.run(run())


def test_a_cancelled_or_expired_request_never_reaches_the_model(passes):
    async def run():
        observer = Refusals()
        async with Engine(model_of("a"), EngineOptions(max_wait_ms=0, max_queue=3), observe=observer) as engine:
            passes.hold()
            first = asyncio.ensure_future(engine.predict(jpeg(0)))
            await passes.entered()
            cancelled = asyncio.ensure_future(engine.predict(jpeg(1)))
            expired = asyncio.ensure_future(engine.predict(jpeg(2), timeout_s=0.05, name="dog.jpg"))
            wanted = asyncio.ensure_future(engine.predict(jpeg(3)))
            await until(lambda: len(engine._queue._ready) >= 3 - expired.done())  # a busy machine decodes later
            cancelled.cancel()
            with pytest.raises(DeadlinePassed, match="dog.jpg: no answer within 0.05 s"):
                await expired
            await until(lambda: engine.stats.waiting == 1)  # they leave room for others before the pass ends
            passes.release()
            await asyncio.gather(first, wanted)
            assert cancelled.cancelled()
            with pytest.raises(DeadlinePassed):
                await engine.predict(jpeg(4), timeout_s=0)
            assert passes.batches == [1, 1]
            assert sorted(observer.reasons) == ["cancelled", "deadline", "deadline"]
            assert engine.stats.refused == {"cancelled": 1, "deadline": 2}

    asyncio.run(run())


def test_a_bad_image_fails_alone(passes):
    good = [jpeg(i) for i in range(4)]
    model = model_of("a")
    bad = {
        "not an image of a known format": b"hello",
        "the file is empty": b"",
        "cannot be decoded": jpeg(0, (400, 300))[:900],
        "2000 × 1500 pixels are more than the limit of 1 million": jpeg(0, (2000, 1500)),
        "expected the bytes of an image file": "a path",
        "hold NaN": torch.full((3, 32, 32), torch.nan),
        "reads (B, 3, height, width)": torch.zeros(32, 32),
        "floating-point": torch.zeros(3, 32, 32, dtype=torch.uint8),
    }

    async def run():
        async with Engine(model, EngineOptions(max_pixels=1_000_000)) as engine:
            passes.batches.clear()
            requests = [
                *(engine.predict(data) for data in good),
                *(engine.predict(data, name="x.jpg") for data in bad.values()),
            ]
            answers = await asyncio.gather(*requests, return_exceptions=True)
            assert sum(passes.batches) == len(good)
            assert engine.stats.waiting == 0
            return answers

    answers = asyncio.run(run())
    for i, data in enumerate(good):
        assert worst(answers[i].outputs["a"], model(as_input(data))["a"][0]) <= ROUNDING
    for (reason, data), error in zip(bad.items(), answers[len(good) :], strict=True):
        assert isinstance(error, ImageError if isinstance(data, torch.Tensor) else BadImage), error
        assert str(error).startswith("x.jpg: ")
        assert reason in str(error)


def test_an_exception_in_one_pass_does_not_stop_the_engine(passes, caplog):
    async def run():
        async with Engine(model_of("a"), EngineOptions(max_batch=2, max_wait_ms=1e6)) as engine:
            passes.fail = RuntimeError("out of memory")
            failed = await asyncio.gather(*(engine.predict(jpeg(i)) for i in range(2)), return_exceptions=True)
            for error in failed:
                assert type(error) is ServingError
                assert "the pass over 2 images failed (RuntimeError: out of memory)" in str(error)
            assert failed[0] is not failed[1]
            answers = await asyncio.gather(*(engine.predict(jpeg(i)) for i in range(2)))
            assert [list(answer.outputs) for answer in answers] == [["a"], ["a"]]
            assert engine.stats.refused == {"failed": 2}

    asyncio.run(run())
    assert "out of memory" in caplog.text


def test_a_pass_that_gets_no_thread_fails_at_once_and_the_next_one_does_not(passes, monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("can't start new thread")

    async def run():
        options = EngineOptions(max_batch=16, max_wait_ms=10_000, threads=2)
        async with Engine(model_of("a"), options) as engine:
            with monkeypatch.context() as limited:
                limited.setattr(ChunkThreads, "start", refuse)
                failed = await asyncio.gather(*(engine.predict(jpeg(i)) for i in range(32)), return_exceptions=True)
            assert {type(error) for error in failed} == {ServingError}
            assert "can't start new thread" in str(failed[0])
            await asyncio.gather(*(engine.predict(jpeg(i)) for i in range(16)))

    asyncio.run(run())


def test_passes_that_keep_failing_are_a_fault_until_one_does_not(passes):
    async def run():
        async with Engine(model_of("a"), EngineOptions(max_batch=1)) as engine:
            for count in range(1, 5):
                passes.fail = RuntimeError("device lost")
                with pytest.raises(ServingError, match="device lost"):
                    await engine.predict(jpeg())
                assert (engine.fault is None) == (count < 3)
            assert "the last 4 passes" in engine.fault
            await engine.predict(jpeg())
            assert engine.fault is None

    asyncio.run(run())


def test_too_little_memory_to_decode_is_not_the_images_fault(monkeypatch):
    def decode(*_, **__):
        raise MemoryError

    async def run():
        async with Engine(model_of("a")) as engine:
            monkeypatch.setattr("vit_memory.data.decoding.Encoded.decode", decode)
            with pytest.raises(ServingError, match="too little memory"):
                await engine.predict(jpeg())

    asyncio.run(run())


def test_close_answers_what_was_admitted_and_refuses_the_rest(passes):
    async def run():
        engine = Engine(model_of("a"), EngineOptions(max_batch=2, max_wait_ms=1e6))
        with pytest.raises(EngineClosed, match="not started"):
            await engine.predict(jpeg())
        async with engine:
            passes.hold()
            admitted = [asyncio.ensure_future(engine.predict(jpeg(i), explain=["a"])) for i in range(5)]
            await passes.entered()
            closing = asyncio.ensure_future(engine.close())
            await asyncio.sleep(0)
            with pytest.raises(EngineClosed, match="the engine is closed"):
                await engine.predict(jpeg())
            assert not closing.done()
            passes.release()
            await closing
            assert all(request.done() for request in admitted)
            assert [list(request.result().explanations) for request in admitted] == 5 * [["a"]]
            await engine.close()  # again
        with pytest.raises(EngineClosed, match="runs once"):
            await engine.__aenter__()
        assert engine.stats.refused == {"closed": 1}

    before = set(threading.enumerate())
    threads = torch.get_num_threads()
    asyncio.run(run())
    assert {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio")} <= before
    assert torch.get_num_threads() == threads


def test_an_engine_whose_start_is_cancelled_ends(passes):
    async def run():
        passes.hold()
        engine = Engine(model_of("a"))
        starting = asyncio.ensure_future(engine.__aenter__())
        await passes.entered()
        starting.cancel()
        await asyncio.sleep(0)
        passes.release()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not engine._model_thread._thread.is_alive()
        with pytest.raises(EngineClosed):
            await engine.predict(jpeg())

    asyncio.run(asyncio.wait_for(run(), 60))


def test_an_observer_that_fails_disturbs_no_answer(caplog):
    class Broken(Observer):
        def answered(self, answer):
            raise ValueError("no space left for metrics")

    async def run():
        async with Engine(model_of("a"), observe=Broken()) as engine:
            return await engine.predict(jpeg())

    assert list(asyncio.run(run()).outputs) == ["a"]
    assert "no space left for metrics" in caplog.text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_batch": 0}, "max_batch is 0; expected 1 or more"),
        ({"max_pixels": 100_000_001}, "max_pixels is 100000001; images of more than 100000000 pixels are never"),
        ({"max_wait_ms": -1}, "max_wait_ms is -1"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, reason):
    with pytest.raises(ServingError, match=reason):
        EngineOptions(**options)
