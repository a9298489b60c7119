"""kill -9 in the middle of a PUT: the bundle folder opens, and holds the old task or the new one, whole."""

import json
import subprocess
import sys
from pathlib import Path

# The process kills itself at the n-th step that touches the disk, in a PUT that comes over HTTP. Each n has a process
# of its own, forked before any thread exists, because importing everything takes longer than the rest.
SCRIPT = """
import os, signal, sys, traceback
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import torch
torch.set_num_threads(1)
from engine_builders import backbone
from http_builders import client_of, file_of, predict
folder = Path(sys.argv[3])
content = file_of("parts", shift=0.1, kind="multi-label")
backbone().fingerprint

def killed_at(n):
    count = 0
    def dying(step):
        def run(*arguments, **options):
            nonlocal count
            count += 1
            if count == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*arguments, **options)
        return run
    with client_of(folder / str(n)) as client:
        for name in ("open", "fsync", "replace", "rename", "unlink", "close"):
            setattr(os, name, dying(getattr(os, name)))
        response = client.put("/v1/tasks/parts", content=content)
        assert response.status_code == 200, response.text
    os._exit(0)  # lived through it: there is no n-th step

for n in range(1, 40):
    child = os.fork()
    if not child:
        try:
            killed_at(n)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    print(n, os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status), flush=True)
    if not os.WIFSIGNALED(status):
        break
"""


def test_a_put_killed_at_any_step_leaves_the_old_task_or_the_new_one(tmp_path):
    from engine_builders import task
    from http_builders import bundle_in, file_of

    from vit_memory import Bundle
    from vit_memory.files.taskfile import task_from_bytes

    for n in range(1, 40):  # about twenty steps touch the disk
        bundle_in(tmp_path / str(n), [task("pets"), task("parts", kind="multi-label")])
    here = Path(__file__).parent
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, here, here.parent, tmp_path], capture_output=True, text=True, check=False
    )
    steps = [tuple(map(int, line.split())) for line in result.stdout.splitlines()]
    assert steps, result.stderr
    assert steps[-1][1] == 0, f"the last one was not killed and answered\n{result.stderr}"
    assert [status for _, status in steps[:-1]] == [9] * (len(steps) - 1)
    old = task("parts", kind="multi-label").digest
    new = task_from_bytes(bytearray(file_of("parts", shift=0.1, kind="multi-label")), "parts").digest
    found = []
    for n, _ in steps:
        bundle = Bundle.open(tmp_path / str(n))
        assert list(bundle.check()) == ["pets", "parts"]
        found.append({old: "old", new: "new"}[bundle.task("parts").digest])
        content = json.loads((tmp_path / str(n) / "bundle.json").read_text())
        assert [entry["name"] for entry in content["tasks"]] == ["pets", "parts"]
    assert found == sorted(found, key=lambda which: which == "new"), "once it is new, it stays"
    assert found[-1] == "new"
    assert found[0] == "old"
    assert found.count("old") > 4, "the process was killed before the change, too"
