"""vit-memory predict --ray: the answers of predict without it, in parts that survive a kill."""

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from builders import trained
from ray_builders import end_all, needs_ray, started
from vit_memory import Bundle, load_backbone
from vit_memory.cli import app
from vit_memory.errors import ServingError

pytestmark = [pytest.mark.slow, needs_ray]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A bundle with a task of every kind, and a folder of images, two of them bad."""
    root = tmp_path_factory.mktemp("root")
    backbone = load_backbone("bundled")
    tasks = [
        trained(backbone, "pets", labels=["cat", "dog", "bird"]),
        trained(backbone, "parts", kind="multi-label"),
        trained(backbone, "size", kind="regression", labels=["height"]),
    ]
    Bundle.create(root / "zoo", backbone, tasks)
    (root / "photos" / "more").mkdir(parents=True)
    for i in range(60):
        folder = root / "photos" / ("more" if i % 3 == 0 else "")
        noise = np.random.default_rng(i).integers(0, 256, (5, 4, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((40, 30)).save(folder / f"{i:02d} photo.jpg")
    (root / "photos" / "05 photo.jpg").write_bytes(b"no image")
    (root / "photos" / "more" / "06 photo.jpg").write_bytes(b"")
    return root


def lines_of(root):
    words = ["predict", str(root / "photos"), "--bundle", str(root / "zoo"), "--format", "jsonl", "--workers", "0"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def rows_of(out):
    return [row for part in sorted(out.glob("part-*.parquet")) for row in pq.read_table(part).to_pylist()]


def check_same(rows, lines):
    """Equal, but for the last of six digits: batches of another size are rounded in another way."""
    assert [row["error"] for row in rows] == [line.get("error") for line in lines]
    for row, line in zip(rows, lines, strict=True):
        if row["error"]:
            assert row["pets"] is row["parts"] is row["size height"] is None
            continue
        told = line["tasks"]
        assert row["pets"] == told["pets"]["label"]
        assert row["pets confidence"] == pytest.approx(told["pets"]["confidence"], abs=2e-6)
        assert row["parts"] == [one["label"] for one in told["parts"]["labels"]]
        probabilities = [one["probability"] for one in told["parts"]["labels"]]
        assert row["parts probabilities"] == pytest.approx(probabilities, abs=2e-6)
        assert row["size height"] == pytest.approx(told["size"]["values"]["height"], rel=1e-4, abs=1e-5)


def test_the_answers_are_those_without_ray_and_a_second_start_does_nothing(root, tmp_path):
    words = [
        "predict",
        root / "photos",
        "--bundle",
        root / "zoo",
        "--ray",
        "--out",
        tmp_path / "out",
        "--part-size",
        16,
    ]
    with started(tmp_path / "log", *words) as running:
        assert running.process.wait(300) == 0, running.log()
    lines, rows = lines_of(root), rows_of(tmp_path / "out")
    assert [row["path"] for row in rows] == [line["image"] for line in lines]
    assert sum(row["error"] is not None for row in rows) == 2
    check_same(rows, lines)
    assert "60 images; 2 bad ones now" in running.log()
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert sorted(before) == ["images.jsonl", *(f"part-{i:05d}.parquet" for i in range(4)), "run.json"]
    again = CliRunner().invoke(app, [str(word) for word in words])  # here: without parts to do, Ray is not started
    assert again.exit_code == 0, again.output
    assert "60 images, 60 of them before; 0 bad ones now" in again.output
    other = CliRunner().invoke(app, [*(str(word) for word in words), "--batch", "32", "--task", "pets"])
    assert "images per pass: 64 there, 32 here" in str(other.exception)
    assert "task parts: " in str(other.exception)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_a_killed_run_leaves_whole_parts_and_the_next_one_does_the_others(root, tmp_path):
    out = tmp_path / "out"
    photos = (root / "photos").as_uri()  # an address: read and listed by pyarrow
    words = ["predict", photos, "--bundle", root / "zoo", "--ray", "--out", out, "--part-size", 1]
    with started(tmp_path / "log", *words) as running:
        running.wait(lambda: any(out.glob("part-*.parquet")))
        family = running.family()
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait()
        end_all(family)  # Ray's agents outlive a killed command for a while
    there = {path: path.stat().st_mtime_ns for path in out.glob("part-*.parquet")}
    assert 0 < len(there) < 60
    assert all(pq.read_table(path).num_rows == 1 for path in there)
    with started(tmp_path / "again", *words) as running:
        assert running.process.wait(300) == 0, running.log()
    assert f"60 images, {len(there)} of them before" in running.log()
    assert {path: path.stat().st_mtime_ns for path in there} == there
    by_name = {Path(line["image"]).name: line for line in lines_of(root)}
    rows = rows_of(out)
    assert all(row["path"].startswith(f"{photos}/") for row in rows)
    assert len(rows) == 60
    check_same(rows, [by_name[Path(row["path"]).name] for row in rows])


def test_what_cannot_be_predicted_is_said_before_ray_starts(root, tmp_path, monkeypatch):
    def refused(*words):
        result = CliRunner().invoke(app, ["predict", *map(str, words)])
        assert result.exit_code in (1, 2)
        return result.output + str(result.exception)

    zoo = ("--bundle", root / "zoo")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    assert "no images" in refused(tmp_path / "empty", *zoo, "--ray", "--out", tmp_path / "out")
    assert "holds notes.txt" in refused(root / "photos", *zoo, "--ray", "--out", tmp_path / "mine")
    assert "--ray needs --out" in refused(root / "photos", *zoo, "--ray")
    assert "--out is for --ray" in refused(root / "photos", *zoo, "--out", tmp_path / "out")
    assert "--format is for answers that are printed" in refused(
        root / "photos", *zoo, "--ray", "--out", tmp_path / "out", "--format", "csv"
    )
    assert "an address is read with --ray only" in refused("s3://bucket/photos", *zoo)
    monkeypatch.setattr("vit_memory.cli.ray.find_spec", lambda name: None)
    assert "ray is missing: pip install 'vit-memory[ray]'" in refused(
        root / "photos", *zoo, "--ray", "--out", tmp_path / "out"
    )
    assert not (tmp_path / "out").exists()


def test_a_task_that_changed_since_the_start_fails_every_part_and_writes_none(root, tmp_path):
    from vit_memory.serving.ray_data import Scorer, ScoringJob

    job = ScoringJob(images=(str(root / "photos"),), sources=(root / "zoo",), out=str(tmp_path), folder=Path.cwd())
    scorer = Scorer(job, {"pets": "the digest of another one"})
    names = json.dumps([str(root / "photos" / "01 photo.jpg")]).encode()
    for part in range(2):  # both by the same actor
        row = scorer({"part": np.array([part]), "names": np.array([names], dtype=object)})
        assert "task 'pets' is another one than when the command began" in row["failure"][0]
    assert not list(tmp_path.iterdir())


def test_a_failure_of_ray_is_an_error_with_its_cause_and_what_to_do(root, tmp_path, monkeypatch):
    from ray.exceptions import RayError

    from vit_memory.serving import ray_data
    from vit_memory.serving.ray_cluster import Cluster

    def rows(*arguments):
        yield {"part": 0, "images": 16, "bad": 0, "failure": ""}
        raise RayError("the object store is full")

    monkeypatch.setattr(ray_data, "connected", lambda: nullcontext(Cluster(own=True, node_cpus=(1.0,), gpus=0.0)))
    monkeypatch.setattr(ray_data, "_rows", rows)
    images, sources = (str(root / "photos"),), (root / "zoo",)
    progress = ray_data.score(ray_data.ScoringJob(images, sources, str(tmp_path / "out"), part_size=16))
    assert [next(progress).images, next(progress).images] == [0, 16]
    with pytest.raises(ServingError, match="after 16 of 60 images: the object store is full. Start the command again"):
        next(progress)
