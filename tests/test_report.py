"""The report of a training or an evaluation: one page that needs nothing else, with the numbers of `evaluate`."""

import csv
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from builders import library_model, trained
from data.test_sources import as_png, pictures, write_folder
from vit_memory import MemoryViT, load_backbone
from vit_memory.cli import app
from vit_memory.data.images import ImageArray
from vit_memory.data.splits import Split
from vit_memory.errors import FileError
from vit_memory.evaluation.inference import evaluate
from vit_memory.evaluation.metrics import score_task
from vit_memory.report.page import About, ScoredSplit, write_report

HOSTILE = '<script>alert("1")</script>'
LABELS = ("ant", HOSTILE, "cow & calf's")
TINTS = ("red", "<b>round", "")
QUICK = ("--steps", "4", "--batch", "8", "--evaluate-every", "2")
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """A parsed page; fails on tags that are not closed in order."""

    def __init__(self, path):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self.open
        self.text = re.sub(r"\s+", " ", " ".join(self.words)).replace("\u202f", " ")

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    def check_self_contained(self):
        assert "script" not in self.tags
        for tag, name, value in self.attributes:
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
                assert value.startswith(("data:image/", "#")), (tag, name, value)
            assert all(target.startswith("#") for target in re.findall(r"url\(['\"]?([^)]*)", value))
        names = [value for _, name, value in self.attributes if name == "id"]
        assert len(names) == len(set(names))


def run(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def train(place, name, out, *more, data="table.csv"):
    return run("train", place / data, "--name", name, "--backbone", place / "backbone", "--out", out, *more)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A backbone, a table of images with three kinds of targets, and a run of every kind."""
    root = tmp_path_factory.mktemp("report")
    library_model("vit")[1].save_pretrained(root / "backbone")
    facts = {"size": {"height": 32, "width": 32}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (root / "backbone/preprocessor_config.json").write_text(json.dumps(facts))
    rng = np.random.default_rng(0)
    rows = []
    for i in range(48):
        (root / f"{i}.png").write_bytes(as_png(rng.integers(0, 256, (12, 12, 3), np.uint8)))
        tints = ";".join(tint for j, tint in enumerate(TINTS[:2]) if i % (j + 2) == 0)
        rows.append((f"{i}.png", LABELS[i % 3], tints, f"{rng.normal():.3f}"))
    with (root / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "label", "tint", "level <i>"), *rows])
    train(root, "beast", root / "single-label", *QUICK)
    train(root, "tint", root / "multi-label", "--label-column", "tint", *QUICK)
    train(root, "level", root / "regression", "--label-column", "level <i>", *QUICK)
    return root


HEADLINES = {
    "single-label": lambda one: f"{100 * one['top1']:.1f} %",
    "multi-label": lambda one: f"{one['mAP']:.3f}",
    "regression": lambda one: f"{one['r2']:.3f}",
}
SECTIONS = {
    "single-label": ("Confusion matrix", "Classes", "Calibration", "Most confident mistakes", "Attention of the class"),
    "multi-label": ("Labels", "Precision and recall", "threshold", "Most confident mistakes"),
    "regression": ("Values", "Predicted and true values", "Largest errors", "95 % interval"),
}


@pytest.mark.parametrize("kind", HEADLINES)
def test_a_training_leaves_a_report_with_the_numbers_of_evaluate(place, kind):
    (file,) = [path for path in (place / kind).glob("*.safetensors") if path.stem != "checkpoint"]
    page = Page(place / kind / "report.html")
    page.check_self_contained()
    scores = json.loads(run("evaluate", file, "--data", place / "table.csv", "--json").stdout)["tasks"]
    assert page.words[page.words.index(file.stem) :]  # the name is the heading
    assert HEADLINES[kind](scores[file.stem]) in [word.strip() for word in page.words]
    assert all(title in page.text for title in (*SECTIONS[kind], "Training", "Settings", "5 cells, rate 0.002"))
    assert "took no part in training or in the choice of the setting" in page.text
    assert page.tags.count("svg") >= 3
    assert (place / kind / "report.html").stat().st_size < 3_000_000


def test_a_branch_on_datasets_of_every_kind_leaves_one_page_with_the_numbers_of_evaluate(place, tmp_path):
    _, *rows = csv.reader((place / "table.csv").read_text().splitlines())
    for column, kind in enumerate(HEADLINES, 1):
        with (place / f"{kind}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("file", "label"), *((row[0], row[column]) for row in rows)])
    data = [word for kind in HEADLINES for word in ("--data", place / f"{kind}.csv")]
    words = ("branch", "train", "--name", "domain", *data, "--backbone", place / "backbone", "--blocks", "1")
    done = run(*words, "--out", tmp_path / "run", *QUICK)
    page = Page(tmp_path / "run/report.html")
    page.check_self_contained()
    words = [word.strip() for word in page.words]
    assert "domain: a branch with 3 tasks on 3 datasets" in words
    assert [words.count(title) for title in ("Training", "Settings", "Confusion matrix", "Values")] == [1] * 4
    assert all(
        title in page.text for titles in SECTIONS.values() for title in titles if not title.startswith("Attention")
    )
    best = max(json.loads((tmp_path / "run/settings.json").read_text()), key=lambda row: row["validation_mean_score"])
    assert {best["setting"], f"{best['parameters']:,}".replace(",", "\u202f")} <= set(words)
    for kind, headline in HEADLINES.items():
        file = tmp_path / f"run/{kind}.safetensors"
        scores = json.loads(run("evaluate", file, "--data", place / f"{kind}.csv", "--json").stdout)["tasks"][kind]
        article = words[words.index(f"{kind} task, scored on test images") :]
        assert article[article.index(headline(scores)) + 1 :]
        assert f"report.html: {kind}, test " in done.stdout
    assert page.text.count("took no part in training or in the choice of the setting") == 3


def test_labels_and_names_are_text_and_never_markup(place):
    for kind, hostile in (("single-label", HOSTILE), ("multi-label", "<b>round"), ("regression", "level <i>")):
        assert hostile in Page(place / kind / "report.html").text
        assert hostile not in (place / kind / "report.html").read_text()


def test_a_bundle_of_mixed_kinds_is_reported_on_one_page(place, tmp_path):
    files = [place / "single-label/beast", place / "multi-label/tint", place / "regression/level"]
    run("bundle", "create", tmp_path / "zoo", *(f"{file}.safetensors" for file in files))
    words = ("evaluate", tmp_path / "zoo", "--data", place / "table.csv", "--split", "validation")
    run(*words, "--report", tmp_path / "pages/zoo.html")
    page = Page(tmp_path / "pages/zoo.html")
    page.check_self_contained()
    assert {"#beast", "#tint", "#level"} <= {value for _, name, value in page.attributes if name == "href"}
    assert all(title in page.text for titles in SECTIONS.values() for title in titles)
    assert "These are validation images." in page.text


@pytest.mark.parametrize("kind", ["single-label", "multi-label", "regression"])
def test_a_task_without_answers_for_some_images_is_reported_as_such(place, tmp_path, kind):
    backbone = load_backbone(place / "backbone")
    model = MemoryViT(backbone, [trained(backbone, "broken", labels=("a", "b"), kind=kind)])
    pixels = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), np.uint8)
    targets = np.arange(12) % 2 if kind == "single-label" else np.random.default_rng(1).integers(0, 2, (12, 2)) * 1.0
    split = Split.of(ImageArray.whole("noise", pixels), targets, kind)
    whole = evaluate(model, split, ("a", "b"), ["broken"])["broken"]
    outputs = whole.outputs.clone()
    outputs[:5] = torch.nan
    scores = score_task(whole.task, outputs, whole.targets)
    scored = {"broken": replace(whole, outputs=outputs, scores=scores)}
    write_report(tmp_path / "page.html", model, [ScoredSplit(split, scored, About("noise", "test", "Noise."))])
    page = Page(tmp_path / "page.html")
    page.check_self_contained()
    if kind == "single-label":
        assert "5 images without an answer: the output is NaN or infinite." in page.text
        assert "no answer (NaN)" in page.text[page.text.index("Most confident mistakes") :]


def test_a_page_that_cannot_be_written_is_refused_before_any_work(place, tmp_path, monkeypatch):
    monkeypatch.setattr("vit_memory.evaluation.models.open_model", lambda *_: pytest.fail("the model was loaded"))
    (tmp_path / "file").write_text("")
    for path, reason in (
        (tmp_path, "is a folder"),
        (tmp_path / "file/page.html", "cannot be written, Not a directory"),
    ):
        words = ["evaluate", str(place / "single-label/beast.safetensors"), "--data", str(place / "table.csv")]
        done = CliRunner().invoke(app, [*words, "--report", str(path)])
        assert isinstance(done.exception, FileError)
        assert reason in str(done.exception)
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


def test_without_a_test_split_the_report_says_that_its_images_chose_the_setting(place, tmp_path):
    write_folder(place / "photos/train", pictures(4))
    write_folder(place / "photos/val", pictures(2, seed=1))
    (place / "photos/train/ant/broken.png").write_bytes(b"no picture")
    words = ("--regime", "head", "--on-bad-image", "skip", *QUICK)
    result = train(place, "birds", tmp_path / "run", *words, data="photos")
    page = Page(tmp_path / "run/report.html")
    assert "There is no test split" in page.text
    assert "The same images also chose the setting" in page.text
    assert "regime head has no class token" in page.text
    assert "broken.png" in page.text[page.text.index("Images left out") :]
    assert "report.html: validation accuracy" in result.stdout


def test_the_report_can_be_left_out(place, tmp_path):
    train(place, "beast", tmp_path / "run", "--no-report", *QUICK)
    assert not (tmp_path / "run/report.html").exists()


@pytest.mark.parametrize("classes", [2, 13, 200, 900])
def test_the_confusion_of_few_and_of_many_classes_fits_the_page(place, tmp_path, classes):
    backbone = load_backbone(place / "backbone")
    labels = [f"class {i}" for i in range(classes)]
    model = MemoryViT(backbone, [trained(backbone, "many", labels=labels)])
    pixels = np.random.default_rng(0).integers(0, 256, (max(40, classes), 8, 8, 3), np.uint8)
    split = Split.of(ImageArray.whole("noise", pixels), np.arange(len(pixels)) % classes)
    scored = evaluate(model, split, labels, ["many"])
    write_report(tmp_path / "page.html", model, [ScoredSplit(split, scored, About("noise", "test", "Noise."))])
    page = Page(tmp_path / "page.html")
    page.check_self_contained()
    assert (tmp_path / "page.html").stat().st_size < 3_000_000
    assert page.tags.count("tr") < 2 * classes + 60
    assert scored["many"].outputs.shape == torch.Size((len(pixels), classes))
