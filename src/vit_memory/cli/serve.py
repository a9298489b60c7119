"""vit-memory serve: answer images over HTTP."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vit_memory.cli.options import spread_options
from vit_memory.cli.ray import require_ray

if TYPE_CHECKING:
    from vit_memory.serving.options import EngineOptions
    from vit_memory.serving.server import ServePlan
    from vit_memory.serving.settings import Limits

TOKEN_VARIABLE, ADMIN_VARIABLE = "VIT_MEMORY_TOKEN", "VIT_MEMORY_ADMIN_TOKEN"
_ACCESS, _LIMITS, _COMPUTE, _RAY = "Access", "Limits", "Computing", "Ray"
LogLevel = Literal["debug", "info", "warning", "error"]
_SECRETS = {"--token": TOKEN_VARIABLE, "--admin-token": ADMIN_VARIABLE}


@dataclass(frozen=True)
class AccessOptions:
    """Who may use the server."""

    token: Annotated[
        str | None,
        typer.Option(
            help=f"Needed to predict; - reads it from stdin.  [environment: {TOKEN_VARIABLE}]", rich_help_panel=_ACCESS
        ),
    ] = None
    token_file: Annotated[
        Path | None, typer.Option(help="A file that holds it.", rich_help_panel=_ACCESS, exists=True, dir_okay=False)
    ] = None
    admin_token: Annotated[
        str | None,
        typer.Option(
            help=f"Needed to change tasks; - reads it from stdin.  [environment: {ADMIN_VARIABLE}]",
            rich_help_panel=_ACCESS,
        ),
    ] = None
    admin_token_file: Annotated[
        Path | None, typer.Option(help="A file that holds it.", rich_help_panel=_ACCESS, exists=True, dir_okay=False)
    ] = None
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Allow other machines without a token.", rich_help_panel=_ACCESS),
    ] = False
    cors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", help="Allow pages of this origin to call; may be repeated.", rich_help_panel=_ACCESS
        ),
    ] = None

    def check(self) -> None:
        """Raise BadParameter if a token is given twice. Call it before a token moves to the environment."""
        for option, token, file in (
            ("--token", self.token, self.token_file),
            ("--admin-token", self.admin_token, self.admin_token_file),
        ):
            if token is not None and file is not None:
                raise typer.BadParameter(f"{option} and {option}-file are both given; give one.")

    def tokens(self) -> tuple[str | None, str | None]:
        """The token to predict and the one to change tasks, from the options, the files or the environment."""
        return (
            _token("--token", self.token, self.token_file, TOKEN_VARIABLE),
            _token("--admin-token", self.admin_token, self.admin_token_file, ADMIN_VARIABLE),
        )


@dataclass(frozen=True)
class LimitOptions:
    """What a request may bring."""

    max_body_mb: Annotated[
        float, typer.Option(min=0.001, help="Megabytes of a prediction's body.", rich_help_panel=_LIMITS)
    ] = 64
    max_images: Annotated[
        int, typer.Option(min=1, help="Images per request; never more than --max-queue.", rich_help_panel=_LIMITS)
    ] = 64
    max_pixels: Annotated[
        int, typer.Option(min=1, help="Pixels of an image, at most 100 million.", rich_help_panel=_LIMITS)
    ] = 50_000_000
    max_queue: Annotated[
        int, typer.Option(min=1, help="Images that wait; more are refused with 503.", rich_help_panel=_LIMITS)
    ] = 256
    timeout_s: Annotated[
        float, typer.Option(min=0.001, help="Seconds until a request is given up.", rich_help_panel=_LIMITS)
    ] = 30.0

    def limits(self) -> "Limits":
        """As the server takes them."""
        from vit_memory.serving.settings import Limits

        defaults = Limits()
        body = int(self.max_body_mb * 2**20)
        return Limits(
            max_body_bytes=body,
            max_bodies_bytes=max(defaults.max_bodies_bytes, body),
            max_images=min(self.max_images, self.max_queue),  # more would be refused on every try
            max_timeout_s=max(defaults.max_timeout_s, self.timeout_s),
        )


@dataclass(frozen=True)
class EngineSettings:
    """How images are computed."""

    backbone: Annotated[
        str | None,
        typer.Option(help="Load this backbone.  [default: the one that the tasks name]", rich_help_panel=_COMPUTE),
    ] = None
    device: Annotated[str, typer.Option(help="cpu, cuda or mps.", rich_help_panel=_COMPUTE)] = "cpu"
    max_batch: Annotated[int, typer.Option(min=1, help="Images per pass.", rich_help_panel=_COMPUTE)] = 16
    max_wait_ms: Annotated[
        float,
        typer.Option(
            min=0, help="How long an image waits for others while the model is idle.", rich_help_panel=_COMPUTE
        ),
    ] = 2.0
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads that compute, per worker.  [default: cores]", rich_help_panel=_COMPUTE),
    ] = None
    decode_threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads that decode.  [default: one per core, at most 8]", rich_help_panel=_COMPUTE),
    ] = None
    workers: Annotated[
        int, typer.Option(min=1, help="Processes, each with the whole model.", rich_help_panel=_COMPUTE)
    ] = 1

    def options(self, limits: LimitOptions) -> "EngineOptions":
        """As the engine takes them."""
        from vit_memory.serving.options import EngineOptions

        return EngineOptions(
            max_batch=self.max_batch,
            max_wait_ms=self.max_wait_ms,
            max_queue=limits.max_queue,
            decode_threads=self.decode_threads,
            threads=self.threads,
            timeout_s=limits.timeout_s,
            max_pixels=limits.max_pixels,
        )


@dataclass(frozen=True)
class RayOptions:
    """Whether Ray runs the server."""

    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Serve with Ray, on this machine or on the cluster that RAY_ADDRESS names.",
            rich_help_panel=_RAY,
        ),
    ] = False
    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="N|MIN-MAX", help="Replicas, or a range, by the load.  [default: 1]", rich_help_panel=_RAY
        ),
    ] = None

    def check(self, workers: int) -> None:
        """Raise BadParameter if the options do not go together, or Ray is missing."""
        if not self.ray and self.replicas is not None:
            raise typer.BadParameter("--replicas is for --ray; without it, there are --workers.")
        if self.ray and workers > 1:
            raise typer.BadParameter("--workers is not for --ray: give --replicas.")
        if self.ray:
            require_ray()


@spread_options
def serve(
    sources: Annotated[list[Path], typer.Argument(metavar="BUNDLE|TASK…", help="A bundle's folder, or task files.")],
    *,
    host: Annotated[str, typer.Option(help="Listen on this address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Listen on this port; 0 takes a free one.")] = 8000,
    bundle_dir: Annotated[
        Path | None, typer.Option(help="Keep changes of task files in this folder, made at the first start.")
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Refuse changes of tasks.")] = False,
    access: AccessOptions,
    limits: LimitOptions,
    engine: EngineSettings,
    ray: RayOptions,
    log_format: Annotated[Literal["text", "json"], typer.Option(help="Lines of the log, on stderr.")] = "text",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="From this level on.")
    ] = "info",
) -> None:
    """Serve tasks over HTTP: predictions, a page, and tasks that come and go while it runs.

    The page is at /, the description of all routes at /docs. Ctrl-C or SIGTERM ends the server after it has answered
    what was asked.
    """
    access.check()
    _hide_tokens(sys.orig_argv)
    from vit_memory.serving.workers import end_on_signals

    end_on_signals()  # loading takes a while
    ray.check(engine.workers)
    token, admin_token = access.tokens()
    try:
        from vit_memory.serving.server import ServePlan, run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("vit_memory"):
            raise
        extra = "ray" if ray.ray else "serve"
        raise typer.BadParameter(f"{error.name} is missing: pip install 'vit-memory[{extra}]'") from None
    from vit_memory.serving.settings import Settings

    plan = ServePlan(
        sources=tuple(sources),
        settings=Settings(
            token=token,
            admin_token=admin_token,
            read_only=read_only,
            cors=tuple(access.cors or ()),
            limits=limits.limits(),
            engine=engine.options(limits),
        ),
        bundle_folder=bundle_dir,
        backbone=engine.backbone,
        device=engine.device,
        host=host,
        port=port,
        workers=engine.workers,
        insecure=access.insecure,
        log_format=log_format,
        log_level=log_level,
    )
    if ray.ray:
        _run_on_ray(plan, access, ray.replicas)
    else:
        run(plan)


def _run_on_ray(plan: "ServePlan", access: AccessOptions, replicas: str | None) -> None:
    """Replicas find tokens where this process says: in a file, or in the environment, which Ray's processes inherit."""
    from vit_memory.serving import ray_serve
    from vit_memory.serving.token_places import TokenPlace

    def place(token: str | None, file: Path | None, variable: str) -> TokenPlace | None:
        if token is None:
            return None
        if file is not None:
            return TokenPlace("file", str(file.resolve()))
        os.environ[variable] = token
        return TokenPlace("env", variable)

    settings = plan.settings
    ray_serve.run(
        ray_serve.RayPlan(
            plan,
            ray_serve.Replicas.parse(replicas or "1"),
            place(settings.token, access.token_file, TOKEN_VARIABLE),
            place(settings.admin_token, access.admin_token_file, ADMIN_VARIABLE),
        )
    )


def _hide_tokens(command: Sequence[str]) -> None:
    """Begin anew without the tokens of the command line, which every user of the machine can read with ps.

    They move to the environment, which only the user can read. The command imports little before this point, so they
    are visible for a fraction of a second; a file or a variable from the start is better, and the help says how.
    """
    kept: list[str] = []
    hidden: dict[str, str] = {}  # variable -> token
    words = iter(command)
    for word in words:
        option, equals, value = word.partition("=")
        if option not in _SECRETS:
            kept.append(word)
            continue
        value = value if equals else next(words, "-")
        if value == "-":
            kept += [option, value]
        else:
            hidden[_SECRETS[option]] = value
    if hidden:
        os.execve(sys.executable, [sys.executable, *kept[1:]], {**os.environ, **hidden})


def _token(option: str, value: str | None, file: Path | None, variable: str) -> str | None:
    from vit_memory.serving.token_places import is_token

    if file is not None:
        token = file.read_text(encoding="utf-8").strip()
    elif value == "-":
        token = sys.stdin.readline().strip()
    elif value is not None:
        token = value
    elif variable in os.environ:
        token = os.environ[variable]
    else:
        return None
    if not is_token(token):
        raise typer.BadParameter(f"the token of {option} is empty or holds characters that a header cannot: use ASCII.")
    return token
