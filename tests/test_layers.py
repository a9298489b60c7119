"""Imports go one way: from commands down to plain values. Imports inside functions and for types count too."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import vit_memory

SRC = Path(vit_memory.__file__).parent
# From top to bottom. A package counts with all its modules; modules that are not named here are core.
LAYERS = (
    {"__init__", "__main__"},  # re-exports the public names; starts the command
    {"cli"},
    {"serving", "report", "demo", "evaluation", "export"},
    {"training"},
    {"files", "data"},
    {"core"},
    {"families"},
    {"atomic", "average_precision", "buffers", "choices", "errors", "outputs", "parallel", "preprocessing", "regimes"}
    | {"user_cache"},
)
ONLY_IN = {
    "transformers": "families",
    "timm": "families",
    "torchvision": "data",
    "datasets": "data",
    "accelerate": "training",
    "tensorboard": "training",
    "peft": "evaluation",
    "fastapi": "serving",
    "starlette": "serving",
    "uvicorn": "serving",
    "pydantic": "serving",
    "anyio": "serving",
    "python_multipart": "serving",
    "prometheus_client": "serving",
    "httpx": "serving",
    "ray": "serving",
    "typer": "cli",
    "rich": "cli",
}
MODULES = {".".join(path.relative_to(SRC).with_suffix("").parts): path for path in sorted(SRC.rglob("*.py"))}


def imported_names(path):
    """Dotted names of everything that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write it from vit_memory"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(name):
    """The module that a name of this package leads to: `vit_memory.task.Task` is in `task`."""
    parts = name.split(".")[1:]
    candidates = (".".join((*parts[:n], *end)) for n in range(len(parts), -1, -1) for end in ((), ("__init__",)))
    return next(module for module in candidates if module in MODULES)


def own_imports():
    """Pairs of modules of this package: the importing one and the imported one."""
    for module, path in MODULES.items():
        for name in imported_names(path):
            if name.split(".")[0] == "vit_memory" and module_of(name) != module:
                yield module, module_of(name)


def layer(module):
    top = module.split(".")[0]
    return next((i for i, names in enumerate(LAYERS) if top in names), LAYERS.index({"core"}))


IMPORTS = set(own_imports())


def test_no_module_imports_from_a_layer_above():
    upward = [f"{a} imports {b}" for a, b in sorted(IMPORTS) if layer(b) < layer(a)]
    assert upward == []


def test_no_modules_import_each_other_in_a_circle():
    graph = {module: {b for a, b in IMPORTS if a == module} for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


def test_each_library_is_imported_in_one_package_only():
    misplaced = [
        f"{module} imports {name}"
        for module, path in MODULES.items()
        for name in imported_names(path)
        if ONLY_IN.get(name.split(".")[0], module.split(".")[0]) != module.split(".")[0]
    ]
    assert misplaced == []
