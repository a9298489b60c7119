"""Files to and from the Hugging Face hub: uploaded in one commit, downloaded into the hub's cache.

The only module that imports huggingface_hub. It moves files and never opens them; see `sharing` for bundles.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vit_memory.errors import FileError


def upload(
    repo: str,
    files: Mapping[str, Path | bytes],
    message: str,
    *,
    private: bool = False,
    endpoint: str | None = None,
    token: str | None = None,
) -> str:
    """Upload files, by their paths in the repository, in one commit. Returns the commit's address."""
    hub = _import_hub()
    try:
        api = hub.HfApi(endpoint=endpoint, token=token, library_name="vit-memory")
        api.create_repo(repo, private=private, exist_ok=True)
        operations = [hub.CommitOperationAdd(path, content) for path, content in files.items()]
        commit = api.create_commit(repo, operations, commit_message=message)
    except Exception as error:  # the library raises many types; the first line names the reason
        raise FileError(f"{repo}: cannot be pushed to the hub: {_first_line(error)}") from error
    return str(commit.commit_url)


def download(
    repo: str,
    patterns: Sequence[str],
    *,
    revision: str | None = None,
    endpoint: str | None = None,
    token: str | None = None,
) -> Path:
    """Download the files that match `patterns`. Returns their folder in the hub's cache."""
    hub = _import_hub()
    try:
        folder = hub.snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(patterns),
            endpoint=endpoint,
            token=token,
            library_name="vit-memory",
        )
    except Exception as error:
        raise FileError(f"{repo}: cannot be pulled from the hub: {_first_line(error)}") from error
    return Path(folder)


def _import_hub() -> Any:
    try:
        import huggingface_hub  # noqa: PLC0415 - an optional dependency
    except ImportError:
        raise FileError("the hub needs huggingface_hub: pip install 'vit-memory[hub]'") from None
    return huggingface_hub


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
