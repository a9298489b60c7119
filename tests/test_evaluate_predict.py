"""vit-memory evaluate and predict: the model's own answers, counted right, streamed in order."""

import csv
import io
import json

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
from vit_memory.data.loading import Loader, default_workers
from vit_memory.data.sources import open_data
from vit_memory.data.splits import Split
from vit_memory.data.transforms import Evaluation
from vit_memory.errors import DataError, TaskError
from vit_memory.evaluation.answering import evaluate, open_model
from vit_memory.evaluation.metrics import score, wilson


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 60), classes=st.integers(2, 9), seed=st.integers(0, 1000))
def test_scores_are_those_of_scikit_learn(n, classes, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=generator)
    truth = torch.randint(0, classes, (n,), generator=generator)
    found = score(logits, truth, [str(i) for i in range(classes)])
    numbers = list(range(classes))
    assert found.confusion.tolist() == confusion_matrix(truth, logits.argmax(1), labels=numbers).tolist()
    assert found.top1 == pytest.approx((logits.argmax(1) == truth).double().mean())
    if classes > 5:
        assert found.top5 == pytest.approx(top_k_accuracy_score(truth, logits, k=5, labels=numbers))
    precision, recall, *_ = precision_recall_fscore_support(
        truth, logits.argmax(1), labels=numbers, zero_division=np.nan
    )
    for i, row in enumerate(found.per_class().values()):
        for ours, theirs in ((row["precision"], precision[i]), (row["recall"], recall[i])):
            assert (ours is None and np.isnan(theirs)) or ours == pytest.approx(theirs)
    low, high = found.interval
    assert 0 <= low <= found.top1 <= high <= 1
    assert 0 <= found.calibration_error <= 1


def test_an_honest_task_is_calibrated_and_a_boastful_one_is_not():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, 4, generator=generator)
    truth = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]  # right as often as it says
    assert score(logits, truth, "abcd").calibration_error < 0.02
    assert score(5 * logits, truth, "abcd").calibration_error > 0.2


def test_the_interval_is_wilsons():
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-3)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A backbone folder, a bundle of three tasks (one extends another), and photographs."""
    root = tmp_path_factory.mktemp("place")
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


def test_evaluating_several_tasks_gives_each_what_the_model_answers(place):
    said = CliRunner().invoke(app, ["evaluate", str(place / "zoo"), "--data", str(place / "photos"), "--json"])
    assert said.exit_code == 0, (said.output, said.exception)
    told = json.loads(said.stdout)["tasks"]
    assert set(told) == {"kinds", "again"}  # sizes answers other labels
    dataset = open_data(place / "photos")
    model = Bundle.open(place / "zoo").model()
    batch = next(Loader(dataset.test, Evaluation(model.backbone.preprocessing), 64).batches())
    outputs = model(batch.images)
    for name in told:
        answers = [model.tasks[name].labels[i] for i in outputs[name].argmax(1)]
        right = np.mean([LABELS[label] == answer for label, answer in zip(batch.targets, answers, strict=True)])
        assert told[name]["top1"] == pytest.approx(right)
        assert told[name]["images"] == 6
    page = CliRunner().invoke(app, ["evaluate", str(place / "kinds.safetensors"), "--data", str(place / "photos")])
    assert "kinds: " in page.output
    assert "95 % interval" in page.output


def test_labels_that_do_not_match_are_named(place):
    words = ["evaluate", str(place / "zoo"), "--data", str(place / "photos"), "--task", "sizes"]
    said = CliRunner().invoke(app, words)
    assert isinstance(said.exception, DataError)
    assert "task 'sizes' answers other labels than the images have: 3 it does not know (ant, bee, cow)" in str(
        said.exception
    )
    wrong = CliRunner().invoke(app, ["evaluate", str(place / "zoo"), "--data", str(place / "photos"), "--split", "dev"])
    assert wrong.exit_code == 2
    nowhere = CliRunner().invoke(app, ["evaluate", str(place / "nothing"), "--data", str(place / "photos")])
    assert isinstance(nowhere.exception, TaskError)


def test_predictions_stream_in_order_with_bad_images_in_their_place(place, monkeypatch):
    from vit_memory.evaluation import answering

    monkeypatch.setattr(answering, "_AT_ONCE", 4)  # so that a small folder streams in many chunks
    for i, name in enumerate(("0-bad.jpg", "5-bad.jpg")):
        (place / "photos/bee" / name).write_bytes(b"bad %d" % i)
    words = ["predict", str(place / "photos"), "--bundle", str(place / "zoo"), "--batch", "3"]
    lines = [json.loads(line) for line in CliRunner().invoke(app, [*words, "--format", "jsonl"]).stdout.splitlines()]
    assert [line["image"] for line in lines] == sorted(line["image"] for line in lines)
    assert len(lines) == 32
    assert [line["image"][-9:] for line in lines if "error" in line] == ["0-bad.jpg", "5-bad.jpg"]
    rows = list(csv.DictReader(io.StringIO(CliRunner().invoke(app, [*words, "--format", "csv"]).stdout)))
    assert [row["kinds"] for row in rows] == [line["tasks"].get("kinds", {}).get("label", "") for line in lines]
    model = Bundle.open(place / "zoo").model()
    from vit_memory.data.decoding import decode

    transform = Evaluation(model.backbone.preprocessing)
    for line in (lines[0], lines[-1]):
        with open(line["image"], "rb") as file:  # noqa: PTH123
            pixels = transform(decode(file.read(), line["image"]))[None]
        outputs = model(transform.normalised(pixels))
        for name, said in line["tasks"].items():
            chances = outputs[name].softmax(-1)[0]
            assert said["label"] == model.tasks[name].labels[int(chances.argmax())]
            assert said["confidence"] == pytest.approx(float(chances.max()), abs=1e-5)


def test_only_bad_images_is_exit_code_1_and_a_missing_path_2(place, tmp_path):
    (tmp_path / "bad.jpg").write_bytes(b"no")
    said = CliRunner().invoke(app, ["predict", str(tmp_path / "bad.jpg"), "--bundle", str(place / "kinds.safetensors")])
    assert said.exit_code == 1
    assert "bad.jpg  error: not an image" in said.output
    assert CliRunner().invoke(app, ["predict", str(tmp_path / "x"), "--bundle", str(place / "zoo")]).exit_code == 2


def test_every_bad_image_is_answered_by_its_reason_also_the_same_one_twice(place, tmp_path):
    bad, good = tmp_path / "bad.jpg", place / "photos/ant/000.png"
    bad.write_bytes(b"no")
    for paths, code in (([bad, bad], 1), ([bad, good, bad], 0)):
        words = ["predict", *map(str, paths), "--bundle", str(place / "kinds.safetensors"), "--format", "jsonl"]
        said = CliRunner().invoke(app, words)
        assert said.exit_code == code, (said.output, said.exception)
        lines = [json.loads(line) for line in said.stdout.splitlines()]
        assert [line["image"] for line in lines] == [str(path) for path in paths]
        assert [line.get("error", "")[:12] for line in lines] == ["not an image" if p == bad else "" for p in paths]


def test_scores_of_nothing_but_bad_images_are_refused(place, tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(name.encode())
    split = Split.of(ImageFiles((str(tmp_path / "a.png"), str(tmp_path / "b.png"))), [0, 1])
    model = open_model([place / "kinds.safetensors"])
    with pytest.raises(DataError, match=r"not one image can be used; the first, .*a\.png: not an image"):
        evaluate(model, split, LABELS, ["kinds"], workers=default_workers(), on_bad_image="skip")


def test_tasks_that_saw_differently_prepared_images_are_not_asked_in_one_pass(place):
    from dataclasses import replace

    from vit_memory.evaluation.answering import preprocessing_of

    backbone = load_backbone(place / "backbone")
    small = trained(backbone, "small", labels=LABELS)
    small = replace(small, record=replace(small.record, preprocessing=backbone.preprocessing.at(16)))
    model = MemoryViT(backbone, [small, trained(backbone, "usual", labels=LABELS)])
    with pytest.raises(TaskError, match="trained on differently prepared images; ask them apart"):
        preprocessing_of(model, ["small", "usual"])
    assert preprocessing_of(model, ["small"]).resize == (16, 16)


def test_evaluate_leaves_bad_images_out_where_it_is_told_to(place, tmp_path):
    photos = write_folder(tmp_path / "photos", pictures(10))
    for path in photos.glob("bee/*.png"):
        path.write_bytes(b"bad " + path.name.encode())
    words = ["evaluate", str(place / "kinds.safetensors"), "--data", str(photos)]
    stopped = CliRunner().invoke(app, words)
    assert "--on-bad-image skip" in str(stopped.exception)
    said = CliRunner().invoke(app, [*words, "--on-bad-image", "skip", "--json"])
    assert said.exit_code == 0, said.exception
    record = json.loads(said.stdout)
    assert len(record["skipped"]) == 2
    assert record["tasks"]["kinds"]["images"] == 4
