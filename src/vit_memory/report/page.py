"""write_report: one HTML page about tasks on the images of a split. It refers to nothing outside itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from vit_memory.atomic import write_atomic
from vit_memory.data.splits import Split
from vit_memory.evaluation.inference import Evaluated
from vit_memory.evaluation.metrics import MultiLabelScores, RegressionScores
from vit_memory.evaluation.models import Model
from vit_memory.model import MemoryViT
from vit_memory.report import multi_label, regression, single_label
from vit_memory.report.elements import Markup, bold, count, details, escape, facts, join, paragraph, section, table
from vit_memory.report.frame import footer, html_page
from vit_memory.report.pictures import Pictures
from vit_memory.report.training import TrainingResult, training_sections
from vit_memory.task import Task

_PICTURES_PER_SECTION = 12
_PICTURES_PER_PAGE = 160  # about 10 kB each: the page stays below 3 MB
_MOST_BAD_IMAGES = 100  # that are listed


@dataclass(frozen=True, slots=True, eq=False)
class ScoredSplit:
    """Images with the tasks that were scored on them."""

    split: Split
    tasks: Mapping[str, Evaluated]


@dataclass(frozen=True, slots=True)
class About:
    """Where the images of a report come from."""

    data: str
    split: str  # test, validation or train
    note: str  # what these images say about new ones
    fair: bool = True  # whether they took no part in training and choosing
    command: str | None = None  # that made the report
    bad_images: Mapping[str, str] = field(default_factory=dict)  # left out: name -> reason


def write_report(
    path: Path, model: Model, scored: Sequence[ScoredSplit], about: About, training: TrainingResult | None = None
) -> None:
    """Write the page of all tasks that were scored; `training` adds the curves and settings of a run."""
    pairs = [(one.split, evaluated) for one in scored for evaluated in one.tasks.values()]
    per_section = min(_PICTURES_PER_SECTION, _PICTURES_PER_PAGE // (4 * len(pairs)))
    articles = []
    for split, evaluated in pairs:
        shown = Pictures.of(model, split, evaluated.task, per_section)
        articles.append(_article(model, evaluated, shown, about, training))
    title = f"{pairs[0][1].task.name}: report" if len(pairs) == 1 else f"{len(pairs)} tasks on {about.data}: report"
    overview = _overview([evaluated for _, evaluated in pairs], about) if len(pairs) > 1 else Markup()
    page = html_page(title, join([overview, *articles, _bad_images(about.bad_images), footer()]))
    write_atomic(path, [page.encode("utf-8", "backslashreplace")])  # file names are bytes of any encoding


def _article(
    model: Model, evaluated: Evaluated, shown: Pictures, about: About, training: TrainingResult | None
) -> Markup:
    task, scores = evaluated.task, evaluated.scores
    if isinstance(scores, RegressionScores):
        numbers, sections = regression.headline(scores), regression.sections(evaluated, shown)
    elif isinstance(scores, MultiLabelScores):
        numbers, sections = multi_label.headline(scores), multi_label.sections(evaluated, shown)
    else:
        numbers, sections = single_label.headline(scores), single_label.sections(evaluated, shown)
    parts = [
        paragraph(f"{task.kind} task, scored on {about.split} images", style="kicker"),
        Markup(f"<h1>{escape(task.name)}</h1>\n"),
        facts(numbers),
        paragraph(about.note, style="note" if about.fair else "warning"),
        details(_facts_of(task, model, about)),
        *(training_sections(training) if training else ()),
        *sections,
    ]
    return Markup(f'<article id="{escape(task.name)}">{join(parts)}</article>\n')


def _facts_of(task: Task, model: Model, about: About) -> list[tuple[str, str]]:
    regime = f"{task.regime}, {count(task.cells, 'memory cell')} per block" if task.cells else task.regime
    if task.reader is not None:
        regime = f"{task.regime}, {task.method}"
    pairs = [
        ("backbone", model.backbone.name),
        ("data", f"{about.data}, {about.split} split"),
        ("regime", f"{regime}; {count(task.parameters, 'parameter')}"),
    ]
    if task.parents:
        pairs.append(("extends", ", ".join(task.parents)))
    branch = model.tasks.branch_of(task.name) if isinstance(model, MemoryViT) else None
    if branch is not None:
        pairs.append(("branch", f"{branch.name}, {branch.method}; {count(branch.parameters, 'parameter')}"))
    if task.record.created:
        pairs.append(("trained", task.record.created.replace("T", " ").replace("+00:00", " UTC")))
    pairs.append(("report of", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")))
    if about.command:
        pairs.append(("command", Markup(f"<code>{escape(about.command)}</code>")))
    return pairs


def _overview(tasks: Sequence[Evaluated], about: About) -> Markup:
    def link(name: str) -> Markup:
        return Markup(f'<td><a href="#{escape(name)}">{escape(name)}</a></td>')

    rows = [[link(one.task.name), one.task.kind, str(one.scores.images), one.scores.headline] for one in tasks]
    heading = Markup(f"<h1>{len(tasks)} tasks on {escape(about.data)}</h1>\n")
    return Markup(
        f"<article>{heading}{table(('task', 'kind', 'images', 'score'), rows, {2}, more='tasks')}</article>\n"
    )


def _bad_images(reasons: Mapping[str, str]) -> Markup:
    if not reasons:
        return Markup()
    rows = [[name, reason] for name, reason in sorted(reasons.items())[:_MOST_BAD_IMAGES]]
    more = f" The first {_MOST_BAD_IMAGES} are listed." if len(reasons) > _MOST_BAD_IMAGES else ""
    text = paragraph(bold(count(len(reasons), "image")), f" could not be read and took no part.{more}")
    return section("Images left out", text, table(("image", "reason"), rows, more="images"))
