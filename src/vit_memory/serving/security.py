"""Who may do what: bearer tokens, the hosts and origins that are accepted, and headers that protect pages.

`--token` is needed to predict and to read, `--admin-token` to change tasks; it allows the other too. A server with a
token but no admin token refuses changes. Without any token everybody who reaches the server may do everything, which is
why the command then listens on this machine only. Even there a page in the user's browser could reach it: by a name
that resolves to this machine (refused by `allowed_hosts`) or by a form (refused by its Origin).
"""

import hashlib
import hmac
from ipaddress import ip_address
from urllib.parse import urlsplit

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from vit_memory.errors import ServingError
from vit_memory.serving.problems import ProblemError
from vit_memory.serving.settings import Settings
from vit_memory.serving.state import state_of

_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="vit-memory"'}
_bearer = HTTPBearer(auto_error=False, description="The value of --token, or of --admin-token to change tasks.")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
# A page of this server loads nothing from elsewhere, runs no inline script, and is shown in no frame.
SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
}


async def allow_predict(  # async although it never waits: FastAPI runs others in a thread
    request: Request,
    credentials: HTTPAuthorizationCredentials | None = Security(_bearer),  # noqa: B008 - FastAPI's way
) -> None:
    """A dependency of routes that predict or read: 401 without a valid token, if the server has one."""
    settings = state_of(request).settings
    _check_origin(request, settings)
    if settings.token is None:
        if credentials is not None and settings.admin_token is not None and not _is_admin(credentials, settings):
            raise ProblemError(401, "the token is not valid.", headers=_CHALLENGE)
        return
    if credentials is None:
        raise ProblemError(401, "this needs a token: Authorization: Bearer TOKEN.", headers=_CHALLENGE)
    if not _equal(credentials.credentials, settings.token) and not _is_admin(credentials, settings):
        raise ProblemError(401, "the token is not valid.", headers=_CHALLENGE)


async def allow_admin(
    request: Request,
    credentials: HTTPAuthorizationCredentials | None = Security(_bearer),  # noqa: B008
) -> None:
    """A dependency of routes that change tasks: 401 without a valid token, 403 with one that only predicts."""
    state = state_of(request)
    settings = state.settings
    await allow_predict(request, credentials)
    if settings.admin_token is None:
        if settings.token is not None:
            raise ProblemError(403, "changing tasks needs an admin token; this server was started without one.")
    elif credentials is None:
        raise ProblemError(
            401, "changing tasks needs the admin token: Authorization: Bearer TOKEN.", headers=_CHALLENGE
        )
    elif not _is_admin(credentials, settings):
        raise ProblemError(403, "changing tasks needs the admin token; this one is for predictions only.")
    if settings.read_only:
        raise ProblemError(403, "this server is read-only: it was started with --read-only.")
    if state.changes_refused is not None:
        raise ProblemError(403, state.changes_refused)


PREDICT = Depends(allow_predict)
ADMIN = Depends(allow_admin)


def check_host(host: str, settings: Settings) -> ProblemError | None:
    """What is wrong with a Host header, if only certain ones are accepted."""
    if not settings.allowed_hosts or _host_name(host) in settings.allowed_hosts:
        return None
    return ProblemError(
        403,
        "this server answers to its own address only, because it has no token. Start it with a token, or with "
        "--insecure.",
    )


def check_cors(settings: Settings) -> None:
    """Raise ServingError if pages of all sites may call a server where nothing is secret."""
    if "*" in settings.cors and settings.token is None:
        raise ServingError(
            "--cors '*' allows pages of every site to call, and without a token nothing keeps them from using this "
            "server. Set a token (VIT_MEMORY_TOKEN, --token-file), or name the origins: --cors https://their.example."
        )


def is_loopback(host: str) -> bool:
    """Whether a server that listens on this address is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name: it may resolve to anything
        return False


def _is_admin(credentials: HTTPAuthorizationCredentials, settings: Settings) -> bool:
    return settings.admin_token is not None and _equal(credentials.credentials, settings.admin_token)


def _equal(given: str, expected: str) -> bool:
    """Compare in constant time; of hashes, so that the time does not depend on the length either."""
    given_hash, expected_hash = (hashlib.sha256(text.encode("utf-8", "replace")).digest() for text in (given, expected))
    return hmac.compare_digest(given_hash, expected_hash)


def _check_origin(request: Request, settings: Settings) -> None:
    """Without tokens a browser's requests need no secret, so those that other sites cause are refused."""
    if settings.token is not None or request.method in ("GET", "HEAD", "OPTIONS"):
        return
    origin, host = request.headers.get("origin"), request.headers.get("host")
    if origin is None or origin in settings.cors or (host and _network_location(origin) == host):
        return
    raise ProblemError(403, "pages of other sites may not use this server; allow one with --cors ORIGIN.")


def _network_location(origin: str) -> str:
    """Host and port of an Origin header; empty if it has none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _host_name(host: str) -> str:
    """A Host header without its port; an IPv6 address without its brackets."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""
