"""Bundles on the Hugging Face hub: pushed in one commit, pulled and checked before they are used."""

from pathlib import Path
from typing import Any

from vit_memory.errors import FileError
from vit_memory.files.bundle import MANIFEST, TASKS, Bundle
from vit_memory.files.card import model_card


def push(
    bundle: Bundle, repo: str, *, private: bool = False, endpoint: str | None = None, token: str | None = None
) -> str:
    """Put a bundle on the hub with a model card, in one commit; returns its address."""
    hub = _hub()
    tasks = list(bundle.check().values())  # nothing damaged leaves this machine
    files: dict[str, Path | bytes] = {"README.md": model_card(bundle, tasks, repo).encode()}
    files[MANIFEST] = bundle.folder / MANIFEST
    for entry in bundle.entries:
        files[f"{TASKS}/{entry.file}"] = bundle.folder / TASKS / entry.file
    try:
        api = hub.HfApi(endpoint=endpoint, token=token, library_name="vit-memory")
        api.create_repo(repo, private=private, exist_ok=True)
        operations = [hub.CommitOperationAdd(path, content) for path, content in files.items()]
        commit = api.create_commit(repo, operations, commit_message=f"{len(tasks)} tasks for {bundle.backbone.name}")
    except Exception as error:  # the library has errors of many kinds; each says what the hub said
        raise FileError(f"{repo}: cannot be pushed, the hub says: {_first_line(error)}") from error
    address: str = str(commit.commit_url)
    return address


def pull(
    repo: str,
    *,
    out: Path | None = None,
    revision: str | None = None,
    endpoint: str | None = None,
    token: str | None = None,
) -> Bundle:
    """Fetch a bundle into the hub's cache, check every file of it, and copy it to `out` if given."""
    hub = _hub()
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileError(f"{out}: is not an empty folder; give another name.")
    try:
        folder = hub.snapshot_download(
            repo,
            revision=revision,
            allow_patterns=[MANIFEST, f"{TASKS}/*.safetensors"],
            endpoint=endpoint,
            token=token,
            library_name="vit-memory",
        )
    except Exception as error:
        raise FileError(f"{repo}: cannot be pulled, the hub says: {_first_line(error)}") from error
    bundle = Bundle.open(folder)
    bundle.check()
    if out is None:
        return bundle
    bundle.save_pretrained(out)
    return Bundle.open(out)


def _hub() -> Any:
    try:
        import huggingface_hub  # noqa: PLC0415 - an extra
    except ImportError:
        raise FileError("the hub needs huggingface_hub: pip install 'vit-memory[hub]'") from None
    return huggingface_hub


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
