"""The page of a server: static files from `web/`, read once, with headers that keep the browser strict.

The page loads nothing from another host and runs no inline script, so its policy allows neither. It needs no token
itself, since a browser cannot send one when it opens an address; what it asks the server for later does.
"""

import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, HTTPException, Request, Response

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' blob: data:",
    "media-src 'self' blob:",
    "connect-src 'self'",
    "form-action 'none'",
    "base-uri 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",  # no markup from strings either
)
HEADERS = {  # beside those that every answer of the server has
    "Content-Security-Policy": "; ".join(_POLICY),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # kept, but asked for again: after an update no old module meets a new one
}


@dataclass(frozen=True, slots=True)
class _File:
    """A file as it is sent."""

    content: bytes
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        """The file, or 304 where the browser has this version."""
        headers = {**HEADERS, "ETag": self.etag}
        known = re.findall(r'"[^"]*"|\*', request.headers.get("if-none-match", ""))
        if self.etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def router() -> APIRouter:
    """The routes `/` and `/page/{file}`. Only files that were there at the start exist, whatever the name asked for."""
    routes = APIRouter(include_in_schema=False)
    web = _read_files()

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return web["index.html"].response(request)

    @routes.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def file(name: str, request: Request) -> Response:
        if name not in web:
            raise HTTPException(404, f"the page has no file {name!r}.")
        return web[name].response(request)

    return routes


def _read_files() -> dict[str, _File]:
    by_name = {}
    for entry in files("vit_memory.serving").joinpath("web").iterdir():
        media_type = _TYPES.get(entry.name[entry.name.rfind(".") :])
        if media_type is not None:
            content = entry.read_bytes()
            by_name[entry.name] = _File(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return by_name
