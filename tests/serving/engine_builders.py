"""Encoded images, small models and a hold on passes, for the tests of the serving engine."""

import asyncio
import io
import threading
from dataclasses import replace
from functools import cache

import torch
from PIL import Image

from builders import library_model, trained
from vit_memory import MemoryViT, Preprocessing, load_backbone
from vit_memory.data.decoding import decode
from vit_memory.data.transforms import EvalTransform
from vit_memory.serving import model_thread
from vit_memory.serving.engine import Engine

PREPROCESSING = Preprocessing((32, 32), None, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), "bilinear")


@cache
def backbone():
    return load_backbone(library_model("vit")[1], preprocessing=PREPROCESSING)


def task(name, preprocessing=None, **options):
    """A trained task, different for every name, whose images are preprocessed so."""
    new = trained(backbone(), name, **options)
    return replace(new, record=replace(new.record, preprocessing=preprocessing))


def model_of(*names, **options):
    return MemoryViT(backbone(), [task(name, **options) for name in names])


def jpeg(seed=0, size=(40, 30)):
    """A small encoded picture, different for every seed."""
    noise = torch.randint(0, 256, (5, 4, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise.numpy()).resize(size, Image.Resampling.BILINEAR).save(buffer, "JPEG")
    return buffer.getvalue()


def as_input(encoded, preprocessing=PREPROCESSING):
    """What the model takes for this image, (1, 3, h, w)."""
    transform = EvalTransform(preprocessing)
    return transform.normalised(transform(decode(encoded, "image"))[None])


class HeldPasses:
    """Counts the calls of every MemoryViT, and holds them in the middle while told to."""

    def __init__(self, monkeypatch):
        self.batches = []  # images of every call
        self.fail = None  # an exception for the next call
        self._open = threading.Event()
        self._open.set()
        self._entered = threading.Event()
        self._held = 0  # calls, of those counted
        counting = threading.Lock()
        forward = MemoryViT.forward

        def held(model, images, tasks=None):
            with counting:
                self.batches.append(len(images))
                is_held = len(self.batches) <= self._held
            self._entered.set()
            assert not is_held or self._open.wait(60)
            error, self.fail = self.fail, None
            if error is not None:
                raise error
            return forward(model, images, tasks)

        start = Engine.__aenter__

        async def start_and_rest(engine):
            """On a busy machine the last job of the start would be due beside the first images, and end their wait."""
            await start(engine)
            await until(lambda: not engine._queue._jobs)
            return engine

        monkeypatch.setattr(Engine, "__aenter__", start_and_rest)
        monkeypatch.setattr(MemoryViT, "forward", held)
        monkeypatch.setattr(model_thread, "_QUIET", 1e6)  # no passes but those of requests

    def hold(self, calls=10**6):
        """Hold so many calls from now on, and forget those before."""
        self._held = calls
        self.batches.clear()
        self._entered.clear()
        self._open.clear()

    def release(self):
        self._open.set()

    async def entered(self):
        """Until a pass is being held."""
        assert await asyncio.to_thread(self._entered.wait, 60)


async def until(condition):
    """Until a condition holds that another thread brings about."""
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to be")
