"""Where a process finds a token, for processes that are started by others: a place can be shown, a token cannot.

`env:NAME` is a variable of the process's own environment, `file:/PATH` a file that it can read.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vit_memory.errors import ServingError


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """A variable or a file that holds a token."""

    kind: Literal["env", "file"]
    name: str

    @classmethod
    def parse(cls, text: str, option: str) -> "TokenPlace":
        """From `env:NAME` or `file:/PATH`. Anything else may be a token by mistake, so no message repeats it."""
        kind, _, name = text.partition(":")
        if kind == "env" and name:
            return cls("env", name)
        if kind == "file" and Path(name).is_absolute():
            return cls("file", name)
        raise ServingError(
            f"{option}: expected where the token is, env:NAME or file:/ABSOLUTE/PATH. A token itself must not stand "
            f"there, because others can read it."
        )

    def read(self) -> str:
        """The token; ServingError if there is none here, so that nothing is served without it."""
        if self.kind == "env":
            token = os.environ.get(self.name, "")
            if not token:
                raise ServingError(
                    f"no token: the environment of this process has no {self.name}. Set it before Ray is started on "
                    f"this machine, or name a file that every machine has."
                )
        else:
            try:
                token = Path(self.name).read_text(encoding="utf-8").strip()
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not text"
                raise ServingError(f"no token: {self.name} cannot be read on this machine, {reason}.") from None
        if not is_token(token):
            raise ServingError(f"{self}: the token is empty or holds characters that a header cannot: use ASCII.")
        return token

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


def is_token(text: str) -> bool:
    """Whether a text can be sent as a token in a header."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text
