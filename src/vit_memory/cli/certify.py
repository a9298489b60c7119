"""vit-memory certify: check given tasks on given images, and write a certificate; or check a certificate again."""

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vit_memory.choices import Precision, SplitName
from vit_memory.cli.data import DataOptions, Seed, column_names
from vit_memory.cli.options import spread_options
from vit_memory.cli.progress import show_log, typed_command
from vit_memory.cli.tasks import Rename, parse_rename
from vit_memory.cli.terminal import Bar, is_interactive

if TYPE_CHECKING:
    from vit_memory.evaluation.certificates.certificate import Certificate, Request

# Where things are may differ when a certificate is checked; what is computed may not.
_WITH_CHECK = {"check", "sources", "rename", "data", "data_dir", "download", "backbone", "device"}


@dataclass(frozen=True)
class CertifiedOn:
    """The images, and how to compute."""

    data: Annotated[str | None, typer.Option(help="Images: DATA as in vit-memory data.", show_default=False)] = None
    split: Annotated[SplitName, typer.Option(help="The images of DATA to compute on.")] = "test"
    images: Annotated[int, typer.Option(min=1, help="How many of them, drawn by content.")] = 64
    batch: Annotated[int, typer.Option(min=1, help="Images per pass.")] = 16
    threads: Annotated[int, typer.Option(min=1, help="Threads of a pass.")] = 1
    dtype: Annotated[Precision, typer.Option(help="The dtype to compute in.")] = "float32"
    seed: Seed = 0


@spread_options
def certify(
    context: typer.Context,
    sources: Annotated[
        list[Path] | None, typer.Argument(metavar="TASK|BUNDLE", help="Task files or bundle folders.")
    ] = None,
    *,
    on: CertifiedOn,
    data: DataOptions,
    backbone: Annotated[
        str | None, typer.Option(help="Load this backbone.  [default: the one that the tasks name]")
    ] = None,
    rename: Rename = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or mps.")] = "cpu",
    out: Annotated[Path, typer.Option(metavar="FILE.json", help="The certificate; the page is beside it.")] = Path(
        "certificate.json"
    ),
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="Check this certificate again instead of making one.", show_default=False
        ),
    ] = None,
) -> None:
    """Certify that tasks change neither the backbone nor each other, on your images.

    Writes a JSON file with a SHA-256 over its content, and a page: original output bit-identical, tasks alone and in
    company, the dense reference, gradients between unrelated tasks, NaN in every task and branch. Exit 1 if a check
    fails. With --check, the checks of a certificate are repeated on the same tasks and images, from its paths or from
    those given; exit 1 if something is not as it was.
    """
    show_log()
    if check is not None:
        _refuse_options(context)
        given_device = device if _is_given(context, "device") else None
        _check(check, _given_paths(sources, rename, on.data, data, backbone, given_device), download=data.download)
        return
    if not sources or on.data is None:
        raise typer.BadParameter("give task files or a bundle, and --data; or --check with a certificate.")
    if out.suffix == ".html":
        raise typer.BadParameter(f"{out}: names the JSON file; the page is written beside it.", param_hint="--out")
    from vit_memory.evaluation.certificates.certificate import Request

    request = Request(
        sources=tuple(map(str, sources)),
        data=on.data,
        split=on.split,
        images=on.images,
        batch=on.batch,
        threads=on.threads,
        dtype=on.dtype,
        device=device,
        backbone=backbone,
        rename=_renamed(rename),
        data_dir=None if data.data_dir is None else str(data.data_dir),
        image_column=data.image_column,
        label_columns=column_names(data.label_column),
        kind=data.kind,
        seed=on.seed,
    )
    _make(request, out, download=data.download)


def _make(request: "Request", out: Path, *, download: bool) -> None:
    from vit_memory.evaluation.certificates.certifying import certify as run
    from vit_memory.evaluation.certificates.files import write_certificate
    from vit_memory.report.certificate_page import write_certificate_page
    from vit_memory.report.frame import check_writable

    page = out.with_suffix(".html")
    check_writable(out)
    check_writable(page)
    with closing(_Progress()) as progress:
        certificate = run(request, command=typed_command(), download=download, on_progress=progress)
    write_certificate(out, certificate)
    write_certificate_page(page, certificate, out.name)
    typer.echo(_table(certificate))
    typer.echo(f"\n{out} and {page.name}: written, SHA-256 {certificate.sha256}")
    if not certificate.passed:
        typer.echo("failed:\n" + "\n".join(f"  {failure}" for failure in certificate.failures), err=True)
        raise typer.Exit(1)


def _given_paths(
    sources: list[Path] | None,
    rename: list[str] | None,
    images: str | None,
    data: DataOptions,
    backbone: str | None,
    device: str | None,
) -> "dict[str, object]":
    """The fields of a certificate's request that are replaced: where things are, as far as it was given."""
    given: dict[str, object] = {
        "data": images,
        "data_dir": None if data.data_dir is None else str(data.data_dir),
        "backbone": backbone,
        "device": device,
    }
    if sources:
        given |= {"sources": tuple(map(str, sources)), "rename": _renamed(rename)}
    return {name: value for name, value in given.items() if value is not None}


def _renamed(rename: list[str] | None) -> tuple[tuple[str, str], ...]:
    return tuple((str(path), name) for path, name in parse_rename(rename).items())


def _check(path: Path, given: "dict[str, object]", *, download: bool) -> None:
    """Check a certificate again, with the paths that were given instead of its own."""
    from vit_memory.errors import TaskError
    from vit_memory.evaluation.certificates.checking import check_again
    from vit_memory.evaluation.certificates.files import read_certificate

    old = read_certificate(path)
    typer.echo(f"{path}: the content matches its SHA-256 ({old.sha256}); made {old.created}")
    request = replace(old.request, **given)  # type: ignore[arg-type]
    missing = [source for source in request.sources if not Path(source).exists()]
    if missing:
        raise TaskError(
            f"{', '.join(missing)}: named by the certificate, but not found from this folder. Give the tasks again: "
            f"vit-memory certify --check {path} TASK|BUNDLE"
        )
    with closing(_Progress()) as progress:
        repetition = check_again(old, request, download=download, on_progress=progress)
    typer.echo(_table(repetition.certificate))
    for note in repetition.notes:
        typer.echo(f"note: {note}")
    if not repetition.passed:
        typer.echo("not as it was:\n" + "\n".join(f"  {one}" for one in repetition.differences), err=True)
        raise typer.Exit(1)
    typer.echo("\neverything is as it was: the same backbone, tasks and images, and all checks passed.")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refuse_options(context: typer.Context) -> None:
    """Raise BadParameter for options that a certificate has fixed."""
    extra = [name for name in context.params if _is_given(context, name) and name not in _WITH_CHECK]
    if extra:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in extra)
        raise typer.BadParameter(f"{options}: not with --check, which repeats what the certificate says.")


def _table(certificate: "Certificate") -> str:
    """One line per check: result, name, images, and the worst value where one is measured."""
    lines = []
    for check in certificate.checks:
        values = [result.value for result in check.results if result.value is not None]
        worst = f", worst {max(values):.1e}" if values else ""
        batches = f", batches: {check.results[0].compared}" if check.unit == "batches" else ""
        lines.append(f"{'passed' if check.passed else 'FAILED':8}{check.name:24}images: {check.images}{batches}{worst}")
    return "\n".join(lines)


class _Progress:
    """Shows how many comparisons are done: as a bar in a terminal, elsewhere as a line per check."""

    def __init__(self) -> None:
        self._bar = Bar() if is_interactive() else None
        self._name = ""

    def __call__(self, done: int, total: int, name: str) -> None:
        if self._bar is not None:
            self._bar.show(done, total, [f"{done}/{total}", name])
        elif name != self._name:
            typer.echo(f"checking: {name} ({done} of {total} comparisons done)", err=True)
        self._name = name

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
