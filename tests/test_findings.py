"""results/: every file has a command that makes it, and every number of findings.md is computed from a record."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import findings

TEMPLATE = (findings.RESULTS / "findings.template.md").read_text(encoding="utf-8")
# Digits that are part of a name, not a result: methods, datasets, the backbone, and the level of all intervals.
NAMES = ("5 cells", "Table 2", "rank 8 + gains", "branch of 6 blocks", "DINOv2-S/14", "95 %")


def test_every_result_has_a_command_that_exists():
    root, text = findings.RESULTS.parent, (findings.RESULTS / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in findings.RESULTS.glob("*.json")}
    assert files - set(re.findall(r"`([\w.]+\.json)`", text)) == set()
    programs = [
        *re.findall(r"(scripts/\w+\.py)", text),
        *(f"benchmarks/{m}.py" for m in re.findall(r"-m benchmarks\.([a-z_]+)", text)),
    ]
    assert [name for name in programs if not (root / name).exists()] == []


def test_the_page_is_what_the_records_say():
    page = (findings.RESULTS / "findings.md").read_text(encoding="utf-8")
    assert findings.render(TEMPLATE, findings.RESULTS) == page


def test_no_number_of_the_page_is_typed_by_hand():
    text = re.sub(r"`[^`]*`", "", findings.EXPRESSION.sub("", TEMPLATE))
    for name in NAMES:
        text = text.replace(name, "")
    assert re.findall(r"\d[\d.]*", text) == []


@pytest.mark.parametrize("asked", ['accuracy("no such method")', 'gap("head", "no such method")', 'verdict("a", "b")'])
def test_what_has_no_record_is_refused(asked):
    with pytest.raises(findings.VitMemoryError, match="not in the records"):
        findings.render("{{" + asked + "}}", findings.RESULTS)
