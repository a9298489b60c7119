"""/docs: the OpenAPI description as a plain page. No script and nothing from elsewhere, as every page of the server."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Response

from vit_memory.serving.openapi import describe

_STYLE = """:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; font-size: 1.1rem; }
code { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.75rem 0.25rem 0; border-bottom: 1px solid #8884; }
"""


def router(app: FastAPI) -> APIRouter:
    """The page and its style."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/docs")
    async def docs() -> Response:
        return Response("\n".join(_page(describe(app))), media_type="text/html")

    @routes.get("/docs.css")
    async def style() -> Response:
        return Response(_STYLE, media_type="text/css")

    return routes


def _page(description: Mapping[str, Any]) -> Iterator[str]:
    title = escape(description["info"]["title"])
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f'<link rel="stylesheet" href="/docs.css"></head><body><h1>{title}</h1>'
    yield f"<p>{escape(description['info'].get('description', ''))}</p>"
    yield '<p>The same for programs: <a href="/openapi.json">openapi.json</a>.</p>'
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            yield from _operation(path, method, operation)
    yield "</body></html>"


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    text = operation.get("description") or operation.get("summary", "")
    yield f"<p>{escape(text)}</p>"
    bodies = operation.get("requestBody", {}).get("content", {})
    if bodies:
        yield f"<p>Body: {', '.join(f'<code>{escape(kind)}</code>' for kind in bodies)}</p>"
    yield "<table>"
    for parameter in operation.get("parameters", ()):
        where = f"{escape(parameter['name'])} <small>({escape(parameter['in'])})</small>"
        yield f"<tr><td>{where}</td><td>{escape(parameter.get('description', ''))}</td></tr>"
    for status, answer in operation["responses"].items():
        yield f"<tr><td><code>{escape(str(status))}</code></td><td>{escape(answer.get('description', ''))}</td></tr>"
    yield "</table>"
