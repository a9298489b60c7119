"""Files that earlier versions wrote still load, answer what they answered, and can be gone on with.

The files in `formats/` were written once, by version 0.1.0, and are never written again.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from vit_memory import Bundle, MemoryViT, load_backbone, load_task, save_task
from vit_memory.cli import app

FORMATS = Path(__file__).parent / "formats"
NAMES = ("single", "multi", "value", "head", "half")  # task formats 1 and 2, every kind, float32 and float16


@pytest.fixture(scope="module")
def backbone():
    return load_backbone("bundled")


def gradient(backbone):
    height, width = backbone.roles.image_size
    return torch.linspace(-1, 1, 3 * height * width).reshape(1, 3, height, width)


def test_task_files_of_earlier_versions_answer_what_they_answered(backbone):
    tasks = [load_task(FORMATS / f"{name}.safetensors") for name in NAMES]
    outputs = MemoryViT(backbone, tasks)(gradient(backbone))
    for name, answers in json.loads((FORMATS / "answers.json").read_text()).items():
        torch.testing.assert_close(outputs[name][0], torch.tensor(answers), rtol=1e-5, atol=1e-4)


def test_task_files_are_still_written_to_the_byte_as_they_were(tmp_path):
    for name in NAMES[:-1]:
        path = FORMATS / f"{name}.safetensors"
        save_task(load_task(path), tmp_path / "again.safetensors")
        assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_a_bundle_of_an_earlier_version_opens(backbone):
    tasks = Bundle.open(FORMATS / "bundle").tasks()
    outputs = MemoryViT(backbone, tasks)(gradient(backbone))
    answers = json.loads((FORMATS / "answers.json").read_text())
    torch.testing.assert_close(outputs["value"][0], torch.tensor(answers["value"]), rtol=1e-5, atol=1e-4)


def test_a_training_that_an_earlier_version_began_goes_on(tmp_path, monkeypatch):
    shutil.copytree(FORMATS / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)  # the run was begun on data in the working folder
    pixels = np.random.default_rng(0).integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)
    np.savez("pack.npz", x_train=pixels, y_train=np.arange(24) % 2)
    words = "train pack.npz --name old --steps 8 --views 1 --evaluate-every 2 --lr 0.1,0.2 --memory 1 --batch 8"
    result = CliRunner().invoke(app, [*words.split(), "--cache", "off", "--seed", "3", "--out", "run", "--resume"])
    assert result.exit_code == 0, (result.output, result.exception)
    lines = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    assert load_task(tmp_path / "run/old.safetensors").labels == ("0", "1")
