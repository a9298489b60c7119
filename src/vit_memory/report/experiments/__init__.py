"""write_experiment_report: one page and one Markdown file from the records of `vit-memory reproduce`."""

from collections.abc import Iterator
from pathlib import Path

from vit_memory.atomic import write_atomic
from vit_memory.errors import FileError
from vit_memory.evaluation.reproduce.records import Record, RecordFolder
from vit_memory.report.document import Section, Table
from vit_memory.report.elements import Markup, escape, join, paragraph
from vit_memory.report.experiments.accuracy import (
    ablation_section,
    architecture_section,
    fewshot_section,
    main_sections,
)
from vit_memory.report.experiments.evidence import Evidence
from vit_memory.report.experiments.summary import summary_section
from vit_memory.report.experiments.together import (
    concatenation_section,
    continual_section,
    example_section,
    extension_section,
)
from vit_memory.report.frame import footer, html_page

TITLE = "vit-memory: the experiments"


def write_experiment_report(folder: Path) -> tuple[Path, Path]:
    """Write report.html and report.md into the folder of the records."""
    records = list(RecordFolder(folder).all())
    if not records:
        raise FileError(f"{folder}: no records in it. Make some: vit-memory reproduce table2 --out {folder}")
    every = evidence_of(records)
    sections = list(experiment_sections(every))
    about = _about(every)
    heading = Markup(f"<h1>{escape(TITLE)}</h1>\n")
    body = join([heading, paragraph(about, style="soft"), *(section.markup() for section in sections), footer()])
    page, text = folder / "report.html", folder / "report.md"
    write_atomic(page, [html_page(TITLE, body).encode()])
    markdown = "\n".join([f"# {TITLE}\n", about + "\n", *(section.markdown() for section in sections)])
    write_atomic(text, [markdown.encode()])
    return page, text


def evidence_of(records: list[Record]) -> list[Evidence]:
    """The records of every backbone; the paper's comes first, else the one with most of them.

    Raises FileError if records of one backbone are not comparable: other weights, image sizes or test images.
    """
    names = sorted({record.identity["backbone"] for record in records})
    every = [Evidence(name, tuple(r for r in records if r.identity["backbone"] == name)) for name in names]
    for one in every:
        _check_comparable(one)
    return sorted(every, key=lambda one: (not _is_papers(one), -len(one.records)))


def _is_papers(evidence: Evidence) -> bool:
    return "vit-base-patch32-224-in21k" in evidence.backbone


def _check_comparable(evidence: Evidence) -> None:
    """Records of different settings have different files where their identity differs; here they would meet."""
    seen: dict[tuple[str, ...], str] = {}
    for record in evidence.of_kind("training"):
        settings, test_of = record.settings, (record.identity["dataset"], str(record.identity["label"]))
        facts = {
            ("weights",): settings["backbone_fingerprint"][:12],
            ("preprocessing",): settings["preprocessing"],
            ("test images of", *test_of): settings["data"]["test"],
        }
        for fact, value in facts.items():
            if seen.setdefault(fact, value) != value:
                raise FileError(
                    f"records of {evidence.backbone!r} differ in {' '.join(fact)}: {seen[fact]} and {value}. They are "
                    f"not comparable: keep runs with other settings in a folder of their own (--out)."
                )


def experiment_sections(every: list[Evidence]) -> Iterator[Section]:
    """All that the records allow, of the backbone with most of them; then the comparison of backbones."""
    main = every[0]
    yield summary_section(main)
    yield from main_sections(main, paper=_is_papers(main))
    optional = (concatenation_section, example_section, extension_section, continual_section)
    for build in (*optional, fewshot_section, ablation_section):
        section = build(main)
        if section is not None:
            yield section
    architectures = architecture_section(every)
    if architectures is not None:
        yield architectures
    yield _origin(every)


def _about(every: list[Evidence]) -> str:
    main = every[0]
    size = main.full_size
    images = "all training images" if size is None else f"at most {size} training images per class"
    trainings, datasets = len(main.of_kind("training")), len(main.trainings().datasets())
    return (
        f"{main.backbone}; {images}; {trainings} trainings on {datasets} datasets. Every number is computed from "
        f"the records beside this page; learning rates and the evaluation that is kept are chosen on validation images."
    )


def _origin(every: list[Evidence]) -> Section:
    """Which commands, commits and machines made the records."""
    counted: dict[tuple[str, ...], int] = {}
    for record in (r for one in every for r in one.records):
        origin = record.made
        machine = origin.get("machine") or {}
        versions = origin.get("versions") or {}
        key = (
            str(origin.get("command") or "–"),
            str(origin.get("commit") or "–")[:7] + (" and changes" if "dirty" in str(origin.get("commit")) else ""),
            f"{machine.get('processor', '–')}, {machine.get('threads', '–')} threads",
            f"torch {versions.get('torch', '–')}",
        )
        counted[key] = counted.get(key, 0) + 1
    rows = tuple((*key, str(count)) for key, count in sorted(counted.items()))
    return Section(
        "Where the numbers come from", (Table(("command", "commit", "machine", "versions", "records"), rows),)
    )
