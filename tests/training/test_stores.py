"""Stores on disk keep to a limit, make way for one another, and are never taken from under a process that uses them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from training.test_cache import RECIPE, content, store
from training.test_sweep import backbone, coloured, fresh  # noqa: F401 - a fixture
from vit_memory.cli import app
from vit_memory.data.loading import default_workers
from vit_memory.errors import TrainingError
from vit_memory.training import cache as cache_module
from vit_memory.training import stores as stores_module
from vit_memory.training.cache import Cache
from vit_memory.training.fit import fit
from vit_memory.training.options import TrainingOptions
from vit_memory.training.sizes import parse_size
from vit_memory.training.stores import clear_stores, list_stores

TESTS = Path(__file__).parents[1]
DAY = 86400


def names(place):
    return {info.folder.name for info in list_stores(place)}


def train(backbone, cache, seed=0, **options):  # noqa: F811
    recipe = replace(RECIPE, seed=seed, learning_rates=(0.1,))
    options = TrainingOptions(cache=cache, **options)
    return fit(backbone, [fresh(backbone)], coloured(20, 1), coloured(12, 2), recipe, options=options)


def filled(backbone, place, **options):  # noqa: F811
    """A store that a training has used and let go."""
    kept = store(backbone, place, **options).open(disk=True)
    kept.fill()
    kept.close()
    return kept


def last_used(kept, days_ago):
    os.utime(kept.folder / "store.json", (time.time() - days_ago * DAY,) * 2)


def cache_command(*words):
    result = CliRunner().invoke(app, ["cache", *map(str, words)])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_a_new_store_takes_the_place_of_the_least_recently_used(backbone, tmp_path):  # noqa: F811
    train(backbone, Cache("disk", folder=tmp_path), seed=0)
    first = list_stores(tmp_path)
    assert len(first) == 2  # of the training views, which the seed draws, and of the validation images
    limit = int(1.5 * sum(info.bytes for info in first))
    train(backbone, Cache("disk", folder=tmp_path, limit=limit), seed=1)
    second = list_stores(tmp_path)
    assert len(second) == 2
    assert all(info.complete and not info.users for info in second)
    assert sum(info.bytes for info in second) <= limit
    (shared,) = {info.folder for info in first} & {info.folder for info in second}
    assert shared.name == min(second, key=lambda info: info.bytes).folder.name
    train(backbone, Cache("disk", folder=tmp_path), seed=0)
    assert names(tmp_path) > {info.folder.name for info in second}  # without a reason, nothing goes
    before = names(tmp_path)
    with pytest.raises(TrainingError, match=r"does not allow .* Raise --cache-limit"):
        train(backbone, Cache("disk", folder=tmp_path, limit=1000), seed=2)
    assert names(tmp_path) == before  # nothing goes for what does not fit anyway


def test_a_second_training_with_the_workers_of_the_command_finds_its_stores_ready(backbone, tmp_path):  # noqa: F811
    first, second = (
        train(backbone, Cache("disk", folder=tmp_path), workers=max(1, default_workers())) for _ in range(2)
    )
    assert second.best.task.digest == first.best.task.digest
    assert len(list_stores(tmp_path)) == 2


USER = """
import sys
sys.path[:0] = [{tests!r}]
from pathlib import Path
from training.test_cache import store
from training.test_sweep import FACTS
from builders import tiny_backbone
from vit_memory import load_backbone
kept = store(load_backbone(tiny_backbone().model, preprocessing=FACTS), Path({place!r})).open(disk=True)
kept.fill()
print(kept.folder.name, flush=True)
sys.stdin.read()
"""


def test_a_store_in_use_stays_until_its_user_ends_even_by_a_kill(backbone, tmp_path, monkeypatch, caplog):  # noqa: F811
    program = USER.format(tests=str(TESTS), place=str(tmp_path))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as user:
        used = user.stdout.readline().strip()
        (info,) = list_stores(tmp_path)
        assert info.users == (user.pid,)
        limit = int(1.5 * info.bytes)
        with pytest.raises(TrainingError, match=r"limit of all stores: .*, of which other trainings use"):
            train(backbone, Cache("disk", folder=tmp_path, limit=limit), seed=5)
        with pytest.raises(TrainingError, match="has no room for"):
            store(backbone, tmp_path, seed=5, limit=limit).open(disk=True)
        caplog.set_level("INFO")
        monkeypatch.setattr(cache_module, "free_memory", lambda: 0)
        assert train(backbone, Cache(folder=tmp_path, limit=limit), seed=5).storage == "off"
        assert "nothing is stored: there is no room for" in caplog.text
        assert f"in use by process {user.pid}" in cache_command("list", "--cache-dir", tmp_path)
        output = cache_command("clear", "--cache-dir", tmp_path)
        assert f"kept {used[:8]}" in output
        assert f": in use by process {user.pid}\n" in output
        assert names(tmp_path) == {used}
        user.send_signal(signal.SIGKILL)
    (info,) = list_stores(tmp_path)
    assert info.users == ()
    assert train(backbone, Cache("disk", folder=tmp_path, limit=limit), seed=5).storage == "disk"
    assert used not in names(tmp_path)


def test_a_store_that_a_training_is_about_to_open_is_not_removed(backbone, tmp_path):  # noqa: F811
    old, new = filled(backbone, tmp_path, seed=1), filled(backbone, tmp_path, seed=2)
    last_used(old, 9)
    limit = int(2.5 * list_stores(tmp_path)[0].bytes)
    wanted = store(backbone, tmp_path, seed=1)
    wanted.reserve()
    third = store(backbone, tmp_path, seed=3, limit=limit).open(disk=True)
    assert names(tmp_path) == {old.folder.name, third.folder.name}
    third.fill()
    wanted.close()
    third.close()
    last_used(old, 9)
    fourth = store(backbone, tmp_path, seed=4, limit=limit).open(disk=True)
    assert names(tmp_path) == {third.folder.name, fourth.folder.name}
    assert not new.folder.exists()


def test_clear_removes_what_was_not_used_for_so_many_days_and_nothing_else(backbone, tmp_path):  # noqa: F811
    old, new = filled(backbone, tmp_path, seed=1), filled(backbone, tmp_path, seed=2)
    last_used(old, 10)
    strangers = [tmp_path / ("ab" * 16), tmp_path / "removed-holidays"]
    for folder in strangers:
        folder.mkdir()
        (folder / "photo.jpg").write_bytes(b"mine")
    output = cache_command("clear", "--older-than", "7", "--dry-run", "--cache-dir", tmp_path)
    assert f"would remove {old.folder.name[:8]}, 20 images × 2 views by" in output
    assert f"kept {new.folder.name[:8]}, 20 images × 2 views by" in output
    assert "would free" in output
    assert names(tmp_path) == {old.folder.name, new.folder.name}
    output = cache_command("clear", "--older-than", "7", "--cache-dir", tmp_path)
    assert f"removed {old.folder.name[:8]}" in output
    assert output.endswith(" from 1 store; 1 store kept\n")
    assert names(tmp_path) == {new.folder.name}
    new.open(disk=True).close()
    last_used(new, 10)
    store(backbone, tmp_path, seed=2).open(disk=True).close()  # used again: no longer old
    cache_command("clear", "--older-than", "7", "--cache-dir", tmp_path)
    assert names(tmp_path) == {new.folder.name}
    cache_command("clear", "--cache-dir", tmp_path)
    assert names(tmp_path) == set()
    assert all((folder / "photo.jpg").read_bytes() == b"mine" for folder in strangers)
    cache_command("clear", "--cache-dir", strangers[0])
    assert [path.name for path in strangers[0].iterdir()] == ["photo.jpg"]  # not even a lock is left there


def test_list_shows_what_each_store_holds_and_how_much_of_it(backbone, tmp_path):  # noqa: F811
    whole, cut = filled(backbone, tmp_path, seed=1), store(backbone, tmp_path, seed=2, views=3).open(disk=True)
    cut.close()
    damaged = filled(backbone, tmp_path, seed=3)
    (damaged.folder / "store.json").write_text("{")
    record = json.loads(cache_command("list", "--json", "--cache-dir", tmp_path))
    by_name = {entry["store"]: entry for entry in record["stores"]}
    assert record["bytes"] == sum(entry["bytes"] for entry in by_name.values())
    entry = by_name[whole.folder.name]
    assert (entry["images"], entry["views"], entry["precision"], entry["complete"]) == (20, 2, "float16", True)
    assert (entry["backbone"], entry["in_use_by"]) == (backbone.name, [])
    assert entry["bytes"] >= whole.bytes == entry["bytes_when_complete"]
    entry = by_name[cut.folder.name]
    assert (entry["views_to_store"], entry["views_stored"], entry["complete"]) == (60, 0, False)
    assert by_name[damaged.folder.name]["backbone"] == "unknown"
    lines = cache_command("list", "--cache-dir", tmp_path).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [entry["store"][:8] for entry in record["stores"]]
    assert "incomplete (0 of 60 views)" in next(line for line in lines if line.startswith(cut.folder.name[:8]))
    assert lines[-1].startswith(f"{tmp_path}: 3 stores, ")
    assert cache_command("list", "--cache-dir", tmp_path / "none").endswith("none: 0 stores, 0 kB\n")
    assert not (tmp_path / "none").exists()


def test_a_store_whose_removal_was_interrupted_is_not_listed_and_is_removed_next_time(backbone, tmp_path, monkeypatch):  # noqa: F811
    kept = filled(backbone, tmp_path)
    before = content(kept)

    def cut_off(folder, **options):
        (folder / "trunks.bin").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(stores_module.shutil, "rmtree", cut_off)
    with pytest.raises(KeyboardInterrupt):
        clear_stores(tmp_path)
    monkeypatch.undo()
    assert len(list(tmp_path.glob("*/done.bin"))) == 1  # half of it is still there
    assert names(tmp_path) == set()
    again = filled(backbone, tmp_path)
    assert len(list(tmp_path.glob("*/done.bin"))) == 1
    assert content(again) == before


STARTER = """
import sys, time
sys.path[:0] = [{tests!r}]
from pathlib import Path
import torch
torch.set_num_threads(1)
from training.test_cache import store
from training.test_sweep import FACTS
from builders import tiny_backbone
from vit_memory import load_backbone
number = sys.argv[1]
backbone = load_backbone(tiny_backbone().model, preprocessing=FACTS)
place, opened = Path({place!r}), Path.open

def slow_open(path, mode="r", *rest, **options):
    if path.suffix == ".bin" and mode == "wb":
        time.sleep(int(number) / 10)  # creating files that another process uses already would do harm
    return opened(path, mode, *rest, **options)

def all_are(what):
    return len(list(place.glob(f"{{turn}}-*-{{what}}"))) == 3

Path.open = slow_open
for turn in range(3):
    kept = store(backbone, place, seed=turn)
    (place / f"{{turn}}-{{number}}-ready").touch()
    while not all_are("ready"):
        time.sleep(0.001)
    kept.open(disk=True)
    kept.fill()
    (place / f"{{turn}}-{{number}}-filled").touch()
    while True:
        last = all_are("filled")
        assert bool(kept.tensors.done.all())  # a file that was cut short kills the process that reads it
        assert kept.tensors.parts["trunks.bin"].abs().amax((1, 2, 3, 4, 5)).min() > 0  # no row is lost
        if last:
            break
"""


def test_processes_that_start_on_one_store_at_once_share_it(backbone, tmp_path):  # noqa: F811
    program = STARTER.format(tests=str(TESTS), place=str(tmp_path))
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(i)], stderr=subprocess.PIPE, text=True) for i in range(3)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0, 0], errors
    for turn in range(3):
        alone = filled(backbone, tmp_path / "alone", seed=turn)
        shared = store(backbone, tmp_path, seed=turn).open(disk=True)
        # Other numbers of threads round differently.
        one, other = (kept.tensors.parts["trunks.bin"] for kept in (shared, alone))
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3)
        shared.close()
        shutil.rmtree(alone.folder)


@pytest.mark.parametrize(
    ("text", "count"),
    [("20GB", 20 * 10**9), ("500 mb", 5 * 10**8), ("1.5T", 15 * 10**11), ("2GiB", 2**31), ("12B", 12), ("0", 0)],
)
def test_sizes_are_read_as_people_write_them(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["20", "GB", "-1GB", "20 gigabytes", "", "1e9B"])
def test_a_text_that_is_not_a_size_is_refused_at_the_command_line(text):
    result = CliRunner().invoke(app, ["train", "photos", "--name", "birds", "--cache-limit", text])
    assert result.exit_code == 2
    assert "such as 20GB or 500MB" in result.output
