"""The body of a prediction in its three forms: files of a form, one raw image, or JSON with base64.

What is wrong with the request as a whole is a problem of the request; what is wrong with one image is that image's own.
"""

import asyncio
import base64
import binascii
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from vit_memory.errors import BadImage
from vit_memory.serving.json_body import JsonLimits, parse_json_body
from vit_memory.serving.limits import Body
from vit_memory.serving.multipart_form import FormLimits, parse_form
from vit_memory.serving.problems import ProblemError

IMAGE_FIELDS = ("image", "images", "file")
_LARGE = 2**20  # bytes from which parsing would hold up other requests
# An image is an object of a name and a text, which may hold a few commas and brackets too; the rest are names of tasks.
# Every item that is none of these costs a line of the validation's errors, which are thousands of times its size.
_FREE_ITEMS, _ITEMS_PER_IMAGE = 10_000, 16
_LONGEST_TASK_NAME = 100  # of `check_name`; the search for similar names takes the square of it
_NOT_SHOWN = re.compile(r"[\x00-\x1f\x7f]")
Result = TypeVar("Result")
TaskName = Annotated[str, Field(max_length=_LONGEST_TASK_NAME)]


class PredictOptions(BaseModel):
    """What a prediction may ask for, in the query, in fields of a form or in JSON."""

    model_config = ConfigDict(extra="forbid")

    tasks: list[TaskName] | None = Field(None, description="Names of the tasks that answer; all by default.")
    top_k: int = Field(5, ge=1, le=1000, description="How many labels `top` lists.")
    explain: list[TaskName] = Field([], description="Names of tasks whose attention is wanted.")
    check_original: bool = Field(False, description="Compare the backbone's own output with the library's forward.")
    timeout_s: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Seconds after which there is no interest in the answer."
    )

    @field_validator("tasks", "explain", mode="before")
    @classmethod
    def _split(cls, names: Any) -> Any:
        """In a query or a form, `a,b` is two names; no name has a comma."""
        if isinstance(names, str):
            names = [names]
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return [part for name in names for part in name.split(",") if part]
        return names

    @field_validator("top_k", mode="before")
    @classmethod
    def _whole(cls, number: Any) -> Any:
        """In JSON, and in the description of this server, 5.0 is a whole number."""
        return int(number) if isinstance(number, float) and number.is_integer() else number


class NamedImage(BaseModel):
    """An image of a JSON body with a name of its own."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=1000)
    data: str = Field(description="The image file in base64.")


class PredictJson(PredictOptions):
    """A prediction as JSON."""

    images: list[str | NamedImage] = Field(min_length=1, description="Image files in base64.")


@dataclass(frozen=True, slots=True)
class SentImage:
    """One image of a request."""

    name: str
    content: bytes | BadImage


_NO_OPTIONS = PredictOptions.model_validate({})
_LISTS = ("tasks", "explain")


def query_options(request: Request) -> PredictOptions:
    """The options in the query. By hand, as those of a form: FastAPI takes as long for them as for all the rest."""
    if not request.scope["query_string"]:
        return _NO_OPTIONS
    values: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        values.setdefault(name, []).append(value)
    return _from_texts(values, "the query")


async def read_images(
    request: Request, body: Body, query: PredictOptions, max_images: int
) -> tuple[list[SentImage], PredictOptions]:
    """The images of a request and its options; those in the body come before those in the query."""
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise ProblemError(
            415, f"the body is encoded as {encoding[:40]!r}; images are compressed already, send it plain."
        )
    if media_type == "multipart/form-data":
        return await _read_form(content_type, body, query, max_images)
    if media_type == "application/json":
        content = await body.read()
        sent = await _off_loop(lambda text: _parse_json_body(text, max_images), content)
        _check_count(len(sent.images), max_images)
        images = await _off_loop(lambda _: [_from_base64(i, image) for i, image in enumerate(sent.images, 1)], content)
        return images, _merged(query, sent)
    if media_type.startswith("image/") or media_type == "application/octet-stream":
        content = await body.read()
        if not content:
            raise ProblemError(400, "the body is empty; send an image file.")
        return [SentImage("image", bytes(content))], query
    raise ProblemError(
        415,
        f"the content type is {media_type[:100]!r}; send an image file as image/* or application/octet-stream, a form "
        f"as multipart/form-data, or JSON as application/json.",
    )


async def _read_form(
    content_type: str, body: Body, query: PredictOptions, max_images: int
) -> tuple[list[SentImage], PredictOptions]:
    images: list[SentImage] = []
    fields: dict[str, list[str]] = {}
    for part in await parse_form(content_type, body.stream(), FormLimits(max_images)):
        if part.file_name is not None:
            if part.name not in IMAGE_FIELDS:
                raise ProblemError(400, f"a file in the field {part.name[:100]!r}; expected {', '.join(IMAGE_FIELDS)}.")
            images.append(SentImage(_file_name(part.file_name, len(images) + 1), bytes(part.content)))
        elif part.name in IMAGE_FIELDS:
            raise ProblemError(400, f"the field {part.name!r} holds text; send a file, with a file name.")
        else:
            fields.setdefault(part.name, []).append(part.text)
    if not images:
        raise ProblemError(400, f"the form has no image; send files in the field {IMAGE_FIELDS[0]!r}.")
    return images, _merged(query, _from_texts(fields, "the form"))


def _from_texts(texts: Mapping[str, list[str]], where: str) -> PredictOptions:
    values = {name: given if name in _LISTS else given[-1] for name, given in texts.items()}
    return _validated(lambda: PredictOptions.model_validate(values), where)


def _parse_json_body(content: bytearray, max_images: int) -> PredictJson:
    items = _FREE_ITEMS + _ITEMS_PER_IMAGE * max_images
    value = parse_json_body(content, JsonLimits(items, items, f"send at most {max_images} images in one request"))
    return _validated(lambda: PredictJson.model_validate(value, strict=True), "the body")


def _validated(parse: Callable[[], Result], where: str) -> Result:
    try:
        return parse()
    except ValidationError as error:
        raise invalid(where, error.errors(include_url=False, include_context=False, include_input=False)) from None


def invalid(where: str, errors: Any) -> ProblemError:
    """A problem that lists what is wrong with some values, without repeating them."""
    listed = [{"where": ".".join(map(str, error["loc"]))[:200], "message": error["msg"]} for error in errors[:20]]
    faults = "; ".join(f"{error['where'] or 'the value'}: {error['message']}" for error in listed)
    return ProblemError(400, f"{where} is not as expected: {faults}.", errors=listed)


def _merged(query: PredictOptions, body: PredictOptions) -> PredictOptions:
    given = {name: getattr(body, name) for name in body.model_fields_set & PredictOptions.model_fields.keys()}
    return query.model_copy(update=given)


def _from_base64(number: int, image: str | NamedImage) -> SentImage:
    name, text = (f"image {number}", image) if isinstance(image, str) else (image.name, image.data)
    name = _file_name(name, number)
    if text.startswith("data:"):  # as browsers write it
        text = text.partition(",")[2]
    try:
        return SentImage(name, base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        return SentImage(name, BadImage(name, f"its base64 text cannot be decoded ({error})"))


def _file_name(name: str | None, number: int) -> str:
    """A name for messages and answers: without folders, control characters and halves of characters."""
    last = re.split(r"[\\/]", name or "")[-1]
    return _NOT_SHOWN.sub("", last.encode("utf-8", "replace").decode())[:200] or f"image {number}"


def _check_count(count: int, most: int) -> None:
    if count > most:
        raise ProblemError(413, f"{count} images in one request; at most {most} are taken.", limit=most)


async def _off_loop(parse: Callable[[bytearray], Result], content: bytearray) -> Result:
    """Parse a large body in a thread."""
    return parse(content) if len(content) < _LARGE else await asyncio.to_thread(parse, content)
