"""Certificates as JSON files, whole or not at all; a changed content is found when one is read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vit_memory.atomic import write_atomic
from vit_memory.errors import DamagedFile, FileError
from vit_memory.evaluation.certificates.certificate import (
    FORMAT,
    VERSION,
    Certificate,
    CertifiedBranch,
    CertifiedImage,
    CertifiedImages,
    CertifiedTask,
    Environment,
    Request,
    content_sha256,
)
from vit_memory.evaluation.noninterference import Check, Result
from vit_memory.files.container import parse_json
from vit_memory.files.description import check_format, read_backbone, read_preprocessing


def write_certificate(path: Path, certificate: Certificate) -> None:
    """Write the JSON file, whole or not at all."""
    content = certificate.content()
    record = {"sha256": content_sha256(content), **content}
    write_atomic(path, [json.dumps(record, indent=2).encode(), b"\n"])


def read_certificate(path: Path) -> Certificate:
    """Read a certificate; raises DamagedFile if its content does not match its hash."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(f"{path}: no such certificate. Make one: vit-memory certify BUNDLE --data DATA") from None
    except OSError as error:
        raise FileError(f"{path}: cannot be read, {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path}: not a certificate, {error}.") from None
    if not isinstance(content, dict) or not isinstance(content.get("format"), str):
        raise DamagedFile(f"{path}: not a certificate: no format in it, expected {FORMAT}/{VERSION}.")
    check_format(path, content["format"], FORMAT, VERSION)
    if content.get("sha256") != content_sha256(content):
        raise DamagedFile(
            f"{path}: the content does not match its SHA-256: changed or damaged since it was written. Get the "
            f"certificate again from its source, or make a new one: vit-memory certify BUNDLE --data DATA"
        )
    try:
        certificate = _rebuild(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFile(f"{path}: a missing or mistyped field: {error}.") from None
    if certificate.content() != {key: value for key, value in content.items() if key != "sha256"}:
        raise DamagedFile(f"{path}: its verdicts contradict its results, or it has unknown fields: made by hand.")
    return certificate


def _rebuild(content: Mapping[str, Any]) -> Certificate:
    request, images = dict(content["request"]), content["images"]
    for name in ("sources", "label_columns"):
        request[name] = tuple(request[name])
    request["rename"] = tuple((path, name) for path, name in request["rename"])
    preprocessing = read_preprocessing(content["preprocessing"])
    if preprocessing is None:
        raise ValueError("no preprocessing")
    return Certificate(
        created=content["created"],
        seconds=content["seconds"],
        command=content["command"],
        request=Request(**request),
        backbone=read_backbone(content["backbone"]),
        tasks=tuple(CertifiedTask(**{**task, "parents": tuple(task["parents"])}) for task in content["tasks"]),
        branches=tuple(CertifiedBranch(**branch) for branch in content["branches"]),
        images=CertifiedImages(
            **{
                **images,
                "used": tuple(CertifiedImage(**image) for image in images["used"]),
                "bad": tuple((name, reason) for name, reason in images["bad"]),
            }
        ),
        preprocessing=preprocessing,
        environment=Environment(**content["environment"]),
        checks=tuple(_rebuild_check(check) for check in content["checks"]),
    )


def _rebuild_check(values: Mapping[str, Any]) -> Check:
    fields = {key: value for key, value in values.items() if key not in ("passed", "results")}
    results = [{key: value for key, value in result.items() if key != "passed"} for result in values["results"]]
    return Check(
        **fields, results=tuple(Result(**{**result, "failures": tuple(result["failures"])}) for result in results)
    )
