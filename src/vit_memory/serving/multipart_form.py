"""Forms with files (multipart/form-data), parsed while they arrive and kept in memory.

The size of a body is limited already, so nothing is written to a disk, which may be read-only. A form that ends without
its last boundary was cut off and is refused.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from vit_memory.serving.problems import ProblemError


@dataclass(slots=True)
class FormPart:
    """One field of a form."""

    name: str = ""
    file_name: str | None = None  # None: a text
    content: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        """Its content as text."""
        try:
            return self.content.decode()
        except UnicodeDecodeError:
            raise ProblemError(400, f"the field {self.name[:100]!r} of the form is not valid UTF-8.") from None


@dataclass(frozen=True, slots=True)
class FormLimits:
    """What a form may bring."""

    max_files: int
    max_texts: int = 64
    max_text_bytes: int = 64 * 1024


async def parse_form(content_type: str, chunks: AsyncIterator[bytes], limits: FormLimits) -> list[FormPart]:
    """The fields of a form, in order; a problem if it is malformed or brings too much."""
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise ProblemError(400, "the content type names no boundary of the form.")
    parser = _Parser(boundary, limits)
    async for chunk in chunks:
        parser.write(chunk)
    return parser.end()


class _Parser:
    """Collects what python-multipart calls back."""

    def __init__(self, boundary: bytes, limits: FormLimits) -> None:
        self._limits = limits
        self._parts: list[FormPart] = []
        self._name, self._value = bytearray(), bytearray()  # of the header that is being read
        self._headers: dict[bytes, bytes] = {}
        self._ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_part_data": self._add_data,
                    "on_header_field": lambda data, start, end: self._name.extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise ProblemError(400, f"the form cannot be read: {error}.") from None

    def write(self, chunk: bytes) -> None:
        """More of the body."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise ProblemError(400, f"the form cannot be read: {error}.") from None

    def end(self) -> list[FormPart]:
        """All fields."""
        if not self._ended:
            raise ProblemError(400, "the form ends before its last boundary: it was cut off.")
        return self._parts

    def _begin_part(self) -> None:
        self._headers = {}

    def _end_header(self) -> None:
        self._headers[bytes(self._name).lower()] = bytes(self._value)
        self._name.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        if b"name" not in options:
            raise ProblemError(400, "a part of the form has no name in its Content-Disposition.")
        file_name = options.get(b"filename")
        part = FormPart(_text(options[b"name"]), None if file_name is None else _text(file_name))
        self._parts.append(part)
        is_file = part.file_name is not None
        count = sum((other.file_name is not None) == is_file for other in self._parts)
        most = self._limits.max_files if is_file else self._limits.max_texts
        if count > most:
            what = "files" if is_file else "fields"
            raise ProblemError(413, f"more than {most} {what} in one form; at most {most} are taken.", limit=most)

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        part = self._parts[-1]
        part.content += data[start:end]
        if part.file_name is None and len(part.content) > self._limits.max_text_bytes:
            raise ProblemError(
                413,
                f"the field {part.name[:100]!r} has more than {self._limits.max_text_bytes} bytes.",
                limit=self._limits.max_text_bytes,
            )

    def _end(self) -> None:
        self._ended = True


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")
