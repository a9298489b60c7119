"""The notebooks: what is committed is clean and true, and executing them anew gives no error and the same claims."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

import vit_memory

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "notebooks"
sys.path.insert(0, str(ROOT / "scripts"))
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SOURCES = [*NOTEBOOKS, FOLDER / "notebook_tools.py"]
LARGEST = 300_000  # bytes

# What each prints, as often as it must.
CLAIMS = {
    "1_full_head_class_memory": {
        r"^original output with 12 tasks attached, equal to the bit: True$": 1,
        r"^\| (head|class|1 cell|5 cells|20 cells|rank 8 \+ gains) \| \d{1,2},\d{3} \|": 6,
        r"^\| full \| 5,\d{3},\d{3} \|": 1,
    },
    "2_larger_vits_and_other_families": {r"\| yes \|$": 9, r"with 16 tasks attached: True$": 1},
    "3_concatenation": {
        r"^original output equal to the bit: True$": 1,
        r"^with a broken task, equal to the bit: True$": 1,
        r"^tasks that still answer: digit, loop$": 1,
        r"^\| \w+ \| (\S+ \S+) \| \1 \| \de-\d+ \|$": 3,  # together as alone, intervals included
    },
    "4_extension": {
        r"^(concatenation|chain|diamond): .*, original output equal to the bit: True$": 3,
        r"^\| digit \| (\S+ \S+) \| \1 \| \1 \|$": 1,  # whoever extends it
    },
}


def by_name(path):
    return path.stem


def cells(notebook, kind):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def text_of(value):
    return value if isinstance(value, str) else "".join(value)


def check_outputs(name, notebook):
    """No error, no noise, nothing of the machine, and every claim."""
    outputs = [output for cell in cells(notebook, "code") for output in cell["outputs"]]
    assert outputs
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert all(output.get("name", "stdout") == "stdout" for output in outputs)
    texts = [text_of(output.get("text", "")) for output in outputs]
    texts += [
        text_of(output["data"]["text/markdown"]) for output in outputs if "text/markdown" in output.get("data", {})
    ]
    printed = "\n".join(texts)
    assert not re.search(r"Warning|Traceback|/tmp|/home|/root|/work|site-packages|<\w+ object at", printed)
    for claim, count in CLAIMS[name].items():
        assert len(re.findall(claim, printed, flags=re.MULTILINE)) == count, claim


def test_there_is_a_list_of_claims_for_every_notebook():
    assert [path.stem for path in NOTEBOOKS] == list(CLAIMS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_committed_outputs_are_clean_and_their_claims_hold(path):
    assert path.stat().st_size < LARGEST
    notebook = json.loads(path.read_text(encoding="utf-8"))
    check_outputs(path.stem, notebook)
    assert [cell["execution_count"] for cell in cells(notebook, "code")] == list(
        range(1, len(cells(notebook, "code")) + 1)
    )
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    assert all(cell["metadata"] == {} for cell in notebook["cells"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_each_begins_with_what_it_shows_in_two_sentences(path):
    first = text_of(cells(json.loads(path.read_text(encoding="utf-8")), "markdown")[0]["source"])
    title, _, sentences, *_ = first.split("\n")
    assert title.startswith("# ")
    assert len(re.findall(r"[.](?: |$)", sentences)) == 2


@pytest.mark.parametrize("path", SOURCES, ids=by_name)
def test_they_use_the_public_names_only(path):
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        source = "\n".join(text_of(cell["source"]) for cell in cells(json.loads(source), "code"))
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vit_memory":
            assert node.module == "vit_memory"
            imported |= {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "vit_memory" for alias in node.names)
    assert imported
    assert imported <= set(vit_memory.__all__)


@pytest.mark.slow  # the slow tests are those that have the extra notebooks
def test_their_images_are_those_that_training_evaluates_on():
    pytest.importorskip("matplotlib_inline", reason="needs the extra notebooks")
    import torch

    from vit_memory.data.loading import Loader
    from vit_memory.data.transforms import EvalTransform

    sys.path.insert(0, str(FOLDER))
    from notebook_tools import as_tensors

    split = vit_memory.open_data("digits").test.per_class(2, seed=0)
    preprocessing = vit_memory.load_backbone("bundled").preprocessing
    images, targets = as_tensors(split, preprocessing)
    (batch,) = Loader(split, EvalTransform(preprocessing), len(split)).batches()
    torch.testing.assert_close(images, batch.images, rtol=0, atol=1e-5)
    assert torch.equal(targets, batch.targets)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_executed_anew_they_end_without_an_error_and_with_the_same_claims(path):
    pytest.importorskip("nbclient", reason="needs the extra notebooks")
    from run_notebooks import execute

    before = path.read_bytes()
    check_outputs(path.stem, execute(path))
    assert path.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_their_pages_ask_no_network_for_anything(path):
    nbformat = pytest.importorskip("nbformat", reason="needs the extra notebooks")
    from run_notebooks import as_html

    page = as_html(nbformat.read(path, as_version=4), path.stem)
    assert "<script" not in page
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//|@import|url\(["']?(?:https?:)?//""", page)
