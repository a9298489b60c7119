"""Clients for a server: `Client` blocks, `AsyncClient` is awaited. Both are the same methods over httpx.

Each method is written once, as a coroutine of `_Calls`. A blocking client runs it over a blocking connection, where it
never waits for an event loop and so ends in its first step. httpx is imported when a client is made.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import quote, urlsplit

from vit_memory.errors import RequestFailed, ServingError
from vit_memory.serving.client_answers import Answers, ServedTasks, TaskInfo
from vit_memory.serving.client_uploads import image_file, upload_of

if TYPE_CHECKING:
    import httpx

    from vit_memory.branch import Branch
    from vit_memory.serving.client_uploads import ImageSource
    from vit_memory.task import Task

LONGEST_WAIT_S = 30.0  # between two attempts, whatever Retry-After says
_RETRY_AFTER_S = 1.0  # where the server says nothing
_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Calls:
    """The methods of both clients; `_request` and `_sleep` are what differs."""

    def __init__(self, url: str, retries: int) -> None:
        if retries < 0:
            raise ServingError(f"retries is {retries}; expected 0 or more.")
        self._url, self._retries = url, retries

    async def _request(self, method: str, path: str, **content: Any) -> "httpx.Response":
        raise NotImplementedError

    async def _sleep(self, seconds: float) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"  # without the token

    async def predict(
        self,
        images: "ImageSource | Sequence[ImageSource]",
        tasks: Sequence[str] | None = None,
        *,
        top_k: int | None = None,
        explain: Sequence[str] = (),
        check_original: bool = False,
        timeout_s: float | None = None,
    ) -> Answers:
        """The answers for one image or several: one per image, in order.

        An image is the path of a file, a file's bytes, or an image of Pillow. `tasks` are all by default. `explain`
        names tasks whose attention is wanted. One bad image of several has its error in its place; a single bad one
        raises it. `timeout_s` is the server's deadline for this request.
        """
        sources = list(images) if isinstance(images, list | tuple) else [images]
        query: dict[str, Any] = {"tasks": _listed(tasks), "explain": _listed(explain) or None, "top_k": top_k}
        query |= {"timeout_s": timeout_s, "check_original": "true" if check_original else None}
        response = await self._send(
            "POST",
            "/v1/predict",
            params={key: value for key, value in query.items() if value is not None},
            files=[("images", image_file(source, i)) for i, source in enumerate(sources, 1)],
            changes_nothing=True,
        )
        return _read(response, Answers.of)

    async def tasks(self) -> ServedTasks:
        """The tasks that the server answers for, by name."""
        return _read(await self._send("GET", "/v1/tasks", changes_nothing=True), ServedTasks.of)

    async def add(
        self, source: "str | Path | Task | Branch", *, replace: bool = False, if_match: str | None = None
    ) -> TaskInfo | None:
        """Add a task or a branch, from its file or as a value; needs the admin token. Returns how a task is served.

        One of the same name is refused, unless `replace`; with `if_match`, it is replaced only if its digest is still
        that one.
        """
        kind, name, content = upload_of(source)
        headers = {"Content-Type": "application/octet-stream"}
        if if_match is not None:
            headers["If-Match"] = f'"{if_match}"'
        elif not replace:
            headers["If-None-Match"] = "*"
        response = await self._send("PUT", f"/v1/{kind}/{quote(name, safe='')}", headers=headers, content=content)
        return _read(response, TaskInfo.of) if kind == "tasks" else None

    async def remove(self, name: str, *, branch: bool = False, if_match: str | None = None) -> None:
        """Remove a task, or a branch; needs the admin token. With `if_match`, only if its digest is still that one."""
        headers = {} if if_match is None else {"If-Match": f'"{if_match}"'}
        kind = "branches" if branch else "tasks"
        await self._send("DELETE", f"/v1/{kind}/{quote(name, safe='')}", headers=headers)

    async def status(self) -> Mapping[str, Any]:
        """The server's queue, counters, version and costs, as it reports them."""
        return _read(await self._send("GET", "/v1/status", changes_nothing=True), dict)

    async def _send(self, method: str, path: str, *, changes_nothing: bool = False, **content: Any) -> "httpx.Response":
        for attempts_left in range(self._retries, -1, -1):
            try:
                response = await self._attempt(method, path, **content)
            except _ConnectionLost:
                if not attempts_left or not changes_nothing:
                    raise
                await self._sleep(_RETRY_AFTER_S)
                continue
            again = response.status_code == 503 or (changes_nothing and _server_was_lost(response))
            if not again or not attempts_left:
                break
            await self._sleep(_retry_after_s(response))
        if not response.is_success:
            raise _refusal(response)
        return response

    async def _attempt(self, method: str, path: str, **content: Any) -> "httpx.Response":
        httpx = _httpx()
        try:
            return await self._request(method, path, **content)
        except httpx.TimeoutException as error:
            raise RequestFailed(None, "timed out", f"{method} {self._url}{path}: no answer in time.") from error
        except httpx.HTTPError as error:
            detail = f"{method} {self._url}{path}: {error or type(error).__name__}"
            raise _ConnectionLost(None, "no answer", detail) from error


class _ConnectionLost(RequestFailed):
    """There was no answer, because the connection could not be made or broke."""


class AsyncClient(_Calls):
    """A client for a server, to be awaited; `Client` has the same methods.

    `async with AsyncClient("http://127.0.0.1:8000") as client: answers = await client.predict("cat.jpg")`
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout_s: float = 60.0,
        retries: int = 0,
        transport: "httpx.AsyncBaseTransport | None" = None,
    ) -> None:
        super().__init__(_check_url(url), retries)
        self._http = _httpx().AsyncClient(**_options(self._url, token, timeout_s), transport=transport)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def _request(self, method: str, path: str, **content: Any) -> "httpx.Response":
        response: httpx.Response = await self._http.request(method, path, **content)
        return response

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _BlockingCalls(_Calls):
    """The same over a blocking connection: its coroutines never suspend."""

    def __init__(self, url: str, retries: int, http: "httpx.Client") -> None:
        super().__init__(url, retries)
        self._http = http

    async def _request(self, method: str, path: str, **content: Any) -> "httpx.Response":
        return self._http.request(method, path, **content)

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def _blocking(
    method: Callable[Concatenate[_Calls, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate["Client", _P], _T]:
    """A method of `_Calls` as one that returns its result."""

    @functools.wraps(method)
    def call(self: "Client", /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        coroutine = method(self._calls, *args, **kwargs)
        try:
            coroutine.send(None)
        except StopIteration as end:
            result: _T = end.value
            return result
        raise AssertionError("a blocking call suspended")

    return call


class Client:
    """A client for a server. `token` is the one to predict, or the admin token, to change tasks too.

    `timeout_s` bounds the wait for each step of an answer; `retries` is how often a request that the server refused
    because its queue was full (503) is sent again, after the wait that the server asks for; predictions also if the
    connection, or the process behind a proxy, was lost. A refusal is a RequestFailed with `status`, `title` and
    `detail`. `transport` is one of httpx, for certificates of your own.

    >>> with Client(url) as client:
    ...     answer = client.predict(image)[0]
    ...     answer["pets"].label, answer["pets"].digest == client.tasks()["pets"].digest
    ('cat', True)
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout_s: float = 60.0,
        retries: int = 0,
        transport: "httpx.BaseTransport | None" = None,
    ) -> None:
        url = _check_url(url)
        http = _httpx().Client(**_options(url, token, timeout_s), transport=transport)
        self._calls = _BlockingCalls(url, retries, http)

    predict = _blocking(_Calls.predict)
    tasks = _blocking(_Calls.tasks)
    add = _blocking(_Calls.add)
    remove = _blocking(_Calls.remove)
    status = _blocking(_Calls.status)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        self._calls._http.close()

    def __repr__(self) -> str:
        return f"Client({self._calls._url!r})"


def _httpx() -> ModuleType:
    try:
        import httpx  # noqa: PLC0415 - only who makes a client needs it
    except ImportError as error:
        raise ServingError("a client needs httpx, which is not installed: pip install 'vit-memory[serve]'") from error
    return httpx


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ServingError("the address of a server begins with http:// or https:// and names a host.")
    if parts.username is not None or parts.password is not None:
        raise ServingError("the address holds a user name or password; give the token as token=…")
    return url.rstrip("/")


def _options(url: str, token: str | None, timeout_s: float) -> dict[str, Any]:
    if token is not None and not (token.isascii() and token.isprintable() and token and " " not in token):
        raise ServingError("the token is empty or holds spaces, line ends or characters beyond ASCII.")
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return {"base_url": url, "headers": headers, "timeout": timeout_s}


def _listed(names: Sequence[str] | None) -> str | None:
    """Names as the query has them; an empty text is no name at all, None leaves the choice to the server."""
    if isinstance(names, str):
        raise ServingError(f"names of tasks are {names!r}; give a list: [{names!r}].")
    return None if names is None else ",".join(names)


def _retry_after_s(response: "httpx.Response") -> float:
    text = response.headers.get("Retry-After", "")
    return min(float(text), LONGEST_WAIT_S) if text.isascii() and text.isdigit() else _RETRY_AFTER_S


def _server_was_lost(response: "httpx.Response") -> bool:
    """Whether a proxy answers in the place of a server that ended: what the server itself says is JSON."""
    return response.status_code in (500, 502) and "json" not in response.headers.get("Content-Type", "")


def _refusal(response: "httpx.Response") -> RequestFailed:
    """The error that a server's refusal is: its problem, or what else there is in the answer."""
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        problem = {"title": response.reason_phrase or "refused", "detail": response.text[:500]}
    return RequestFailed.from_problem({**problem, "status": response.status_code})


def _read(response: "httpx.Response", parse: Callable[[Any], _T]) -> _T:
    try:
        return parse(response.json())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        detail = f"{response.request.url.path}: not an answer that this client knows ({type(error).__name__}: {error})."
        raise RequestFailed(response.status_code, "unexpected answer", detail) from error
