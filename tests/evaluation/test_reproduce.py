"""vit-memory reproduce: one record per training, nothing trained twice or mixed, and a report of what is there."""

import json
import re
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from builders import images, library_model, tiny_backbone, trained
from data.test_sources import as_png, pictures, write_folder
from vit_memory import MemoryViT, load_backbone, new_task
from vit_memory.cli import app
from vit_memory.errors import DamagedFile, FileError, TrainingStopped
from vit_memory.evaluation.reproduce import continual
from vit_memory.evaluation.reproduce import runner as runner_module
from vit_memory.evaluation.reproduce.concatenation import _unmasked_answers
from vit_memory.evaluation.reproduce.experiment import Plan
from vit_memory.evaluation.reproduce.lora import LoraModel
from vit_memory.evaluation.reproduce.methods import BOTH, FULL, HEAD, LORA, SHORT, UNMASKED, cells, variant
from vit_memory.evaluation.reproduce.records import RecordFolder
from vit_memory.evaluation.reproduce.runner import Runner, Sources, Training, with_prerequisites
from vit_memory.evaluation.reproduce.scale import SMALL
from vit_memory.evaluation.reproduce.variants import VariantSweep
from vit_memory.graph import TaskGraph
from vit_memory.preprocessing import Preprocessing
from vit_memory.standalone import StandaloneModel
from vit_memory.training.cache import Cache
from vit_memory.training.options import TrainingOptions
from vit_memory.training.recipe import Recipe
from vit_memory.training.stores import list_stores
from vit_memory.training.sweep import Setting
from vit_memory.training.trunk_sweep import TrunkSweep
from vit_memory.trunk import run_originals

FACTS = Preprocessing((32, 32), None, (0.5,) * 3, (0.5,) * 3, "bilinear")


@pytest.fixture
def data(tmp_path):
    """Two datasets of three classes."""
    for seed, name in enumerate(("first", "second")):
        write_folder(tmp_path / "data" / name, pictures(10, seed=seed))
    return tmp_path / "data"


@pytest.fixture
def runner(data, tmp_path):
    short = {group: replace(recipe, steps=2, batch=4, evaluate_every=2) for group, recipe in SMALL.recipes.items()}
    scale = replace(SMALL, per_class=3, seeds=(0, 1), recipes=short)
    backbone = load_backbone(tiny_backbone().model, preprocessing=FACTS, name="tiny")
    return Runner(backbone, scale, Sources(data), RecordFolder(tmp_path / "out"))


def test_a_training_with_a_record_is_not_trained_again(runner, monkeypatch):
    wanted = [Training("first", method, seed, 3) for seed in (0, 1) for method in (HEAD, cells(5), BOTH)]
    first = runner.train(wanted)
    assert [record.identity["method"] for record in first] == ["head", "5 cells", "rank 8 + gains"] * 2
    monkeypatch.setattr("vit_memory.evaluation.reproduce.runner.train_methods", None)  # would fail if it were called
    assert runner.train(wanted) == first


def test_methods_that_share_a_pass_are_trained_at_once_and_later_seeds_use_the_rate_of_the_first(runner):
    wanted = [Training("first", method, seed, 3) for seed in (0, 1) for method in (HEAD, cells(5), BOTH)]
    records = {(r.identity["method"], r.identity["seed"]): r for r in runner.train(wanted)}
    assert {records[name, 0].result["trained_at_once"] for name in ("head", "5 cells", BOTH.name)} == {9}
    assert set(records["5 cells", 0].result["searched"]) == {"0.003", "0.01", "0.03"}
    assert set(records[BOTH.name, 0].result["searched"]) == {"0.001", "0.003", "0.01"}
    for method in ("5 cells", BOTH.name):
        chosen = records[method, 0].result["rate"]
        later = records[method, 1]
        assert later.settings["recipe"]["learning_rates"] == [chosen]
        assert later.result["trained_at_once"] == 3


def test_seeds_that_are_asked_for_later_go_on_where_the_first_ended(runner):
    def train(*seeds):
        own = replace(runner, scale=replace(runner.scale, seeds=seeds))
        return own.train([Training("first", cells(5), seed, 3) for seed in seeds])

    first, later = train(0), train(1)
    assert later[0].settings["recipe"]["learning_rates"] == [first[0].result["rate"]]
    assert train(0, 1) == [*first, *later]


def test_a_store_on_disk_serves_the_methods_that_have_a_trunk_and_spares_the_others(runner, tmp_path):
    stores = TrainingOptions(cache=Cache("disk", folder=tmp_path / "stores"))
    methods = (HEAD, SHORT, BOTH, variant("after the norm"), UNMASKED, FULL)
    records = replace(runner, options=stores).train([Training("first", method, 0, 3) for method in methods])
    assert [record.identity["method"] for record in records] == [method.name for method in methods]
    assert {record.made["cache"]["mode"] for record in records} == {"disk"}
    assert len(list_stores(tmp_path / "stores")) == 2  # training and validation images, once for all


def test_what_another_process_recorded_meanwhile_stays(runner, monkeypatch):
    training = Training("first", cells(5), 0, 3)
    other = replace(runner)
    train = runner_module.train_methods

    def slow(*arguments):
        outcomes = train(*arguments)
        monkeypatch.setattr(runner_module, "train_methods", train)
        other.train([training])
        return outcomes

    monkeypatch.setattr(runner_module, "train_methods", slow)
    path = runner.records.path(training.identity("tiny"))
    (record,) = runner.train([training])
    assert record.result["trained_at_once"] == 3
    written = path.stat().st_mtime_ns
    assert (runner.records.folder / "weights" / f"{path.stem}.safetensors").stat().st_mtime_ns < written


def test_test_images_are_the_same_for_every_seed_and_unknown_to_all_trainings(runner):
    first, second = (runner.images(Training("first", HEAD, seed, 3)) for seed in (0, 1))
    assert first.test.digests == second.test.digests
    for drawn in (first, second):
        assert not {*drawn.train.digests, *drawn.validation.digests} & set(first.test.digests)


def test_what_a_training_needs_first_is_known_beforehand(runner):
    parent = Training("first", cells(5), 1, 1)
    child = Training("second", cells(5), 1, 1, parents=(parent,))
    needed = with_prerequisites([child], runner.scale)
    assert [(one.dataset, one.seed, one.per_class) for one in needed] == [
        ("first", 0, 3),
        ("first", 1, 1),
        ("second", 0, 3),
        ("second", 1, 1),
    ]


def test_a_coarse_task_has_the_images_of_the_fine_one(runner):
    lines = ["file,label,coarse_label,split"]
    for i, (_, pixels) in enumerate(pictures(14, seed=3)):
        (runner.sources.folder / f"{i}.png").write_bytes(as_png(pixels))
        lines.append(f"{i}.png,{'abcd'[i % 4]},{'xy'[i % 4 // 2]},{'test' if i % 5 == 0 else 'train'}")
    (runner.sources.folder / "table.csv").write_text("\n".join(lines))
    fine, coarse = (runner.images(Training("table.csv", HEAD, 1, 3, label)) for label in ("label", "coarse_label"))
    assert (fine.labels, coarse.labels) == (("a", "b", "c", "d"), ("x", "y"))
    assert len(fine.train) == 12
    for name, split in fine.splits.items():
        assert coarse.splits[name].digests == split.digests
        assert coarse.splits[name].targets.tolist() == (split.targets // 2).tolist()


def test_records_of_other_settings_are_refused_by_name(runner):
    training = Training("first", HEAD, 0, 3)
    (record,) = runner.train([training])
    longer = {group: replace(recipe, steps=3) for group, recipe in runner.scale.recipes.items()}
    other = replace(runner, scale=replace(runner.scale, recipes=longer))
    with pytest.raises(FileError, match=r"head.*recipe\.steps 2, now 3.*another --out"):
        other.train([training])
    assert list(runner.records.all()) == [record]


def test_a_damaged_record_is_named(runner):
    training = Training("first", HEAD, 0, 3)
    runner.train([training])
    path = runner.records.path(training.identity("tiny"))
    path.write_text(path.read_text()[:-40])
    with pytest.raises(DamagedFile, match="head.*Remove it to make it again"):
        runner.train([training])


def test_lost_weights_are_trained_again_and_the_record_stays(runner):
    training = Training("first", cells(5), 0, 3)
    (record,) = runner.train([training])
    for file in (runner.records.folder / "weights").iterdir():
        file.unlink()
    task, branch = runner.load(training)
    assert (task.cells, branch) == (5, None)
    assert runner.train([training]) == [record]


def test_a_task_extends_what_was_trained_before_it(runner):
    parent = Training("first", cells(5), 0, 3)
    child = Training("second", cells(5), 0, 3, parents=(parent,))
    (record,) = runner.train([child])
    assert record.identity["extends"] == ["first label"]
    task, _ = runner.load(child)
    assert task.parent_digests == {parent.task_name: runner.load(parent)[0].digest}


def test_lora_is_trained_by_peft_on_the_same_images(runner):
    pytest.importorskip("peft", reason="peft is not installed")
    (record,) = runner.train([Training("first", LORA, 0, 3)])
    width, depth = runner.backbone.width, runner.backbone.depth
    assert record.result["parameters"] == depth * 2 * 2 * 8 * width + 3 * width + 3  # A and B of q and v, and a head


def test_lora_stops_when_asked_to(runner):
    pytest.importorskip("peft", reason="peft is not installed")
    with pytest.raises(TrainingStopped, match="after step 1 of 2"):
        replace(runner, should_stop=lambda: True).train([Training("first", LORA, 0, 3)])
    assert list(runner.records.all()) == []


def test_tasks_that_arrive_go_on_after_the_last_arrival_of_a_stopped_run(runner, monkeypatch):
    plan = Plan(runner.scale, ("first", "second"), (), runner.backbone.depth)
    arrived = []

    def fine_tune(runner, backbone, training, rate):
        if stops and arrived == ["first"]:
            raise TrainingStopped("stopped")
        arrived.append(training.dataset)
        return original(runner, backbone, training, rate)

    original, stops = continual._fine_tune, True
    monkeypatch.setattr(continual, "_fine_tune", fine_tune)
    with pytest.raises(TrainingStopped):
        continual.measure(runner, plan)
    stops = False
    continual.measure(runner, plan)
    assert arrived == ["first", "second"]
    found = [record for record in runner.records.all("continual") if record.identity["method"] == "full"]
    assert len(found) == 1
    assert not [path for path in (runner.records.folder / "weights").iterdir() if path.is_dir()]

    whole = replace(runner, records=RecordFolder(runner.records.folder.parent / "whole"))
    continual.measure(whole, plan)
    (unbroken,) = (record for record in whole.records.all("continual") if record.identity["method"] == "full")
    assert found[0].result == unbroken.result


@pytest.mark.parametrize("variant", ["vit", "timm-vit:augreg", "dinov2-with-registers"])
def test_lora_computes_what_pefts_own_model_does(variant):
    pytest.importorskip("peft", reason="peft is not installed")
    family, model = library_model(variant)
    backbone = tiny_backbone(variant)
    torch.manual_seed(0)
    ours = LoraModel(backbone, 3)
    assert not any(parameter.any() for parameter in ours.head.parameters()), "as the heads of all methods start"
    for name, parameter in ours.vit.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        output = run_originals(ours._roles, images())
        judge = family.library_forward(ours.vit, images())
        plain = family.library_forward(model, images())
    for name, value in judge.items():
        torch.testing.assert_close(getattr(output, name), value, rtol=0, atol=1e-5)
        assert (value - plain[name]).abs().max() > 1e-2


def test_an_unmasked_task_beside_no_other_answers_as_it_does_alone():
    backbone = tiny_backbone()
    task = trained(backbone, "a", cells=3, regime="memory-unmasked")
    pixels = images()
    alone = StandaloneModel(backbone, task)(pixels)["a"]
    torch.testing.assert_close(_unmasked_answers(backbone, [task], pixels), alone, rtol=0, atol=1e-5)
    other = trained(backbone, "b", cells=3, regime="memory-unmasked")
    assert (_unmasked_answers(backbone, [task, other], pixels) - alone).abs().max() > 1e-2


@pytest.mark.parametrize("half", ["first half of the blocks", "second half of the blocks"])
def test_cells_of_the_other_half_are_not_read(half):
    backbone = tiny_backbone()
    sweep = VariantSweep(half, backbone, [Setting(trained(backbone, "a", cells=3), 0.1)], Recipe())
    _, gradients = sweep.backward(sweep.encode(images()), torch.tensor([0, 1]))
    sweep.accumulate(gradients)
    sweep.gradients()
    read = [bool(block.abs().sum() > 0) for block in sweep.cells.values.grad]
    middle = [2 * i >= backbone.depth for i in range(backbone.depth)]
    assert read == ([not second for second in middle] if half.startswith("first") else middle)


def test_cells_after_the_norm_are_the_raw_memory_of_imported_files():
    backbone = tiny_backbone()
    task = trained(backbone, "a", cells=3)
    pixels = images()
    sweep = VariantSweep("after the norm", backbone, [Setting(task, 0.1)], Recipe())
    with torch.no_grad():
        logits = sweep.logits(sweep.encode(pixels))[0]
    expected = MemoryViT(backbone, [replace(task, raw_memory=True)])(pixels)["a"]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    plain = TrunkSweep(backbone, [Setting(task, 0.1)], TaskGraph(), Recipe())
    assert (plain.logits(plain.encode(pixels))[0] - expected).abs().max() > 1e-2


# ------------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def backbone_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-backbone")
    library_model("vit")[1].save_pretrained(folder)
    facts = {"size": {"height": 32, "width": 32}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "ViTImageProcessor", **facts}))
    return str(folder)


def reproduce(experiment, data, backbone, out, *more):
    words = ["reproduce", experiment, "--data", str(data), "--backbone", backbone, "--out", str(out)]
    short = ["--steps", "2", "--per-class", "3", "--seeds", "0,1", "--workers", "0"]
    return CliRunner().invoke(app, [*words, *short, *more])


def test_a_second_run_changes_no_record_and_the_report_says_the_same_twice(data, backbone_folder, tmp_path):
    out, chosen = tmp_path / "out", ("--methods", "head; class; 5 cells; rank 8 + gains")
    assert reproduce("table2", data, backbone_folder, out, *chosen).exit_code == 0
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert len(list(out.rglob("training/*.json"))) == 2 * 4 * 2
    assert reproduce("table2", data, backbone_folder, out, *chosen).exit_code == 0
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == files
    check_report(out, "What was found", "Accuracy of every method", "Every dataset", "Where the numbers come from")


def check_report(out, *titles):
    """Both files hold the sections and the same numbers; the page asks for nothing from outside."""
    page, text = (out / "report.html").read_text(), (out / "report.md").read_text()
    for title in titles:
        assert title in page
        assert title in text
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", page)
    assert "nan" not in re.sub(r"<[^>]*>", " ", page).lower().split()
    numbers = re.findall(r"\d+\.\d \(\d+\.\d to \d+\.\d\)", text)
    assert numbers
    for number in numbers:
        assert number in page


@pytest.mark.slow
def test_all_experiments_run_twice_and_report_what_they_found(data, backbone_folder, tmp_path):
    pytest.importorskip("peft", reason="peft is not installed")
    out = tmp_path / "out"
    result = reproduce("all", data, backbone_folder, out, "--pictures", "first")
    assert result.exit_code == 0, result.output
    assert "extension is left out: none of first, second has a column coarse_label" in " ".join(result.output.split())
    records = {path: path.read_bytes() for path in out.rglob("*.json")}
    assert reproduce("concatenation", data, backbone_folder, out).exit_code == 0
    assert {path: path.read_bytes() for path in out.rglob("*.json")} == records
    kinds = {path.parent.name for path in records}
    assert kinds == {"training", "timing", "concatenation", "continual", "examples"}

    check_report(out, "What was found", "Tasks trained apart, put together", "Few images", "One image, one pass")

    together = json.loads(next((out / "concatenation").glob("*5-cells-first-second-seed-0.json")).read_text())["result"]
    assert together["original_identical"]
    for row in together["datasets"].values():
        assert row["alone_right"] == row["together_right"]
        assert row["largest_difference"] < 1e-5


def test_extension_trains_a_chain_and_a_diamond(data, backbone_folder, tmp_path):
    for name in ("first", "second"):
        files = sorted(path.relative_to(data) for path in (data / name).rglob("*.png"))
        coarse = {label: "xy"[i > 0] for i, label in enumerate(sorted({file.parts[1] for file in files}))}
        lines = [f"{file.as_posix()},{file.parts[1]},{coarse[file.parts[1]]}" for file in files]
        (data / f"{name}.csv").write_text("\n".join(["file,label,coarse_label", *lines]))
    out, chosen = tmp_path / "out", ("--datasets", "first.csv,second.csv", "--methods", "5 cells")
    result = reproduce("extension", data, backbone_folder, out, *chosen)
    assert result.exit_code == 0, result.output
    extends = [record.identity["extends"] for record in RecordFolder(out).all("training")]
    assert ["first.csv coarse_label"] in extends
    assert ["first.csv label", "second.csv coarse_label"] in extends
    check_report(out, "Tasks built on one another")


def test_extension_needs_coarse_labels(data, backbone_folder, tmp_path):
    result = reproduce("extension", data, backbone_folder, tmp_path / "out")
    assert result.exit_code == 1
    assert "has a column coarse_label" in str(result.exception)


def test_unknown_methods_are_refused_with_those_that_are_known(data, backbone_folder, tmp_path):
    result = reproduce("table2", data, backbone_folder, tmp_path / "out", "--methods", "head; heads")
    assert result.exit_code == 2
    assert "heads: table2 has head; class; 1 cell" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_a_dry_run_tells_the_cost_of_the_paper_without_data_or_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("vit_memory.families.vit._SHAPES", {"google/vit-base-patch32-224-in21k": (32, 2, 2, 32)})
    result = CliRunner().invoke(
        app, ["reproduce", "table2", "--scale", "paper", "--dry-run", "--out", str(tmp_path / "o")]
    )
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if line.startswith("inaturalist-2017")]
    assert any("LoRA" in row for row in rows)
    # 370 678 training images do not fit into 20 000 steps of 512 images often: every step is a new pass.
    assert re.search(r"million passes of one image, .*(h|days)", " ".join(result.output.split()))
    assert not (tmp_path / "o").exists()


def test_a_report_without_records_says_how_to_make_some(tmp_path):
    result = CliRunner().invoke(app, ["reproduce", "report", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "vit-memory reproduce table2" in str(result.exception)


def test_untrained_methods_start_as_the_table_says():
    task = new_task(tiny_backbone(), "t", ("a", "b"), **BOTH.arguments)
    assert task.method == BOTH.name
