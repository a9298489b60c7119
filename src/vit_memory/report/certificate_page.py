"""write_certificate_page: a certificate as one HTML page to read, print and keep beside the JSON file."""

from dataclasses import asdict
from pathlib import Path

from vit_memory.atomic import write_atomic
from vit_memory.evaluation.certificates.certificate import Certificate, CertifiedImages
from vit_memory.evaluation.noninterference import Check, Result
from vit_memory.report.elements import (
    Markup,
    bold,
    code_block,
    count,
    details,
    escape,
    facts,
    join,
    number,
    paragraph,
    section,
    table,
    verdict_cell,
)
from vit_memory.report.frame import footer, html_page

_SHOWN_BAD_IMAGES = 100


def hash_in_python(file: str) -> str:
    """Three lines of Python that compute the hash of a certificate again."""
    return (
        "import hashlib, json\n"
        f'file = json.load(open("{file}", encoding="utf-8"))\n'
        'print(file.pop("sha256") == hashlib.sha256('
        'json.dumps(file, sort_keys=True, separators=(",", ":")).encode()).hexdigest())'
    )


def write_certificate_page(path: Path, certificate: Certificate, json_name: str) -> None:
    """Write the page of a certificate whose JSON file is called `json_name`."""
    tasks = count(len(certificate.tasks), "task")
    verdict = "passed" if certificate.passed else "FAILED"
    body = [
        paragraph("certificate of non-interference", style="kicker"),
        Markup(f"<h1>{escape(tasks)} on {escape(certificate.backbone.name)}: {verdict}</h1>\n"),
        facts(_headline(certificate)),
        _verdict(certificate),
        details(_facts_of(certificate)),
        _summary(certificate),
        *(_check(check) for check in certificate.checks),
        _tasks(certificate),
        _images(certificate.images),
        _machine(certificate),
        _integrity(certificate, json_name),
        footer(),
    ]
    page = html_page(f"{tasks}: certificate of non-interference, {verdict}", join(body))
    write_atomic(path, [page.encode("utf-8", "backslashreplace")])  # file names are bytes of any encoding


def _headline(certificate: Certificate) -> list[tuple[str, str]]:
    passed = sum(check.passed for check in certificate.checks)
    pairs = [
        (f"{passed} of {len(certificate.checks)}", "checks passed"),
        (number(len(certificate.tasks)), "tasks attached" if len(certificate.tasks) > 1 else "task attached"),
        (number(len(certificate.images.used)), "images computed on"),
    ]
    if certificate.branches:
        pairs.append((number(len(certificate.branches)), "branches" if len(certificate.branches) > 1 else "branch"))
    return pairs


def _verdict(certificate: Certificate) -> Markup:
    if certificate.passed:
        return paragraph(
            "With all tasks attached, the original output of the backbone kept every bit, no task depended on an "
            "unrelated one, and the fast pass computed what the attention rule says. This was measured on the images "
            "named below, with the versions and on the machine named below.",
            style="note",
        )
    failed = [Markup(f"<li>{escape(failure)}</li>") for failure in certificate.failures]
    return Markup(
        f'<div class="warning"><p>{bold("These checks failed. Do not rely on these tasks together.")}</p>'
        f"<ul>{join(failed)}</ul></div>\n"
    )


def _facts_of(certificate: Certificate) -> list[tuple[str, str]]:
    request, backbone, images = certificate.request, certificate.backbone, certificate.images
    pairs = [
        ("made", certificate.created.replace("T", " ").replace("+00:00", " UTC")),
        ("backbone", f"{backbone.name} (family {backbone.family})"),
        ("fingerprint", _code(backbone.fingerprint)),
        ("images", f"{count(len(images.used), 'image')} of the {images.split} split of {images.source}"),
        ("their SHA-256", _code(images.sha256)),
        (
            "preprocessing",
            ", ".join(f"{name} {_plain(value)}" for name, value in asdict(certificate.preprocessing).items()),
        ),
        (
            "computed in",
            f"{request.dtype} on {request.device}, batches of {request.batch}, "
            f"{count(request.threads, 'thread')} per pass; {certificate.seconds:.0f} s",
        ),
    ]
    if certificate.command:
        pairs.append(("command", _code(certificate.command)))
    return pairs


def _summary(certificate: Certificate) -> Markup:
    rows = [[check.name, _worst(check), str(check.images), verdict_cell(check.passed)] for check in certificate.checks]
    return section("Verdict", table(("check", "worst", "images", "result"), rows, {1, 2}, fold=False))


def _check(check: Check) -> Markup:
    measured = [result for result in check.results if result.limit is not None]
    counted = check.unit != "images"  # the number of images is the same in every row, and said above
    titles = ["subject", *([check.unit] if counted else ()), *(("measured", "limit") if measured else ()), "result"]
    rows = []
    for result in check.results:
        values = [number(result.compared)] if counted else []
        values += [_value(result), "0" if result.limit == 0 else f"{result.limit or 0:.1e}"] if measured else []
        rows.append([result.subject, *values, verdict_cell(result.passed)])
    failed = [
        paragraph(bold(result.subject), f": {', '.join(result.failures)}.", style="warning") for result in check.failed
    ]
    body = table(titles, rows, range(1, len(titles) - 1), fold=False)
    text = paragraph(check.method, f" On {count(check.images, 'image')}.", style="soft")
    return section(check.name[0].upper() + check.name[1:], text, body, *failed)


def _worst(check: Check) -> str:
    measured = [result for result in check.results if result.limit is not None]
    if not measured:
        return "bit-identical" if check.passed else "changed"
    failed = [result for result in measured if not result.passed] or measured
    return _value(max(failed, key=lambda result: float("inf") if result.value is None else result.value))


def _value(result: Result) -> str:
    if result.value is None:
        return "not finite"
    return "0" if result.value == 0 else f"{result.value:.1e}"


def _tasks(certificate: Certificate) -> Markup:
    pairs = []
    for task in certificate.tasks:
        facts_of_task = [
            f"{task.regime}: {task.method}" if task.method != task.regime else task.regime,
            f"{task.kind}, {count(task.labels, 'output')}",
            *([f"extends {', '.join(task.parents)}"] if task.parents else ()),
            *([f"on branch {task.branch}"] if task.branch else ()),
            count(task.parameters, "parameter"),
            task.file,
        ]
        pairs.append((f"task {task.name}", _with_digest("; ".join(facts_of_task), task.digest)))
    for branch in certificate.branches:
        text = f"{branch.method}; {count(branch.parameters, 'parameter')}"
        pairs.append((f"branch {branch.name}", _with_digest(text, branch.digest)))
    return section("Tasks and branches" if certificate.branches else "Tasks", details(pairs))


def _with_digest(text: str, digest: str) -> Markup:
    return join([text, Markup("<br>digest "), _code(digest)])


def _images(images: CertifiedImages) -> Markup:
    text = paragraph(
        f"The {images.split} split: {images.origin}. Its images were taken in the order of their digests. The SHA-256 "
        f"above is that of the hexadecimal ones below, one after the other.",
        style="soft",
    )
    rows = [[image.name, _code_cell(image.sha256)] for image in images.used]
    parts = [text, table(("image", "SHA-256"), rows, more="images")]
    if images.bad:
        bad = [list(one) for one in images.bad[:_SHOWN_BAD_IMAGES]]
        parts += [paragraph(bold(count(len(images.bad), "image")), " could not be decoded and took no part.")]
        parts += [table(("image", "reason"), bad, more="images")]
    return section("Images", *parts)


def _machine(certificate: Certificate) -> Markup:
    environment = certificate.environment
    versions = {
        "vit-memory": environment.vit_memory,
        "python": environment.python,
        "torch": environment.torch,
        "transformers": environment.transformers,
        "timm": environment.timm,
    }
    pairs = [(name, value or "not installed") for name, value in versions.items()]
    machine = f"{environment.processor}, {count(environment.cores, 'core')}, {environment.system}"
    return section("Versions and machine", details([*pairs, ("machine", machine)]))


def _integrity(certificate: Certificate, json_name: str) -> Markup:
    return section(
        "Checking this certificate",
        paragraph("This page shows the file ", _code(json_name), ", which holds its own SHA-256:"),
        paragraph(_code(certificate.sha256)),
        paragraph(
            "It covers everything in the file but itself, as JSON with sorted keys and no spaces. By hand, in Python:"
        ),
        code_block(hash_in_python(json_name)),
        paragraph(
            "This is integrity, not identity: it shows that the content is the one that was hashed, not who made it. "
            "Whoever changes the content can compute the hash again. To know whose it is, keep the SHA-256 in another "
            "place, or sign the file with a tool of your own. To know that it is true, repeat the checks:"
        ),
        code_block(f"vit-memory certify --check {json_name}"),
        paragraph(
            "It repeats them on the same tasks and images and names what differs. Other versions or machines are "
            "reported and are no failure; differences to rounding may change, their limits count.",
            style="soft",
        ),
    )


def _plain(value: object) -> str:
    """Sizes with ×, other lists in brackets."""
    if not isinstance(value, (list, tuple)):
        return str(value)
    sizes = all(isinstance(one, int) for one in value)
    return " × ".join(map(str, value)) if sizes else f"({', '.join(map(str, value))})"


def _code(text: str) -> Markup:
    return Markup(f"<code>{escape(text)}</code>")


def _code_cell(digest: str) -> Markup:
    return Markup(f'<td class="digest"><code>{escape(digest)}</code></td>')
