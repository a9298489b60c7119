"""Promise 5, repeatable: a training that was stopped, however and whenever, ends as one that was not."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from training.test_sweep import READER, backbone, coloured, fresh  # noqa: F401 - a fixture
from vit_memory.errors import DamagedFile, TrainingError
from vit_memory.training.cache import Cache
from vit_memory.training.callbacks import Callbacks, Progress
from vit_memory.training.fit import fit
from vit_memory.training.options import TrainingOptions
from vit_memory.training.recipe import Recipe

RECIPE = Recipe(steps=9, batch=8, learning_rates=(0.05, 0.2), evaluate_every=3)


def run(backbone, checkpoint, recipe=RECIPE, on_progress=lambda progress: None, **options):  # noqa: F811
    tasks = [fresh(backbone), fresh(backbone, regime="class"), fresh(backbone, **READER)]
    options = TrainingOptions(checkpoint=checkpoint, **options)
    callbacks = Callbacks(on_progress)
    return fit(backbone, tasks, coloured(20, 1), coloured(9, 2), recipe, options=options, callbacks=callbacks)


class Stop(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize("mode", ["off", "ram", "disk"])
@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
@pytest.mark.parametrize("at", [3, 6, 9])
def test_resuming_ends_with_the_same_bits_and_the_same_reports(backbone, tmp_path, optimiser, at, mode):  # noqa: F811
    patience = 3 if at == 6 else None
    recipe = replace(RECIPE, optimiser=optimiser, learning_rates=(0.01, 0.02), patience=patience)
    reports: list[Progress] = []
    whole = run(
        backbone, tmp_path / "whole", recipe, on_progress=reports.append, cache=Cache(mode, folder=tmp_path / "a")
    )

    def stop(progress):
        if progress.stage == "training" and progress.step == at:
            raise Stop

    cache = Cache(mode, folder=tmp_path / "b")
    with pytest.raises(Stop):
        run(backbone, tmp_path / "cut", recipe, on_progress=stop, checkpoint_every=2, cache=cache)
    again: list[Progress] = []
    resumed = run(
        backbone, tmp_path / "cut", recipe, on_progress=again.append, checkpoint_every=2, resume=True, cache=cache
    )
    assert [r.task.digest for r in resumed.settings] == [r.task.digest for r in whole.settings]
    assert [r.score for r in resumed.settings] == [r.score for r in whole.settings]
    again = [progress for progress in again if progress.stage == "training"]
    assert again == reports[-len(again) :]
    work: list[Progress] = []
    finished = run(backbone, tmp_path / "cut", recipe, on_progress=work.append, resume=True, cache=cache)
    assert finished.best.task.digest == whole.best.task.digest
    assert work == []  # nothing was left to do, and nothing was stored for it


def test_a_checkpoint_of_another_training_or_a_damaged_one_is_refused(backbone, tmp_path):  # noqa: F811
    path = tmp_path / "checkpoint"
    run(backbone, path)
    with pytest.raises(TrainingError, match="it belongs to another training: other images, tasks, parents, recipe"):
        run(backbone, path, replace(RECIPE, seed=1), resume=True)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFile):
        run(backbone, path, resume=True)
    assert run(backbone, path).best.score is not None  # without resume, it is replaced


def test_a_full_disk_during_a_checkpoint_leaves_the_last_good_one(backbone, tmp_path, monkeypatch):  # noqa: F811
    path = tmp_path / "checkpoint"
    whole = run(backbone, tmp_path / "whole")
    real, calls = os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) > 2:  # the file and its folder of the first checkpoint went well
            raise OSError(28, "No space left on device")
        return real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Exception, match="No space left on device. The old file, if any, is unchanged"):
        run(backbone, path, checkpoint_every=4)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []
    resumed = run(backbone, path, resume=True)
    assert resumed.best.task.digest == whole.best.task.digest


PROGRAM = """
import sys, torch
sys.path[:0] = {paths!r}
torch.set_num_threads(1)
from pathlib import Path
from builders import tiny_backbone
from vit_memory import load_backbone
from training.test_sweep import FACTS
from training.test_resume import run
from vit_memory.training.cache import Cache
backbone = load_backbone(tiny_backbone().model, preprocessing=FACTS)
cache = Cache("disk", folder=Path({path!r} + "-store"))
show = lambda progress: print(progress.stage, progress.step, flush=True)
result = run(backbone, Path({path!r}), checkpoint_every=1, resume=True, cache=cache, on_progress=show)
print(*(r.task.digest for r in result.settings))
"""


@pytest.mark.slow
def test_killed_at_twenty_random_moments_and_resumed_it_ends_with_the_same_weights(tmp_path):
    tests = Path(__file__).parents[1]

    def start(name):
        program = PROGRAM.format(paths=[str(tests)], path=str(tmp_path / name))
        return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)

    def ended(name):
        lines = start(name).communicate(timeout=300)[0].splitlines()
        return lines[:-1], lines[-1]

    events, expected = ended("whole")
    assert len(expected.split()) == 6  # settings
    rng = random.Random(0)
    interrupted = []
    for i in range(20):
        process = start(f"killed-{i}")
        # Somewhere between two events of the run: while it stores, trains, or writes a checkpoint.
        last = ""
        for _ in range(rng.randint(1, len(events) - 1)):
            last = process.stdout.readline()
        time.sleep(rng.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == -signal.SIGKILL:
            interrupted.append(last.split()[0])
        assert ended(f"killed-{i}")[1] == expected
    assert len(interrupted) >= 15
    assert {"storing", "training"} <= set(interrupted)


def test_reading_a_checkpoint_leaves_no_tensor_of_the_file_in_use(backbone, tmp_path):  # noqa: F811
    from vit_memory.graph import TaskGraph
    from vit_memory.training.sweep import Setting
    from vit_memory.training.trunk_sweep import TrunkSweep

    sweep = TrunkSweep(backbone, [Setting(fresh(backbone), 0.1)], TaskGraph(), RECIPE)
    addresses = {name: value.data_ptr() for name, value in sweep.state_dict().items()}
    sweep.load_state_dict({name: torch.zeros_like(value) for name, value in sweep.state_dict().items()}, [])
    assert {name: value.data_ptr() for name, value in sweep.state_dict().items()} == addresses
