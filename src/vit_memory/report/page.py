"""write_report: one HTML page about tasks on the images of a split. It refers to nothing outside itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from vit_memory.atomic import write_atomic
from vit_memory.branch import Branch
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


@dataclass(frozen=True, slots=True)
class About:
    """Where scored images come from."""

    data: str
    split: str  # test, validation or train
    note: str  # what these images say about new ones
    fair: bool = True  # whether they took no part in training and choosing


@dataclass(frozen=True, slots=True, eq=False)
class ScoredSplit:
    """Images with the tasks that were scored on them."""

    split: Split
    tasks: Mapping[str, Evaluated]
    about: About


def write_report(
    path: Path,
    model: Model,
    scored: Sequence[ScoredSplit],
    training: TrainingResult | None = None,
    *,
    command: str | None = None,
    bad_images: Mapping[str, str] | None = None,
) -> None:
    """Write the page of all tasks that were scored; `training` adds the curves and settings of the run they come from.

    `command` is the one that makes the report; `bad_images` are those that were left out, with the reason.
    """
    pairs = [(one, evaluated) for one in scored for evaluated in one.tasks.values()]
    per_section = min(_PICTURES_PER_SECTION, _PICTURES_PER_PAGE // (4 * len(pairs)))
    several = len(pairs) > 1
    title, articles = f"{pairs[0][1].task.name}", []
    if several:
        data = dict.fromkeys(one.about.data for one, _ in pairs)
        title = f"{len(pairs)} tasks on {next(iter(data)) if len(data) == 1 else f'{len(data)} datasets'}"
        if training is not None and training.branch is not None:
            title = f"{training.branch.name}: a branch with {title}"
        articles.append(_overview(title, pairs, training, model, command))
    for one, evaluated in pairs:
        shown = Pictures.of(model, one.split, evaluated.task, per_section)
        own = () if several or training is None else training_sections(training)
        articles.append(_article(model, evaluated, shown, one.about, own, None if several else command))
    page = html_page(f"{title}: report", join([*articles, _bad_images(bad_images or {}), footer()]))
    write_atomic(path, [page.encode("utf-8", "backslashreplace")])  # file names are bytes of any encoding


def _article(
    model: Model,
    evaluated: Evaluated,
    shown: Pictures,
    about: About,
    training: Sequence[Markup],
    command: str | None,
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
        details([*_facts_of(task, model, about), *_written(command)]),
        *training,
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
        pairs.append(("branch", _branch_text(branch)))
    if task.record.created:
        pairs.append(("trained", task.record.created.replace("T", " ").replace("+00:00", " UTC")))
    return pairs


def _branch_text(branch: Branch) -> str:
    return f"{branch.name}, {branch.method}; {count(branch.parameters, 'parameter')}"


def _written(command: str | None) -> list[tuple[str, str]]:
    """When the page was written, and by which command."""
    pairs = [("report of", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"))]
    return pairs + ([("command", Markup(f"<code>{escape(command)}</code>"))] if command else [])


def _overview(
    title: str,
    pairs: Sequence[tuple[ScoredSplit, Evaluated]],
    training: TrainingResult | None,
    model: Model,
    command: str | None,
) -> Markup:
    """All tasks of the page in one table, and the training that they share."""

    def link(name: str) -> Markup:
        return Markup(f'<td><a href="#{escape(name)}">{escape(name)}</a></td>')

    rows = []
    for one, evaluated in pairs:
        task, scores = evaluated.task, evaluated.scores
        kind = Markup(f'<td class="whole">{escape(task.kind)}</td>')
        rows.append([link(task.name), kind, str(scores.images), f"{one.about.split} {scores.headline}"])
    facts_of_run = [("backbone", model.backbone.name), *_written(command)]
    if training is not None and training.branch is not None:
        facts_of_run.insert(1, ("branch", _branch_text(training.branch)))
    parts = [
        Markup(f"<h1>{escape(title)}</h1>\n"),
        table(("task", "kind", "images", "score"), rows, {2}, more="tasks"),
        details(facts_of_run),
        *(training_sections(training) if training else ()),
    ]
    return Markup(f"<article>{join(parts)}</article>\n")


def _bad_images(reasons: Mapping[str, str]) -> Markup:
    if not reasons:
        return Markup()
    rows = [[name, reason] for name, reason in sorted(reasons.items())[:_MOST_BAD_IMAGES]]
    more = f" The first {_MOST_BAD_IMAGES} are listed." if len(reasons) > _MOST_BAD_IMAGES else ""
    text = paragraph(bold(count(len(reasons), "image")), f" could not be read and took no part.{more}")
    return section("Images left out", text, table(("image", "reason"), rows, more="images"))
