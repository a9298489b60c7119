"""Branches from the command line, with default options: train, train on them, bundle, evaluate, predict, import."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from builders import trained, trained_branch
from data.test_sources import pictures, write_folder
from training.test_runs import backbone, photos, train  # noqa: F401 - fixtures
from vit_memory import Bundle, load_backbone, load_branch, load_task, save_branch, save_task
from vit_memory.cli import app


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_branch_is_trained_with_a_task_and_carries_further_tasks(photos, backbone, tmp_path):  # noqa: F811
    first = train(photos, backbone, tmp_path / "a", "--branch-blocks", "2")
    assert first.exit_code == 0, first.output
    assert "every setting trains a branch of its own" in first.output
    assert "birds.branch.safetensors: last 2 blocks, rank 8" in first.output
    task, branch = load_task(tmp_path / "a/birds.safetensors"), load_branch(tmp_path / "a/birds.branch.safetensors")
    assert (task.regime, task.branch, branch.blocks) == ("head", branch.ref, 2)
    assert branch.record.recipe["data"] == task.record.recipe["data"]
    again = train(photos, backbone, tmp_path / "again", "--branch-blocks", "2")
    assert again.exit_code == 0
    assert load_branch(tmp_path / "again/birds.branch.safetensors").digest == branch.digest
    resumed = train(photos, backbone, tmp_path / "a", "--branch-blocks", "2", "--resume")
    assert resumed.exit_code == 0, resumed.output
    refused = train(photos, backbone, tmp_path / "a", "--branch-blocks", "1", "--resume")
    assert refused.exit_code == 1
    assert "was started with other options" in str(refused.exception)
    file = tmp_path / "a/birds.branch.safetensors"
    second = train(photos, backbone, tmp_path / "b", "--branch", str(file), name="nests")
    assert second.exit_code == 0, second.output
    assert load_task(tmp_path / "b/nests.safetensors").branch == branch.ref
    axes = ("--branch-blocks", "1,2", "--branch-rank", "2,4", "--regime", "class")
    sweep = train(photos, backbone, tmp_path / "c", *axes)
    rows = json.loads((tmp_path / "c/settings.json").read_text())
    assert sweep.exit_code == 0, sweep.output
    assert {(row["branch_blocks"], row["branch_rank"]["q"], row["regime"]) for row in rows} == {
        (blocks, rank, "class") for blocks in (1, 2) for rank in (2, 4)
    }

    created = run("bundle", "create", tmp_path / "zoo", tmp_path / "a/birds.safetensors")
    assert "1 task, 1 branch for" in created.stdout, created.output
    scored = run("evaluate", tmp_path / "b/nests.safetensors", "--data", photos)  # the branch is beside it
    assert scored.exit_code == 0, scored.exception
    extended = train(
        photos,
        backbone,
        tmp_path / "e",
        "--branch",
        str(file),
        "--extends",
        str(tmp_path / "b/nests.safetensors"),
        name="e",
    )
    assert extended.exit_code == 0, (extended.output, extended.exception)
    added = run("bundle", "add", tmp_path / "zoo", tmp_path / "b/nests.safetensors")
    assert added.exit_code == 0, added.exception
    assert "1 branch" in run("bundle", "check", tmp_path / "zoo", "--backbone", backbone).stdout
    listed = run("bundle", "list", tmp_path / "zoo").stdout
    assert "branch birds" in listed
    assert "on branch birds" in listed
    for words in (("evaluate", tmp_path / "zoo", "--data", photos), ("predict", photos, "--bundle", tmp_path / "zoo")):
        answered = run(*words)
        assert answered.exit_code == 0, answered.output
        assert "nests" in answered.stdout
    removed = run("bundle", "remove", tmp_path / "zoo", "--branch", "birds")
    assert "stands on branch 'birds'" in str(removed.exception)
    assert len(Bundle.open(tmp_path / "zoo").branch_entries) == 1
    inspected = run("inspect", tmp_path / "a/birds.safetensors", file)
    assert "last 2 blocks, rank 8, from block 1 on" in inspected.stdout
    assert json.loads(run("inspect", file, "--json").stdout)[0]["digest"] == branch.digest


def test_one_branch_is_trained_on_several_folders_and_carries_a_task_more(photos, backbone, tmp_path):  # noqa: F811
    other = write_folder(tmp_path / "other", pictures(8, seed=1))
    quick = ("--backbone", backbone, "--steps", "4", "--batch", "8", "--evaluate-every", "2", "--blocks", "2")
    words = ("branch", "train", "--name", "zoo", "--data", photos, "--data", f"more={other}", *quick)
    for out, more in (("a", ()), ("b", ("--no-report",))):
        done = run(*words, "--out", tmp_path / out, *more)
        assert done.exit_code == 0, (done.output, done.exception)
        assert (tmp_path / out / "report.html").exists() == (not more)
    first, second = (load_branch(tmp_path / out / "zoo.branch.safetensors") for out in ("a", "b"))
    assert first.digest == second.digest
    assert f"further tasks on it: vit-memory train DATA --name TASK --branch {tmp_path / 'b'}" in done.stdout
    files = {path.name for path in (tmp_path / "a").iterdir()}
    assert files >= {
        "config.json",
        "log.jsonl",
        "settings.json",
        "curves.png",
        "photos.safetensors",
        "more.safetensors",
    }
    assert "holds a training already" in str(run(*words, "--out", tmp_path / "a").exception)
    assert run(*words, "--out", tmp_path / "a", "--resume").exit_code == 0
    scored = run("evaluate", tmp_path / "a/photos.safetensors", tmp_path / "a/more.safetensors", "--data", photos)
    assert scored.exit_code == 0, scored.exception
    on_it = train(
        photos, backbone, tmp_path / "c", "--branch", str(tmp_path / "a/zoo.branch.safetensors"), name="third"
    )
    assert on_it.exit_code == 0, on_it.exception
    for name in ("checkpoint", "zoo.branch"):
        refused = run("branch", "train", "--name", "zoo", "--data", f"{name}={photos}", "--out", tmp_path / "x", *quick)
        assert "would be mistaken for another of the run" in str(refused.exception)
    clash = run("branch", "train", "--name", "zoo", "--data", photos, "--data", photos, *quick)
    assert clash.exit_code == 2
    assert "use --data TASK=DATA" in " ".join(clash.output.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--branch-rank", "4"), "--branch-rank: for a branch that is trained; give --branch-blocks too"),
        (("--branch-blocks", "x"), "expected whole numbers, separated by commas"),
        (("--branch-blocks", "9"), "branch 'birds': blocks is 9; expected 1 to 3"),
        (("--branch-blocks", "2", "--branch-rank", "99"), "branch 'birds': rank 99; expected 1 to 32"),
        (("--branch-blocks", "2", "--branch-projections", "q+x"), "low-rank updates of 'x'"),
        (("--branch-blocks", "2", "--branch-rank", "none"), "it is the original trunk. Give it either"),
        (("--branch-blocks", "2", "--regime", "full"), "cannot stand on a branch"),
    ],
)
def test_a_branch_that_cannot_be_is_refused_and_leaves_nothing(photos, backbone, tmp_path, words, message):  # noqa: F811
    refused = train(photos, backbone, tmp_path / "run", *words)
    assert refused.exit_code != 0
    text = f"{refused.output} {refused.exception}"
    assert re.search(message, " ".join(text.split())), text
    assert not (tmp_path / "run").exists()


def test_a_run_names_the_branch_it_stands_on_and_resumes_whatever_the_name(photos, backbone, tmp_path):  # noqa: F811
    branch = trained_branch(load_backbone(backbone), "birds", blocks=1, rank=2)
    for name in ("birds", "finches"):
        save_branch(replace(branch, name=name), tmp_path / f"{name}.branch.safetensors")

    def on_branch(name, *more):
        words = ("--branch", str(tmp_path / f"{name}.branch.safetensors"), "--regime", "head", "--no-report", *more)
        result = train(photos, backbone, tmp_path / "run", *words)
        assert result.exit_code == 0, result.exception

    on_branch("birds")
    file = tmp_path / "run/config.json"
    config = json.loads(file.read_text())
    assert (config["branch"], config["branch_name"]) == (branch.digest, "birds")
    on_branch("finches", "--resume")  # the same branch, renamed
    del config["branch_name"]
    file.write_text(json.dumps(config))
    on_branch("birds", "--resume")  # a run that an earlier version began


@pytest.mark.parametrize("stands_on_a_branch", [False, True])
def test_extending_a_task_while_a_branch_trains_is_refused_before_data_are_read(
    backbone,  # noqa: F811
    tmp_path,
    stands_on_a_branch,
):
    loaded = load_backbone(backbone)
    branch = trained_branch(loaded, "birds", blocks=1, rank=2)
    save_branch(branch, tmp_path / "birds.branch.safetensors")
    parent = trained(loaded, "nests", branch=branch if stands_on_a_branch else None)
    save_task(parent, tmp_path / "nests.safetensors")
    words = ("--branch-blocks", "1", "--extends", str(tmp_path / "nests.safetensors"))
    refused = train("no such data", backbone, tmp_path / "run", *words, name="eggs")
    assert "eggs: while a branch is trained, a task on it cannot extend others (nests)" in str(refused.exception)
    assert "Train the branch first, then a task on it that extends them: --branch FILE" in str(refused.exception)
    assert not (tmp_path / "run").exists()


def test_an_adapter_goes_in_and_out(photos, backbone, tmp_path):  # noqa: F811
    trained = train(photos, backbone, tmp_path / "a", "--branch-blocks", "2")
    assert trained.exit_code == 0
    words = ("export", tmp_path / "a/birds.branch.safetensors", "--to", "peft", "--out", tmp_path / "lora")
    exported = run(*words)
    assert exported.exit_code == 0, exported.exception
    assert "LoRA adapter for" in exported.stdout
    imported = run("import", tmp_path / "lora", "--out", tmp_path / "back", "--name", "birds")
    assert imported.exit_code == 0, imported.exception
    before = load_branch(tmp_path / "a/birds.branch.safetensors")
    after = load_branch(tmp_path / "back/birds.branch.safetensors")
    assert after.digest == before.digest
    overwriting = run("import", tmp_path / "lora", "--out", tmp_path / "back", "--name", "birds")
    assert "exists already; nothing was written" in str(overwriting.exception)
    assert all(torch.equal(a, b) for a, b in zip(before.tensors().values(), after.tensors().values(), strict=True))
    assert run(*words).exit_code == 1  # never written over
    assert len(load_file(tmp_path / "lora/adapter_model.safetensors")) == 8
    renamed = run("branch", "rename", tmp_path / "back/birds.branch.safetensors", "finches")
    assert renamed.exit_code == 0, renamed.exception
    assert load_branch(tmp_path / "back/finches.branch.safetensors").name == "finches"
