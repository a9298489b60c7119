"""Task files: bit for bit what was saved, the same bytes every time, whole or absent."""

import errno
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from builders import images, tiny_backbone, trained, variant_params, worst
from vit_memory import (
    BackboneIdentity,
    FileError,
    MemoryViT,
    Preprocessing,
    Task,
    TaskError,
    TaskRecord,
    load_task,
    save_task,
)
from vit_memory.files.card import card, facts
from vit_memory.files.container import parse_json

VIT_B = BackboneIdentity("google/vit-base-patch32-224-in21k", "vit", 768, 12, 12, "ab" * 32)


def vit_b_task(cells=5, classes=100):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    labels = tuple(f"label {i}" for i in range(classes))
    return Task("birds", labels, normal(classes, 768), normal(classes), normal(768), normal(12, cells, 768), VIT_B)


def assert_same(a, b):
    for part in ("head_weight", "head_bias", "memory"):
        assert torch.equal(getattr(a, part), getattr(b, part))
    assert (a.class_token is None) == (b.class_token is None)
    assert a.class_token is None or torch.equal(a.class_token, b.class_token)
    for part in ("name", "labels", "kind", "regime", "parents", "parent_digests", "raw_memory", "backbone", "record"):
        assert getattr(a, part) == getattr(b, part), part
    assert a.digest == b.digest


@pytest.mark.parametrize("variant", variant_params())
def test_a_task_is_loaded_bit_for_bit_for_every_family_and_regime(variant, tmp_path):
    backbone = tiny_backbone(variant)
    parent = trained(backbone, "parent", cells=3)
    tasks = [
        parent,
        trained(backbone, "memory", cells=7, parents=[parent]),
        trained(backbone, "empty", cells=0),
        trained(backbone, "class", regime="class", kind="multi-label"),
        trained(backbone, "head", regime="head", kind="regression"),
        replace(trained(backbone, "raw"), raw_memory=True),
    ]
    for task in tasks:
        save_task(task, tmp_path / f"{task.name}.safetensors")
    loaded = [load_task(tmp_path / f"{task.name}.safetensors") for task in tasks]
    for before, after in zip(tasks, loaded, strict=True):
        assert_same(before, after)
    expected, outputs = MemoryViT(backbone, tasks)(images()), MemoryViT(backbone, loaded)(images())
    assert all(torch.equal(expected[name], outputs[name]) for name in expected)


def test_a_record_is_loaded_as_it_was_saved(tmp_path):
    record = TaskRecord(
        created="2026-11-15T12:00:00+00:00",
        library_version="0.1.0",
        preprocessing=Preprocessing((224, 224), None, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), "bicubic"),
        recipe={"steps": 200, "lr": 0.1, "nested": {"a": [1, 2, None, True]}},
        metrics={"accuracy": 0.8125, "note": "größer 🐦"},
    )
    task = replace(vit_b_task(), record=record)
    save_task(task, tmp_path / "task.safetensors")
    assert_same(task, load_task(tmp_path / "task.safetensors"))


def test_saving_twice_gives_the_same_bytes_and_fits_in_200_kb_and_the_head(tmp_path):
    task = vit_b_task()
    save_task(task, tmp_path / "one.safetensors")
    save_task(load_task(tmp_path / "one.safetensors"), tmp_path / "two.safetensors")
    content = (tmp_path / "one.safetensors").read_bytes()
    assert content == (tmp_path / "two.safetensors").read_bytes()
    assert len(content) < 200_000 + 4 * (768 + 1) * 100
    save_task(task, tmp_path / "half.safetensors", half=True)
    assert (tmp_path / "half.safetensors").stat().st_size < 0.52 * len(content)


def test_the_bytes_are_these(tmp_path):
    """The format itself, on the smallest task there is. A change here is a new format version."""
    tiny = BackboneIdentity("b", "vit", 2, 1, 1, "f")
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 4.0]])
    save_task(Task("t", ("x",), two, torch.tensor([5.0]), one, torch.zeros(1, 0, 2), tiny), tmp_path / "t.safetensors")
    content = (tmp_path / "t.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    assert list(header) == ["__metadata__", "class_token", "head.bias", "head.weight", "memory"]
    assert list(header["__metadata__"]) == ["sha256", "format", "task"]
    assert header["__metadata__"]["format"] == "vit-memory-task/1"
    assert header["__metadata__"]["task"] == (
        '{"backbone":{"depth":1,"family":"vit","fingerprint":"f","heads":1,"name":"b","width":2},"created":"",'
        '"half_of":null,"kind":"single-label","labels":["x"],"library_version":"","memory_size":0,"metrics":{},'
        '"name":"t","parents":[],"preprocessing":null,"raw_memory":false,"recipe":{},"regime":"memory"}'
    )
    assert header["head.weight"] == {"dtype": "F32", "shape": [1, 2], "data_offsets": [12, 20]}
    floats = bytes.fromhex("0000803f 00000040 0000a040 00004040 00008040")  # 1 2 | 5 | 3 4
    assert content[8 + length :] == floats


def test_any_safetensors_reader_opens_them(tmp_path):
    task = vit_b_task()
    save_task(task, tmp_path / "task.safetensors")
    with safe_open(tmp_path / "task.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["class_token", "head.bias", "head.weight", "memory"]
        assert torch.equal(file.get_tensor("memory"), task.memory)
        assert file.metadata()["format"] == "vit-memory-task/1"


def test_a_float16_task_is_accepted_as_the_parent_that_it_was(tmp_path):
    """A child pinned to the full task accepts the same task in half precision, and no other."""
    backbone = tiny_backbone()
    parent = trained(backbone, "parent")
    child = trained(backbone, "child", parents=[parent])
    save_task(parent, tmp_path / "half.safetensors", half=True)
    half = load_task(tmp_path / "half.safetensors")
    assert half.digest != parent.digest
    assert half.record.half_of == parent.digest
    assert worst(half.memory, parent.memory) < 2e-3
    assert list(MemoryViT(backbone, [half, child])(images())) == ["parent", "child"]
    save_task(half, tmp_path / "again.safetensors", half=True)
    assert load_task(tmp_path / "again.safetensors").record.half_of == parent.digest


def test_a_task_is_written_in_the_precision_it_has_unless_half_is_given(tmp_path):
    half, again, full = (tmp_path / f"{name}.safetensors" for name in ("half", "again", "full"))
    task = vit_b_task()
    save_task(task, half, half=True)
    save_task(load_task(half), again)
    assert again.read_bytes() == half.read_bytes()
    save_task(load_task(half), full, half=False)
    assert load_task(full).memory.dtype == torch.float32
    assert load_task(full).digest == load_task(half).digest
    save_task(replace(task, memory=task.memory.half()), full)  # of two precisions: the larger
    assert load_task(full).head_weight.dtype == load_task(full).memory.dtype == torch.float32


def test_nan_and_infinite_values_are_not_saved(tmp_path):
    path = tmp_path / "task.safetensors"
    task = vit_b_task()
    save_task(task, path)
    before = path.read_bytes()
    large = replace(task, memory=task.memory * 1e6)
    with pytest.raises(TaskError, match=r"memory holds NaN or infinite values in float16: save it in full"):
        save_task(large, path, half=True)
    task.head_bias[3] = float("nan")
    with pytest.raises(TaskError, match=r"head.bias holds NaN or infinite values. Not saved"):
        save_task(task, path)
    assert path.read_bytes() == before


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "task.safetensors"
    save_task(vit_b_task(cells=1), path)
    before = path.read_bytes()

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match=r"No space left on device. The old file, if any, is unchanged"):
        save_task(vit_b_task(cells=9), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["task.safetensors"]


KILL_SWEEP = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)  # so that a forked child can use it
sys.path.insert(0, {tests!r})
from test_taskfile import vit_b_task
from vit_memory import load_task, save_task
folder, chance = sys.argv[1], random.Random(0)
path = os.path.join(folder, "task.safetensors")
old, new = vit_b_task(cells=20), vit_b_task(cells=21)
save_task(old, path)
digests = {{old.digest, new.digest}}
seen = []
for _ in range(50):
    child = os.fork()
    if not child:
        while True:
            save_task(new, path)
            save_task(old, path)
    time.sleep(chance.uniform(0.0, 0.06))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    seen.append(load_task(path).digest)
assert set(seen) <= digests
print(len(seen), len(set(seen)), len(os.listdir(folder)))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked writers")
def test_a_killed_writer_leaves_the_old_file_or_the_new_one(tmp_path):
    script = KILL_SWEEP.format(tests=str(Path(__file__).parent))
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    kills, versions, files = map(int, run.stdout.split())
    assert kills == 50
    assert versions == 2, "both versions were seen, so some kills were between writes"
    assert files > 1, "some kills were inside writes"


def test_a_repeated_key_among_many_is_found_in_one_pass():
    text = json.dumps({str(i): i for i in range(95_000)})[:-1] + ', "94999": 0}'
    started = time.process_time()
    with pytest.raises(ValueError, match="key '94999' is given twice"):
        parse_json(text)
    assert time.process_time() - started < 5, "comparing every key with every other takes minutes"


def test_a_card_lists_labels_size_and_metrics(tmp_path):
    path = tmp_path / "birds.safetensors"
    task = replace(vit_b_task(), record=TaskRecord(metrics={"accuracy": 0.9}))
    save_task(task, path)
    text = card(path, task)
    for part in (
        "birds",
        "single-label",
        "label 0, label 1",
        "100 in all",
        "5 cells in each of 12 blocks",
        "123 748",
        "accuracy 0.9",
    ):
        assert part in text
    assert facts(path, task)["parameters"] == 46_848 + 76_900
