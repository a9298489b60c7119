"""Settings of a server: plain values that every part of it reads and none changes."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vit_memory.serving.options import EngineOptions

LogFormat = Literal["text", "json"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may bring, and what all of them together may hold in memory."""

    max_body_bytes: int = 64 * 2**20  # of a prediction
    max_file_bytes: int = 512 * 2**20  # of a task or branch file in a PUT
    max_bodies_bytes: int = 2**30  # of all requests that are being answered, together
    max_requests: int = 1024  # at once; more are refused before they are read
    max_images: int = 64  # per request
    max_explained: int = 64  # explanations per request, of all its images and tasks; each has thousands of numbers
    max_timeout_s: float = 300.0  # the longest `timeout_s` that a request may ask for
    body_timeout_s: float = 60.0  # for a client to send its whole body
    max_listeners: int = 100  # open /v1/events streams
    stream_s: float | None = None  # after which such a stream ends, and its client asks again; None: no limit


@dataclass(frozen=True, slots=True)
class Settings:
    """How a server is set up. Tokens are left out of its repr, so that no log shows them."""

    token: str | None = field(default=None, repr=False)  # to predict; None: everybody may
    admin_token: str | None = field(default=None, repr=False)  # to change tasks, and to predict
    read_only: bool = False
    cors: tuple[str, ...] = ()  # origins whose pages may call this server
    allowed_hosts: tuple[str, ...] = ()  # accepted Host headers without the port; empty: all
    bundle_folder: Path | None = None  # where changes are kept; None: in memory
    run_folder: Path | None = None  # what several workers share until the server stops
    limits: Limits = field(default_factory=Limits)
    engine: EngineOptions = field(default_factory=EngineOptions)
