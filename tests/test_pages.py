"""Pages that people keep: the report of the experiments and the notebooks, in a browser, wide and on a phone."""

import sys
from pathlib import Path

import pytest

from browser import WIDTHS, Window
from vit_memory.report.experiments import write_experiment_report

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
RECORDS = ROOT / "results" / "reproduce"
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
pytestmark = pytest.mark.slow


def check(browser, page):
    for width in WIDTHS:
        window = Window(browser, page.as_uri(), width)
        window.check()
        window.context.close()


def test_the_committed_report_is_what_the_records_say(tmp_path):
    for path in RECORDS.glob("*/*.json"):
        (tmp_path / path.parent.name).mkdir(exist_ok=True)
        (tmp_path / path.parent.name / path.name).write_bytes(path.read_bytes())
    _, text = write_experiment_report(tmp_path)
    assert text.read_text(encoding="utf-8") == (RECORDS / "report.md").read_text(encoding="utf-8")


def test_the_report_is_readable_at_every_width_and_asks_nobody_for_anything(browser):
    check(browser, RECORDS / "report.html")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_readable_at_every_width_and_ask_nobody_for_anything(path, browser, tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="needs the extra notebooks")
    from run_notebooks import as_html

    page = tmp_path / f"{path.stem}.html"
    page.write_text(as_html(nbformat.read(path, as_version=4), path.stem), encoding="utf-8")
    check(browser, page)
