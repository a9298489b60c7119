"""LoRA adapters made by the real peft: imported they answer as peft does, exported they are the same tensors."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from builders import images, library_model, trained, trained_branch, worst
from vit_memory import BackboneMismatch, FileError, MemoryViT, load_backbone, load_branch, save_branch
from vit_memory.files.container import read_format
from vit_memory.files.peft_adapter import import_adapter
from vit_memory.files.peft_export import export_adapter

peft = pytest.importorskip("peft", reason="peft is not installed")

QKV = {
    "vit": ["q_proj", "v_proj"],
    "dinov2": ["query", "key", "value"],
    "timm-vit:augreg": ["qkv"],
    "clip-vision": ["q_proj"],
}
CASES = {
    "q and v": {},
    "some blocks": {"layers_to_transform": [1, 2]},
    "rsLoRA": {"use_rslora": True, "r": 3},
    "every projection": {"everything": True},
    "ranks by module": {
        "rank_pattern": {"layers.1.attention.q_proj": 2},
        "lora_alpha": 3,
        "alpha_pattern": {"layers.1.attention.q_proj": 1.5},
    },
    "several scalings": {"rank_pattern": {"layers.1.attention.q_proj": 2}, "lora_alpha": 3, "r": 7},
}


def adapted(variant, **options):
    """peft's own model with a LoRA adapter in which nothing is zero, and the backbone below it."""
    library = library_model(variant)[1]
    names = [name for name, _ in library.named_modules()]
    targets = [name for name in QKV[variant] if any(n.endswith(name) for n in names)] or ["q_proj", "v_proj"]
    if options.pop("everything", False):
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"]
    head = [name for name in ("classifier", "head") if isinstance(getattr(library, name, None), torch.nn.Linear)]
    saved = head if variant in ("vit", "timm-vit:augreg") else []
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 16, "target_modules": targets, "modules_to_save": saved or None, **options}
    )
    model = peft.get_peft_model(copy.deepcopy(library), config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model, load_backbone(library)


@pytest.mark.parametrize("case", CASES)
def test_an_imported_adapter_answers_as_pefts_own_model_and_goes_back_as_the_same_tensors(tmp_path, case):
    model, backbone = adapted("vit", **CASES[case])
    model.save_pretrained(tmp_path / "adapter")
    imported = import_adapter(tmp_path / "adapter", backbone)
    assert imported.branch.start == (1 if case == "some blocks" else 0)
    with torch.no_grad():
        expected = model(pixel_values=images(3)).logits
    ours = MemoryViT(backbone, [imported.task, trained(backbone, "beside")], [imported.branch])
    outputs = ours(images(3))
    assert worst(outputs["adapter"], expected) <= 1e-5
    assert torch.equal(outputs.original.logits, library_model("vit")[1](pixel_values=images(3)).logits)
    file = tmp_path / "adapter.branch.safetensors"
    save_branch(imported.branch, file)
    assert read_format(file) == f"vit-memory-branch/{2 if case == 'several scalings' else 1}"
    branch = load_branch(file)
    assert branch.digest == imported.branch.digest
    export_adapter(branch, backbone, tmp_path / "again", imported.task)
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "again"))
    assert sorted(before) == sorted(after)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert import_adapter(tmp_path / "again", backbone).branch.digest == branch.digest
    reloaded = peft.PeftModel.from_pretrained(copy.deepcopy(library_model("vit")[1]), tmp_path / "again").eval()
    with torch.no_grad():
        assert worst(reloaded(pixel_values=images(3)).logits, expected) <= 1e-5


@pytest.mark.parametrize("variant", ["timm-vit:augreg", "dinov2", "clip-vision"])
def test_adapters_of_other_families_answer_as_pefts_own_model(tmp_path, variant):
    if variant.startswith("timm"):
        pytest.importorskip("timm", reason="timm is not installed")
    model, backbone = adapted(variant)
    model.save_pretrained(tmp_path / "adapter")
    imported = import_adapter(tmp_path / "adapter", backbone)
    base = model.get_base_model()
    expected = MemoryViT(backbone)(images(3)).original
    merged = load_backbone(copy.deepcopy(model).merge_and_unload())
    judged = MemoryViT(merged)(images(3)).original
    assert worst(judged.feature, expected.feature) > 1e-3
    if imported.task is not None:  # the adapter's own classifier
        with torch.no_grad():
            assert (
                worst(MemoryViT(backbone, [imported.task], [imported.branch])(images(3))["adapter"], base(images(3)))
                <= 1e-5
            )
    labels = [str(i) for i in range(backbone.width)]
    probe = trained(backbone, "probe", labels=labels, regime="head", branch=imported.branch)
    feature = MemoryViT(backbone, [probe], [imported.branch])(images(3))["probe"]
    assert worst(feature, probe.answer(judged.feature)) <= 1e-5
    export_adapter(imported.branch, backbone, tmp_path / "again", imported.task)
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "again"))
    assert sorted(before) == sorted(after)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_two_adapters_and_a_task_answer_in_one_pass(tmp_path):
    branches, tasks, expected = [], [], {}
    for name, options in (("one", {}), ("two", {"layers_to_transform": [2], "r": 2})):
        model, backbone = adapted("vit", **options)
        model.save_pretrained(tmp_path / name)
        imported = import_adapter(tmp_path / name, backbone, labels=[f"{name} {i}" for i in range(7)])
        branches.append(imported.branch)
        tasks.append(imported.task)
        with torch.no_grad():
            expected[name] = model(pixel_values=images()).logits
    outputs = MemoryViT(backbone, [*tasks, trained(backbone, "memory")], branches)(images())
    assert all(worst(outputs[name], logits) <= 1e-5 for name, logits in expected.items())


def test_a_trained_branch_becomes_an_adapter_that_peft_loads(tmp_path):
    """q and o of a fused module too: what is apart here is put together there."""
    backbone = load_backbone(library_model("vit")[1])
    branch = trained_branch(backbone, "birds", blocks=2, rank=3, projections=("q", "o"))
    task = trained(backbone, "birds", labels=[str(i) for i in range(7)], regime="head", branch=branch)
    export_adapter(branch, backbone, tmp_path / "birds", task)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(library_model("vit")[1]), tmp_path / "birds").eval()
    with torch.no_grad():
        theirs = model(pixel_values=images(3)).logits
    assert worst(theirs, MemoryViT(backbone, [task], [branch])(images(3))["birds"]) <= 1e-5
    gains = trained_branch(backbone, "gains", blocks=2, gains=True)
    with pytest.raises(FileError, match=r"branch 'gains' has gains, which LoRA does not have"):
        export_adapter(gains, backbone, tmp_path / "gains")
    assert not (tmp_path / "gains").exists()
    with pytest.raises(FileError, match=r"is not an empty folder"):
        export_adapter(branch, backbone, tmp_path / "birds")


def test_names_of_transformers_4_are_known(tmp_path):
    model, backbone = adapted("vit")
    model.save_pretrained(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    old = {
        key.replace("vit.layers", "vit.encoder.layer")
        .replace("attention.q_proj", "attention.attention.query")
        .replace("attention.v_proj", "attention.attention.value"): tensor
        for key, tensor in tensors.items()
    }
    assert sorted(old) != sorted(tensors)
    expected = import_adapter(tmp_path / "adapter", backbone).branch.digest
    save_file(old, tmp_path / "adapter" / "adapter_model.safetensors")
    assert import_adapter(tmp_path / "adapter", backbone).branch.digest == expected


@pytest.fixture
def saved(tmp_path):
    """An adapter to be spoiled: its folder, its backbone, and a function that expects a refusal."""
    model, backbone = adapted("vit")
    folder = tmp_path / "adapter"
    model.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")

    def refused(message, error=FileError, changes=None, branch_only=False, **fields):
        (folder / "adapter_config.json").write_text(json.dumps({**config, **fields}))
        save_file({**tensors, **(changes or {})}, folder / "adapter_model.safetensors")
        with pytest.raises(error, match=message):
            import_adapter(folder, backbone, branch_only=branch_only)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "adapter_model.safetensors")

    return folder, backbone, refused


def pair(path, inner=32, outer=32, rank=4):
    path = f"base_model.model.{path}"
    return {f"{path}.lora_A.weight": torch.zeros(rank, inner), f"{path}.lora_B.weight": torch.zeros(outer, rank)}


def test_what_a_configuration_asks_for_and_a_branch_cannot_is_refused_by_name(saved):
    _, _, refused = saved
    refused(r"method IA3; only LORA can be imported", peft_type="IA3")
    refused(r"uses options that cannot be imported: use_dora = true", use_dora=True)
    refused(r"init_lora_weights is 'pissa', which changes the weights of the base model", init_lora_weights="pissa")
    refused(r"bias is 'all': trained biases cannot be imported", bias="all")
    refused(r"a_feature_of_tomorrow = \[1\]", a_feature_of_tomorrow=[1])
    refused(r"lora_alpha of .* is 'much'; expected a number", lora_alpha="much")
    refused(r"lora_alpha of .* is '1000", lora_alpha=10**400)
    refused(r"alpha_pattern is \[1\]; expected numbers", alpha_pattern=[1])
    refused(r"alpha_pattern has '\(\.\+\)\+!', which is too complicated", alpha_pattern={"(.+)+!": 1.0})
    refused(r"alpha_pattern has '\[', no regular expression", alpha_pattern={"[": 1.0})


def test_tensors_that_are_no_update_of_the_backbone_are_refused_by_name(saved):
    _, _, refused = saved
    path = "vit.layers.0.attention.q_proj"
    name = f"base_model.model.{path}"
    patches = pair("vit.embeddings.patch_embeddings.projection")
    refused(r"patch_embeddings.projection, which is none of the projections q, k, v, o, fc1, fc2", changes=patches)
    refused(r"belongs to a kind of LoRA", changes={f"{name}.lora_magnitude_vector": torch.zeros(32)})
    refused(r"has low-rank tensors .*expected A \(r, in\) and B", changes={f"{name}.lora_A.weight": torch.zeros(3, 32)})
    refused(r"has low-rank tensors", changes=pair(path, rank=0))
    refused(r"q lora_A is|several sizes", changes={f"{name}.lora_A.weight": torch.zeros(4, 31)})
    refused(r"other values than finite", changes={f"{name}.lora_A.weight": torch.full((4, 32), torch.inf)})
    huge = torch.full((4, 32), 1e300, dtype=torch.float64)
    refused(r"other values than finite", changes={f"{name}.lora_A.weight": huge})
    refused(r"two modules are q of block 0", changes=pair("vit.layer.0.attention.q_proj"))
    refused(r"blocks of several models: other, vit", changes=pair("other.layers.0.attention.k_proj"))
    refused(r"it changes block 7; .* has 3 blocks", BackboneMismatch, changes=pair("vit.layers.7.attention.q_proj"))
    refused(r"classifier has 64 inputs", changes={"base_model.model.classifier.weight": torch.zeros(7, 64)})
    norm = {"base_model.model.vit.layernorm.weight": torch.ones(32)}
    for branch_only in (False, True):  # the branch alone would not be this model either
        refused(
            r"weights of classifier, vit.layernorm, which change the features", changes=norm, branch_only=branch_only
        )


def test_folders_and_backbones_that_do_not_fit_are_refused_by_name(saved, tmp_path):
    folder, backbone, _ = saved
    with pytest.raises(BackboneMismatch, match=r"does not fit"):
        import_adapter(folder, load_backbone(_wider()))
    with pytest.raises(FileError, match=r"3 labels given; its classifier has 7 classes"):
        import_adapter(folder, backbone, labels=["a", "b", "c"])
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(FileError, match=r"no adapter_model.safetensors here"):
        import_adapter(folder, backbone)
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(FileError, match=r"pickled file, which could run code; not opened"):
        import_adapter(folder, backbone)
    with pytest.raises(FileError, match=r"no adapter_config.json here"):
        import_adapter(tmp_path, backbone)


def _wider():
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8
    )
    return ViTModel(config, add_pooling_layer=False)
