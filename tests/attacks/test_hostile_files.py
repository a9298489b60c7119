"""Hostile files: each is refused with an error that names it, runs no code, and stays unchanged.

Each recipe turns a sound task file into a hostile one. Those that forge a valid checksum reach the checks behind it.
"""

import hashlib
import json
import pickle
import random
import struct
import subprocess
import sys

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from builders import tiny_backbone, trained
from test_taskfile import vit_b_task
from vit_memory import DamagedFile, FileError, NewerFormat, UnsafeFile, load_task, save_task

ZEROS = "0" * 64


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "task.safetensors"
    save_task(trained(tiny_backbone(), "task", cells=4), path)
    return path.read_bytes()


def taken_apart(content):
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def sealed(header, data):
    """A file with a checksum that fits, whatever it says; `header` is a dict or the text itself."""
    if isinstance(header, dict):
        header["__metadata__"]["sha256"] = ZEROS
        header = json.dumps(header, separators=(",", ":"))
    text = header.encode()
    text += b" " * (-len(text) % 8)
    length = struct.pack("<Q", len(text))
    digest = hashlib.sha256(length + text + data).hexdigest()
    return length + text.replace(ZEROS.encode(), digest.encode(), 1) + data


def with_header(change):
    def recipe(content):
        header, data = taken_apart(content)
        return sealed(change(header) or header, data)

    return recipe


def with_task(change):
    def edit(header):
        task = json.loads(header["__metadata__"]["task"])
        task = change(task) or task
        header["__metadata__"]["task"] = task if isinstance(task, str) else json.dumps(task)

    return with_header(edit)


def with_values(value):
    def recipe(content):
        header, data = taken_apart(content)
        start, end = header["memory"]["data_offsets"]
        return sealed(header, data[:start] + struct.pack("<f", value) * ((end - start) // 4) + data[end:])

    return recipe


class RunsCode:
    def __reduce__(self):
        return (exec, ("raise SystemExit('the file ran its code')",))


RECIPES = {
    "empty": (lambda c: b"", DamagedFile, "0 bytes, too short"),
    "cut in the header": (lambda c: c[:100], DamagedFile, r"header claims \d+ bytes, the file has 100"),
    "cut in the data": (lambda c: c[:-1], DamagedFile, "does not match its checksum"),
    "longer than it says": (lambda c: c + b"\0", DamagedFile, "does not match its checksum"),
    "one bit flipped": (lambda c: c[:-5] + bytes([c[-5] ^ 1]) + c[-4:], DamagedFile, "does not match its checksum"),
    "oversized header": (lambda c: struct.pack("<Q", 2**62) + c[8:], DamagedFile, r"header claims 4611686018427387904"),
    "no JSON": (lambda c: sealed("{'a'", b""), DamagedFile, "header is not valid JSON"),
    "a list": (lambda c: sealed("[1]", b""), DamagedFile, "not a JSON object"),
    "deep nesting": (lambda c: sealed("[" * 5000, b""), DamagedFile, "more than its data justifies"),
    "many items": (lambda c: sealed("[" + "0," * 100_000 + "0]", b""), DamagedFile, "more than its data justifies"),
    "no metadata": (lambda c: sealed("{}", b""), DamagedFile, "no metadata of texts"),
    "no checksum": (with_header(lambda h: '{"__metadata__":{"format":"vit-memory-task/1"}}'), DamagedFile, "checksum"),
    "a pickle": (lambda c: pickle.dumps(RunsCode()), UnsafeFile, "could run code; not opened"),
    "a zip": (lambda c: b"PK\x03\x04" + c, UnsafeFile, "could run code; not opened"),
    "duplicate key": (
        lambda c: sealed(f'{{"__metadata__":{{"sha256":"{ZEROS}"}},"a":1,"a":2}}', b""),
        DamagedFile,
        "key 'a' is given twice",
    ),
    "NaN-filled": (with_values(float("nan")), DamagedFile, "memory holds NaN or infinite values"),
    "infinite": (with_values(float("inf")), DamagedFile, "memory holds NaN or infinite values"),
    "newer version": (
        with_header(lambda h: h["__metadata__"].update(format="vit-memory-task/5")),
        NewerFormat,
        r"written in format vit-memory-task/5; .* pip install -U vit-memory",
    ),
    "another format": (
        with_header(lambda h: h["__metadata__"].update(format="lora/1")),
        DamagedFile,
        "format 'lora/1', expected vit-memory-task/4",
    ),
    "wrong dtype": (
        with_header(lambda h: h["memory"].update(dtype="I64")),
        DamagedFile,
        "tensor 'memory': dtype 'I64'",
    ),
    "wrong shape": (
        with_header(lambda h: h["memory"].update(shape=[4, 3, 32])),
        DamagedFile,
        r"memory_size is 4, the memory has shape \(4, 3, 32\)",
    ),
    "wrong rank": (
        with_header(lambda h: h["memory"].update(shape=[12, 32])),
        DamagedFile,
        r"memory has shape \(12, 32\)",
    ),
    "negative shape": (
        with_header(lambda h: h["memory"].update(shape=[-3, -4, 32])),
        DamagedFile,
        "not a valid shape",
    ),
    "huge shape": (with_header(lambda h: h["memory"].update(shape=[2**39, 4, 32])), DamagedFile, "bytes expected at"),
    "huge shape without numbers": (
        lambda c: sealed(
            {"__metadata__": {}, "a": {"dtype": "F32", "shape": [2**39, 2**39, 0], "data_offsets": [0, 0]}}, b""
        ),
        DamagedFile,
        "not a valid shape",
    ),
    "true as a size": (
        with_header(lambda h: h["memory"].update(shape=[True, 12, 32])),
        DamagedFile,
        "not a valid shape",
    ),
    "overlap": (
        with_header(lambda h: h["memory"].update(data_offsets=[0, 1536])),
        DamagedFile,
        "cut off, overlapping or with gaps",
    ),
    "foreign tensor": (
        with_header(lambda h: h.update({"evil": {"dtype": "F32", "shape": [0], "data_offsets": [2448, 2448]}})),
        DamagedFile,
        r"evil|unknown tensors|bytes expected",
    ),
    "missing tensor": (
        with_header(lambda h: {k: v for k, v in h.items() if k != "memory"}),
        DamagedFile,
        "are not described",
    ),
    "other fields": (
        with_header(lambda h: h["memory"].update(code="x")),
        DamagedFile,
        "expected the fields dtype",
    ),
    "no description": (with_header(lambda h: h["__metadata__"].pop("task") and None), DamagedFile, "is not valid JSON"),
    "broken description": (with_task(lambda t: "{"), DamagedFile, "description is not valid JSON"),
    "description twice": (with_task(lambda t: '{"name":"a","name":"b"}'), DamagedFile, "'name' is given twice"),
    "missing field": (
        with_task(lambda t: t.pop("labels") and None),
        DamagedFile,
        "mistyped field: 'labels'",
    ),
    "labels of another type": (
        with_task(lambda t: t.update(labels=[1, 2, 3])),
        DamagedFile,
        "int, expected a text",
    ),
    "too few labels": (with_task(lambda t: t.update(labels=["a"])), DamagedFile, r"head_weight is \(3, 32\)"),
    "no labels": (with_task(lambda t: t.update(labels=[])), DamagedFile, "label list is empty"),
    "path in the name": (with_task(lambda t: t.update(name="../../etc/passwd")), DamagedFile, "use 1 to 100 letters"),
    "path in a parent": (
        with_task(lambda t: t.update(parents=[{"name": "../up", "digest": None}])),
        DamagedFile,
        "task name '../up'",
    ),
    "unknown regime": (with_task(lambda t: t.update(regime="exec")), DamagedFile, "regime 'exec' is none of"),
    "another width": (with_task(lambda t: t["backbone"].update(width=64)), DamagedFile, r"expected \(3, 64\)"),
    "width of another type": (with_task(lambda t: t["backbone"].update(width="32")), DamagedFile, "backbone sizes"),
    "not a number": (with_task(lambda t: '{"metrics": NaN}'), DamagedFile, "NaN is not valid JSON"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_hostile_file_is_refused_by_name(name, sound, tmp_path):
    recipe, error, message = RECIPES[name]
    path = tmp_path / "hostile.safetensors"
    content = recipe(sound)
    path.write_bytes(content)
    with pytest.raises(error, match=message) as raised:
        load_task(path)
    assert str(path) in str(raised.value), "the message names the file"
    assert path.read_bytes() == content


def test_recipes_start_from_a_file_that_loads(sound, tmp_path):
    """Taken apart and sealed again it loads: what the recipes are refused for is what they change."""
    path = tmp_path / "task.safetensors"
    path.write_bytes(with_task(lambda task: None)(sound))
    assert load_task(path).cells == 4


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_changed_byte_goes_unnoticed(data, sound, tmp_path_factory):
    place = data.draw(st.integers(0, len(sound) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda value: value != sound[place]))
    path = tmp_path_factory.mktemp("flip") / "task.safetensors"
    path.write_bytes(sound[:place] + bytes([value]) + sound[place + 1 :])
    with pytest.raises(FileError):
        load_task(path)


def test_a_thousand_mutated_files_give_a_thousand_clear_errors(sound, tmp_path):
    chance = random.Random(0)
    path = tmp_path / "task.safetensors"
    errors = []
    for _ in range(1000):
        content = bytearray(sound)
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(content))
            way = chance.choice(("flip", "cut", "insert", "drop", "zero"))
            if way == "flip":
                content[place] ^= 1 << chance.randrange(8)
            elif way == "cut":
                del content[place:]
                break
            elif way == "insert":
                content[place:place] = chance.randbytes(chance.randint(1, 16))
            elif way == "drop":
                del content[place : place + chance.randint(1, 16)]
            else:
                content[place : place + 8] = b"\xff" * len(content[place : place + 8])
        if bytes(content) == sound:
            content[0] ^= 1
        path.write_bytes(content)
        try:
            load_task(path)
        except FileError as error:
            errors.append(str(error))
    assert len(errors) == 1000
    assert all(str(path) in error and len(error) < 1000 for error in errors)


MEMORY = """
import resource, sys
from pathlib import Path
from vit_memory import FileError, load_task
load_task(sys.argv[1])  # torch's own first costs
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    load_task(sys.argv[2])
except FileError:
    pass
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
print(grown / Path(sys.argv[2]).stat().st_size)
"""


@pytest.mark.parametrize("kind", ["full", "half", "damaged", "items"])
def test_no_load_takes_more_memory_than_twice_the_file(kind, sound, tmp_path):
    small, large = tmp_path / "small.safetensors", tmp_path / "large.safetensors"
    small.write_bytes(sound)
    save_task(vit_b_task(cells=2000), large, half=kind == "half")
    if kind == "damaged":
        content = bytearray(large.read_bytes())
        content[-1] ^= 1
        large.write_bytes(content)
    elif kind == "items":  # 10 million things to make Python objects of, in 20 MB
        header, data = taken_apart(sound)
        header["__metadata__"]["list"] = "[" + "0," * 10_000_000 + "0]"
        large.write_bytes(sealed(header, data))
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, str(small), str(large)], capture_output=True, text=True, check=True
    )
    assert float(run.stdout) <= 2.05  # the twentieth: the interpreter's own


def test_loading_a_real_file_imports_no_pickle_machinery(sound, tmp_path, monkeypatch):
    path = tmp_path / "task.safetensors"
    path.write_bytes(sound)

    def refuse(*arguments, **options):
        raise AssertionError("torch.load was called")

    monkeypatch.setattr(torch, "load", refuse)
    assert load_task(path).name == "task"
