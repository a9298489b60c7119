"""What produced a record: machine, versions, commit, command, time and peak memory."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "transformers", "timm", "peft", "vit-memory")


def environment() -> dict[str, Any]:
    """Machine, versions and commit, as JSON values."""
    return {
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": platform.system(),
        },
        "versions": versions(),
        "commit": commit(),
    }


def versions() -> Mapping[str, str]:
    """Of Python and of the installed packages that results depend on."""
    by_package = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            by_package[package] = version(package)
        except PackageNotFoundError:
            continue
    return by_package


def processor() -> str:
    """The processor's model name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the code, with `-dirty` if it was changed since; None outside a git checkout.

    Records do not count: a run that writes one does not change the code that it runs.
    """
    here = Path(__file__).resolve()
    root = next((folder for folder in here.parents if (folder / ".git").exists()), None)
    if root is None:
        return None

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=root, check=False)
        return done.stdout.strip()

    revision = git("rev-parse", "HEAD")
    return revision and revision + ("-dirty" if git("status", "--porcelain", "--", ".", ":!results") else "")


def command_line(program: str) -> str:
    """The command for a shell, with absolute paths cut to their names: folders say something of the machine only."""
    arguments = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return f"{program} {shlex.join(arguments)}".rstrip()


def peak_memory_bytes() -> int:
    """The largest resident memory that this process has had; 0 where the system does not tell."""
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024
