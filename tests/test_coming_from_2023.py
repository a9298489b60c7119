"""docs/coming-from-2023.md is executed: every command on it runs, in its order, in one folder.

What stands in for what a test cannot have is in SUBSTITUTES and QUICK, and nothing else is changed: tiny datasets in
the official layouts for those in /hdd/datasets, a tiny ViT for the two of the hub, a file of its shape for the
downloaded model.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from builders import library_model
from data.test_named_datasets import WRITERS
from test_interop import WIDTH, its_own_logits, reproduction
from vit_memory import MemoryViT, load_backbone, load_task
from vit_memory import backbone as backbone_module
from vit_memory.cli import app
from vit_memory.cli.options_2023 import DATASETS_2023

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/coming-from-2023.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [line.removeprefix("vit-memory ") for block in BLOCKS for line in block.splitlines()]
HUB_MODELS = ("google/vit-base-patch32-224-in21k", "google/vit-large-patch32-224-in21k")
SUBSTITUTES = {"/hdd": "hdd", "12500": "40", "625": "2"}  # the tiny CIFAR-100 has 100 training images, not 40 000
QUICK = {"train": ["--workers", "0", "--no-report"], "evaluate": ["--workers", "0"], "predict": ["--workers", "0"]}
ITS_FLAGS = {
    "train": {"-d --dataset", "-r --directory", "-e --epochs", "-b --batch_size", "-m --number_of_memory_tokens"},
    "evaluate": {"-m --models-list", "-r --directory", "-b --batch_size", "-t --number_of_memory_tokens"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The datasets in torchvision's layouts, a tiny ViT, and a model file; the working folder of every command."""
    root = tmp_path_factory.mktemp("place")
    datasets = root / "hdd/datasets"
    datasets.mkdir(parents=True)
    for name in DATASETS_2023.values():
        WRITERS[name][0](datasets)
    (datasets / "data_256").rename(datasets / "data_256_standard")
    (datasets / "train_val_images").rename(datasets / "2017")
    for file in ("train2017.json", "val2017.json"):
        (datasets / file).unlink()
    library_model("vit")[1].save_pretrained(root / "vit")
    facts = {"size": {"height": 32, "width": 32}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    config = {"image_processor_type": "ViTImageProcessor", **facts}
    (root / "vit/preprocessor_config.json").write_text(json.dumps(config))
    (root / "models").mkdir()
    state = reproduction([1], extension=False)
    generator = torch.Generator().manual_seed(0)
    state["classifiers.1.weight"] = torch.randn(100, WIDTH, generator=generator)
    state["classifiers.1.bias"] = torch.zeros(100)
    torch.save(state, root / "models/CIFAR100_model.pt")
    return root


@pytest.fixture
def run(place, monkeypatch):
    """Runs the words of a command in the place, with the tiny ViT for models of the hub."""
    load = backbone_module._load
    monkeypatch.setattr(backbone_module, "_load", lambda name: load(str(place / "vit") if name in HUB_MODELS else name))
    monkeypatch.chdir(place)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


def substituted(command):
    for original, substitute in SUBSTITUTES.items():
        command = re.sub(rf"(?<![\w.]){original}(?![\w.])", substitute, command)
    words = command.split()
    quick = QUICK.get(words[0], [])
    if words[0] == "train" and not {"-e", "--steps"} & set(words):
        quick = [*quick, "--steps", "2"]
    return [*words, *quick]


def test_every_command_of_the_page_runs(run, place):
    assert len(COMMANDS) == 19
    printed, answers = {}, {}
    for command in COMMANDS:
        result = run(*substituted(command))
        assert result.exit_code == 0, (command, result.output, result.exception)
        printed[command], answers[command] = result.output, result.stdout.strip()

    # The two ways to write the first command train the same weights, and the steps are printed.
    assert "--epochs 20: 40 optimiser steps, 2 per epoch (100 training images in batches of 64)" in printed[COMMANDS[0]]
    theirs, ours = (
        load_task(place / "runs" / name) for name in ("CIFAR100/CIFAR100.safetensors", "one-cell/one-cell.safetensors")
    )
    assert theirs.name == "CIFAR100"
    assert theirs.backbone.name == HUB_MODELS[0]
    assert torch.equal(theirs.memory, ours.memory)
    assert torch.equal(theirs.head_weight, ours.head_weight)

    # Scored together or alone, a task has the same score on its own dataset.
    together, *alone = [answers[command] for command in COMMANDS if command.startswith("evaluate ")][:3]
    assert together == "\n\n".join(alone)
    assert "cifar100, test: 200 images" in together
    assert "places365, test: 6 images" in together

    # The imported model has the dataset's labels and the images and logits of that code.
    imported = load_task(place / "models/CIFAR100.safetensors")
    assert imported.labels == tuple(f"class{i}" for i in range(100))
    preprocessing = imported.record.preprocessing
    assert (preprocessing.resize, preprocessing.mean, preprocessing.std) == ((32, 32), (0, 0, 0), (1, 1, 1))
    pixels = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    state = torch.load(place / "models/CIFAR100_model.pt", weights_only=True)
    logits = MemoryViT(load_backbone(place / "vit"), [imported])(pixels)["CIFAR100"]
    torch.testing.assert_close(logits, its_own_logits(state, pixels)[1], rtol=0, atol=1e-4)

    assert load_task(place / "runs/extended/extended.safetensors").parents == ("Places",)
    assert (place / "runs/full/full.backbone.safetensors").exists()


@pytest.mark.parametrize("command", ITS_FLAGS)
def test_every_flag_of_its_scripts_is_on_the_page_and_in_a_section_of_the_help(command):
    told = CliRunner().invoke(app, [command, "--help"]).output
    options, section = told.split("Options of the 2023 reproduction (docs/coming-from-2023.md):")
    for flags in ITS_FLAGS[command]:
        short, long = flags.split()
        assert re.search(rf"^  {short}, {long}\b", section, flags=re.MULTILINE)
        assert not re.search(rf"^  {short}, {long}\b", options, flags=re.MULTILINE)
        assert re.search(rf"^\| `{short}`, `{long}`", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "photos", "-d", "Sun", "--name", "x"], r"DATA \(photos\) and --dataset Sun both name the images"),
        (["train", "-d", "Sun", "-e", "2", "--steps", "5"], "--epochs 2 and --steps 5 both say how long to train"),
        (["train", "-d", "Sun", "-b", "2", "--batch", "5"], "--batch_size and --batch mean the same"),
        (["train", "-d", "Sun", "-m", "2", "--memory", "5"], "--number_of_memory_tokens and --memory mean the same"),
        (["train", "-d", "Sun", "-r", "a", "--data-dir", "b"], "--directory and --data-dir mean the same"),
        (["train", "-d", "ImageNet"], "is not one of 'CIFAR100', 'INaturalist', 'Places', 'Sun'"),
        (["train", "--name", "x"], "give DATA, the images to train on"),
        (["train", "photos"], "--name: give the task a name"),
        (["evaluate", "-m", "Sun", "--data", "photos"], "no runs/Sun/Sun.safetensors"),
        (["evaluate", "-m", "Sun", "-r", "hdd"], "vit-memory import models/Sun_model.pt --backbone google/"),
        (["evaluate", "-m", "Birds"], "--models-list takes CIFAR100, INaturalist, Places, Sun. For other tasks"),
        (["evaluate", "-m", "Sun", "Sun"], "a name is given twice"),
        (["evaluate", "x.safetensors"], "give the task files or bundles to score, and the images"),
        (["evaluate", "x.safetensors", "--data", "d", "-b", "2", "--batch", "3"], "--batch_size and --batch mean"),
    ],
)
def test_what_contradicts_or_is_missing_is_refused_with_what_to_use(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    assert re.search(message, " ".join(result.output.split())), result.output
    assert list(tmp_path.iterdir()) == []


def test_evaluation_by_name(run, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = ("--backbone", place / "vit", "--steps", "1", "--workers", "0", "--no-report")
    trained = run("train", "-d", "Sun", "-r", place / "hdd", "-m", "2", *quick)
    assert trained.exit_code == 0, trained.output
    score = ("evaluate", "-m", "Sun", "--directory", place / "hdd", "--workers", "0")
    records = json.loads(run(*score, "-t", "2", "--json").stdout)
    assert [(record["data"], list(record["tasks"])) for record in records] == [("sun397", ["Sun"])]
    for words, message in (
        ((*score, "-t", "1"), "1, but of memory cells per block Sun has 2"),
        ((*score, "--data", "photos"), "vit-memory evaluate runs/Sun/Sun.safetensors --data photos"),
        ((*score, "--task", "Sun"), "names the tasks already"),
    ):
        result = run(*words)
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split())
    (tmp_path / "models").mkdir()
    (tmp_path / "models/Sun.safetensors").write_bytes((tmp_path / "runs/Sun/Sun.safetensors").read_bytes())
    both = run(*score)
    assert both.exit_code == 2
    assert "both runs/Sun/Sun.safetensors and models/Sun.safetensors exist" in " ".join(both.output.split())


def test_a_run_without_their_backbone_says_so(run):
    words = ("--workers", "0", "--no-report", "--lr", "0.1", "--out", "runs/note")
    result = run("train", "-d", "Sun", "-r", "hdd/datasets", "-e", "1", "-m", "1", *words)
    assert result.exit_code == 0, result.output
    assert f"backbone: bundled; the 2023 reproduction's is --backbone {HUB_MODELS[0]}" in result.output


def test_local_links_lead_somewhere():
    links = sorted(set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", PAGE)))
    assert [link for link in links if link.startswith("../examples/")][1:] == [
        "../examples/notebooks/1_full_head_class_memory.ipynb",
        "../examples/notebooks/2_larger_vits_and_other_families.ipynb",
        "../examples/notebooks/3_concatenation.ipynb",
        "../examples/notebooks/4_extension.ipynb",
    ]
    if not (ROOT / "examples").exists():
        pytest.skip("examples/ is not in this checkout")
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
