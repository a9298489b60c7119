"""vit-memory train: a folder of images in, a run folder with a task file out; nothing replaced, nothing guessed."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from itertools import count

import pytest
import torch
from typer.testing import CliRunner

from builders import library_model
from data.test_sources import pictures, write_folder
from vit_memory import MemoryViT, load_backbone, load_task
from vit_memory.cli import app
from vit_memory.errors import TrainingError


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """A backbone as people have it: a folder with weights and preprocessing."""
    folder = tmp_path_factory.mktemp("backbone")
    library_model("vit")[1].save_pretrained(folder)
    facts = {"size": {"height": 32, "width": 32}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "ViTImageProcessor", **facts}))
    return str(folder)


@pytest.fixture
def photos(tmp_path):
    return str(write_folder(tmp_path / "photos", pictures(10)))


def train(photos, backbone, out, *more, name="birds"):
    words = ["train", photos, "--name", name, "--backbone", backbone, "--out", str(out), "--steps", "4", "--batch", "8"]
    return CliRunner().invoke(app, [*words, "--evaluate-every", "2", *more])


def test_a_folder_of_images_becomes_a_task_file_that_answers(photos, backbone, tmp_path):
    result = train(photos, backbone, tmp_path / "run", "--memory", "0,2", "--lr", "0.05,0.2", "--regime", "head,memory")
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "run").iterdir()}
    drawn = {"curves.png", "tensorboard", "report.html"}
    assert names == drawn | {"config.json", "log.jsonl", "settings.json", "checkpoint.safetensors", "birds.safetensors"}
    rows = json.loads((tmp_path / "run/settings.json").read_text())
    assert {(row["regime"], row["cells"]) for row in rows} == {("head", 0), ("class", 0), ("memory", 2)}
    assert len(rows) == 6
    assert [json.loads(line)["step"] for line in (tmp_path / "run/log.jsonl").read_text().splitlines()] == [2, 4]
    task = load_task(tmp_path / "run/birds.safetensors")
    assert task.labels == ("ant", "bee", "cow")
    assert task.record.metrics["validation_accuracy"] == max(row["validation_accuracy"] for row in rows)
    assert task.record.recipe["data"]["splits"]["test"]["images"] == 6
    loaded = load_backbone(backbone)
    assert MemoryViT(loaded, [task])(torch.zeros(2, 3, 32, 32))["birds"].shape == (2, 3)
    lines = result.output.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("method ")) + 1 :][:3]
    assert [line.split("  ")[0] for line in table] == ["head", "class", "2 cells"]  # from the smallest to the largest


def test_told_nothing_it_tries_every_method_keeps_the_best_and_shows_what_each_part_bought(photos, backbone, tmp_path):
    words = ["train", photos, "--name", "birds", "--backbone", backbone]  # everything else as it is
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (result.output, result.exception)
        again = CliRunner().invoke(app, [*words, "--out", "again"])
        assert again.exit_code == 0, (again.output, again.exception)
        refused = CliRunner().invoke(app, words)
    assert "holds a training already" in str(refused.exception)
    rows = json.loads((tmp_path / "runs/birds/settings.json").read_text())
    methods = dict.fromkeys(row["setting"].split(", rate")[0] for row in rows)
    assert list(methods) == ["head", "class", "5 cells", "gains + patches", "rank 8 + gains + patches"]
    task, second = (load_task(tmp_path / folder / "birds.safetensors") for folder in ("runs/birds", "again"))
    assert task.digest == second.digest
    best = max(row["validation_accuracy"] for row in rows)
    assert task.record.metrics["validation_accuracy"] == best
    assert task.parameters == min(row["parameters"] for row in rows if row["validation_accuracy"] == best)
    lines = result.output.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("method ")) + 1 :][:5]
    assert [line.split("  ")[0] for line in table] == list(methods)
    assert [task.method for line in table if "<- kept" in line] == [
        line.split("  ")[0] for line in table if "<- kept" in line
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rank", "0"), "'0': expected whole numbers above 0, or none"),
        (("--rank", "8,x"), "'8,x': expected whole numbers above 0, or none"),
        (
            ("--projections", "q+out"),
            "low-rank updates of 'out'; expected one or more of q, k, v, o, fc1, fc2, each once",
        ),
        (("--projections", "q", "--rank", "none"), "--projections are updated with a --rank, which is none"),
        (("--read-out", "last"), "read-out 'last': expected final, patches, blocks:N"),
        (("--rank", "4", "--patience", "2", "--keep-last"), "it does not go with --keep-last"),
        (("--rank", "4", "--rate-factors", "gains=1,gains=0"), "a part is given twice"),
        (("--regime", "memory", "--rank", "8"), "are for --regime reader, not memory"),
        (("--regime", "head", "--no-gains"), "are for --regime reader, not head"),
        (("--rate-factors", "heads=2"), "expected PART=FACTOR, such as gains=10"),
        (("--rank", "33"), "rank 33; expected 1 to 32, the backbone's width"),
        (("--read-out", "blocks:4"), "a read-out of the last 4 blocks; the backbone has 3"),
        (("--rank", "none", "--no-gains"), "a reader without gains, a rank or a read-out has nothing to learn"),
        (("--regime", "class,reader", "--rank", "none", "--no-gains"), "a reader without gains, a rank or a read-out"),
        (("--regime", "reader", "--memory", "-1"), "-1 memory cells; expected 0 or more"),
    ],
)
def test_a_reader_that_cannot_be_trained_is_refused_and_leaves_nothing(photos, backbone, tmp_path, words, message):
    result = train(photos, backbone, tmp_path / "run", *words)
    assert result.exit_code != 0
    assert message in " ".join((result.output + str(result.exception)).replace("│", " ").split())
    assert not (tmp_path / "run").exists()


def test_a_task_extends_another_and_brings_the_ancestors_it_finds_beside_it(photos, backbone, tmp_path):
    files = tmp_path / "tasks"
    for name, extends in (("one", ()), ("two", ("one",)), ("three", ("two",))):
        more = [word for parent in extends for word in ("--extends", str(files / f"{parent}.safetensors"))]
        result = train(photos, backbone, tmp_path / name, "--lr", "0.1", *more, name=name)
        assert result.exit_code == 0, (result.output, result.exception)
        files.mkdir(exist_ok=True)
        (files / f"{name}.safetensors").write_bytes((tmp_path / name / f"{name}.safetensors").read_bytes())
    three = load_task(files / "three.safetensors")
    assert three.parents == ("two",)
    assert three.parent_digests["two"] == load_task(files / "two.safetensors").digest


def test_a_run_is_resumed_to_the_same_task_and_never_replaced(photos, backbone, tmp_path):
    assert train(photos, backbone, tmp_path / "run", "--lr", "0.1").exit_code == 0
    content = (tmp_path / "run/birds.safetensors").read_bytes()
    again = train(photos, backbone, tmp_path / "run", "--lr", "0.1")
    assert isinstance(again.exception, TrainingError)
    assert "holds a training already. Resume it with --resume, or use another --out" in str(again.exception)
    other = train(photos, backbone, tmp_path / "run", "--lr", "0.2", "--resume")
    assert "recipe.learning_rates: [0.1] then, [0.2] now" in str(other.exception)
    assert train(photos, backbone, tmp_path / "run", "--lr", "0.1", "--resume").exit_code == 0
    resumed = load_task(tmp_path / "run/birds.safetensors")
    (tmp_path / "old.safetensors").write_bytes(content)
    assert resumed.digest == load_task(tmp_path / "old.safetensors").digest
    nothing = train(photos, backbone, tmp_path / "empty", "--resume")
    assert "no checkpoint to resume from" in str(nothing.exception)


def stopped_after(steps, monkeypatch):
    """From here on, a training is asked to stop after so many steps, as by Ctrl-C."""

    @contextmanager
    def stopping():
        asked = count(1)
        yield lambda: next(asked) >= steps

    monkeypatch.setattr("vit_memory.cli.train.stopping", stopping)


def test_a_disk_store_serves_a_second_training_and_its_resumption(photos, backbone, tmp_path, monkeypatch):
    more = ["--cache", "disk", "--cache-dir", str(tmp_path / "store")]
    for name in ("first", "second"):
        result = train(photos, backbone, tmp_path / name, *more, name=name)
        assert result.exit_code == 0, (result.output, result.exception)
    with monkeypatch.context() as patch:
        stopped_after(3, patch)
        assert train(photos, backbone, tmp_path / "third", *more, name="third").exit_code == 130
    for name in ("second", "third"):  # one has ended, the other has not
        result = train(photos, backbone, tmp_path / name, *more, "--resume", name=name)
        assert result.exit_code == 0, (result.output, result.exception)
    tasks = [load_task(tmp_path / name / f"{name}.safetensors") for name in ("first", "second", "third")]
    assert len({task.digest for task in tasks}) == 1
    assert (
        sum(path.is_dir() for path in (tmp_path / "store").iterdir()) == 2
    )  # of the training and of the validation images


@pytest.mark.parametrize(
    "torn",
    [b'{"torn', b'{"time": 1.5, "step": 4, "losses": [0.1', b"\0" * 40, b"\xc3"],
    ids=["a word", "most of a line", "zeros", "half a letter"],
)
def test_a_log_whose_last_line_was_cut_off_does_not_keep_a_run_from_ending(
    photos, backbone, tmp_path, monkeypatch, torn
):
    run = tmp_path / "run"
    options = ["--lr", "0.1", "--cache", "off"]
    with monkeypatch.context() as patch:
        stopped_after(3, patch)
        result = train(photos, backbone, run, *options)
        assert result.exit_code == 130, (result.output, result.exception)
    with (run / "log.jsonl").open("ab") as file:
        file.write(torn)
    result = train(photos, backbone, run, *options, "--resume")
    assert result.exit_code == 0, (result.output, result.exception)
    first, cut_off, last, end = (run / "log.jsonl").read_bytes().split(b"\n")
    assert [json.loads(line)["step"] for line in (first, last)] == [2, 4]
    assert (cut_off, end) == (torn, b"")
    assert (run / "curves.png").exists()
    assert train(photos, backbone, tmp_path / "whole", *options).exit_code == 0
    assert load_task(run / "birds.safetensors").digest == load_task(tmp_path / "whole/birds.safetensors").digest


def test_a_dataset_too_small_to_split_is_told_and_refused_with_what_to_do(backbone, tmp_path):
    photos = str(write_folder(tmp_path / "photos", pictures(1)))
    advice = "drawn from classes with at least two different images .*Add images, .*DATA/train/, DATA/val/"
    shown = CliRunner().invoke(app, ["data", photos])
    assert shown.exit_code == 0
    for name in ("validation", "test"):
        assert re.search(f"note: the {name} split holds no images: a split is {advice}", shown.output)
    refused = train(photos, backbone, tmp_path / "run").exception
    assert isinstance(refused, TrainingError)
    assert re.search(f"the validation split holds no images: a split is {advice}", str(refused))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--regime", "all", "all: expected head, class, memory, reader, memory-unmasked"),
        ("--memory", "1,x", "'1,x': expected whole numbers, separated by commas."),
        ("--lr", "fast", "'fast': expected numbers or auto, separated by commas."),
        ("--start", "random", "random: expected original, normal."),
        ("--on-bad-image", "ignore", "'ignore' is not one of 'fail', 'skip'."),
    ],
)
def test_a_wrong_option_is_refused_at_once(photos, backbone, tmp_path, option, value, message):
    result = train(photos, backbone, tmp_path / "run", option, value)
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "run").exists()


def test_the_defaults_of_the_command_are_those_of_the_library():
    from vit_memory import Cache, Recipe, TrainingOptions
    from vit_memory.cli.train_options import CacheOptions, GridOptions, MachineOptions, RecipeOptions
    from vit_memory.training.grid import DEFAULT_GRID, Grid
    from vit_memory.training.ranks import Ranks

    assert GridOptions().build() == DEFAULT_GRID
    assert GridOptions(memory="5").build() == Grid()
    assert GridOptions(rank="8").build() == GridOptions(regime="reader").build() == Grid(regimes=("reader",))
    assert RecipeOptions().build(DEFAULT_GRID) == Recipe.reader()
    assert RecipeOptions().build(Grid()) == Recipe()
    assert RecipeOptions(steps=7, views=0).build(Grid()) == Recipe(steps=7, views=None)
    assert CacheOptions().build() == Cache()
    ranks = Ranks()
    assert MachineOptions(workers=0).build(Cache(), ranks, resume=False) == TrainingOptions(ranks=ranks)


def test_bad_images_are_left_out_when_asked_and_reported_in_the_run(photos, backbone, tmp_path):
    for i in range(12):
        (tmp_path / f"photos/ant/bad{i}.jpg").write_bytes(b"%d" % i)
    assert "--on-bad-image skip" in str(train(photos, backbone, tmp_path / "a").exception)
    # Batches of one: some of them hold nothing but a bad image.
    result = train(
        photos, backbone, tmp_path / "b", "--on-bad-image", "skip", "--lr", "0.1", "--batch", "1", "--steps", "30"
    )
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "b/log.jsonl").read_text().splitlines()[-1])["step"] == 30
    assert (tmp_path / "b/bad-images.tsv").read_text().count("not an image of a known format") >= 8


@pytest.mark.parametrize("regime", ["memory-unmasked", "full"])
def test_a_regime_that_stands_alone_is_trained_and_evaluated_like_any(photos, backbone, tmp_path, regime):
    result = train(photos, backbone, tmp_path / "run", "--regime", regime, "--lr", "0.01")
    assert result.exit_code == 0, (result.output, result.exception)
    file = tmp_path / "run/birds.safetensors"
    assert (tmp_path / "run/birds.backbone.safetensors").exists() == (regime == "full")
    words = ["evaluate", str(file), "--data", photos, "--split", "validation", "--json"]
    scored = CliRunner().invoke(app, words)
    assert scored.exit_code == 0, scored.exception
    accuracy = load_task(file).record.metrics["validation_accuracy"]
    assert json.loads(scored.stdout)["tasks"]["birds"]["top1"] == pytest.approx(accuracy)
    if regime == "full":
        (tmp_path / "run/birds.backbone.safetensors").unlink()
        assert "birds.backbone.safetensors is missing" in str(CliRunner().invoke(app, words).exception)


def test_curves_are_a_picture(photos, backbone, tmp_path):
    from PIL import Image

    assert train(photos, backbone, tmp_path / "run", "--lr", "0.1,0.2").exit_code == 0
    with Image.open(tmp_path / "run/curves.png") as picture:
        assert picture.size[0] == 1740
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 5


def command(photos, backbone, out, *more):
    words = ["train", photos, "--name", "birds", "--backbone", backbone, "--out", str(out), "--batch", "8", *more]
    return ["-m", "vit_memory", *words, "--lr", "0.05,0.2"]


@pytest.mark.slow
def test_ctrl_c_saves_and_prints_how_to_resume_to_the_same_task(photos, backbone, tmp_path):
    more = ["--steps", "400", "--evaluate-every", "20"]
    subprocess.run([sys.executable, *command(photos, backbone, tmp_path / "whole", *more)], check=True)
    cut = command(photos, backbone, tmp_path / "cut", *more)
    with subprocess.Popen([sys.executable, *cut], stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if line.startswith("step 40 "):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
    assert process.returncode == 130
    assert "Resume with the same command and --resume." in rest
    assert not (tmp_path / "cut/birds.safetensors").exists()
    subprocess.run([sys.executable, *cut, "--resume"], check=True)
    whole, resumed = (load_task(tmp_path / name / "birds.safetensors") for name in ("whole", "cut"))
    assert resumed.digest == whole.digest


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["off", "ram", "disk"])
def test_two_processes_train_the_task_of_one_and_only_the_main_one_writes(photos, backbone, tmp_path, cache):
    more = ["--steps", "12", "--evaluate-every", "4", "--cache", cache, "--cache-dtype", "float32"]
    more += ["--cache-dir", str(tmp_path / "cache")]
    one = subprocess.run([sys.executable, *command(photos, backbone, tmp_path / "one", *more)], check=False)
    assert one.returncode == 0
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    two = subprocess.run(
        [sys.executable, *launcher, *command(photos, backbone, tmp_path / "two", *more)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("birds.safetensors") == 1
    rows = [json.loads((tmp_path / name / "settings.json").read_text()) for name in ("one", "two")]
    assert [row["validation_accuracy"] for row in rows[0]] == [row["validation_accuracy"] for row in rows[1]]
    one_task, two_task = (load_task(tmp_path / name / "birds.safetensors") for name in ("one", "two"))
    for name, values in one_task.tensors().items():
        torch.testing.assert_close(two_task.tensors()[name], values, rtol=0, atol=1e-4)
    assert len((tmp_path / "two/log.jsonl").read_text().splitlines()) == 3
