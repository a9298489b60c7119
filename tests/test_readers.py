"""Learned readers: what they consist of, that untrained ones have no effect, and that bad ones are refused by name."""

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from builders import ROUNDING, graph_shapes, images, tiny_backbone, trained, variant_params, worst
from vit_memory import FileError, MemoryViT, Task, TaskError, load_task, new_task, save_task
from vit_memory.adapter import Adapter, LowRank
from vit_memory.files.card import card, facts
from vit_memory.files.container import read_container, write_container
from vit_memory.read_out import ReadOut

LABELS = ["a", "b", "c"]


def seeded():
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("variant", variant_params())
@pytest.mark.parametrize("cells", [0, 4])
def test_an_untrained_reader_answers_to_the_bit_as_class_or_memory_does(variant, cells):
    backbone = tiny_backbone(variant)
    plain = new_task(backbone, "t", LABELS, cells=cells, generator=seeded())
    reader = new_task(backbone, "t", LABELS, regime="reader", rank=8, gains=True, cells=cells, generator=seeded())
    assert torch.equal(plain.memory, reader.memory)
    head = torch.randn(3, backbone.width, generator=seeded())
    plain, reader = (replace(task, head_weight=head) for task in (plain, reader))
    for batch in (1, 3):
        expected, outputs = (MemoryViT(backbone, [task])(images(batch)) for task in (plain, reader))
        assert torch.equal(outputs["t"], expected["t"])


def test_every_part_of_a_reader_changes_the_answer_of_its_own_task_only():
    backbone = tiny_backbone()
    tasks = graph_shapes(backbone)["readers"]
    sound = MemoryViT(backbone, tasks)(images())
    task = next(task for task in tasks if task.name == "patches")
    for name, tensor in task.reader.tensors():
        for row in range(tensor.shape[1] if name == "gains" else 1):
            changed = tensor.clone()
            changed[:, row] += 0.5
            parts = {key: changed if key == name else value for key, value in task.reader.tensors()}
            reader = Adapter(
                parts["gains"],
                {p: LowRank(parts[f"{p}.lora_A"], parts[f"{p}.lora_B"]) for p in task.reader.low_rank},
            )
            others = [replace(task, reader=reader) if each is task else each for each in tasks]
            outputs = MemoryViT(backbone, others)(images())
            for other in sound:
                same = torch.equal(outputs[other], sound[other])
                assert same == (other not in ("patches", "child")), (name, row, other)


def test_a_read_out_of_several_blocks_is_the_class_token_after_each_of_them():
    """The head's parts are the last block's output, the one before it, and the patch mean: told apart by zeros."""
    backbone = tiny_backbone()
    task = trained(backbone, "t", regime="reader", rank=3, gains=True, read_out="blocks:2+patches")
    width = backbone.width
    outputs = {}
    for part in range(3):
        weight = torch.zeros_like(task.head_weight)
        weight[:, part * width : (part + 1) * width] = 1.0
        outputs[part] = MemoryViT(backbone, [replace(task, head_weight=weight)])(images())["t"]
    plain = replace(task, read_out=ReadOut(), head_weight=torch.ones(3, width))
    assert worst(outputs[0], MemoryViT(backbone, [plain])(images())["t"]) <= ROUNDING * width
    mean = backbone.roles.finish(_last_tokens(backbone)).tokens[:, 1:].mean(1)
    mean = (mean - mean.mean(1, keepdim=True)) / (mean.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    assert worst(outputs[2], mean.sum(1, keepdim=True) + task.head_bias) <= 1e-4
    assert worst(outputs[1], outputs[0]) > 1e-2


def _last_tokens(backbone):
    x, _ = backbone.roles.embed(images())
    with torch.no_grad():
        for layer in backbone.model.vit.layers:
            x = layer(x)
    return x


def test_a_reader_comes_back_bit_for_bit_with_names_that_people_know(tmp_path):
    backbone = tiny_backbone()
    path, half = tmp_path / "t.safetensors", tmp_path / "half.safetensors"
    for task in graph_shapes(backbone)["readers"]:
        save_task(task, path)
        loaded = load_task(path)
        assert (loaded.digest, loaded.read_out, loaded.method) == (task.digest, task.read_out, task.method)
        for (name, before), (_, after) in zip(task.tensors().items(), loaded.tensors().items(), strict=True):
            assert torch.equal(before, after), name
        save_task(loaded, tmp_path / "again.safetensors")
        assert path.read_bytes() == (tmp_path / "again.safetensors").read_bytes()
        save_task(task, half, half=True)
        for (name, before), (_, after) in zip(task.tensors().items(), load_task(half).tensors().items(), strict=True):
            torch.testing.assert_close(after.float(), before, rtol=2e-3, atol=1e-4, msg=name)
    task = trained(backbone, "both", regime="reader", rank=4, gains=True)
    save_task(task, path)
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "vit-memory-task/3"
        names = {f"blocks.{i}.{p}.lora_{side}.weight" for i in range(3) for p in "qo" for side in "AB"}
        assert set(file.keys()) == names | {"gains", "class_token", "head.bias", "head.weight", "memory"}
        assert torch.equal(file.get_tensor("blocks.2.o.lora_A.weight"), task.reader.low_rank["o"].A[2])
    assert facts(path, task)["reader"] == {"gains": True, "rank": {"q": 4, "o": 4}}
    assert facts(path, task)["parameters"] == task.parameters == sum(p.numel() for p in task.tensors().values())
    assert "gains in every block, rank 4 on q, rank 4 on o" in card(path, task)
    save_task(trained(backbone, "plain"), path)
    assert read_container(path)[0]["format"] == "vit-memory-task/1"


def test_a_digest_depends_on_every_part_of_a_reader_and_on_the_read_out():
    backbone = tiny_backbone()
    task = trained(backbone, "t", regime="reader", rank=2, gains=True)
    digests = {task.digest}
    for name, tensor in task.reader.tensors():
        tensor.view(-1)[-1] += 1
        assert task.digest not in digests, name
        digests.add(task.digest)
    swapped = replace(task.reader, low_rank={"k": task.reader.low_rank["q"], "o": task.reader.low_rank["o"]})
    assert replace(task, reader=swapped).digest not in digests
    wide = trained(backbone, "t", regime="reader", gains=True, read_out="blocks:2")
    other = replace(wide, read_out=ReadOut(1, patches=True))
    assert wide.digest != other.digest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, r"task 't': rank 0; expected 1 to 32, the backbone's width"),
        ({"rank": 33}, r"rank 33; expected 1 to 32"),
        ({"rank": 4, "projections": ("q", "out")}, r"low-rank updates of 'out'; expected one or more of q, k, v, o"),
        ({"rank": 4, "projections": ("q", "q")}, r"low-rank updates of 'q', 'q'; .* each once"),
        ({"rank": 4, "projections": ()}, r"low-rank updates of no projection"),
        ({"gains": True, "read_out": "all"}, r"read-out 'all': expected final, patches, blocks:N"),
        ({"gains": True, "read_out": "blocks:0"}, r"read-out 'blocks:0': expected"),
        ({"gains": True, "read_out": "blocks:2+blocks:3"}, r"read-out 'blocks:2\+blocks:3': expected"),
        ({"gains": True, "read_out": "patches:2"}, r"read-out 'patches:2': expected"),
        ({"gains": True, "read_out": "blocks:9"}, r"a read-out of the last 9 blocks; the backbone has 3"),
        ({}, r"a reader without gains, low-rank updates or read-outs has nothing to learn"),
        ({"regime": "memory", "rank": 4}, r"a rank, gains and a read-out belong to regime 'reader', .* 'memory'"),
        ({"regime": "class", "gains": True}, r"belong to regime 'reader', this one is of regime 'class'"),
        ({"regime": "head", "read_out": "patches"}, r"belong to regime 'reader', this one is of regime 'head'"),
    ],
)
def test_a_reader_that_cannot_be_is_refused_with_what_is_allowed(options, message):
    with pytest.raises(TaskError, match=message):
        new_task(tiny_backbone(), "t", LABELS, **{"regime": "reader", **options})


def test_a_family_without_the_projection_is_named():
    with pytest.raises(
        TaskError, match=r"family dinov2\) has no projection 'fc1' that could be updated; it has q, k, v"
    ):
        new_task(tiny_backbone("dinov2:swiglu"), "t", LABELS, regime="reader", rank=2, projections=("q", "fc1"))


def test_values_that_do_not_fit_are_refused_when_a_task_is_built_or_attached():
    backbone = tiny_backbone()
    task = trained(backbone, "t", regime="reader", rank=2, gains=True, projections=("fc1",))
    with pytest.raises(TaskError, match=r"gains is \(3, 5, 32\) torch.float32, expected \(3, 6, 32\)"):
        replace(task, reader=replace(task.reader, gains=torch.zeros(3, 5, 32)))
    update = task.reader.low_rank["fc1"]
    with pytest.raises(TaskError, match=r"fc1 lora_B is \(3, 64, 3\) torch.float32, expected \(3, 64, 2\)"):
        replace(task, reader=Adapter(None, {"fc1": replace(update, B=torch.zeros(3, 64, 3))}))
    with pytest.raises(TaskError, match=r"needs a learned reader"):
        replace(task, reader=None)
    with pytest.raises(TaskError, match=r"belong to regime 'reader', this one is of regime 'memory'"):
        replace(task, regime="memory")
    # The width of the MLP is known to the backbone only.
    narrow = replace(task, reader=Adapter(None, {"fc1": replace(update, B=torch.zeros(3, 48, 2))}))
    with pytest.raises(TaskError, match=r"fc1 lora_B is \(3, 48, 2\) torch.float32, expected \(3, 64, 2\)"):
        MemoryViT(backbone, [narrow])


def test_a_file_with_a_wrong_reader_is_refused_and_stays(tmp_path):
    backbone = tiny_backbone()
    path = tmp_path / "t.safetensors"
    task = trained(backbone, "t", regime="reader", rank=2, gains=True)
    save_task(task, path)
    metadata, tensors = read_container(path)
    sound = {name: tensor.clone() for name, tensor in tensors.items()}

    def refused(changes, message, without=(), metadata=metadata):
        content = {name: tensor for name, tensor in {**sound, **changes}.items() if name not in without}
        write_container(path, metadata, content)
        before = path.read_bytes()
        with pytest.raises(FileError, match=message):
            load_task(path)
        assert path.read_bytes() == before

    name = "blocks.1.q.lora_A.weight"
    refused({}, r"11 tensors of low-rank updates of q, o, expected 12", without=(name,))
    moved = {"blocks.3.q.lora_A.weight": sound[name]}
    refused(moved, r"q.lora_A.weight: 2 of 3 blocks", without=(name,))
    refused({f"blocks.{i}.q.lora_A.weight": torch.tensor(1.0) for i in range(3)}, r"of the shapes \[\(\)\]")
    refused({"memory": torch.zeros(0, 0, 32)}, r"memory is \(0, 0, 32\)")
    refused({"memory": torch.zeros(50_000_000, 0, 32)}, r"memory is \(50000000, 0, 32\)")
    deep = metadata["task"].replace('"depth":3', '"depth":900000000000')
    refused({}, r"12 tensors of low-rank updates of q, o, expected 3600000000000", metadata={**metadata, "task": deep})
    refused({name: torch.zeros(3, 32)}, r"q.lora_A.weight: 3 of 3 blocks, of the shapes \[\(2, 32\), \(3, 32\)\]")
    refused({name: torch.full((2, 32), float("nan"))}, r"blocks.1.q.lora_A.weight holds NaN or infinite values")
    refused({"gains": torch.zeros(3, 6, 31)}, r"gains is \(3, 6, 31\)")
    refused({}, r"the description of the adapter is", without=("gains",))
    refused({"blocks.3.q.lora_A.weight": torch.zeros(2, 32)}, r"13 tensors of low-rank updates of q, o, expected 12")
    refused({"blocks.1.x.lora_A.weight": torch.zeros(2, 32)}, r"unknown tensors: \['blocks.1.x.lora_A.weight'\]")
    newer = {**metadata, "format": "vit-memory-task/5"}
    refused({}, r"written in format vit-memory-task/5; this version reads up to vit-memory-task/4", metadata=newer)
    wrong = {**metadata, "task": metadata["task"].replace('"read_out":"final"', '"read_out":"blocks:2"')}
    refused({}, r"head_weight is \(3, 32\) torch.float32, expected \(3, 64\)", metadata=wrong)
    wrong = {**metadata, "task": metadata["task"].replace('"regime":"reader"', '"regime":"memory"')}
    refused({}, r"belong to regime 'reader'", metadata=wrong)


def test_attention_of_a_reader_is_explained_as_that_of_any_task():
    backbone = tiny_backbone()
    model = MemoryViT(backbone, graph_shapes(backbone)["readers"])
    for name in ("gains", "both", "child"):
        explanation = model.explain(images(1), name)
        assert worst(explanation.total(), torch.ones(3, backbone.heads)) <= ROUNDING


def test_a_reader_of_every_projection_of_many_blocks_is_saved_and_read_back(tmp_path):
    """A header of 120 blocks with six updates each lists 1 440 tensors."""
    identity = replace(tiny_backbone().identity, depth=120)
    updates = {p: LowRank(torch.ones(120, 1, 32), torch.ones(120, 32, 1)) for p in ("q", "k", "v", "o", "fc1", "fc2")}
    head = torch.zeros(3, 32), torch.zeros(3), torch.zeros(32), torch.zeros(120, 0, 32)
    task = Task("deep", ("a", "b", "c"), *head, identity, regime="reader", reader=Adapter(None, updates))
    save_task(task, tmp_path / "deep.safetensors")
    assert load_task(tmp_path / "deep.safetensors").digest == task.digest
