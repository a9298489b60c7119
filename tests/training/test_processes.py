"""Several processes that train together: they stop at the same step, and a failure of one is an error of all."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vit_memory.training.ranks import Ranks

TESTS = Path(__file__).parents[1]


class DeviceOnly:
    """An accelerator whose messages must lie on its device, as NCCL's must; both of its processes send the same."""

    device = torch.device("meta")

    def __init__(self, answer):
        self.answer = answer

    def reduce(self, message, reduction):
        assert message.device == self.device
        assert reduction == "sum"
        return torch.tensor(self.answer)


def test_messages_lie_on_the_device_that_sends_them_and_answers_come_back():
    assert Ranks(0, 2, 2, DeviceOnly([1.0])).any(False)
    assert not Ranks(0, 2, 2, DeviceOnly([0.0])).any(False)
    assert Ranks(0, 2, 2, DeviceOnly([2.0])).all(True)
    assert not Ranks(0, 2, 2, DeviceOnly([1.0])).all(True)
    gradients, count = torch.zeros(2, 2, dtype=torch.bfloat16), torch.zeros(1)
    Ranks(0, 2, 2, DeviceOnly([1.0, 2.0, 3.0, 4.0, 5.0])).all_reduce([gradients, count])
    assert gradients.tolist() == [[1, 2], [3, 4]]
    assert count.tolist() == [5]


PROGRAM = """
import sys, time
sys.path[:0] = [{tests!r}]
import numpy as np, torch
torch.set_num_threads(1)
from builders import tiny_backbone
from training.test_sweep import FACTS, coloured, fresh
from vit_memory import load_backbone
from vit_memory.data.images import ImageArray
from vit_memory.data.splits import Split
from vit_memory.errors import VitMemoryError
from vit_memory.training import cache as cache_module, row_formats
from vit_memory.training.cache import Cache
from vit_memory.training.callbacks import Callbacks
from vit_memory.training.fit import fit
from vit_memory.training.options import TrainingOptions
from vit_memory.training.ranks import init_ranks
from vit_memory.training.recipe import Recipe

ranks = init_ranks()
pixels = np.random.default_rng(0).random((12, 32, 32, 3)).astype(np.float32)
cache, should_stop, last = Cache("ram"), lambda: False, [0, 1]

def on_progress(progress):
    last[:] = progress.step, progress.steps
    if ranks.rank == 0 and progress.stage == "storing":
        time.sleep(0.3)  # so that the other has failed long before this one is done

{case}
backbone = load_backbone(tiny_backbone().model, preprocessing=FACTS)
split = Split.of(ImageArray.whole("noise", pixels), np.arange(12) % 3)
recipe = Recipe(steps=60, batch=12, views=30, learning_rates=(0.1,), evaluate_every=30)
try:
    options = TrainingOptions(cache=cache, ranks=ranks)
    callbacks = Callbacks(on_progress, should_stop=should_stop)
    fit(backbone, [fresh(backbone)], split, coloured(12, 2), recipe, options=options, callbacks=callbacks)
finally:
    print("before the end" if last[0] < last[1] else "at the end")
"""
CASES = {  # the fault, the error of process 0, the error of process 1
    "a bad image of process 1, while storing": (
        "pixels[5, 0, 0, 0] = np.nan",
        "TrainingError: process 1 of 2 (counted from 0) failed: noise[5]: ",
        "BadImage: noise[5]: ",
    ),
    "a bug that process 1 alone meets": (
        "if ranks.rank == 1: row_formats.run_trunk = None",
        "TrainingError: process 1 of 2 (counted from 0) failed: TypeError: 'NoneType' object is not callable",
        "TypeError: 'NoneType' object is not callable",
    ),
    "process 1 is asked to stop, while storing": (
        "should_stop = lambda: ranks.rank == 1",
        "TrainingStopped: stopped before the first step",
        "TrainingStopped: stopped before the first step",
    ),
    "process 0 has no memory for a store": (
        "cache_module.free_memory = lambda: ranks.rank * 10**10",
        "TrainingError: memory does not hold",
        "TrainingError: process 0 of 2 (counted from 0) failed: memory does not hold",
    ),
    "a bad image of process 1, in a step": (
        "pixels[5, 0, 0, 0] = np.nan; cache = Cache('off')",
        "TrainingError: process 0 of 2 (counted from 0) lost the others: ",
        "BadImage: noise[5]: ",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_when_one_process_fails_both_end_with_the_reason(case):
    wrong, *expected = CASES[case]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Without torchrun, which would end the second process once the first has failed: both must end by themselves.
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(tests=str(TESTS), case=wrong)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, err), message in zip(processes, outputs, expected, strict=True):
        assert process.returncode == 1, err
        assert message in err.strip().splitlines()[-1]
        assert "before the end" in out


BRANCHES = """
import json, sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
import torch
torch.set_num_threads(1)
from builders import tiny_backbone
from training import test_branch_training, test_domain
from training.test_sweep import FACTS
from vit_memory import load_backbone, save_branch, save_task
from vit_memory.training.cache import Cache
from vit_memory.training.ranks import init_ranks

ranks = init_ranks()
backbone = load_backbone(tiny_backbone().model, preprocessing=FACTS)
options = {{"ranks": ranks, "cache": Cache({cache!r}, "float32")}}
if {function!r} == "fit":
    result = test_branch_training.train(backbone, *test_branch_training.on_new_branches(backbone), **options)
else:
    result = test_domain.train(backbone, test_domain.domain(backbone), **options)
folder = Path({folder!r}) / f"{{ranks.rank}} of {{ranks.world_size}}"
for i, one in enumerate(result.settings):
    (folder / str(i)).mkdir(parents=True)
    save_branch(one.branch, folder / str(i) / "branch")
    for task in one.tasks:
        save_task(task, folder / str(i) / task.name)
(folder / "scores").write_text(json.dumps([one.score for one in result.settings]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("function", ["fit", "fit_branch"])
@pytest.mark.parametrize("cache", ["off", "ram"])
def test_two_processes_train_the_branches_and_tasks_of_one(tmp_path, function, cache):
    program = tmp_path / "program.py"
    program.write_text(BRANCHES.format(tests=str(TESTS), folder=str(tmp_path), function=function, cache=cache))
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]):
        done = subprocess.run([sys.executable, *launcher, program], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    one, first, second = (tmp_path / name for name in ("0 of 1", "0 of 2", "1 of 2"))
    scores = [json.loads((folder / "scores").read_text()) for folder in (one, first, second)]
    assert scores[1] == scores[2] == pytest.approx(scores[0], abs=1e-4)
    files = sorted(path.relative_to(one) for path in one.glob("*/*"))
    assert len(files) == {"fit": 8 * 2, "fit_branch": 4 * 4}[function]  # settings x (branch and tasks)
    for file in files:
        expected, *both = (load_file(folder / file) for folder in (one, first, second))
        for name, values in expected.items():
            assert torch.equal(both[0][name], both[1][name])
            torch.testing.assert_close(both[0][name], values, rtol=0, atol=1e-4)
