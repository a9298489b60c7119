"""The example from scratch computes what the library computes, and what it prints is true."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from builders import ROUNDING, worst
from vit_memory import MemoryViT, load_backbone, new_task

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import minimal_memory_vit as minimal  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    """Its tensors are tiny: on a busy machine, a second thread makes every step wait for a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def example_vit():
    """With a random value in every weight, so that none can be forgotten."""
    from vit_memory.families.tiny import randomised

    return randomised(minimal.ViT(classes=5)).requires_grad_(False)


def as_transformers_model(vit):
    """The same weights in a model of transformers; found by role, since parameter names differ between versions."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=minimal.WIDTH,
        num_hidden_layers=minimal.DEPTH,
        num_attention_heads=minimal.HEADS,
        intermediate_size=4 * minimal.WIDTH,
        image_size=minimal.IMAGE,
        patch_size=minimal.PATCH,
        num_channels=1,
        layer_norm_eps=vit.norm.eps,
        num_labels=5,
    )
    model = ViTForImageClassification(config).eval()
    embeddings = model.vit.embeddings
    copies = [
        (embeddings.patch_embeddings.projection, vit.patches),
        (model.vit.layernorm, vit.norm),
        (model.classifier, vit.head),
    ]
    for theirs, ours in zip(load_backbone(model).roles.blocks, vit.blocks, strict=True):  # shares the model's weights
        linear = [module for module in theirs.mlp if isinstance(module, torch.nn.Linear)]
        copies += zip(theirs.qkv, (ours.q, ours.k, ours.v), strict=True)
        copies += zip(
            (theirs.norm1, *theirs.project, theirs.norm2), (ours.norm1, ours.project, ours.norm2), strict=True
        )
        copies += zip(linear, (ours.mlp[0], ours.mlp[2]), strict=True)
    with torch.no_grad():
        embeddings.cls_token.copy_(vit.class_token)
        embeddings.position_embeddings.copy_(vit.positions)
        for theirs, ours in copies:
            theirs.weight.copy_(ours.weight)
            theirs.bias.copy_(ours.bias)
    return model


def example_tasks(vit):
    """Concatenated and extended ones, a diamond among them, as training would leave them: nothing at zero."""
    torch.manual_seed(1)
    even, loop = minimal.Task(vit, "even", 2), minimal.Task(vit, "loop", 2)
    digit = minimal.Task(vit, "digit", 10, parents=(loop,))
    prime = minimal.Task(vit, "prime", 2, parents=(loop,))
    both = minimal.Task(vit, "both", 4, parents=(digit, prime))
    tasks = [even, loop, digit, prime, both]
    for task in tasks:
        task.requires_grad_(False)
        task.token += torch.randn_like(task.token) * 0.5
        task.memory.copy_(torch.randn_like(task.memory) * 0.5)
    return tasks, {"even": [], "loop": [], "digit": ["loop"], "prime": ["loop"], "both": ["digit", "prime"]}


def as_library_task(backbone, task, parents):
    labels = [str(i) for i in range(task.head.out_features)]
    fresh = new_task(backbone, task.name, labels, cells=minimal.CELLS, parents=parents)
    return replace(
        fresh, class_token=task.token, memory=task.memory, head_weight=task.head.weight, head_bias=task.head.bias
    )


def test_it_computes_what_the_library_computes():
    vit = example_vit()
    model = as_transformers_model(vit)
    backbone = load_backbone(model)
    tasks, parents = example_tasks(vit)
    library = MemoryViT(backbone, [as_library_task(backbone, task, parents[task.name]) for task in tasks])
    images = torch.randn(7, 1, minimal.IMAGE, minimal.IMAGE, generator=torch.Generator().manual_seed(2))

    original, answers = minimal.answer(vit, tasks, images)
    outputs = library(images)
    with torch.no_grad():
        assert worst(original, model(images).logits) < ROUNDING
    assert worst(original, outputs.original.logits) < ROUNDING
    assert list(answers) == list(outputs)
    for name, logits in answers.items():
        assert worst(logits, outputs[name]) < ROUNDING, name
        assert logits.std() > 0.1  # so that the tolerance means something


def test_its_tasks_start_as_the_library_starts_them():
    vit = example_vit()
    task = minimal.Task(vit, "even", 2)
    fresh = new_task(load_backbone(as_transformers_model(vit)), "even", ["odd", "even"])
    assert torch.equal(task.token, fresh.class_token)
    assert task.memory.shape == fresh.memory.shape
    assert task.memory.std().item() == pytest.approx(fresh.memory.std().item(), rel=0.1)


def test_extension_is_read_and_concatenation_is_not():
    vit = example_vit()
    tasks, _ = example_tasks(vit)
    images = torch.randn(3, 1, minimal.IMAGE, minimal.IMAGE, generator=torch.Generator().manual_seed(2))
    _, before = minimal.answer(vit, tasks, images)
    tasks[1].memory += torch.randn_like(tasks[1].memory)  # of `loop`
    _, after = minimal.answer(vit, tasks, images)
    changed = {name for name in before if worst(before[name], after[name]) > 1e-3}
    assert changed == {"loop", "digit", "prime", "both"}
    assert torch.equal(before["even"], after["even"])


def test_a_short_run_ends_and_its_claims_hold(capsys):
    findings = minimal.main(steps=2)
    assert findings.original_unchanged
    assert findings.concatenated < ROUNDING
    assert findings.extended < ROUNDING
    printed = capsys.readouterr().out
    assert "bit for bit" in printed
    assert "CHANGED" not in printed
    assert len(printed.splitlines()) == 6


@pytest.mark.slow
def test_the_full_run_learns_all_tasks():
    findings = minimal.main()
    assert findings.original_unchanged
    assert max(findings.concatenated, findings.extended) < 5e-5  # of logits far above unit scale
    assert findings.accuracy["vit"] > 90
    assert findings.accuracy["even"] > 75  # a guess: 50
    assert findings.accuracy["loop"] > 75  # a guess: 60
    assert findings.accuracy["digit"] > 50  # a guess: 10


def test_it_runs_as_a_script_and_fits_on_a_few_pages():
    script = EXAMPLES / "minimal_memory_vit.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 250
    ran = subprocess.run([sys.executable, script, "--steps", "1"], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("ViT, pretrained on")
    assert not ran.stderr
