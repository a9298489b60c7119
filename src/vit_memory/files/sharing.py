"""Bundles on the Hugging Face hub: checked before they are pushed, and checked after they are pulled."""

from pathlib import Path

from vit_memory.atomic import check_empty
from vit_memory.files.bundle import Bundle
from vit_memory.files.card import model_card
from vit_memory.files.hub import upload
from vit_memory.files.manifest import MANIFEST


def push(
    bundle: Bundle, repo: str, *, private: bool = False, endpoint: str | None = None, token: str | None = None
) -> str:
    """Upload a bundle with a model card, in one commit. Returns the commit's address."""
    graph = bundle.check()  # a damaged bundle is not uploaded
    tasks = list(graph.values())
    files: dict[str, Path | bytes] = {
        "README.md": model_card(repo, bundle.backbone, tasks, list(graph.branches.values())).encode(),
        MANIFEST: bundle.folder / MANIFEST,
    }
    paths = [bundle.path(entry) for entry in bundle.all_entries]
    files |= {f"{path.parent.name}/{path.name}": path for path in paths}
    message = f"{len(tasks)} tasks for {bundle.backbone.name}"
    return upload(repo, files, message, private=private, endpoint=endpoint, token=token)


def pull(
    repo: str,
    *,
    out: Path | None = None,
    revision: str | None = None,
    endpoint: str | None = None,
    token: str | None = None,
) -> Bundle:
    """Download a bundle into the hub's cache, check every file, and copy it to the folder `out` if given."""
    if out is not None:
        check_empty(out)
    bundle = Bundle.download(repo, revision=revision, endpoint=endpoint, token=token)
    if out is None:
        return bundle
    bundle.save_pretrained(out)
    return Bundle.open(out)
