"""Execute the notebooks of examples/notebooks and write their outputs into them.

    python scripts/run_notebooks.py                            # all of them
    python scripts/run_notebooks.py 3_concatenation --html out # one of them, and its page

What differs between machines and runs without meaning is left out: times of execution, versions, identifiers. A cell
that raises, warns or writes to stderr fails the run, and the notebook on disk stays as it was.
"""

import argparse
import os
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from nbformat import NotebookNode

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
TIMEOUT = 1800  # seconds per cell: a busy machine takes many times as long as an idle one
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# On a phone, tables and code scroll by themselves and pictures shrink, so that the page does not scroll sideways.
_STYLE = """
body { max-width: 60rem; margin: auto; }
table { display: block; overflow-x: auto; max-width: 100%; }
table td { white-space: nowrap !important; }
.highlight, .jp-RenderedHTMLCommon pre { overflow-x: auto; }
img { max-width: 100%; height: auto; }
@media (max-width: 640px) { .jp-InputPrompt, .jp-OutputPrompt, .jp-Collapser { display: none; } }
"""


def notebooks() -> list[Path]:
    """All of them, in order."""
    return sorted(FOLDER.glob("*.ipynb"))


def execute(path: Path) -> NotebookNode:
    """The notebook with the outputs of this machine; the file does not change."""
    notebook = nbformat.read(path, as_version=4)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # they need no network, and do not ask for one
    quiet = ["--IPKernelApp.log_level=ERROR"]  # it warns that its ports on this machine are not encrypted
    place = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=TIMEOUT, resources=place, extra_arguments=quiet, coalesce_streams=True).execute()
    noise = [output.text for cell in _code(notebook) for output in cell.outputs if output.get("name") == "stderr"]
    if noise:
        raise RuntimeError(f"{path.name}: a cell wrote to stderr: {noise[0]}")
    return clean(notebook)


def clean(notebook: NotebookNode) -> NotebookNode:
    """Without what differs between runs and machines."""
    notebook.metadata = nbformat.from_dict(_METADATA)
    for i, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{i + 1}", nbformat.from_dict({})
    return notebook


def printed(notebook: NotebookNode) -> str:
    """Everything that its cells printed and every table, as text."""
    texts = []
    for cell in _code(notebook):
        for output in cell.outputs:
            data = output.get("data", {})
            texts.append(output.get("text") or data.get("text/markdown") or data.get("text/plain") or "")
    return "\n".join(texts)


def as_html(notebook: NotebookNode, title: str) -> str:
    """A page that asks no network for anything.

    The template's own scripts (require.js, MathJax, Mermaid) come from a CDN, and these pages have neither formulas nor
    widgets nor diagrams: they are taken out.
    """
    exporter = HTMLExporter(template_name="lab", embed_images=True, exclude_anchor_links=True)
    page, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"name": title}})
    page = re.sub(r"<script\b.*?</script>", "", page, flags=re.DOTALL)
    return page.replace("</head>", f"<style>{_STYLE}</style></head>")


def _code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def main() -> None:
    """Execute, write, and render."""
    parser = argparse.ArgumentParser(description="Execute the notebooks of examples/notebooks in place.")
    parser.add_argument("names", nargs="*", help="names without .ipynb; default: all")
    parser.add_argument("--html", type=Path, help="also write a page of each into this folder")
    parser.add_argument("--keep", action="store_true", help="execute nothing: keep the outputs that are there")
    options = parser.parse_args()
    for path in [FOLDER / f"{name}.ipynb" for name in options.names] or notebooks():
        notebook = nbformat.read(path, as_version=4) if options.keep else execute(path)
        if not options.keep:
            nbformat.write(notebook, path)
            print(f"{path.name}: executed")
        if options.html is not None:
            options.html.mkdir(parents=True, exist_ok=True)
            page = options.html / f"{path.stem}.html"
            page.write_text(as_html(notebook, path.stem), encoding="utf-8")
            print(f"{page}: written")


if __name__ == "__main__":
    main()
