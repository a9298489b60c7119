"""Tasks of several files and bundles together: no name means two tasks, and every child keeps its own parents."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from builders import ROUNDING, images, library_model, tiny_backbone, trained, worst
from data.test_sources import LABELS, pictures, write_folder
from vit_memory import Bundle, FileError, GraphError, MemoryViT, load_backbone, load_task, save_task
from vit_memory.cli import app
from vit_memory.files.collect import collect

PREPARED = {"size": {"height": 32, "width": 32}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def write_family(folder, backbone, shift=0.0, pinned=True, child="child"):
    """Two task files of the same names in every folder, and of other content for every shift: `child` extends `a`."""
    a = trained(backbone, "a", labels=LABELS)
    a = replace(a, memory=a.memory + shift)
    extending = trained(backbone, child, labels=LABELS, parents=[a if pinned else "a"])
    for task in (a, extending):
        save_task(task, folder / f"{task.name}.safetensors")
    return a, extending


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two people's task files and bundles, with tasks of the same names, on one backbone; and photographs."""
    root = tmp_path_factory.mktemp("root")
    library_model("vit")[1].save_pretrained(root / "backbone")
    (root / "backbone/preprocessor_config.json").write_text(json.dumps(PREPARED))
    backbone = load_backbone(root / "backbone")
    for person, shift in (("x", 0.0), ("y", 0.3)):
        Bundle.create(root / f"{person}-bundle", backbone, write_family(root / person, backbone, shift))
    write_folder(root / "photos", pictures(4))
    return root


def test_two_different_tasks_of_one_name_are_refused_by_their_files(root, tmp_path):
    x, y = root / "x/a.safetensors", root / "y/a.safetensors"
    bundled = [root / person / "tasks/a.safetensors" for person in ("x-bundle", "y-bundle")]
    data = ("--data", root / "photos")
    photo, zoo = root / "photos/ant", tmp_path / "zoo"
    option, command = f"--rename {y}=NEW", f"vit-memory task rename {y} NEW"
    Bundle.create(tmp_path / "own", load_backbone(root / "backbone"), [])
    assert run("bundle", "add", tmp_path / "own", x).exit_code == 0
    train = ("train", root / "photos", "--name", "new", "--backbone", root / "backbone", "--out", tmp_path / "run")
    for words, files, remedies in (
        (("evaluate", x, y, *data), (x, y), (option, command)),
        (("evaluate", root / "x-bundle", y, *data), (bundled[0], y), (option, command)),
        (
            ("predict", photo, "--bundle", root / "x-bundle", "--bundle", root / "y-bundle"),
            bundled,
            (f"--rename {bundled[1]}=NEW", f"vit-memory bundle rename {root / 'y-bundle'} a NEW"),
        ),
        (("bundle", "create", zoo, x, y), (x, y), (option, command)),
        (("bundle", "create", zoo, x, root / "y/child.safetensors"), (x, y), (option, command)),  # and its parent y/a
        (("bundle", "add", tmp_path / "own", y), (tmp_path / "own/tasks/a.safetensors", y), (option, command)),
        ((*train, "--extends", x, "--extends", y), (x, y), (command,)),
    ):
        refused = run(*words)
        assert isinstance(refused.exception, GraphError), (words, refused.output)
        message = str(refused.exception)
        assert f"{files[0]} and {files[1]} hold two tasks called 'a'" in message
        assert all(remedy in message for remedy in remedies), message
    assert not zoo.exists()
    assert [entry.name for entry in Bundle.open(tmp_path / "own").entries] == ["a"]


def test_the_same_task_given_twice_counts_once(root, tmp_path):
    x = root / "x/a.safetensors"
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy/a.safetensors"
    copy.write_bytes(x.read_bytes())
    result = run("evaluate", x, x, copy, root / "x-bundle", "--data", root / "photos", "--json")
    assert result.exit_code == 0, result.exception
    assert set(json.loads(result.stdout)["tasks"]) == {"a", "child"}
    assert run("bundle", "create", tmp_path / "zoo", x, copy).exit_code == 0
    again = run("bundle", "add", tmp_path / "zoo", copy)
    assert again.exit_code == 0, again.exception
    assert "added nothing; it holds these files already" in again.stdout
    assert [entry.name for entry in Bundle.open(tmp_path / "zoo").entries] == ["a"]


def test_two_runs_that_agree_to_the_bit_are_still_two_tasks(root, tmp_path):
    x = load_task(root / "x/a.safetensors")
    again = tmp_path / "a.safetensors"
    save_task(replace(x, record=replace(x.record, created="2020-01-01T00:00:00+00:00")), again)
    result = run("evaluate", root / "x/a.safetensors", again, "--data", root / "photos")
    assert result.exit_code == 1
    assert "hold two tasks called 'a'. Give one of them, or rename one" in str(result.exception)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_renamed_parent_keeps_its_children_and_their_outputs(tmp_path, pinned):
    backbone = tiny_backbone()
    families = {}
    for person, shift in (("x", 0.0), ("y", 0.3)):
        families[person] = write_family(tmp_path / person, backbone, shift, pinned, child=f"child-{person}")
    files = [tmp_path / person / f"child-{person}.safetensors" for person in ("x", "y")]
    created = run("bundle", "create", tmp_path / "zoo", *files, "--rename", f"{tmp_path / 'y/a.safetensors'}=b")
    assert created.exit_code == 0, created.exception
    zoo = Bundle.open(tmp_path / "zoo")
    assert {entry.name: entry.parents for entry in zoo.entries} == {
        "a": (), "b": (), "child-x": ("a",), "child-y": ("b",)
    }  # fmt: skip
    together = zoo.model(backbone)(images())
    for person, parent in (("x", "a"), ("y", "b")):
        alone = MemoryViT(backbone, families[person])(images())
        assert worst(together[f"child-{person}"], alone[f"child-{person}"]) <= ROUNDING
        assert worst(together[parent], alone["a"]) <= ROUNDING


def test_tasks_of_two_bundles_are_told_apart_by_their_files(root):
    renames = [f"{root / 'y-bundle/tasks'}/{name}.safetensors={name}-2" for name in ("a", "child")]
    result = run(
        "predict", root / "photos/ant", "--bundle", root / "x-bundle", "--bundle", root / "y-bundle",
        "--rename", renames[0], "--rename", renames[1], "--format", "jsonl",
    )  # fmt: skip
    assert result.exit_code == 0, result.exception
    for person, ending in (("x", ""), ("y", "-2")):
        alone = run("predict", root / "photos/ant", "--bundle", root / f"{person}-bundle", "--format", "jsonl")
        for both, one in zip(result.stdout.splitlines(), alone.stdout.splitlines(), strict=True):
            for name, answer in json.loads(one)["tasks"].items():
                renamed = json.loads(both)["tasks"][f"{name}{ending}"]
                assert renamed["label"] == answer["label"]
                assert renamed["confidence"] == pytest.approx(answer["confidence"], abs=1e-5)


def test_what_is_pinned_to_a_child_follows_where_renaming_changes_its_digest(tmp_path):
    backbone = tiny_backbone()
    write_family(tmp_path / "x", backbone)
    _, child = write_family(tmp_path / "y", backbone, 0.3, pinned=False)
    save_task(trained(backbone, "grandchild", parents=[child]), tmp_path / "y/grandchild.safetensors")
    collected = collect(
        [tmp_path / "x/a.safetensors", tmp_path / "y/grandchild.safetensors"],
        rename={tmp_path / "y/a.safetensors": "b"},
    )
    tasks = {task.name: task for task in collected.tasks}
    assert tasks["child"].parents == ("b",)
    assert tasks["child"].digest != child.digest
    assert tasks["grandchild"].parent_digests == {"child": tasks["child"].digest}
    assert list(MemoryViT(backbone, tasks.values())(images(), ["grandchild"])) == ["grandchild"]


def test_an_unpinned_child_of_two_possible_parents_is_refused(tmp_path):
    backbone = tiny_backbone()
    for person, shift in (("x", 0.0), ("y", 0.3)):
        write_family(tmp_path / person, backbone, shift)
    child = tmp_path / "elsewhere/child.safetensors"
    save_task(trained(backbone, "child", parents=["a"]), child)
    files = [tmp_path / "x/a.safetensors", tmp_path / "y/a.safetensors", child]
    with pytest.raises(GraphError, match=r"extends 'a', which could be any of .*x/a.*y/a.*vit-memory task repin"):
        collect(files, rename={files[1]: "b"})


def test_invalid_renames_are_refused(root, tmp_path):
    x = root / "x/a.safetensors"
    create = ("bundle", "create", tmp_path / "zoo", x, "--rename")
    assert run(*create, "b").exit_code == 2
    assert run(*create, f"{x}=b", "--rename", f"{x}=c").exit_code == 2
    unknown = run(*create, "elsewhere.safetensors=b")
    assert isinstance(unknown.exception, FileError)
    assert f"not among the files read: {x}" in str(unknown.exception)
    assert "task name '../b'" in str(run(*create, f"{x}=../b").exception)
    assert not (tmp_path / "zoo").exists()
    own = run("bundle", "add", root / "x-bundle", x, "--rename", f"{root / 'x-bundle/tasks/a.safetensors'}=b")
    assert f"vit-memory bundle rename {root / 'x-bundle'} a NEW" in str(own.exception)


def test_a_file_beside_a_child_that_holds_another_task_is_not_its_parent(tmp_path):
    backbone = tiny_backbone()
    write_family(tmp_path, backbone)
    save_task(trained(backbone, "other"), tmp_path / "a.safetensors")
    with pytest.raises(GraphError, match=r"'child' extends 'a', which is neither given nor beside it.*task repin"):
        collect([tmp_path / "child.safetensors"])
