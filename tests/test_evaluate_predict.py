"""vit-memory evaluate and predict: the outputs of the model, scored as by scikit-learn, and printed in order."""

import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support, top_k_accuracy_score
from typer.testing import CliRunner

from builders import library_model, trained
from data.test_sources import LABELS, pictures, write_folder
from vit_memory import Bundle, MemoryViT, load_backbone, save_task
from vit_memory.cli import app
from vit_memory.data.images import ImageFiles
from vit_memory.data.loading import BadImages, Loader, default_workers
from vit_memory.data.sources import open_data
from vit_memory.data.splits import Split
from vit_memory.data.transforms import EvalTransform
from vit_memory.errors import DataError, TaskError
from vit_memory.evaluation.inference import evaluate
from vit_memory.evaluation.metrics.intervals import wilson_interval
from vit_memory.evaluation.metrics.single_label import score_single_label
from vit_memory.evaluation.models import open_model, preprocessing_of


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 60), classes=st.integers(2, 12), seed=st.integers(0, 1000))
def test_scores_are_those_of_scikit_learn(n, classes, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=generator)
    truth = torch.randint(0, classes, (n,), generator=generator)
    scores = score_single_label(logits, truth, [str(i) for i in range(classes)])
    numbers = list(range(classes))
    assert scores.confusion.tolist() == confusion_matrix(truth, logits.argmax(1), labels=numbers).tolist()
    assert scores.accuracy == pytest.approx((logits.argmax(1) == truth).double().mean())
    if classes < 10:
        assert scores.top5_accuracy is None  # half of the labels are among five by chance
    else:
        assert scores.top5_accuracy == pytest.approx(top_k_accuracy_score(truth, logits, k=5, labels=numbers))
    precision, recall, *_ = precision_recall_fscore_support(
        truth, logits.argmax(1), labels=numbers, zero_division=np.nan
    )
    for i, row in enumerate(scores.per_class().values()):
        for ours, theirs in ((row["precision"], precision[i]), (row["recall"], recall[i])):
            assert (ours is None and np.isnan(theirs)) or ours == pytest.approx(theirs)
    low, high = scores.interval
    assert 0 <= low <= scores.accuracy <= high <= 1
    assert 0 <= scores.calibration_error <= 1


def test_the_calibration_error_is_small_for_true_probabilities_and_large_for_overconfident_ones():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, 4, generator=generator)
    truth = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]  # drawn from the probabilities
    assert score_single_label(logits, truth, "abcd").calibration_error < 0.02
    assert score_single_label(5 * logits, truth, "abcd").calibration_error > 0.2


def test_the_interval_is_that_of_wilson():
    assert wilson_interval(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson_interval(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-3)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A backbone folder, a bundle of three tasks (one extends another), and photographs."""
    root = tmp_path_factory.mktemp("root")
    library_model("vit")[1].save_pretrained(root / "backbone")
    facts = {"size": {"height": 32, "width": 32}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (root / "backbone/preprocessor_config.json").write_text(json.dumps(facts))
    backbone = load_backbone(root / "backbone")
    kinds = trained(backbone, "kinds", labels=LABELS)
    sizes = trained(backbone, "sizes", labels=("large", "small"))
    again = trained(backbone, "again", labels=LABELS[::-1], parents=[kinds])
    Bundle.create(root / "zoo", backbone, [kinds, sizes, again])
    save_task(kinds, root / "kinds.safetensors")
    write_folder(root / "photos", pictures(10))
    return root


def test_evaluate_scores_every_task_on_the_outputs_of_the_model(root):
    result = CliRunner().invoke(app, ["evaluate", str(root / "zoo"), "--data", str(root / "photos"), "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    scored = json.loads(result.stdout)["tasks"]
    assert set(scored) == {"kinds", "again"}  # sizes has other labels
    dataset = open_data(root / "photos")
    model = Bundle.open(root / "zoo").model()
    batch = next(Loader(dataset.test, EvalTransform(model.backbone.preprocessing), 64).batches())
    outputs = model(batch.images)
    for name in scored:
        answers = [model.tasks[name].labels[i] for i in outputs[name].argmax(1)]
        right = np.mean([LABELS[label] == answer for label, answer in zip(batch.targets, answers, strict=True)])
        assert scored[name]["top1"] == pytest.approx(right)
        assert scored[name]["images"] == 6
    page = CliRunner().invoke(app, ["evaluate", str(root / "kinds.safetensors"), "--data", str(root / "photos")])
    assert "kinds: " in page.output
    assert "95 % interval" in page.output


def test_labels_that_do_not_match_are_named(root):
    words = ["evaluate", str(root / "zoo"), "--data", str(root / "photos"), "--task", "sizes"]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, DataError)
    assert (
        "task 'sizes' has other labels than the images: 3 of the images' labels are unknown to it (ant, bee, cow)"
        in str(result.exception)
    )
    wrong = CliRunner().invoke(app, ["evaluate", str(root / "zoo"), "--data", str(root / "photos"), "--split", "dev"])
    assert wrong.exit_code == 2
    nowhere = CliRunner().invoke(app, ["evaluate", str(root / "nothing"), "--data", str(root / "photos")])
    assert isinstance(nowhere.exception, TaskError)


def test_predictions_stream_in_order_with_bad_images_in_their_place(root, monkeypatch):
    from vit_memory.evaluation import inference

    monkeypatch.setattr(inference, "_CHUNK", 4)  # so that a small folder streams in many chunks
    for i, name in enumerate(("0-bad.jpg", "5-bad.jpg")):
        (root / "photos/bee" / name).write_bytes(b"bad %d" % i)
    words = ["predict", str(root / "photos"), "--bundle", str(root / "zoo"), "--batch", "3"]
    lines = [json.loads(line) for line in CliRunner().invoke(app, [*words, "--format", "jsonl"]).stdout.splitlines()]
    assert [line["image"] for line in lines] == sorted(line["image"] for line in lines)
    assert len(lines) == 32
    assert [line["image"][-9:] for line in lines if "error" in line] == ["0-bad.jpg", "5-bad.jpg"]
    rows = list(csv.DictReader(io.StringIO(CliRunner().invoke(app, [*words, "--format", "csv"]).stdout)))
    assert [row["kinds"] for row in rows] == [line["tasks"].get("kinds", {}).get("label", "") for line in lines]
    model = Bundle.open(root / "zoo").model()
    from vit_memory.data.decoding import decode

    transform = EvalTransform(model.backbone.preprocessing)
    for line in (lines[0], lines[-1]):
        with open(line["image"], "rb") as file:  # noqa: PTH123
            pixels = transform(decode(file.read(), line["image"]))[None]
        outputs = model(transform.normalised(pixels))
        for name, prediction in line["tasks"].items():
            probabilities = outputs[name].softmax(-1)[0]
            assert prediction["label"] == model.tasks[name].labels[int(probabilities.argmax())]
            assert prediction["confidence"] == pytest.approx(float(probabilities.max()), abs=1e-5)


def test_an_answer_that_is_not_a_number_names_no_label_and_leaves_the_others_alone(root, tmp_path):
    kinds = Bundle.open(root / "zoo").model().tasks["kinds"]
    broken = replace(kinds, name="broken", head_weight=torch.full_like(kinds.head_weight, 3e38))
    save_task(broken, tmp_path / "broken.safetensors")
    words = ["predict", str(root / "photos/ant"), "--bundle", str(root / "kinds.safetensors")]
    alone = CliRunner().invoke(app, [*words, "--backbone", str(root / "backbone"), "--format", "jsonl"]).stdout
    words += ["--bundle", str(tmp_path / "broken.safetensors"), "--backbone", str(root / "backbone")]
    lines = [
        json.loads(line)["tasks"] for line in CliRunner().invoke(app, [*words, "--format", "jsonl"]).stdout.splitlines()
    ]
    assert all(line["broken"] == {"not_a_number": True} for line in lines)
    assert [line["kinds"]["label"] for line in lines] == [
        json.loads(line)["tasks"]["kinds"]["label"] for line in alone.splitlines()
    ]
    rows = csv.DictReader(io.StringIO(CliRunner().invoke(app, [*words, "--format", "csv"]).stdout))
    assert {(row["broken"], row["broken confidence"]) for row in rows} == {("nan", "nan")}
    assert "broken: not a number" in CliRunner().invoke(app, words).stdout


def test_only_bad_images_is_exit_code_1_and_a_missing_path_2(root, tmp_path):
    (tmp_path / "bad.jpg").write_bytes(b"no")
    result = CliRunner().invoke(
        app, ["predict", str(tmp_path / "bad.jpg"), "--bundle", str(root / "kinds.safetensors")]
    )
    assert result.exit_code == 1
    assert "bad.jpg  error: not an image" in result.output
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(app, ["predict", str(tmp_path / "empty"), "--bundle", str(root / "kinds.safetensors")])
    assert result.exit_code == 1
    assert result.stderr.endswith(f"no images in {tmp_path / 'empty'}.\n")
    assert CliRunner().invoke(app, ["predict", str(tmp_path / "x"), "--bundle", str(root / "zoo")]).exit_code == 2


def test_every_bad_image_gets_its_reason_also_the_same_one_twice(root, tmp_path):
    bad, good = tmp_path / "bad.jpg", root / "photos/ant/000.png"
    bad.write_bytes(b"no")
    for paths, code in (([bad, bad], 1), ([bad, good, bad], 0)):
        words = ["predict", *map(str, paths), "--bundle", str(root / "kinds.safetensors"), "--format", "jsonl"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == code, (result.output, result.exception)
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        assert [line["image"] for line in lines] == [str(path) for path in paths]
        assert [line.get("error", "")[:12] for line in lines] == ["not an image" if p == bad else "" for p in paths]


def test_scores_of_nothing_but_bad_images_are_refused(root, tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(name.encode())
    split = Split.of(ImageFiles((str(tmp_path / "a.png"), str(tmp_path / "b.png"))), [0, 1])
    model = open_model([root / "kinds.safetensors"])
    with pytest.raises(DataError, match=r"not one image can be used; the first, .*a\.png: not an image"):
        evaluate(model, split, LABELS, ["kinds"], workers=default_workers(), skipped=BadImages())


def test_tasks_with_different_preprocessing_are_not_run_in_one_pass(root):
    from dataclasses import replace

    backbone = load_backbone(root / "backbone")
    small = trained(backbone, "small", labels=LABELS)
    small = replace(small, record=replace(small.record, preprocessing=backbone.preprocessing.at(16)))
    model = MemoryViT(backbone, [small, trained(backbone, "usual", labels=LABELS)])
    with pytest.raises(TaskError, match="trained with different preprocessing; run them separately"):
        preprocessing_of(model, ["small", "usual"])
    assert preprocessing_of(model, ["small"]).resize == (16, 16)


def test_evaluate_skips_bad_images_on_request(root, tmp_path):
    photos = write_folder(tmp_path / "photos", pictures(10))
    for path in photos.glob("bee/*.png"):
        path.write_bytes(b"bad " + path.name.encode())
    words = ["evaluate", str(root / "kinds.safetensors"), "--data", str(photos)]
    stopped = CliRunner().invoke(app, words)
    assert "--on-bad-image skip" in str(stopped.exception)
    result = CliRunner().invoke(app, [*words, "--on-bad-image", "skip", "--json"])
    assert result.exit_code == 0, result.exception
    record = json.loads(result.stdout)
    assert len(record["skipped"]) == 2
    assert record["tasks"]["kinds"]["images"] == 4
