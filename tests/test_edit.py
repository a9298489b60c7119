"""vit-memory task rename and repin, bundle rename: nothing is lost, broken or changed silently."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from builders import images, library_model, tiny_backbone, trained
from data.test_sources import LABELS, pictures, write_folder
from vit_memory import BackboneMismatch, Bundle, FileError, GraphError, MemoryViT, load_backbone, load_task, save_task
from vit_memory.cli import app
from vit_memory.files import bundle as bundle_module
from vit_memory.files import container, edit, manifest
from vit_memory.files.collect import collect
from vit_memory.files.container import read_container, write_container

PREPARED = {"size": {"height": 32, "width": 32}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def refused(error, *words):
    result = run(*words)
    assert isinstance(result.exception, error), (result.output, result.exception)
    return str(result.exception)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def outputs_of(folder, name):
    """The outputs of a task file, with its parents from the same folder."""
    tasks = collect([folder / f"{name}.safetensors"]).tasks
    return MemoryViT(tiny_backbone(), tasks)(images())[name]


@pytest.fixture
def chain(tmp_path):
    """top ← middle ← bottom, each pinned to its parent; loose extends top by name only, and onloose is pinned to it."""
    backbone = tiny_backbone()
    top = trained(backbone, "top", cells=2)
    middle = trained(backbone, "middle", cells=3, parents=[top])
    loose = trained(backbone, "loose", parents=["top"])
    tasks = [top, middle, trained(backbone, "bottom", parents=[middle]), loose]
    tasks.append(trained(backbone, "onloose", parents=[loose]))
    for task in tasks:
        save_task(task, tmp_path / "tasks.d" / f"{task.name}.safetensors")
    return tmp_path / "tasks.d"


def test_a_renamed_file_takes_the_place_of_the_old_one(tmp_path):
    task = trained(tiny_backbone(), "old")
    save_task(task, tmp_path / "old.safetensors", half=True)
    before = outputs_of(tmp_path, "old")
    result = run("task", "rename", tmp_path / "old.safetensors", "new")
    assert result.exit_code == 0, result.exception
    assert "task 'old' is now called 'new'" in result.stdout
    assert "old.safetensors is removed" in result.stdout
    assert names(tmp_path) == ["new.safetensors"]
    assert torch.equal(outputs_of(tmp_path, "new"), before)
    renamed = load_task(tmp_path / "new.safetensors")
    assert renamed.memory.dtype == torch.float16
    assert renamed.record.half_of == task.digest


def test_a_renamed_copy_leaves_the_old_file(chain):
    before = content(chain)
    result = run("task", "rename", chain / "top.safetensors", "copy", "--out", chain / "copy.safetensors")
    assert result.exit_code == 0, result.exception
    assert "top.safetensors is kept" in result.stdout
    assert load_task(chain / "copy.safetensors").name == "copy"
    (chain / "copy.safetensors").unlink()
    assert content(chain) == before


def test_a_rename_that_would_break_or_replace_a_file_is_refused(chain):
    before = content(chain)
    top = chain / "top.safetensors"
    message = refused(GraphError, "task", "rename", top, "new")
    assert "loose.safetensors, middle.safetensors beside it would no longer find the parent 'top'" in message
    assert "--children" in message
    assert "exists already" in refused(FileError, "task", "rename", top, "middle")
    assert "exists already" in refused(FileError, "task", "rename", top, "new", "--out", chain / "loose.safetensors")
    assert "is called 'top' already" in refused(FileError, "task", "rename", top, "top")
    assert run("task", "rename", top, "new", "--children", "--out", chain / "x.safetensors").exit_code == 2
    assert content(chain) == before


def test_children_are_rewritten_and_keep_their_outputs(chain):
    tasks = ("middle", "bottom", "loose", "onloose")
    before = {name: outputs_of(chain, name) for name in tasks}
    digests = {name: load_task(chain / f"{name}.safetensors").digest for name in tasks}
    bottom = (chain / "bottom.safetensors").read_bytes()
    result = run("task", "rename", chain / "top.safetensors", "new", "--children")
    assert result.exit_code == 0, result.exception
    assert names(chain) == [f"{name}.safetensors" for name in ("bottom", "loose", "middle", "new", "onloose")]
    for name in tasks:
        assert torch.equal(outputs_of(chain, name), before[name])
    assert (chain / "bottom.safetensors").read_bytes() == bottom
    kept = {name for name in tasks if load_task(chain / f"{name}.safetensors").digest == digests[name]}
    assert kept == {"middle", "bottom"}
    changed = [line for line in result.stdout.splitlines() if "its digest" in line]
    assert [line.partition(".safetensors: ")[0] for line in changed] == [str(chain / "loose"), str(chain / "onloose")]


def test_a_rename_interrupted_anywhere_leaves_every_child_a_parent(chain, monkeypatch):
    (chain / "loose.safetensors").unlink()
    (chain / "onloose.safetensors").unlink()
    expected = outputs_of(chain, "bottom")
    save_task_file = edit.save_task
    for lasts in range(2):
        left = iter(range(lasts))

        def interrupted(task, path, left=left):
            next(left)  # StopIteration, as if the process ended here
            save_task_file(task, path)

        monkeypatch.setattr(edit, "save_task", interrupted)
        with pytest.raises(StopIteration):
            edit.rename_file(chain / "top.safetensors", "new", children=True)
        assert torch.equal(outputs_of(chain, "bottom"), expected)
        (chain / "new.safetensors").unlink(missing_ok=True)


def test_a_backbone_that_was_trained_with_a_task_is_renamed_with_it(tmp_path):
    library_model("vit")[1].save_pretrained(tmp_path / "backbone")
    (tmp_path / "backbone/preprocessor_config.json").write_text(json.dumps(PREPARED))
    backbone = load_backbone(tmp_path / "backbone")
    runs = tmp_path / "run"
    save_task(trained(backbone, "whole", regime="full", labels=LABELS), runs / "whole.safetensors")
    about = {"format": "vit-memory-backbone/1", "backbone": backbone.name, "task": "whole"}
    write_container(runs / "whole.backbone.safetensors", about, backbone.model.state_dict())
    assert run("task", "rename", runs / "whole.safetensors", "new").exit_code == 0
    assert names(runs) == ["new.backbone.safetensors", "new.safetensors"]
    assert read_container(runs / "new.backbone.safetensors")[0] == {**about, "task": "new"}
    photos = write_folder(tmp_path / "photos", pictures(4))
    evaluated = run("evaluate", runs / "new.safetensors", "--data", photos)
    assert evaluated.exit_code == 0, evaluated.exception


@pytest.fixture
def bundle(chain, tmp_path):
    bundle = Bundle.create(tmp_path / "zoo", tiny_backbone(), [load_task(path) for path in sorted(chain.iterdir())])
    assert [entry.name for entry in bundle.entries] == ["bottom", "loose", "middle", "onloose", "top"]
    return bundle


def test_a_task_of_a_bundle_is_renamed_with_its_children_and_the_manifest(bundle):
    before = bundle.model(tiny_backbone())(images())
    result = run("bundle", "rename", bundle.folder, "top", "new")
    assert result.exit_code == 0, result.exception
    assert "loose, middle, onloose" in result.stdout
    after = Bundle.open(bundle.folder)
    assert list(after.check()) == ["bottom", "loose", "middle", "onloose", "new"]
    assert names(bundle.folder / "tasks") == sorted(f"{entry.name}.safetensors" for entry in after.entries)
    outputs = after.model(tiny_backbone())(images())
    for name in before:
        assert torch.equal(outputs["new" if name == "top" else name], before[name])
    there = content(bundle.folder)
    assert "there is a task 'middle' already" in refused(GraphError, "bundle", "rename", bundle.folder, "new", "middle")
    assert "no task 'top' in this bundle" in refused(FileError, "bundle", "rename", bundle.folder, "top", "x")
    assert content(bundle.folder) == there


def test_a_bundle_rename_interrupted_anywhere_leaves_the_old_bundle_or_the_new_one(bundle, monkeypatch):
    write_atomic = bundle_module.write_atomic
    seen = []
    for lasts in range(20):
        left = iter(range(lasts))

        def interrupted(path, chunks, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            write_atomic(path, chunks)

        monkeypatch.setattr(bundle_module, "write_atomic", interrupted)
        monkeypatch.setattr(container, "write_atomic", interrupted)
        monkeypatch.setattr(manifest, "write_atomic", interrupted)
        try:
            Bundle.open(bundle.folder).rename("top", "new")
            finished = True
        except KeyboardInterrupt:
            finished = False
        monkeypatch.undo()
        graph = Bundle.open(bundle.folder).check()
        assert ("top" in graph) != ("new" in graph)
        seen.append("new" in graph)
        if finished:
            break
        if "new" in graph:
            Bundle.open(bundle.folder).rename("new", "top")
    assert finished
    assert False in seen[:-1]
    assert True in seen[:-1], "also interrupted after the manifest"


def test_a_file_of_a_bundle_is_changed_through_the_bundle(bundle, chain, monkeypatch):
    before = content(bundle.folder)
    message = refused(FileError, "task", "rename", bundle.folder / "tasks/top.safetensors", "new", "--children")
    assert f"vit-memory bundle rename {bundle.folder} top new" in message
    retrain(chain / "top.safetensors")
    middle = bundle.folder / "tasks/middle.safetensors"
    assert "vit-memory bundle add" in refused(FileError, "task", "repin", middle, chain / "top.safetensors")
    monkeypatch.chdir(bundle.folder / "tasks")
    assert "belongs to a bundle" in refused(FileError, "task", "rename", "top.safetensors", "new")
    assert content(bundle.folder) == before
    assert run("task", "repin", middle, chain / "top.safetensors", "--out", chain / "new.safetensors").exit_code == 0


def retrain(path):
    task = load_task(path)
    save_task(replace(task, memory=task.memory + 0.2), path)
    return task.digest, load_task(path).digest


def test_a_task_is_pinned_to_a_retrained_parent_only_on_purpose(chain):
    old, new = retrain(chain / "top.safetensors")
    with pytest.raises(GraphError, match=r"vit-memory task repin middle.safetensors top.safetensors"):
        outputs_of(chain, "middle")
    weights = load_task(chain / "middle.safetensors")
    result = run("task", "repin", chain / "middle.safetensors", chain / "top.safetensors")
    assert result.exit_code == 0, result.exception
    assert f"parent 'top' was {old[:12]}…, is now {new[:12]}…" in result.stdout
    assert "'middle' was trained with another 'top'; its outputs change" in result.stderr
    middle = load_task(chain / "middle.safetensors")
    assert middle.parent_digests == {"top": new}
    assert middle.record.recipe["repinned"] == {"top": old}
    assert torch.equal(middle.memory, weights.memory)
    assert torch.isfinite(outputs_of(chain, "middle")).all()
    # What is pinned to the changed task is not repinned silently: it is listed, with the command to run.
    command = ["task", "repin", str(chain / "bottom.safetensors"), str(chain / "middle.safetensors")]
    assert f"vit-memory {' '.join(command)}" in result.stderr
    with pytest.raises(GraphError, match="'bottom' was trained on a task 'middle'"):
        outputs_of(chain, "bottom")
    assert run(*command).exit_code == 0
    assert torch.isfinite(outputs_of(chain, "bottom")).all()


def test_a_repinned_float16_task_is_no_longer_the_full_task_it_was(chain):
    middle = chain / "middle.safetensors"
    save_task(load_task(middle), middle, half=True)
    assert torch.isfinite(outputs_of(chain, "bottom")).all()  # pinned to the full one, which this is
    retrain(chain / "top.safetensors")
    result = run("task", "repin", middle, chain / "top.safetensors")
    assert "bottom.safetensors is pinned to 'middle' as it was before" in result.stderr
    assert load_task(middle).memory.dtype == torch.float16
    with pytest.raises(GraphError, match="'bottom' was trained on a task 'middle'"):
        outputs_of(chain, "bottom")


def test_pinning_back_to_the_parent_it_was_trained_with_leaves_no_trace(chain, tmp_path):
    original = (chain / "middle.safetensors").read_bytes()
    (tmp_path / "top.safetensors").write_bytes((chain / "top.safetensors").read_bytes())
    retrain(chain / "top.safetensors")
    out = tmp_path / "middle.safetensors"
    assert run("task", "repin", chain / "middle.safetensors", chain / "top.safetensors", "--out", out).exit_code == 0
    assert (chain / "middle.safetensors").read_bytes() == original
    again = run("task", "repin", out, tmp_path / "top.safetensors")
    assert again.exit_code == 0, again.exception
    assert out.read_bytes() == original
    once_more = run("task", "repin", out, tmp_path / "top.safetensors")
    assert "as before" in once_more.stdout
    assert not once_more.stderr
    assert out.read_bytes() == original


def test_a_child_elsewhere_finds_a_renamed_parent_again_by_its_content(chain, tmp_path):
    expected = outputs_of(chain, "middle")
    child = tmp_path / "middle.safetensors"
    child.write_bytes((chain / "middle.safetensors").read_bytes())
    assert run("task", "rename", chain / "top.safetensors", "new", "--children").exit_code == 0
    with pytest.raises(GraphError, match="If the parent was renamed since: vit-memory task repin"):
        collect([child, chain / "new.safetensors"])
    result = run("task", "repin", child, chain / "new.safetensors")
    assert "parent 'top' is now called 'new'" in result.stdout
    assert not result.stderr
    tasks = collect([child, chain / "new.safetensors"]).tasks
    assert torch.equal(MemoryViT(tiny_backbone(), tasks)(images())["middle"], expected)


def test_a_task_that_is_not_a_parent_is_not_pinned(chain, tmp_path):
    before = content(chain)
    middle = chain / "middle.safetensors"
    message = refused(GraphError, "task", "repin", middle, chain / "bottom.safetensors")
    assert "holds a task 'bottom', which 'middle' does not extend; it extends top" in message
    twice = (chain / "top.safetensors", chain / "top.safetensors")
    assert "given for 'top' already" in refused(GraphError, "task", "repin", middle, *twice)
    save_task(trained(tiny_backbone("dinov2"), "top"), tmp_path / "top.safetensors")
    assert "need the same backbone" in refused(BackboneMismatch, "task", "repin", middle, tmp_path / "top.safetensors")
    assert content(chain) == before
