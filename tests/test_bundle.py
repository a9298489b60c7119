"""Bundles: tasks of one backbone in a folder, whole or absent, refused if they do not fit together."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from builders import graph_shapes, images, library_model, tiny_backbone, trained
from vit_memory import (
    BackboneMismatch,
    Bundle,
    DamagedFile,
    FileError,
    GraphError,
    MemoryViT,
    NewerFormat,
    UnsafeFile,
    save_task,
)
from vit_memory.cli import app
from vit_memory.files import collect, manifest


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def pinned_diamond(backbone):
    top = trained(backbone, "top", cells=2)
    left = trained(backbone, "left", cells=5, parents=[top])
    right = trained(backbone, "right", regime="class", parents=[top])
    return [top, left, right, trained(backbone, "bottom", cells=1, parents=[left, right])]


@pytest.fixture
def diamond(tmp_path):
    backbone = tiny_backbone()
    return Bundle.create(tmp_path / "bundle", backbone, pinned_diamond(backbone))


def test_a_bundle_gives_the_outputs_of_its_tasks(diamond):
    backbone = tiny_backbone()
    direct = MemoryViT(backbone, pinned_diamond(backbone))(images())
    bundled = Bundle.open(diamond.folder).model(backbone)(images())
    assert list(bundled) == list(direct)
    assert all(torch.equal(bundled[name], direct[name]) for name in direct)


def test_concatenating_separately_trained_tasks_is_adding_their_files(tmp_path):
    backbone = tiny_backbone()
    for task in (trained(backbone, "birds"), trained(backbone, "boats", cells=2)):
        save_task(task, tmp_path / f"{task.name}.safetensors")
    created = run("bundle", "create", tmp_path / "both", tmp_path / "birds.safetensors")
    assert created.exit_code == 0, created.output
    added = run("bundle", "add", tmp_path / "both", tmp_path / "boats.safetensors")
    assert added.exit_code == 0, added.output
    assert "added boats" in added.stdout
    together = Bundle.open(tmp_path / "both").model(backbone)(images())
    alone = MemoryViT(backbone, [trained(backbone, "boats", cells=2)])(images())
    torch.testing.assert_close(together["boats"], alone["boats"], rtol=0, atol=1e-5)
    listed = run("bundle", "list", tmp_path / "both", "--json")
    assert [task["name"] for task in json.loads(listed.stdout)] == ["birds", "boats"]
    assert "boats" in run("bundle", "list", tmp_path / "both").stdout
    assert run("bundle", "check", tmp_path / "both").exit_code == 0


def test_create_add_check_and_inspect_work_with_a_backbone_folder(tmp_path):
    library_model("vit")[1].save_pretrained(tmp_path / "vit")
    assert run("bundle", "create", tmp_path / "b", "--backbone", tmp_path / "vit").exit_code == 0
    save_task(trained(tiny_backbone(), "birds"), tmp_path / "birds.safetensors")
    assert run("bundle", "add", tmp_path / "b", tmp_path / "birds.safetensors").exit_code == 0
    assert run("bundle", "check", tmp_path / "b", "--backbone", tmp_path / "vit").exit_code == 0
    assert list(Bundle.from_pretrained(tmp_path / "b").model()(images())) == ["birds"], "the reference is enough"
    shown = run("inspect", tmp_path / "birds.safetensors", tmp_path / "b" / "tasks" / "birds.safetensors")
    assert shown.stdout.count("5 cells in each of 3 blocks") == 2
    tasks = json.loads(run("inspect", tmp_path / "birds.safetensors", "--json").stdout)
    assert tasks[0]["backbone"]["fingerprint"] == tiny_backbone().fingerprint
    assert run("bundle", "create", tmp_path / "none").exit_code == 2


def test_parents_are_added_with_a_task_or_named_if_missing(tmp_path, diamond):
    folder = tmp_path / "files"
    for task in diamond.tasks():
        save_task(task, folder / f"{task.name}.safetensors")
    bundle = collect.add_files(Bundle.create(tmp_path / "new", diamond.backbone), [folder / "bottom.safetensors"])
    assert sorted(entry.name for entry in bundle.entries) == ["bottom", "left", "right", "top"]
    (folder / "right.safetensors").unlink()
    before = list(tmp_path.iterdir())
    result = CliRunner().invoke(app, ["bundle", "create", str(tmp_path / "other"), str(folder / "bottom.safetensors")])
    assert isinstance(result.exception, GraphError)
    assert "task 'bottom' extends 'right', which is neither given nor beside it" in str(result.exception)
    assert list(tmp_path.iterdir()) == before, "nothing is left"


def test_a_task_of_another_backbone_is_refused_with_both_fingerprints(diamond):
    before = content(diamond.folder)
    stranger = trained(tiny_backbone("dinov2"), "stranger")
    with pytest.raises(
        BackboneMismatch, match=r"was trained on .* with fingerprint .*this bundle is for .*train the"
    ) as error:
        diamond.add([stranger])
    assert stranger.backbone.fingerprint[:12] in str(error.value)
    assert diamond.backbone.fingerprint[:12] in str(error.value)
    assert content(diamond.folder) == before


def test_refused_changes_leave_the_folder_as_it_was(diamond):
    before = content(diamond.folder)
    backbone = tiny_backbone()
    with pytest.raises(GraphError, match="two tasks are called 'top'"):
        diamond.add([trained(backbone, "fine"), trained(backbone, "top")])
    with pytest.raises(GraphError, match="task 'left' extends top: remove 'left' too"):
        diamond.remove(["top"])
    with pytest.raises(FileError, match="no task 'nobody' in this bundle. Tasks: top, left, right, bottom"):
        diamond.remove(["nobody"])
    with pytest.raises(FileError, match="is a bundle already"):
        Bundle.create(diamond.folder, backbone)
    assert content(diamond.folder) == before


def test_a_retrained_parent_is_not_mistaken_for_the_one_a_task_was_trained_on(tmp_path):
    backbone = tiny_backbone()
    parent = trained(backbone, "parent")
    child = trained(backbone, "child", parents=[parent])
    retrained = replace(parent, memory=parent.memory + 0.1)
    with pytest.raises(GraphError, match=r"was trained on a task 'parent' with digest .*trained again since"):
        Bundle.create(tmp_path / "bundle", backbone, [retrained, child])
    assert not (tmp_path / "bundle").exists()


def test_removing_a_task_deletes_its_file(diamond):
    after = diamond.remove(["bottom", "left"])
    assert [entry.name for entry in Bundle.open(diamond.folder).entries] == ["top", "right"]
    assert sorted(path.name for path in (diamond.folder / "tasks").iterdir()) == [
        "right.safetensors",
        "top.safetensors",
    ]
    assert list(after.check()) == ["top", "right"]


def test_a_crash_between_file_and_manifest_leaves_the_old_bundle(diamond, monkeypatch):
    write_atomic = manifest.write_atomic

    def crash(path, chunks):
        if path.name == "bundle.json":
            raise KeyboardInterrupt
        write_atomic(path, chunks)

    monkeypatch.setattr(manifest, "write_atomic", crash)
    with pytest.raises(KeyboardInterrupt):
        diamond.add([trained(tiny_backbone(), "late")])
    assert list(Bundle.open(diamond.folder).check()) == ["top", "left", "right", "bottom"]


def test_save_pretrained_and_from_pretrained_keep_every_byte(diamond, tmp_path):
    late = trained(tiny_backbone(), "late", parents=[diamond.task("top")])
    bundle = diamond.add([late], half=True)
    bundle.save_pretrained(tmp_path / "copy")
    assert content(tmp_path / "copy") == content(bundle.folder)
    copied = Bundle.from_pretrained(str(tmp_path / "copy"))
    assert copied.entries == bundle.entries
    assert copied.task("late").memory.dtype == torch.float16


def test_no_file_of_a_bundle_is_overwritten(tmp_path):
    backbone = tiny_backbone()
    bundle = Bundle.create(tmp_path / "bundle", backbone, [trained(backbone, "first")])
    tasks = bundle.folder / "tasks"
    (tasks / "first.safetensors").rename(tasks / "a.safetensors")
    edited(bundle, lambda content: content["tasks"][0].update(file="a.safetensors"))
    bundle = Bundle.open(bundle.folder).add([trained(backbone, name) for name in ("a", "a.1", "A")])
    assert list(bundle.check()) == ["first", "a", "a.1", "A"]
    assert len({entry.file.casefold() for entry in bundle.entries}) == 4


def test_a_bundle_keeps_the_precision_of_the_files_it_is_given(tmp_path):
    backbone = tiny_backbone()
    save_task(trained(backbone, "half"), tmp_path / "half.safetensors", half=True)
    save_task(trained(backbone, "full"), tmp_path / "full.safetensors")
    assert run("bundle", "create", tmp_path / "kept", tmp_path / "half.safetensors").exit_code == 0
    assert run("bundle", "add", tmp_path / "kept", tmp_path / "full.safetensors").exit_code == 0
    for name in ("half", "full"):
        original = (tmp_path / f"{name}.safetensors").read_bytes()
        assert (tmp_path / "kept" / "tasks" / f"{name}.safetensors").read_bytes() == original
    assert run("bundle", "create", tmp_path / "small", tmp_path / "full.safetensors", "--half").exit_code == 0
    assert Bundle.open(tmp_path / "small").task("full").memory.dtype == torch.float16


def test_a_file_that_changes_while_a_bundle_is_copied_is_not_copied(diamond, tmp_path, monkeypatch):
    check = Bundle.check

    def changed_meanwhile(bundle):
        graph = check(bundle)
        left, right = (bundle.folder / "tasks" / f"{name}.safetensors" for name in ("left", "right"))
        left.write_bytes(right.read_bytes())
        return graph

    monkeypatch.setattr(Bundle, "check", changed_meanwhile)
    with pytest.raises(DamagedFile, match="left.safetensors: is not the file that bundle.json lists"):
        diamond.save_pretrained(tmp_path / "copy")
    assert not (tmp_path / "copy" / "bundle.json").exists()


def edited(bundle, change):
    manifest = bundle.folder / "bundle.json"
    content = json.loads(manifest.read_text())
    changed = change(content)
    manifest.write_text(json.dumps(content if changed is None else changed))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda t: t["tasks"][0].update(file="../../secret"),
            UnsafeFile,
            "names the file '../../secret', outside tasks/",
        ),
        (lambda t: t["tasks"][0].update(file="/etc/passwd"), UnsafeFile, "outside tasks/"),
        (lambda t: t["tasks"][0].update(file=".."), UnsafeFile, "outside tasks/"),
        (lambda t: t["tasks"][0].update(name="../top"), UnsafeFile, "task name '../top'"),
        (lambda t: t.update(format="vit-memory-bundle/7"), NewerFormat, "written in format vit-memory-bundle/7"),
        (lambda t: t.pop("backbone") and None, DamagedFile, "cannot be read as a bundle: 'backbone'"),
        (lambda t: t.update(tasks=[1]), DamagedFile, "cannot be read as a bundle"),
        (lambda t: [], DamagedFile, "cannot be read as a bundle"),
    ],
)
def test_a_forged_manifest_is_refused(diamond, change, error, message):
    edited(diamond, change)
    with pytest.raises(error, match=message):
        Bundle.open(diamond.folder)


def test_files_that_were_swapped_or_damaged_are_refused(diamond):
    left, right = (diamond.folder / "tasks" / f"{name}.safetensors" for name in ("left", "right"))
    whole = left.read_bytes()
    left.write_bytes(right.read_bytes())
    with pytest.raises(DamagedFile, match="is not the file that bundle.json lists"):
        diamond.check()
    left.write_bytes(whole[:-3])
    with pytest.raises(DamagedFile, match="does not match its checksum"):
        diamond.check()
    left.unlink()
    with pytest.raises(FileError, match="no such file"):
        diamond.check()
    with pytest.raises(FileError, match="not a bundle, it has no bundle.json. Create one"):
        Bundle.open(diamond.folder / "tasks")


def test_a_thousand_task_files_load_into_one_model(tmp_path):
    backbone = tiny_backbone()
    tasks = [trained(backbone, f"task-{i}", cells=5) for i in range(1000)]
    bundle = Bundle.create(tmp_path / "bundle", backbone, tasks)
    model = Bundle.open(bundle.folder).model(backbone)
    assert len(model(images(1))) == 1000


def test_graph_shapes_survive_a_bundle(tmp_path):
    backbone = tiny_backbone()
    for name, tasks in graph_shapes(backbone).items():
        bundle = Bundle.create(tmp_path / name, backbone, tasks)
        expected, loaded = MemoryViT(backbone, tasks)(images()), bundle.model(backbone)(images())
        assert all(torch.equal(expected[task], loaded[task]) for task in expected)


INTERRUPTED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)  # so that a forked child can use it
sys.path.insert(0, {tests!r})
from builders import tiny_backbone, trained
from vit_memory import Bundle
from vit_memory.files import bundle, container, manifest

root, backbone, write_atomic = Path(sys.argv[1]), tiny_backbone(), manifest.write_atomic
tasks = [trained(backbone, name) for name in ("a", "b", "c")]
source = Bundle.create(root / "source", backbone, tasks)
WAYS = {{
    "create": lambda folder: Bundle.create(folder, backbone, tasks),
    "copy": lambda folder: source.save_pretrained(folder),
}}


def run(way, folder, writes):
    def write(path, chunks, left=iter(range(writes))):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        write_atomic(path, chunks)

    for module in (bundle, container, manifest):
        module.write_atomic = write
    WAYS[way](folder)


kills = 0
for way in WAYS:
    for exists in (False, True):
        for writes in range(5):
            folder = root / f"{{way}}-{{exists}}-{{writes}}"
            if exists:
                folder.mkdir()
            child = os.fork()
            if not child:
                run(way, folder, writes)
                os._exit(0)
            killed = os.waitpid(child, 0)[1] != 0
            assert killed == (writes < 4)
            assert killed == (not (folder / "bundle.json").exists())
            if killed:
                kills += 1
                visible = [path.name for path in folder.glob("*") if not path.name.startswith(".")]
                assert folder.exists() == exists and not visible, visible
                WAYS[way](folder)
            assert list(Bundle.open(folder).check()) == ["a", "b", "c"]
print(kills)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked writers")
def test_a_killed_create_or_copy_leaves_no_bundle_and_can_be_run_again(tmp_path):
    script = INTERRUPTED.format(tests=str(Path(__file__).parent))
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "16\n", "three task files and the manifest, two ways, new and empty folders"


def test_a_bundle_is_created_in_an_empty_folder_in_use(tmp_path, monkeypatch):
    """The folder itself stays: it may be a working directory or a mounted disk."""
    monkeypatch.chdir(tmp_path)
    backbone = tiny_backbone()
    before = tmp_path.stat().st_ino
    Bundle.create(".", backbone, [trained(backbone, "birds")])
    assert tmp_path.stat().st_ino == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle.json", "tasks"]
    with pytest.raises(FileError, match="is not an empty folder"):
        Bundle.create("tasks", backbone)


def test_task_files_without_a_manifest_are_explained(diamond):
    (diamond.folder / "bundle.json").unlink()
    with pytest.raises(FileError, match="it has no bundle.json. Its tasks/ may be left from an interrupted command"):
        Bundle.open(diamond.folder)
