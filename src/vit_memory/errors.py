"""Everything this package raises on purpose, as one tree.

VitMemoryError
├── BackboneError            a backbone cannot be loaded
│   ├── UnsupportedFamily    no family knows this model's layout
│   └── BackboneMismatch     a task was trained on another backbone
├── TaskError                a task cannot be built from these values
├── GraphError               these tasks do not go together
│   └── UnknownTask          a name that no attached task has
├── ImageError               these images cannot be read by this backbone
├── DataError                a source of images cannot be opened, or not be used for this
│   └── BadImage             one image in it cannot be decoded
├── TrainingError            a task cannot be trained this way, or training came to nothing
│   └── TrainingStopped      it was asked to stop, and did
├── FileError                a file or bundle cannot be read or written
│   ├── DamagedFile          it is not what it says it is
│   ├── NewerFormat          a later version wrote it
│   └── UnsafeFile           it could run code or reach outside its folder
└── ServingError             a serving engine cannot answer a request, or its pass failed
    ├── QueueFull            too many images wait already
    ├── DeadlinePassed       the answer was not there in time
    ├── EngineClosed         the engine is closed, or was not started
    └── RequestFailed        a client's request was refused by the server, or not answered

A message says where, what was found, what was expected and what to do. Commands print it and exit 1;
any other exception that reaches a user is a bug of ours.
"""

from collections.abc import Mapping


class VitMemoryError(Exception):
    """Base of every error this package raises on purpose."""


class BackboneError(VitMemoryError):
    """A backbone cannot be loaded or used."""


class UnsupportedFamily(BackboneError):  # noqa: N818 - reads as what it says
    """No family knows this model's layout."""


class BackboneMismatch(BackboneError):  # noqa: N818
    """A task was trained on another backbone."""


class TaskError(VitMemoryError):
    """A task cannot be built from these values."""


class GraphError(VitMemoryError):
    """These tasks do not go together."""


class UnknownTask(GraphError, KeyError):  # noqa: N818 - a KeyError too: graphs and outputs are mappings
    """A name that no attached task has."""

    __str__ = Exception.__str__  # KeyError's own would print the message in quotes


class ImageError(VitMemoryError):
    """These images cannot be read by this backbone."""


class DataError(VitMemoryError):
    """A source of images cannot be opened, or cannot be used for what was asked."""


class BadImage(DataError):  # noqa: N818 - reads as what it says
    """One image cannot be decoded."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple[type["BadImage"], tuple[str, str]]:
        """Travels from worker processes."""
        return BadImage, (self.name, self.reason)


class TrainingError(VitMemoryError):
    """A task cannot be trained this way, or training came to nothing."""


class TrainingStopped(TrainingError):  # noqa: N818
    """A training stopped because it was asked to; `fit` with a checkpoint resumes it."""


class FileError(VitMemoryError):
    """A file or bundle cannot be read or written."""


class DamagedFile(FileError):  # noqa: N818
    """A file is not what it says it is."""


class NewerFormat(FileError):  # noqa: N818
    """A later version wrote this file."""


class UnsafeFile(FileError):  # noqa: N818
    """A file could run code or reach outside its folder."""


class ServingError(VitMemoryError):
    """A serving engine cannot answer a request: by its subclasses, or because the pass over its batch failed."""


class QueueFull(ServingError):  # noqa: N818
    """Too many images wait for the model already; try again later."""


class DeadlinePassed(ServingError):  # noqa: N818
    """A request was not answered within its time."""


class EngineClosed(ServingError):  # noqa: N818
    """An engine that is closed, or was not started, takes no requests."""


class RequestFailed(ServingError):  # noqa: N818
    """A client's request was refused by the server, or not answered: what the server's problem says (RFC 9457)."""

    def __init__(
        self, status: int | None, title: str, detail: str, problem: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(f"{title if status is None else f'{status} {title}'}: {detail}" if detail else title)
        self.status = status  # None: there was no answer
        self.title = title
        self.detail = detail
        self.problem = dict(problem or {})  # all that the server said

    @classmethod
    def from_problem(cls, problem: Mapping[str, object]) -> "RequestFailed":
        """From the JSON of a problem."""
        status = problem.get("status")
        return cls(
            status if isinstance(status, int) else None,
            str(problem.get("title") or "refused"),
            str(problem.get("detail") or problem.get("error") or ""),
            problem,
        )

    @property
    def request_id(self) -> str | None:
        """The id of the request in the server's log."""
        instance = self.problem.get("instance")
        return None if instance is None else str(instance)

    def __reduce__(self) -> tuple[type["RequestFailed"], tuple[object, ...]]:
        """Travels from worker processes."""
        return RequestFailed, (self.status, self.title, self.detail, self.problem)
