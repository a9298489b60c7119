"""Predictions for large sets of images with Ray Data: parts of the list are spread over actors, each with the model.

An actor reads, decodes, computes and writes a part by itself, with the code of `vit-memory predict`, so the answers are
the same. The dataset that Ray handles is the list of parts; images and answers do not travel between machines.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray.data
from ray.exceptions import RayError

from vit_memory.data.stored_files import StoredFiles, images_at, is_address
from vit_memory.errors import DataError, FileError, ServingError, TaskError, VitMemoryError
from vit_memory.evaluation.inference import image_files, predict
from vit_memory.evaluation.models import Model, open_model, preprocessing_of
from vit_memory.evaluation.prediction_table import schema_of, table_of
from vit_memory.evaluation.scoring_run import ScoringRun, begin_run, write_part
from vit_memory.parallel import limit_threads
from vit_memory.serving.ray_cluster import Cluster, connected

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScoringJob:
    """What is predicted, and how. Every machine of a cluster must see the bundles and task files under their paths."""

    images: tuple[str, ...]  # files, folders or addresses
    sources: tuple[Path, ...]  # bundles and task files
    out: str  # a folder, or an address
    backbone: str | None = None
    device: str = "cpu"
    tasks: tuple[str, ...] = ()  # all, if there are none
    rename: Mapping[Path, str] | None = None
    batch: int = 64
    part_size: int = 512
    threads: int = 1  # that compute, per actor
    workers: int = 0  # threads that read and decode ahead, per actor
    folder: Path = Path()  # that relative paths of images are below

    def resolved(self) -> "ScoringJob":
        """The same with paths that mean the same in other processes."""
        return replace(
            self,
            sources=tuple(source.resolve() for source in self.sources),
            rename=None if self.rename is None else {path.resolve(): name for path, name in self.rename.items()},
            out=self.out if is_address(self.out) else str(Path(self.out).resolve()),
            folder=Path.cwd(),
        )

    def open(self) -> Model:
        """The model."""
        return open_model(self.sources, self.backbone, self.device, self.rename)

    def names(self, model: Model) -> list[str]:
        """The tasks that answer."""
        return list(self.tasks or model.tasks)


@dataclass(frozen=True, slots=True)
class Progress:
    """What has been done of a run."""

    images: int  # predicted by now, in this run and before
    total: int
    bad: int  # of those that were predicted in this run
    scored: int  # predicted in this run


def score(job: ScoringJob) -> Iterator[Progress]:
    """Predict the images of a job that its folder does not hold yet; tells how far it is, at the start and per part.

    FileError if the folder holds something else, DataError if there are no images, ServingError if Ray fails.
    """
    job = job.resolved()
    model = job.open()
    schema_of([model.tasks[name] for name in job.names(model)])
    listed = list_images(job.images)
    run = begin_run(job.out, _settings(job, model), listed, job.part_size)
    if run.images != tuple(listed):
        log.warning(
            "since this run began, %d images have come and %d have gone; it goes on with the list of its beginning. "
            "Predict new ones into another folder.",
            len(set(listed) - set(run.images)),
            len(set(run.images) - set(listed)),
        )
    complete = run.complete()
    missing = [part for part in range(run.parts) if part not in complete]
    done, bad, scored = len(run.images) - sum(len(run.names(part)) for part in missing), 0, 0
    yield Progress(done, len(run.images), bad, scored)
    if not missing:
        return
    digests = {name: model.tasks[name].digest for name in job.names(model)}
    try:
        with connected() as cluster:
            for row in _rows(job, run, missing, digests, cluster):
                if row["failure"]:
                    raise ServingError(f"part {row['part']} could not be predicted: {row['failure']}")
                done, scored, bad = done + row["images"], scored + row["images"], bad + row["bad"]
                yield Progress(done, len(run.images), bad, scored)
    except RayError as error:
        raise ServingError(
            f"Ray failed after {done} of {len(run.images)} images: {error}. Start the command again: it predicts the "
            f"parts that {job.out} does not hold yet."
        ) from error
    unseen = [part for part in range(run.parts) if part not in run.complete()]
    if unseen:
        raise FileError(
            f"{job.out}: {len(unseen)} of {run.parts} parts were written, but are not seen from this machine. Give a "
            f"folder that all machines share, or an address such as s3://bucket/folder."
        )


def list_images(sources: Sequence[str]) -> list[str]:
    """Every image of files, folders and addresses, in order."""
    names: list[str] = []
    for source in sources:
        if is_address(source):
            names += images_at(source)
        elif Path(source).exists():
            names += image_files([Path(source)])
        else:
            raise DataError(f"{source}: no such file or folder.")
    return names


class Scorer:
    """An actor: opens the model once, then predicts parts. What it refuses comes back as a value, with its message."""

    def __init__(self, job: ScoringJob, digests: Mapping[str, str]) -> None:
        self._job, self._digests = job, digests
        self._model: Model | None = None

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Predict and write one part; a batch of Ray Data has one row."""
        part, names = int(batch["part"][0]), json.loads(batch["names"][0])
        bad, failure = 0, ""
        try:
            bad = self._score(part, names)
        except VitMemoryError as error:
            failure = str(error)
        return {
            "part": np.array([part]),
            "images": np.array([len(names)]),
            "bad": np.array([bad]),
            "failure": np.array([failure], dtype=object),
        }

    def _score(self, part: int, names: Sequence[str]) -> int:
        job = self._job
        model = self._open() if self._model is None else self._model
        predicted = list(
            predict(
                model,
                names,
                job.names(model),
                batch=job.batch,
                workers=job.workers,
                threads=job.threads,
                images=partial(StoredFiles, addresses=tuple(filter(is_address, job.images))),
                in_threads=True,
            )
        )
        write_part(job.out, part, table_of([model.tasks[name] for name in job.names(model)], predicted))
        return sum(one.error is not None for one in predicted)

    def _open(self) -> Model:
        limit_threads(self._job.threads)
        if self._job.folder.is_dir():
            os.chdir(self._job.folder)
        model = self._job.open()
        for name, digest in self._digests.items():
            if model.tasks[name].digest != digest:
                raise TaskError(f"task {name!r} is another one than when the command began; start it again.")
        self._model = model  # after the check: the next part of this actor relies on it
        return model


def _rows(
    job: ScoringJob, run: ScoringRun, parts: Sequence[int], digests: Mapping[str, str], cluster: Cluster
) -> Iterator[Mapping[str, Any]]:
    """One row per part, as they are done."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    cpus = min(max(job.threads, job.workers, 1), max(cluster.node_cpus))
    on_gpu = job.device.startswith("cuda")
    actors = max(1, min(len(parts), int(cluster.gpus if on_gpu else cluster.cpus // cpus)))
    # Names as bytes: those of files may be in any encoding, and a text of Arrow must be UTF-8.
    items = [{"part": part, "names": json.dumps(run.names(part)).encode()} for part in parts]
    scored = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        Scorer,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=actors, initial_size=actors),
        num_cpus=cpus,
        num_gpus=1 if on_gpu else 0,
        fn_constructor_kwargs={"job": job, "digests": dict(digests)},
    )
    yield from scored.iter_rows()


def _settings(job: ScoringJob, model: Model) -> dict[str, Any]:
    """What decides the answers, by the names that messages use."""
    names = job.names(model)
    return {
        "images": list(job.images),
        "backbone": f"{model.backbone.name} {model.backbone.fingerprint[:12]}",
        "preprocessing": str(preprocessing_of(model, names)),
        "images per pass": job.batch,
        **{f"task {name}": model.tasks[name].digest for name in names},
    }
