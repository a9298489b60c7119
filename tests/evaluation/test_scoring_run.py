"""Predictions in parts: the values of `predict`, whole parts or none, other settings refused by name; without Ray."""

import json
import math
import os
import signal

import pyarrow.fs
import pyarrow.parquet as pq
import pytest
import torch

from builders import tiny_backbone, trained
from vit_memory.data.stored_files import StoredFiles, StoredFolder, images_at
from vit_memory.errors import BadImage, DamagedFile, DataError, FileError, TaskError
from vit_memory.evaluation.inference import FilePrediction
from vit_memory.evaluation.prediction_table import schema_of, table_of
from vit_memory.evaluation.scoring_run import begin_run, write_part
from vit_memory.predictions import predictions

NAMES = [f"photos/{i}.jpg" for i in range(5)]
SETTINGS = {"images": ["photos"], "task pets": "abc", "images per pass": 64}


@pytest.fixture(scope="module")
def tasks():
    backbone = tiny_backbone()
    return [
        trained(backbone, "pets", labels=["cat", "dog"]),
        trained(backbone, "parts", kind="multi-label"),
        trained(backbone, "size", kind="regression", labels=["height", "width"]),
    ]


def test_the_table_holds_the_values_of_jsonl_in_the_columns_of_csv(tasks):
    outputs = [torch.randn(1, len(task.labels), generator=torch.Generator().manual_seed(3)) for task in tasks]
    good = {task.name: next(predictions(task, output)) for task, output in zip(tasks, outputs, strict=True)}
    nan = {task.name: next(predictions(task, torch.full((1, len(task.labels)), math.nan))) for task in tasks}
    files = [FilePrediction("a.jpg", good), FilePrediction("b\udcff.jpg", {}, "no image"), FilePrediction("c.jpg", nan)]
    rows = table_of(tasks, files).to_pylist()
    expected = {name: one.as_json() for name, one in good.items()}
    assert rows[0] == {
        "path": "a.jpg",
        "error": None,
        "pets": expected["pets"]["label"],
        "pets confidence": expected["pets"]["confidence"],
        "parts": [one["label"] for one in expected["parts"]["labels"]],
        "parts probabilities": [one["probability"] for one in expected["parts"]["labels"]],
        "size height": expected["size"]["values"]["height"],
        "size width": expected["size"]["values"]["width"],
    }
    assert (rows[1].pop("path"), rows[1].pop("error")) == ("b\\xff.jpg", "no image")
    assert set(rows[1].values()) == {None}
    assert rows[2]["pets"] is None
    assert math.isnan(rows[2]["pets confidence"])
    assert math.isnan(rows[2]["size width"])


def test_two_columns_of_one_name_are_refused(tasks):
    with pytest.raises(TaskError, match="two columns would be called 'error': give a task another name"):
        schema_of([trained(tiny_backbone(), "error")])


def test_a_run_goes_on_with_its_own_list_and_refuses_other_settings_by_name(tasks, tmp_path):
    out = str(tmp_path / "out")
    run = begin_run(out, SETTINGS, NAMES, 2)
    assert (run.parts, run.names(2), run.complete()) == (3, ("photos/4.jpg",), set())
    write_part(out, 1, table_of(tasks, [FilePrediction(name, {}, "bad") for name in run.names(1)]))
    again = begin_run(out, SETTINGS, [*NAMES, "photos/new.jpg"], 2)
    assert (again.images, again.complete()) == (tuple(NAMES), {1})
    with pytest.raises(FileError, match="task pets: abc there, def here; images per pass: 64 there, 32 here"):
        begin_run(out, {**SETTINGS, "task pets": "def", "images per pass": 32}, NAMES, 2)
    with pytest.raises(FileError, match="part size: 2 there, 3 here"):
        begin_run(out, SETTINGS, NAMES, 3)
    with pytest.raises(FileError, match="task birds: null there, x here"):
        begin_run(out, {**SETTINGS, "task birds": "x"}, NAMES, 2)
    (tmp_path / "out" / "images.jsonl").write_text('"other.jpg"\n')
    with pytest.raises(DamagedFile, match="images.jsonl: is not the list that the run began with"):
        begin_run(out, SETTINGS, NAMES, 2)
    (tmp_path / "out" / "run.json").write_text(json.dumps({"format": "other/1", "settings": {}, "images sha256": ""}))
    with pytest.raises(FileError, match="its format is 'other/1'"):
        begin_run(out, SETTINGS, NAMES, 2)


def test_a_folder_of_something_else_and_no_images_are_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(FileError, match="holds thesis.tex, which is no part of a run"):
        begin_run(str(tmp_path), SETTINGS, NAMES, 2)
    with pytest.raises(DataError, match="no images"):
        begin_run(str(tmp_path / "new"), SETTINGS, [], 2)
    assert not (tmp_path / "new").exists()


class Elsewhere:
    """The local disk as any other filesystem is written to: under another name, then moved."""

    def __init__(self, move=None):
        self._disk = pyarrow.fs.LocalFileSystem()
        self.move = move or self._disk.move

    def __getattr__(self, name):
        return getattr(self._disk, name)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked writers")
@pytest.mark.parametrize("place", ["on this machine", "elsewhere"])
def test_a_part_whose_writer_is_killed_does_not_count(tmp_path, tasks, monkeypatch, place):
    out = str(tmp_path / "out") if place == "on this machine" else "elsewhere://out"

    def use(filesystem):
        monkeypatch.setattr("vit_memory.data.stored_files._opened", lambda _: (filesystem, str(tmp_path / "out")))

    use(Elsewhere())
    run = begin_run(out, SETTINGS, NAMES, 5)
    table = table_of(tasks, [FilePrediction(name, {}, "bad") for name in NAMES])
    child = os.fork()
    if not child:
        use(Elsewhere(move=die))
        monkeypatch.setattr("vit_memory.atomic.os.fsync", die)
        write_part(out, 0, table)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert [name for name in run.folder.names() if name.endswith(".partial")], "it was killed while it wrote"
    assert run.complete() == set()
    write_part(out, 0, table)
    assert begin_run(out, SETTINGS, NAMES, 5).complete() == {0}
    assert pq.read_table(tmp_path / "out" / "part-00000.parquet").num_rows == 5


def test_addresses_are_listed_and_read_as_folders_are(tmp_path):
    folder = tmp_path / "some photos"
    (folder / "sub").mkdir(parents=True)
    for name in ("b.jpg", "a.PNG", "sub/c d.jpg", "notes.txt", ".hidden.jpg"):
        (folder / name).write_bytes(name.encode())
    address = folder.as_uri()
    names = tuple(images_at(f"{address}/"))
    assert [name.removeprefix(address) for name in names] == ["/a.PNG", "/b.jpg", "/sub/c d.jpg"]
    files = StoredFiles((*names, f"{address}/gone.jpg", str(folder / "b.jpg")), (f"{address}/",))
    assert [files.read(i) for i in (0, 2, 4)] == [b"a.PNG", b"sub/c d.jpg", b"b.jpg"]
    with pytest.raises(BadImage, match="gone.jpg: cannot be read"):
        files.read(3)
    single = f"{address}/b.jpg"
    assert list(images_at(single)) == [single]
    assert StoredFiles((single,), (single,)).read(0) == b"b.jpg"
    with pytest.raises(DataError, match="no such file or folder"):
        list(images_at(f"{address}/nowhere"))
    with pytest.raises(DataError, match="the address holds a password"):
        StoredFolder("s3://key:secret@bucket/x").names()
    with pytest.raises(DataError, match="nothing://x: cannot be opened"):
        StoredFolder("nothing://x").names()
