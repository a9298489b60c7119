"""A document of sections with text, tables and charts, written as a part of a page or as Markdown.

Both are made from the same values, so that they cannot say different things.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vit_memory.report.elements import Markup, charts, join, paragraph, pictures, section, table


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under titles."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""  # what the numbers are: images, seeds, command

    def markup(self) -> Markup:
        """For a page."""
        numeric = {i for i in range(1, len(self.titles)) if all(_is_number(row[i]) for row in self.rows)}
        note = paragraph(self.note, style="soft") if self.note else Markup()
        return join([table(self.titles, self.rows, numeric, fold=False), note])  # folded rows are not printed

    def markdown(self) -> str:
        """For a file that people read as text."""
        lines = [_row(self.titles), "|---" * len(self.titles) + "|", *map(_row, self.rows)]
        return "\n".join(lines) + (f"\n\n{self.note}" if self.note else "")


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing, with what it shows in words."""

    svg: str
    caption: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture that is ready as markup; Markdown leaves it out."""

    markup: Markup


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the document under its own heading."""

    title: str
    parts: Sequence[str | Table | Chart | Figure] = field(default_factory=tuple)

    def markup(self) -> Markup:
        """For a page; neighbouring charts stand side by side where there is space, and pictures in a grid."""
        parts: list[str] = []
        drawn: list[tuple[str, str]] = []
        shown: list[str] = []
        for part in (*self.parts, ""):
            if not isinstance(part, Chart) and drawn:
                parts.append(charts([(Markup(svg), caption) for svg, caption in drawn]))
                drawn = []
            if not isinstance(part, Figure) and shown:
                parts.append(pictures(shown, "pairs"))
                shown = []
            if isinstance(part, Chart):
                drawn.append((part.svg, part.caption))
            elif isinstance(part, Figure):
                shown.append(part.markup)
            elif isinstance(part, Table):
                parts.append(part.markup())
            elif part:
                parts.append(paragraph(part))
        return section(self.title, *parts)

    def markdown(self) -> str:
        """For a file that people read as text; charts become their captions."""
        texts = [f"## {self.title}"]
        for part in self.parts:
            if isinstance(part, Table):
                texts.append(part.markdown())
            elif isinstance(part, Chart):
                texts.append(f"*Chart: {part.caption}*")
            elif isinstance(part, str):
                texts.append(part)
        return "\n\n".join(texts) + "\n"


def _is_number(cell: str) -> bool:
    """Whether a cell begins with a number, or has none where its neighbours do; such columns stand at the right."""
    return not cell or cell == "–" or cell.lstrip("+-").startswith(tuple("0123456789"))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
