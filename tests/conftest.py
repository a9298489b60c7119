"""Small tensors on two threads, as everywhere here; the builders are importable by name."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: no test asks a network
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="vit-memory-tests-")  # nor touches the cache of who runs it
# Some virtual machines announce AMX and refuse its instructions: torch's own bfloat16 products end the process there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from browser import open_browser

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)  # two workers share two cores


def pytest_unconfigure():
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser
