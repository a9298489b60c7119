"""The package's face: public names, their documentation, and an import that does no work."""

import doctest
import subprocess
import sys

import pytest
import torch

import vit_memory
from builders import tiny_backbone

PUBLIC = [
    "Adapter",
    "AsyncClient",
    "Backbone",
    "BackboneError",
    "BackboneIdentity",
    "BackboneMismatch",
    "BadImage",
    "Branch",
    "BranchRef",
    "Bundle",
    "Cache",
    "Callbacks",
    "Client",
    "DamagedFile",
    "DataError",
    "Dataset",
    "DeadlinePassed",
    "Engine",
    "EngineClosed",
    "EngineOptions",
    "Explanation",
    "FileError",
    "FitResult",
    "GraphError",
    "ImageError",
    "LowRank",
    "MemoryViT",
    "NewerFormat",
    "Original",
    "Outputs",
    "Preprocessing",
    "Progress",
    "QueueFull",
    "RateFactors",
    "ReadOut",
    "Recipe",
    "RequestFailed",
    "ServingError",
    "Task",
    "TaskError",
    "TaskGraph",
    "TaskRecord",
    "TrainingError",
    "TrainingOptions",
    "TrainingStopped",
    "Trunk",
    "UnknownTask",
    "UnsafeFile",
    "UnsupportedFamily",
    "VitMemoryError",
    "fit",
    "load_backbone",
    "load_branch",
    "load_task",
    "new_branch",
    "new_task",
    "open_data",
    "save_branch",
    "save_task",
]


def test_the_public_names_are_these():
    assert sorted(vit_memory.__all__) == sorted(PUBLIC)
    assert set(PUBLIC) <= set(dir(vit_memory))
    assert all(getattr(vit_memory, name).__doc__ for name in PUBLIC)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        vit_memory.nothing  # noqa: B018


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "Client"])  # needs a server: test_client.py
def test_examples_in_docstrings_run(name):
    names = {"backbone": tiny_backbone(), "torch": torch, **{public: getattr(vit_memory, public) for public in PUBLIC}}
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder(recurse=False).find(getattr(vit_memory, name), name, globs=names):
        assert runner.run(test).failed == 0


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        (
            "vit_memory, vit_memory.cli",
            ("torch", "numpy", "PIL", "transformers", "timm", "rich"),
        ),  # --help does not wait for torch
        ("vit_memory.model, vit_memory.reference, vit_memory.families.vit", ("transformers", "timm")),
    ],
)
def test_importing_brings_nothing_that_is_not_needed_yet(imported, absent):
    code = f"import sys, {imported}; print([module for module in {absent} if module in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"
    assert not said.stderr
