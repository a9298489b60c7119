"""JSON bodies, counted before they are parsed: a few megabytes of brackets become gigabytes of lists."""

from dataclasses import dataclass
from typing import Any

from vit_memory.files.container import parse_json
from vit_memory.serving.problems import ProblemError


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """What a body may hold, commas and brackets inside of texts included, and what to do if it has to hold more."""

    values: int
    groups: int  # lists and objects
    advice: str


def parse_json_body(text: bytes | bytearray, limits: JsonLimits) -> Any:
    """Strict JSON; a problem if it is not valid or holds too much."""
    if text.count(b",") > limits.values or text.count(b"[") + text.count(b"{") > limits.groups:
        raise ProblemError(
            400, f"the JSON has more than {limits.values} values or {limits.groups} lists; {limits.advice}."
        )
    try:
        return parse_json(text.decode())
    except (ValueError, RecursionError) as error:
        raise ProblemError(400, f"the body is not valid JSON: {error or 'nested too deeply'}.") from None
