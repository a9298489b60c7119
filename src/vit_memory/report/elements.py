"""Parts of the page: text is escaped here and nowhere else, so a label cannot become markup."""

import html
from collections.abc import Collection, Iterable, Sequence

FIRST_ROWS = 15  # of a long table; the others are folded away
MOST_ROWS = 500  # of any table


class Markup(str):
    """HTML as it is. Every other string is text, and `escape` makes markup of it."""

    __slots__ = ()


def escape(text: str) -> Markup:
    """The text as markup; markup stays what it is."""
    return text if isinstance(text, Markup) else Markup(html.escape(text))


def join(parts: Iterable[str]) -> Markup:
    """Parts one after the other, text among them escaped."""
    return Markup("".join(map(escape, parts)))


def paragraph(*parts: str, style: str = "") -> Markup:
    """A paragraph; `style` is a class of the style sheet."""
    opening = f'<p class="{style}">' if style else "<p>"
    return Markup(f"{opening}{join(parts)}</p>\n")


def bold(text: str) -> Markup:
    """Bold text."""
    return Markup(f"<b>{escape(text)}</b>")


def section(title: str, *parts: str) -> Markup:
    """A part of the page under its own heading."""
    return Markup(f"<section><h2>{escape(title)}</h2>\n{join(parts)}</section>\n")


def facts(pairs: Iterable[tuple[str, str]]) -> Markup:
    """Large numbers in boxes, each with what it is."""
    boxes = [f'<div class="fact"><b>{escape(value)}</b>{escape(meaning)}</div>' for value, meaning in pairs]
    return Markup(f'<div class="facts">{"".join(boxes)}</div>\n')


def details(pairs: Iterable[tuple[str, str]]) -> Markup:
    """Names with their values, one per line."""
    rows = [f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs]
    return Markup(f"<dl>{''.join(rows)}</dl>\n")


def verdict_cell(passed: bool) -> Markup:
    """A table cell that says whether a check passed."""
    return Markup(f'<td class="{"yes" if passed else "no"}">{"passed" if passed else "FAILED"}</td>')


def code_block(text: str) -> Markup:
    """Lines of code."""
    return Markup(f"<pre><code>{escape(text)}</code></pre>\n")


def share_cell(share: float | None) -> Markup:
    """A table cell with a share of one as a number and a bar."""
    if share is None:
        return Markup('<td class="n">–</td>')
    return Markup(f'<td class="n share" style="--v:{100 * share:.1f}%">{100 * share:.1f}</td>')


def table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Collection[int] = (),
    bold_row: int | None = None,
    more: str = "rows",
    fold: bool = True,
) -> Markup:
    """A table; a value that is markup is a whole <td>. Rows after the first ones are folded away, unless not `fold`."""
    head = "".join(f"<th{_numeric(i in numeric)}>{escape(title)}</th>" for i, title in enumerate(titles))

    def part(chosen: Sequence[Sequence[str]], first: int) -> str:
        lines = []
        for place, row in enumerate(chosen, first):
            cells = [
                cell if isinstance(cell, Markup) else f"<td{_numeric(i in numeric)}>{escape(cell)}</td>"
                for i, cell in enumerate(row)
            ]
            lines.append(f"<tr{' class=best' if place == bold_row else ''}>{''.join(cells)}</tr>")
        body = "\n".join(lines)
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>\n'

    if len(rows) <= FIRST_ROWS + 5 or not fold:
        return Markup(part(rows, 0))
    listed = "" if len(rows) <= MOST_ROWS else f", of which {MOST_ROWS - FIRST_ROWS} are listed"
    summary = f"<summary>{number(len(rows) - FIRST_ROWS)} more {escape(more)}{listed}</summary>"
    rest = part(rows[FIRST_ROWS:MOST_ROWS], FIRST_ROWS)
    return Markup(f"{part(rows[:FIRST_ROWS], 0)}<details>{summary}{rest}</details>\n")


def picture(source: str, caption: str, name: str, second: str | None = None) -> Markup:
    """An image, or two beside each other, from data URIs, with a caption and the end of the image's name below."""
    full = escape(name)
    images = [f'<img src="{uri}" alt="{full}">' for uri in (source, second) if uri is not None]
    style = ' class="pair"' if second is not None else ""
    file = f'<span class="file" title="{full}">{escape(name.replace(chr(92), "/").rpartition("/")[2])}</span>'
    text = f"<figcaption>{escape(caption)}{file}</figcaption>"
    return Markup(f"<figure{style}><div>{''.join(images)}</div>{text}</figure>\n")


def pictures(figures: Iterable[str], style: str = "pictures") -> Markup:
    """A grid of pictures."""
    return Markup(f'<div class="{style}">{join(figures)}</div>\n')


def charts(drawn: Iterable[tuple[str, str]]) -> Markup:
    """Charts (<svg>) beside each other where there is space, each with a caption, which may be empty."""
    figures = [
        f'<figure class="chart">{svg}{f"<figcaption>{escape(text)}</figcaption>" if text else ""}</figure>'
        for svg, text in drawn
    ]
    return Markup(f'<div class="charts">{"".join(figures)}</div>\n')


def percent(share: float) -> str:
    """A share of one in per cent."""
    return f"{100 * share:.1f} %"


def number(value: int) -> str:
    """A whole number, thousands apart by a thin space."""
    return f"{value:,}".replace(",", "\u202f")


def count(value: int, one: str, many: str | None = None) -> str:
    """A number with what it counts."""
    return f"{number(value)} {one if value == 1 else many or one + 's'}"


def _numeric(yes: bool) -> str:
    return ' class="n"' if yes else ""
