"""Files of the 2023 reproduction: the same logits, whatever was added to the model, and nothing run on opening."""

import math
import os

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from builders import ROUNDING, images, library_model, tiny_backbone, worst
from vit_memory import BackboneMismatch, Bundle, DamagedFile, FileError, MemoryViT, UnsafeFile, load_backbone, load_task
from vit_memory.cli import app
from vit_memory.files.interop import _weights, import_reproduction

PATCHES, WIDTH, DEPTH, HEADS = 16, 32, 3, 4


class Asked(dict):
    """Answers every question with the key itself: the names that the importer looks for, in its order."""

    def get(self, key, default=None):
        return key


def backbone_state(backbone):
    """The backbone's weights under transformers 4's names."""
    names = dict(_weights(Asked(), DEPTH))
    return {names[role]: weight.detach().clone() for role, weight in backbone.roles.weights()}


def reproduction(cells, extension):
    """A state dict as that code writes it: transformers 4's names, the backbone of our tiny ViT, heads added to it."""
    backbone = tiny_backbone()
    generator = torch.Generator().manual_seed(len(cells) + 10 * extension)
    state = backbone_state(backbone)

    def drawn(*shape, std=0.5):
        return torch.randn(*shape, generator=generator) * std

    tokens = PATCHES + 1 + len(cells)
    mask = torch.zeros(1, tokens, tokens + sum(cells))
    mask[:, :, PATCHES + 1 :] = -math.inf
    first = tokens
    for t, count in enumerate(cells):
        row = slice(PATCHES + 1 + t, None) if extension else PATCHES + 1 + t
        mask[:, row, PATCHES + 1 + t] = 0
        mask[:, row, first : first + count] = 0
        first += count
    for i in range(DEPTH):
        prefix = f"vit.encoder.layer.{i}.attention.attention."
        state[prefix + "attention_mask"] = mask.clone()
        for t, count in enumerate(cells):
            state[prefix + f"memory_tokens.{t}"] = drawn(1, count, WIDTH)
    for t in range(len(cells)):
        state[f"vit.embeddings.cls_tokens.{t + 1}"] = drawn(1, 1, WIDTH)
    for t in range(len(cells) + 1):
        state[f"classifiers.{t}.weight"], state[f"classifiers.{t}.bias"] = drawn(5 + t, WIDTH, std=0.2), drawn(5 + t)
    return state


def its_own_logits(state, pixels):
    """What that code computes, from its state dict alone: patches, class tokens, memory as further keys and values."""
    s = lambda key: state["vit." + key]  # noqa: E731
    position = s("embeddings.position_embeddings")
    patches = F.conv2d(
        pixels, s("embeddings.patch_embeddings.projection.weight"), s("embeddings.patch_embeddings.projection.bias"), 8
    )
    x = patches.flatten(2).transpose(1, 2) + position[:, 1:]
    classes = sum(key.startswith("vit.embeddings.cls_tokens") for key in state)
    tokens = [(s(f"embeddings.cls_tokens.{t}") + position[:, :1]).expand(len(x), -1, -1) for t in range(classes)]
    x = torch.cat([x, *tokens], 1)

    def norm(x, name):
        return F.layer_norm(x, (WIDTH,), s(name + ".weight"), s(name + ".bias"), 1e-12)

    def linear(x, name):
        return F.linear(x, s(name + ".weight"), s(name + ".bias"))

    def heads(x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    for i in range(DEPTH):
        layer = f"encoder.layer.{i}."
        attention = layer + "attention.attention."
        h = norm(x, layer + "layernorm_before")
        memory = [s(attention + f"memory_tokens.{t}").expand(len(x), -1, -1) for t in range(classes - 1)]
        with_memory = torch.cat([h, *memory], 1)
        q, k, v = (
            heads(linear(h, attention + "query")),
            *(heads(linear(with_memory, attention + n)) for n in ("key", "value")),
        )
        weights = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS) + s(attention + "attention_mask")).softmax(-1)
        x = x + linear((weights @ v).transpose(1, 2).flatten(2), layer + "attention.output.dense")
        x = x + linear(
            F.gelu(linear(norm(x, layer + "layernorm_after"), layer + "intermediate.dense")), layer + "output.dense"
        )
    out = norm(x, "layernorm")[:, -classes:]
    return [
        F.linear(out[:, t], state[f"classifiers.{t}.weight"], state[f"classifiers.{t}.bias"]) for t in range(classes)
    ]


@pytest.mark.parametrize("extension", [False, True])
@pytest.mark.parametrize("cells", [[3], [2, 5], [1, 4, 2]])
def test_an_imported_model_gives_the_reproductions_own_logits(cells, extension, tmp_path):
    backbone = tiny_backbone()
    state = reproduction(cells, extension)
    torch.save(state, tmp_path / "CIFAR100_model.pt")
    tasks = import_reproduction(tmp_path / "CIFAR100_model.pt", backbone)
    expected = its_own_logits(state, images())
    outputs = MemoryViT(backbone, tasks)(images())
    assert len(tasks) == len(cells)
    for task, logits in zip(tasks, expected[1:], strict=True):
        assert task.raw_memory
        assert len(task.parents) == (tasks.index(task) if extension else 0)
        assert worst(outputs[task.name], logits) <= ROUNDING
    original = F.linear(outputs.original.tokens[:, 0], state["classifiers.0.weight"], state["classifiers.0.bias"])
    assert worst(original, expected[0]) <= ROUNDING


def test_the_command_writes_task_files_that_make_a_bundle(tmp_path):
    library_model("vit")[1].save_pretrained(tmp_path / "vit")
    torch.save(reproduction([2, 5], extension=True), tmp_path / "Sun_model.pt")
    (tmp_path / "labels.txt").write_text("\n".join("abcdef"))
    arguments = ["import", tmp_path / "Sun_model.pt", "--backbone", tmp_path / "vit", "--out", tmp_path / "tasks"]
    result = CliRunner().invoke(app, [str(a) for a in [*arguments, "--labels", tmp_path / "labels.txt"]])
    assert result.exit_code == 0, result.output
    first, second = (load_task(tmp_path / "tasks" / f"Sun-{t}.safetensors") for t in (1, 2))
    assert first.labels == tuple("abcdef")
    assert second.labels[:2] == ("class 0", "class 1")
    assert second.parents == ("Sun-1",)
    bundle = Bundle.create(tmp_path / "bundle", load_backbone(tmp_path / "vit"), [first, second])
    assert list(bundle.model()(images())) == ["Sun-1", "Sun-2"]


def test_another_backbone_is_refused_with_the_first_difference(tmp_path):
    state = reproduction([2], extension=False)
    state["vit.encoder.layer.1.output.dense.bias"][3] += 1e-3
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(BackboneMismatch, match=r"the backbone inside is not .*: 1.mlp.1.1 differs"):
        import_reproduction(tmp_path / "model.pt", tiny_backbone())
    with pytest.raises(BackboneMismatch, match="the backbone inside is not Dinov2"):
        import_reproduction(tmp_path / "model.pt", tiny_backbone("dinov2"))


class RunsCode:
    def __reduce__(self):
        return (os.system, ("touch ran",))


def test_a_pickle_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({**reproduction([2], extension=False), "evil": RunsCode()}, tmp_path / "model.pt")
    with pytest.raises(UnsafeFile, match="refused: it holds more than tensors, which could run code"):
        import_reproduction(tmp_path / "model.pt", tiny_backbone())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("vit.embeddings.cls_tokens.0") is None, "not a model of the 2023 reproduction"),
        (lambda s: [s.pop(f"classifiers.1.{k}") for k in ("weight", "bias")], "no task was added"),
        (lambda s: s.pop("vit.encoder.layer.0.attention.attention.attention_mask") is None, "attention mask is None"),
        (lambda s: s["vit.encoder.layer.1.attention.attention.attention_mask"].zero_(), "masks of the blocks differ"),
        (
            lambda s: [
                s[f"vit.encoder.layer.{i}.attention.attention.attention_mask"][0, PATCHES + 1].fill_(-1)
                for i in range(DEPTH)
            ],
            "reads what neither concatenation nor extension",
        ),
    ],
)
def test_other_files_are_refused_with_the_reason(change, message, tmp_path):
    state = reproduction([2], extension=False)
    change(state)
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(DamagedFile, match=message):
        import_reproduction(tmp_path / "model.pt", tiny_backbone())


def test_other_bad_files_and_labels(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"nothing of the kind")
    with pytest.raises((DamagedFile, UnsafeFile), match="model.pt"):
        import_reproduction(tmp_path / "model.pt", tiny_backbone())
    with pytest.raises(FileError, match="no such file"):
        import_reproduction(tmp_path / "absent.pt", tiny_backbone())
    torch.save(reproduction([2], extension=False), tmp_path / "model.pt")
    with pytest.raises(FileError, match=r"2 labels given; heads have \[6\] classes"):
        import_reproduction(tmp_path / "model.pt", tiny_backbone(), labels=["a", "b"])
