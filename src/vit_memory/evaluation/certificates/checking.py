"""check_again: the checks of a certificate, made again on its images, and what is not as it was."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from vit_memory.evaluation.certificates.certificate import Certificate, CertifiedImages, Request
from vit_memory.evaluation.certificates.certifying import certify
from vit_memory.evaluation.noninterference import OnProgress


@dataclass(frozen=True, slots=True)
class Repetition:
    """The checks of a certificate, made again."""

    certificate: Certificate  # the new one
    differences: tuple[str, ...]  # what is not as it was, and what failed
    notes: tuple[str, ...]  # other versions or another machine, which is no failure

    @property
    def passed(self) -> bool:
        """Whether everything is as it was and every check passed."""
        return not self.differences


def check_again(
    old: Certificate, request: Request, *, download: bool = False, on_progress: OnProgress | None = None
) -> Repetition:
    """Repeat the checks of a certificate on its images; `request` is its own, or one with other paths."""
    new = certify(request, images_of=old, download=download, on_progress=on_progress)
    differences = [
        *_other_backbone(old, new),
        *_other_items("task", {t.name: t.digest for t in old.tasks}, {t.name: t.digest for t in new.tasks}, new),
        *_other_items("branch", {b.name: b.digest for b in old.branches}, {b.name: b.digest for b in new.branches}),
        *_other_images(old.images, new.images),
        *(f"check failed: {failure}" for failure in new.failures),
    ]
    if old.preprocessing != new.preprocessing:
        differences.append(f"preprocessing: was {old.preprocessing}, is {new.preprocessing}")
    if not old.passed:
        differences.append(f"the certificate itself is of failed checks: {'; '.join(old.failures)}")
    dropped = {check.name for check in old.checks} - {check.name for check in new.checks}
    differences += [f"check {name!r} is in the certificate, but was not made" for name in sorted(dropped)]
    return Repetition(new, tuple(differences), tuple(_notes(old, new)))


def _other_backbone(old: Certificate, new: Certificate) -> list[str]:
    was, now = old.backbone.fingerprint, new.backbone.fingerprint
    return [] if was == now else [f"backbone {new.backbone.name}: fingerprint was {was[:12]}…, is {now[:12]}…"]


def _other_items(
    what: str, old: Mapping[str, str], new: Mapping[str, str], certificate: Certificate | None = None
) -> list[str]:
    files = {task.name: f" ({task.file})" for task in certificate.tasks} if certificate is not None else {}
    changed = [
        f"{what} {name}{files.get(name, '')}: digest was {old[name][:12]}…, is {new[name][:12]}…"
        for name in old
        if name in new and old[name] != new[name]
    ]
    missing = [f"{what} {name}: is in the certificate, but was not given" for name in old if name not in new]
    added = [f"{what} {name}{files.get(name, '')}: is not in the certificate" for name in new if name not in old]
    return [*changed, *missing, *added]


def _other_images(old: CertifiedImages, new: CertifiedImages) -> list[str]:
    """The images of the certificate that were not found again; others are not looked at."""
    there = Counter(image.sha256 for image in new.used)
    missing = []
    for image in old.used:
        there[image.sha256] -= 1
        if there[image.sha256] < 0:
            missing.append(f"image {image.name}: not found in {new.source} with the same content")
    return missing


def _notes(old: Certificate, new: Certificate) -> list[str]:
    was, now = asdict(old.environment), asdict(new.environment)
    return [f"{name}: was {was[name]}, is {now[name]}" for name in was if was[name] != now[name]]
