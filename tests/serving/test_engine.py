"""The serving engine answers as the model does, whatever shares the batch and whatever tasks come and go."""

import asyncio
import io
from functools import cache

import pytest
import torch
from PIL import Image

from builders import ROUNDING, library_model, trained, worst
from vit_memory import MemoryViT, Preprocessing, load_backbone
from vit_memory.data.decoding import decode
from vit_memory.data.transforms import EvalTransform
from vit_memory.serving.engine import Engine, EngineOptions


def jpeg(seed=0, size=(40, 30)):
    """A small encoded picture, different for every seed."""
    noise = torch.randint(0, 256, (5, 4, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise.numpy()).resize(size, Image.Resampling.BILINEAR).save(buffer, "JPEG")
    return buffer.getvalue()


def as_input(model, encoded, task=None):
    """What the model takes for this image, (1, 3, h, w)."""
    preprocessing = model.backbone.preprocessing if task is None else model.tasks[task].record.preprocessing
    transform = EvalTransform(preprocessing or model.backbone.preprocessing)
    return transform.normalised(transform(decode(encoded, "image"))[None])


PREPROCESSING = Preprocessing((32, 32), None, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), "bilinear")


@cache
def backbone_with_preprocessing():
    return load_backbone(library_model("vit")[1], preprocessing=PREPROCESSING)


def model_of(*names, **options):
    backbone = backbone_with_preprocessing()
    return MemoryViT(backbone, [trained(backbone, name, **options) for name in names])


def test_first():
    model = model_of("a", "b", "c")

    async def run():
        async with Engine(model) as engine:
            answers = await asyncio.gather(*(engine.predict(jpeg(i), check_original=True) for i in range(8)))
            print(engine.stats)
            return answers

    for i, answer in enumerate(asyncio.run(run())):
        print(answer.stages, answer.batch, answer.original.identical)
        expected = model(as_input(model, jpeg(i)))
        for name in "abc":
            assert worst(answer.outputs[name], expected[name][0]) < ROUNDING
