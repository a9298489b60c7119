"""Logs of a server: one line per request and per event, as text or as JSON. No image content, no tokens, no queries.

    {"time": "2026-01-31T12:00:00.123Z", "level": "info", "event": "request", "request_id": "…", "method": "POST",
     "route": "/v1/predict", "status": 200, "ms": 12.3, "bytes_in": 20480, "bytes_out": 812, "client": "127.0.0.1"}

`route` is the pattern that matched, not what the client typed, which could be anything.
"""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from vit_memory.serving.settings import LogFormat

REQUESTS = logging.getLogger("vit_memory.serving.requests")
_FIELDS = "fields"  # where a record carries its values


def log_request(fields: Mapping[str, Any]) -> None:
    """Log an answered request; a failure of the server is an error, everything else is information."""
    level = logging.ERROR if fields["status"] == 500 else logging.INFO
    if REQUESTS.isEnabledFor(level):
        REQUESTS.log(level, "request", extra={_FIELDS: fields})


def configure_logs(form: LogFormat, level: str = "info") -> None:
    """Log to stderr in this form, uvicorn's messages too; its own lines about requests are left out."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    lowest = getattr(logging, level.upper())
    for name in ("vit_memory", "uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        # What others say of every start and stop is said by this package already.
        logger.setLevel(lowest if name == "vit_memory" else max(logging.WARNING, lowest))
    # It warns of every malformed form, in a line that is neither ours nor JSON; the answer to the client says the same.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """A record as JSON; control characters are escaped, so that no text can begin a line of its own."""
        values: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            values["traceback"] = self.formatException(record.exc_info)
        return json.dumps(values, default=str)


class TextFormatter(logging.Formatter):
    """A line for people."""

    def format(self, record: logging.LogRecord) -> str:
        """A record as text, values behind the message."""
        values = getattr(record, _FIELDS, {})
        text = " ".join([record.getMessage(), *(f"{key}={_plain(value)}" for key, value in values.items())])
        line = f"{_time(record)} {record.levelname.lower():7} {text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _plain(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
