"""What can go wrong, as exceptions.

Each exception says what happened (``message``), what to do about it (``hint``), the HTTP status
that the node answered with (``status``, if it answered), the kind of error in its words (``code``)
and the id under which the node logged the request (``request_id``). All derive from :class:`Error`;
where Python has an exception of the same meaning, they derive from that too, so that ``except
FileNotFoundError`` works.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AlreadyExists",
    "Busy",
    "Changed",
    "Conflict",
    "ConnectionFailed",
    "Damaged",
    "EntryFailed",
    "Error",
    "InvalidRequest",
    "NotFound",
    "PermissionDenied",
    "PreconditionFailed",
    "RangeNotSatisfiable",
    "SampleFailed",
    "ServerError",
    "Timeout",
    "TooLarge",
    "Truncated",
    "Unauthenticated",
    "Unsupported",
]


class Error(Exception):
    """Any failure of a Forebay call.

    Attributes:
        message: What happened, and where.
        hint: What to do about it, or None.
        status: The HTTP status of the node's answer, or None if it gave none.
        request_id: The id of the request in the node's log, or None.
        code: What kind of error it is, in the words of the node and of the commands' ``--json``,
            such as ``"bucket_not_found"``; None for an error that no node has answered with.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        status: int | None = None,
        request_id: str | None = None,
        code: str | None = None,
    ) -> None:
        # Only one positional argument: DataLoader rebuilds a worker's exception from its text
        # alone.
        Exception.__init__(self, message)
        self.message = message
        self.hint = hint
        self.status = status
        self.request_id = request_id
        self.code = code

    def __str__(self) -> str:
        text = f"{self.message} ({self.hint})" if self.hint else self.message
        return f"{text} [request {self.request_id}]" if self.request_id else text

    def __reduce__(self) -> tuple[Any, ...]:
        about = self.message, self.hint, self.status, self.request_id, self.code
        return _rebuild, (type(self), *about)


def _rebuild(
    cls: type[Error],
    message: str,
    hint: str | None,
    status: int | None,
    request_id: str | None,
    code: str | None,
) -> Error:
    return cls(message, hint=hint, status=status, request_id=request_id, code=code)


class InvalidRequest(Error, ValueError):
    """The request makes no sense: a bad name, a bad range, a bad parameter (400)."""


class NotFound(Error, FileNotFoundError):
    """The object, the archive member or the bucket does not exist (404)."""


class Unauthenticated(Error, PermissionError):
    """The node requires a token, or does not know the one it got (401)."""


class PermissionDenied(Error, PermissionError):
    """The token, or the node's own credentials at the origin, do not allow this (403)."""


class Conflict(Error):
    """It already exists, or is in the wrong state (409)."""


class AlreadyExists(Conflict, FileExistsError):
    """There is one of this name (409)."""


class PreconditionFailed(Error):
    """A condition of the request does not hold (412)."""


class RangeNotSatisfiable(Error, ValueError):
    """The byte range lies outside the object or the member (416)."""


class TooLarge(Error, ValueError):
    """The request, or a batch, is too large (413)."""


class Busy(Error):
    """The node is over one of its limits, or stopping, and stayed so for the whole ``timeout``
    (429, 503).
    """


class Unsupported(Error, NotImplementedError):
    """The node, or this origin, does not support it (501)."""


class ServerError(Error):
    """The node or its origin failed (5xx)."""


class Damaged(ServerError):
    """An object or file is not what its format, or its checksum, says (502)."""


class ConnectionFailed(Error, ConnectionError):
    """The node cannot be reached, or the connection broke before it answered."""


class Timeout(Error, TimeoutError):
    """Nothing arrived for ``timeout`` seconds."""


class Truncated(Error, EOFError):
    """An answer broke off or does not match the request. What had arrived is not all of it."""


class EntryFailed(Error, LookupError):
    """The bytes of a batch entry that could not be had were accessed. See ``Item.error``."""


class SampleFailed(Error):
    """A sample could not be made from its row: ``decode``, ``transform`` or reading the row failed.
    The cause is ``__cause__``.

    Attributes:
        row: The row's number in its dataset, or None.
        file: The file that the row is in, ``"bucket/key"``, or None if that is unknown.
        row_in_file: Its number there, or None.
    """

    row: int | None = None
    file: str | None = None
    row_in_file: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_sample, (self.message, self.hint, self.row, self.file, self.row_in_file)


def _rebuild_sample(
    message: str, hint: str | None, row: int | None, file: str | None, row_in_file: int | None
) -> SampleFailed:
    error = SampleFailed(message, hint=hint)
    error.row, error.file, error.row_in_file = row, file, row_in_file
    return error


class Changed(PreconditionFailed):
    """A file of a dataset has changed since the dataset was opened. The new version is never handed
    out as the old one.
    """
