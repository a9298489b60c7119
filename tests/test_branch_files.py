"""Branch files, and bundles, collections and commands that know branches: whole or absent, refused by name."""

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from builders import images, tiny_backbone, trained, trained_branch
from vit_memory import (
    Bundle,
    FileError,
    GraphError,
    MemoryViT,
    load_backbone,
    load_branch,
    load_task,
    save_branch,
    save_task,
)
from vit_memory.evaluation.models import open_model
from vit_memory.files.card import branch_card, branch_facts, card, model_card
from vit_memory.files.collect import add_files, collect
from vit_memory.files.container import read_container, write_container
from vit_memory.files.edit import rename_branch_file


@pytest.fixture
def branch():
    return trained_branch(tiny_backbone(), "birds", blocks=2, rank=3, gains=True)


def test_a_branch_comes_back_bit_for_bit_with_names_that_people_know(tmp_path, branch):
    path, half = tmp_path / "birds.branch.safetensors", tmp_path / "half.branch.safetensors"
    scaled = {name: replace(update, scaling=2 / 3) for name, update in branch.adapter.low_rank.items()}
    for one in (branch, replace(branch, adapter=replace(branch.adapter, low_rank=scaled))):
        save_branch(one, path)
        loaded = load_branch(path)
        assert (loaded.name, loaded.start, loaded.digest) == (one.name, one.start, one.digest)
        save_branch(loaded, tmp_path / "again")
        assert path.read_bytes() == (tmp_path / "again").read_bytes()
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "vit-memory-branch/1"
        names = {f"blocks.{i}.{p}.lora_{side}.weight" for i in (1, 2) for p in "qv" for side in "AB"}
        assert set(file.keys()) == names | {"gains"}  # block 0 is the original's
    save_branch(branch, half, half=True)
    loaded = load_branch(half)
    assert half.stat().st_size < 0.7 * path.stat().st_size
    assert loaded.record.half_of == branch.digest
    task = trained(tiny_backbone(), "wings", branch=branch)
    MemoryViT(tiny_backbone(), [task], [loaded])  # a task on the full branch accepts its float16 file


def test_a_task_names_its_branch_in_a_format_of_its_own_and_others_keep_theirs(tmp_path, branch):
    path = tmp_path / "wings.safetensors"
    task = trained(tiny_backbone(), "wings", branch=branch)
    save_task(task, path)
    assert read_container(path)[0]["format"] == "vit-memory-task/4"
    assert load_task(path).branch == branch.ref
    assert load_task(path).digest == task.digest
    assert f"birds ({branch.digest[:12]}…)" in card(path, task)
    save_task(trained(tiny_backbone(), "plain"), path)
    assert read_container(path)[0]["format"] == "vit-memory-task/1"


def test_a_damaged_or_forged_branch_file_is_refused_and_stays(tmp_path, branch):
    path = tmp_path / "birds.branch.safetensors"
    save_branch(branch, path)
    metadata, tensors = read_container(path)
    sound = {name: tensor.clone() for name, tensor in tensors.items()}

    def refused(message, changes=None, without=(), **description):
        text = metadata["branch"]
        for old, new in description.get("replaced", ()):
            assert old in text
            text = text.replace(old, new)
        content = {name: tensor for name, tensor in {**sound, **(changes or {})}.items() if name not in without}
        about = {**metadata, "branch": text, **description.get("metadata", {})}
        write_container(path, about, content)
        before = path.read_bytes()
        with pytest.raises(FileError, match=message):
            load_branch(path)
        assert path.read_bytes() == before

    refused(r"starts at block 3; .* has 3 blocks", replaced=[('"start":1', '"start":3')])
    refused(r"starts at block -1", replaced=[('"start":1', '"start":-1')])
    refused(r"8 tensors of low-rank updates of q, v, expected 12", replaced=[('"start":1', '"start":0')])
    refused(r"starts at block 'x'", replaced=[('"start":1', '"start":"x"')])
    refused(r"missing or mistyped field: 'adapter'", replaced=[('"adapter":', '"adaptor":')])
    refused(
        r"is not valid JSON",
        replaced=[
            (
                "{",
                "",
            )
        ],
    )
    for forged in ("[]", "5", "{}"):
        refused(r"mistyped field: half_of", replaced=[('"half_of":null', f'"half_of":{forged}')])
    refused(r"of low-rank updates of q, v, expected", replaced=[('"depth":3', f'"depth":{10**30}')])
    refused(r"missing or mistyped field", replaced=[('"rank":', f'"scaling":{{"q":{10**400}}},"rank":')])
    for forged in ("[1.5]", "[1.5,2.5,3.5]"):
        refused(
            r"q has a scaling of .*or one for each of 2 blocks",
            replaced=[('"rank":', f'"scaling":{{"q":{forged}}},"rank":')],
        )
    refused(r"missing or mistyped field|not valid JSON", replaced=[('"rank":', '"scaling":{"q":[null,1]},"rank":')])
    refused(r"format 'vit-memory-branch/9", metadata={"format": f"vit-memory-branch/{'9' * 5000}"})
    refused(r"gains is \(2, 6, 31\)", {"gains": torch.zeros(2, 6, 31)})
    refused(r"blocks.1.q.lora_A.weight holds NaN", {"blocks.1.q.lora_A.weight": torch.full((3, 32), torch.nan)})
    refused(r"7 tensors of low-rank updates", without=("blocks.1.q.lora_A.weight",))
    refused(r"unknown tensors: \['memory'\]", {"memory": torch.zeros(2)})
    refused(r"the description of the adapter is", without=("gains",))
    refused(r"this version reads up to vit-memory-branch/2", metadata={"format": "vit-memory-branch/3"})
    refused(r"format 'peft/1', expected vit-memory-branch/2", metadata={"format": "peft/1"})
    save_task(trained(tiny_backbone(), "plain"), path)
    with pytest.raises(FileError, match=r"a task file .*, expected a branch file"):
        load_branch(path)
    broken = replace(branch, adapter=branch.adapter.map(lambda x: x * torch.inf))
    with pytest.raises(Exception, match=r"branch 'birds': blocks.1.q.lora_A.weight holds NaN .* Not saved"):
        save_branch(broken, tmp_path / "new.branch.safetensors")
    assert not (tmp_path / "new.branch.safetensors").exists()


def test_a_bundle_holds_branches_and_refuses_to_lose_one_that_is_needed(tmp_path, branch):
    backbone = tiny_backbone()
    tasks = [trained(backbone, "wings", branch=branch), trained(backbone, "plain", parents=["wings"])]
    bundle = Bundle.create(tmp_path / "zoo", backbone, tasks, [branch])
    assert '"vit-memory-bundle/2"' in (tmp_path / "zoo/bundle.json").read_text()
    assert sorted(p.name for p in (tmp_path / "zoo/branches").iterdir()) == ["birds.branch.safetensors"]
    expected = MemoryViT(backbone, tasks, [branch])(images())
    for opened in (Bundle.open(tmp_path / "zoo"), bundle):
        outputs = opened.model(backbone)(images())
        assert all(torch.equal(outputs[name], expected[name]) for name in expected)
    with pytest.raises(GraphError, match=r"task 'wings' stands on branch 'birds': remove 'wings' too"):
        bundle.remove([], ["birds"])
    with pytest.raises(FileError, match=r"no branch 'bird' in this bundle. Branches: birds"):
        bundle.remove([], ["bird"])
    bundle.save_pretrained(tmp_path / "copy")
    assert Bundle.open(tmp_path / "copy").branch("birds").digest == branch.digest
    renamed = bundle.rename("wings", "feathers")
    assert [(entry.name, entry.branch) for entry in renamed.entries] == [("feathers", "birds"), ("plain", None)]
    assert [entry.branch for entry in renamed.rename_branch("birds", "finches").entries] == ["finches", None]
    assert sorted(p.name for p in (tmp_path / "zoo/branches").iterdir()) == ["finches.branch.safetensors"]
    assert Bundle.open(tmp_path / "zoo").check().branch_of("feathers").name == "finches"
    manifest = tmp_path / "zoo/bundle.json"
    listed = manifest.read_text()
    manifest.write_text(listed.replace(',\n      "branch": "finches"', ""))
    with pytest.raises(FileError, match=r"lists task 'feathers' on branch none, but its file names finches"):
        Bundle.open(tmp_path / "zoo").remove([], ["finches"])
    manifest.write_text(listed)
    renamed = Bundle.open(tmp_path / "zoo").rename_branch("finches", "birds")
    emptied = renamed.remove(["feathers", "plain"], ["birds"])
    assert emptied.check().branches == {}
    assert '"vit-memory-bundle/1"' in (tmp_path / "zoo/bundle.json").read_text()
    assert list((tmp_path / "zoo/branches").iterdir()) == []
    with pytest.raises(GraphError, match=r"'wings' stands on branch 'birds' .* not attached: add it, from birds"):
        emptied.add(tasks)
    (tmp_path / "copy/branches/birds.branch.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(FileError, match=r"birds.branch.safetensors"):
        Bundle.open(tmp_path / "copy").check()
    page = model_card("me/zoo", backbone.identity, tasks, [branch])
    assert "| birds | last 2 blocks, rank 3 + gains | 0.67 |" in page
    assert "on branch birds" in page


def test_a_task_finds_its_branch_beside_it_or_among_what_is_given(tmp_path, branch):
    backbone = tiny_backbone()
    backbone_folder = tmp_path / "vit"
    backbone.model.save_pretrained(backbone_folder)
    own = load_backbone(backbone_folder)
    branch = trained_branch(own, "birds", blocks=2, rank=3)
    task = trained(own, "wings", branch=branch)
    save_task(task, tmp_path / "wings.safetensors")
    with pytest.raises(GraphError, match=r"neither given nor beside it as birds.branch.safetensors"):
        collect([tmp_path / "wings.safetensors"])
    save_branch(branch, tmp_path / "elsewhere" / "b.branch.safetensors")
    both = [tmp_path / "wings.safetensors", tmp_path / "elsewhere" / "b.branch.safetensors"]
    assert [b.name for b in collect(both).branches] == ["birds"]
    model = open_model(both)
    assert torch.equal(model(images())["wings"], MemoryViT(own, [task], [branch])(images())["wings"])
    save_branch(branch, tmp_path / "birds.branch.safetensors")
    assert [b.name for b in collect([tmp_path / "wings.safetensors"]).branches] == ["birds"]
    bundle = add_files(Bundle.begin(tmp_path / "zoo", own), [tmp_path / "wings.safetensors"])
    assert [entry.name for entry in bundle.branch_entries] == ["birds"]
    again = add_files(bundle, [*both, tmp_path / "birds.branch.safetensors"])
    assert again == bundle  # what it holds counts once
    assert [b.name for b in collect([tmp_path / "zoo/tasks/wings.safetensors"]).branches] == ["birds"]
    halved = Bundle.begin(tmp_path / "half", own).add([task], [branch], half=True)
    save_task(trained(own, "second", branch=branch), tmp_path / "second.safetensors")
    (tmp_path / "stranger.branch.safetensors").write_bytes(b"not a branch")
    assert len(add_files(halved, [tmp_path / "second.safetensors"]).branch_entries) == 1
    other = replace(branch, adapter=branch.adapter.map(lambda x: x + 1))
    save_branch(other, tmp_path / "other.branch.safetensors")
    with pytest.raises(GraphError, match=r"hold two branches called 'birds'.* vit-memory branch rename .*other.branch"):
        collect([tmp_path / "birds.branch.safetensors", tmp_path / "other.branch.safetensors"])
    renamed = rename_branch_file(tmp_path / "other.branch.safetensors", "finches")
    assert renamed == tmp_path / "finches.branch.safetensors"
    assert not (tmp_path / "other.branch.safetensors").exists()
    assert load_branch(renamed).digest == other.digest
    with pytest.raises(FileError, match=r"exists already; nothing was changed"):
        rename_branch_file(renamed, "birds")
    with pytest.raises(FileError, match=r"belongs to a bundle"):
        rename_branch_file(tmp_path / "zoo/branches/birds.branch.safetensors", "x")


def test_a_branch_file_is_described_for_people_and_programs(tmp_path, branch):
    path = tmp_path / "birds.branch.safetensors"
    save_branch(branch, path)
    facts = branch_facts(path, branch)
    assert (facts["blocks"], facts["start"], facts["parameters"]) == (2, 1, branch.parameters)
    text = branch_card(path, branch)
    assert "last 2 blocks, rank 3 + gains, from block 1 on; costs 0.67 of a plain pass, once for all its tasks" in text
