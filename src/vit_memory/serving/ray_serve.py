"""The server as an application of Ray Serve: replicas of one application, on this machine or on many.

`run` is what the command does, `build` is for Serve's own configuration files, `application` for `serve.run`.
"""

import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI
from ray import serve
from ray.serve.exceptions import RayServeException

from vit_memory.errors import ServingError
from vit_memory.evaluation.models import collect_composable
from vit_memory.files.bundle import Bundle
from vit_memory.files.manifest import MANIFEST
from vit_memory.serving.logs import configure_logs
from vit_memory.serving.options import EngineOptions
from vit_memory.serving.ray_cluster import Cluster, connected
from vit_memory.serving.ray_replica import Replica, ReplicaPlan, absolute, build_app, open_tasks
from vit_memory.serving.server import ServePlan, bind, create_bundle, log_address
from vit_memory.serving.settings import Limits, Settings
from vit_memory.serving.token_places import TokenPlace
from vit_memory.serving.workers import end_on_signals

APPLICATION = "vit-memory"  # also the name of its only deployment
_GRACE_S = 15  # beyond the longest time that a request may take by default
_STREAM_S = 10.0  # of events: a replica waits for the end of all that it was asked, and these would have none
_STARTS = 3  # attempts to start a replica, before its deployment has failed
_ARGS = {"backbone", "bundle", "device", "token", "admin_token", "insecure", "read_only", "cors"}
_ARGS |= {"log_format", "log_level", "cpus", "engine", "limits"}
_Values = TypeVar("_Values")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Replicas:
    """How many replicas there are: a fixed number, or between two numbers by the load."""

    least: int = 1
    most: int = 1

    @classmethod
    def parse(cls, text: str) -> "Replicas":
        """From `2`, or `1-8`."""
        least, _, most = text.partition("-")
        try:
            replicas = cls(int(least), int(most or least))
        except ValueError:
            raise ServingError(f"--replicas is {text!r}; expected a number, 2, or a range, 1-8.") from None
        if not 1 <= replicas.least <= replicas.most:
            raise ServingError(f"--replicas is {text!r}; expected 1 or more, and the smaller number first.")
        return replicas

    def options(self, target: int) -> dict[str, Any]:
        """As Serve takes them. `target` is how many requests at once a replica should have, where it varies."""
        if self.least == self.most:
            return {"num_replicas": self.least}
        limits = {"min_replicas": self.least, "max_replicas": self.most}
        return {"autoscaling_config": {**limits, "target_ongoing_requests": target}}


_ONE = Replicas()


def application(
    plan: ReplicaPlan, user_config: Mapping[str, Any], replicas: Replicas = _ONE, cpus: float = 1.0
) -> serve.Application:
    """The application for `serve.run`: so many replicas, each with so many processors."""
    engine = plan.settings.engine
    threads = engine.threads or max(1, int(cpus))
    limits = replace(plan.settings.limits, stream_s=_STREAM_S)
    shared = replace(engine, threads=threads, decode_threads=engine.decode_threads or threads)  # a machine has others
    plan = replace(plan, settings=replace(plan.settings, limits=limits, engine=shared))

    def build_here() -> FastAPI:  # called in every replica
        return build_app(plan)

    deployment = serve.deployment(
        serve.ingress(build_here)(Replica),
        name=APPLICATION,
        user_config=dict(user_config),
        ray_actor_options={"num_cpus": cpus, "num_gpus": 1 if plan.device.startswith("cuda") else 0},
        max_ongoing_requests=limits.max_requests,  # the application itself refuses more, as it does elsewhere
        graceful_shutdown_timeout_s=engine.timeout_s + _GRACE_S,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_timeout_s=60,  # a busy machine is not a dead one
        max_constructor_retry_count=_STARTS,
        logging_config={"enable_access_log": False},  # the application has its own lines, without queries
        **replicas.options(engine.max_batch),
    )
    return deployment.bind()


def build(args: dict[str, Any]) -> serve.Application:
    """The application for a configuration file of Serve: `import_path: vit_memory.serving.ray_serve:build`.

    args: `backbone`; `token` and `admin_token`, as env:NAME or file:/PATH, or `insecure: true`; `device`, `read_only`,
    `cors`, `log_format`, `log_level`; `cpus` of a replica; `engine` and `limits`, with fields of EngineOptions and
    Limits; `bundle` instead of user_config. Replicas and user_config stand under `deployments`.
    """
    if unknown := sorted(set(args) - _ARGS):
        raise ServingError(f"args: {', '.join(unknown)} is not known; known are {', '.join(sorted(_ARGS))}.")
    if "token" not in args and args.get("insecure") is not True:
        raise ServingError(
            "args: without a token everybody who reaches the server may use it. Say where replicas find one, "
            "token: env:VIT_MEMORY_TOKEN or token: file:/PATH, or give insecure: true."
        )
    if "backbone" not in args and "bundle" not in args:
        raise ServingError("args: name the backbone, backbone: NAME, or a bundle that names it, bundle: /FOLDER.")
    plan = ReplicaPlan(
        backbone=args.get("backbone") or Bundle.open(absolute(args["bundle"])).backbone.name,
        device=args.get("device", "cpu"),
        settings=Settings(
            read_only=args.get("read_only", False),
            cors=tuple(args.get("cors", ())),
            limits=_values(Limits, "limits", args),
            engine=_values(EngineOptions, "engine", args),
        ),
        **{key: TokenPlace.parse(str(args[key]), f"args: {key}") for key in ("token", "admin_token") if key in args},
        log_format=args.get("log_format", "text"),
        log_level=args.get("log_level", "info"),
    )
    user_config = {"bundle": args["bundle"]} if "bundle" in args else {}
    return application(plan, user_config, cpus=float(args.get("cpus", 1)))


@dataclass(frozen=True, slots=True)
class RayPlan:
    """What the command serves: as without Ray, how many replicas, and where they find the tokens."""

    serve: ServePlan
    replicas: Replicas = _ONE
    token: TokenPlace | None = None
    admin_token: TokenPlace | None = None

    def replica(self) -> ReplicaPlan:
        """What its replicas are built from."""
        served = self.serve
        name = served.backbone or _backbone_of(served)
        return ReplicaPlan(
            backbone=str(Path(name).resolve()) if Path(name).is_dir() else name,  # replicas run in other folders
            device=served.device,
            settings=replace(served.settings, token=None, admin_token=None, allowed_hosts=served.hosts),
            token=self.token,
            admin_token=self.admin_token,
            log_format=served.log_format,
            log_level=served.log_level,
        )


def run(plan: RayPlan) -> None:
    """Serve on this machine, or on the cluster that RAY_ADDRESS names, until SIGTERM or Ctrl-C."""
    configure_logs(plan.serve.log_format, plan.serve.log_level)
    user_config = _user_config(plan.serve)
    replica = plan.replica()
    port = _free_port(plan.serve.host, plan.serve.port)
    with connected() as cluster:
        end_on_signals()  # Ray has set handlers of its own
        with _deployed(plan, replica, user_config, port, cluster):
            log_address(plan.serve.host, port)
            threading.Event().wait()


@contextmanager
def _deployed(
    plan: RayPlan, replica: ReplicaPlan, user_config: Mapping[str, Any], port: int, cluster: Cluster
) -> Iterator[None]:
    """The application on a cluster; at the end, replicas answer what they were asked, and end."""
    if APPLICATION in serve.status().applications:
        raise ServingError(
            f"the Ray cluster has an application {APPLICATION!r}: change its tasks with serve deploy, or end it first."
        )
    engine = plan.serve.settings.engine
    try:
        quiet = {"enable_access_log": False, "log_level": "WARNING"}
        serve.start(http_options={"host": plan.serve.host, "port": port}, logging_config=quiet)
        cpus = min(float(engine.threads), max(cluster.node_cpus)) if engine.threads else None
        target = application(replica, user_config, plan.replicas, cpus or cluster.share(plan.replicas.most))
        try:
            serve.run(target, name=APPLICATION, route_prefix="/")
        except RuntimeError as error:
            raise ServingError(f"the replicas cannot start. {error}") from error
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # the end has begun
        log.info("stopping")
        with suppress(RayServeException):  # Serve did not start
            _delete(engine.timeout_s + _GRACE_S)
        if cluster.own:
            serve.shutdown()
        log.info("stopped")


def _delete(timeout_s: float) -> None:
    """Remove the application: replicas get nothing new, answer what they have, and end."""
    for _ in range(1 + int(timeout_s // 60)):  # each attempt waits for a minute
        try:
            serve.delete(APPLICATION)
            return
        except TimeoutError:
            continue
    log.error("the replicas did not end within %g s", timeout_s)


def _user_config(plan: ServePlan) -> dict[str, Any]:
    """A folder that replicas follow, or the files."""
    if plan.bundle_folder is not None:
        create_bundle(plan.bundle_folder, plan.sources)
    if plan.folder is not None:
        user_config: dict[str, Any] = {"bundle": str(plan.folder.resolve())}
    else:
        log.info("the tasks cannot be changed while the server runs; give --bundle-dir DIR to change them")
        user_config = {"tasks": [str(source.resolve()) for source in plan.sources]}
    open_tasks(user_config)  # what is wrong with them is told before anything is started
    return user_config


def _backbone_of(plan: ServePlan) -> str:
    if plan.folder is not None and (plan.folder / MANIFEST).exists():
        return Bundle.open(plan.folder).backbone.name
    return collect_composable(plan.sources).tasks[0].backbone.name


def _free_port(host: str, port: int) -> int:
    """The port, if nothing listens on it; for 0, one that is free."""
    listener = bind(host, port)
    chosen: int = listener.getsockname()[1]
    listener.close()
    return chosen


def _values(kind: type[_Values], key: str, args: Mapping[str, Any]) -> _Values:
    """A value of a dataclass from a mapping of its fields."""
    given = args.get(key, {})
    known = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(given, Mapping) or not set(given) <= set(known):
        raise ServingError(f"args: {key} has fields of these: {', '.join(known)}.")
    return kind(**given)
