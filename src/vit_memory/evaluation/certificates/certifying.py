"""certify: open the tasks and images of a request, check them, and put what was found into a certificate."""

import os
import platform
import time
from datetime import datetime, timezone
from pathlib import Path

import torch

from vit_memory.evaluation.certificates.certificate import (
    Certificate,
    CertifiedBranch,
    CertifiedTask,
    Environment,
    Request,
)
from vit_memory.evaluation.certificates.images import load_images
from vit_memory.evaluation.environment import processor, versions
from vit_memory.evaluation.models import open_composable, preprocessing_of
from vit_memory.evaluation.noninterference import OnProgress, check_noninterference
from vit_memory.files.collect import Collected
from vit_memory.model import MemoryViT


def certify(
    request: Request,
    *,
    images_of: Certificate | None = None,
    command: str | None = None,
    download: bool = False,
    on_progress: OnProgress | None = None,
) -> Certificate:
    """Check the tasks of a request on its images, or on the images of another certificate."""
    started = time.perf_counter()
    model, collected = _open(request)
    preprocessing = preprocessing_of(model, model.tasks)
    images, pixels = load_images(request, preprocessing, None if images_of is None else images_of.images, download)
    model = model.to(getattr(torch, request.dtype))
    pixels = pixels.to(model.backbone.device, model.backbone.dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(request.threads)  # all passes must be cut up alike, or their bits may differ
    try:
        checks = check_noninterference(model, pixels, request.batch, on_progress)
    finally:
        torch.set_num_threads(threads)
    return Certificate(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - started, 1),
        command=command,
        request=request,
        backbone=model.backbone.identity,
        tasks=_certified_tasks(model, collected),
        branches=tuple(
            CertifiedBranch(branch.name, branch.digest, branch.method, branch.parameters)
            for branch in model.tasks.branches.values()
        ),
        images=images,
        preprocessing=preprocessing,
        environment=_environment(),
        checks=checks,
    )


def _open(request: Request) -> tuple[MemoryViT, Collected]:
    rename = {Path(path): name for path, name in request.rename}
    return open_composable([Path(source) for source in request.sources], request.backbone, request.device, rename)


def _certified_tasks(model: MemoryViT, collected: Collected) -> tuple[CertifiedTask, ...]:
    tasks = []
    for file in collected.files:
        task, branch = file.task, model.tasks.branch_of(file.task.name)
        tasks.append(
            CertifiedTask(
                name=task.name,
                digest=task.digest,
                file=str(file.path),
                regime=task.regime,
                method=task.method,
                kind=task.kind,
                labels=len(task.labels),
                parameters=task.parameters,
                parents=task.parents,
                branch=None if branch is None else branch.name,
            )
        )
    return tuple(tasks)


def _environment() -> Environment:
    installed = versions()
    return Environment(
        python=installed["python"],
        vit_memory=installed["vit-memory"],
        torch=installed["torch"],
        transformers=installed.get("transformers"),
        timm=installed.get("timm"),
        system=f"{platform.system()} {platform.machine()}",
        processor=processor(),
        cores=os.cpu_count() or 1,
    )
