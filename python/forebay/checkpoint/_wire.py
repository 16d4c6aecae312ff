"""Checkpoints over the node's HTTP API: begin, stage, commit, wait, read. No framework in here."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import fnmatch
import functools
import itertools
import json
import logging
import math
import os
import threading
import time
import typing
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait

from .._arguments import check_client, is_unicode, real_number, seconds, whole_number
from .._fetch import PASSING, UNSURE, patiently
from .._forebay import Client, _Borrowed
from .._pools import Pool
from .._stop import Stop
from ..errors import (
    AlreadyExists,
    Conflict,
    ConnectionFailed,
    Damaged,
    Error,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    ServerError,
    Timeout,
    Truncated,
    Unsupported,
)
from ..stats import Meter

log = logging.getLogger("forebay")
T = typing.TypeVar("T")

#: The longest that one request waits for a checkpoint.
_WAIT_SECONDS = 20.0
#: Ranges of files are read in pieces of this size (whole blocks of a file that the node lends): so
#: many at the same time, of files that are lent at most one for each processor. More would take
#: turns, and lose what is in the processors' caches.
_PIECE_BYTES = 8 << 20
_PARALLEL = 8
#: A block of a file that the node lends: what has one checksum.
_BLOCK_BYTES = 1 << 20
#: Smaller files are not worth being borrowed; and so many are at the same time.
_BORROWED_BYTES = 1 << 20
_BORROWED_FILES = 64
#: How much longer than its timeout a wait may take, for a node that does not answer.
_GRACE_SECONDS = 5.0
#: The pause before the same question is asked again.
_PAUSE_SECONDS = 1.0
#: How often a wait says what it still waits for.
_TOLD_SECONDS = 60.0
#: Pauses between the attempts to give up what is being committed.
_COMMIT_PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0, 1.0, 1.0, 1.0)
#: The largest ``meta``, as JSON.
_META_BYTES = 64 << 10
#: The longest time until a deadline.
_DEADLINE_SECONDS = 1e9
_SCHEMES = ("s3", "gs", "az", "forebay", "file")


def split(name: str) -> tuple[str, str]:
    """Bucket and prefix of a checkpoint's name."""
    bucket, prefix = split_where(name)
    if not prefix:
        raise InvalidRequest(
            f"{name!r} does not name a checkpoint within a bucket",
            hint='as in "s3://bucket/run/step-100"',
        )
    return bucket, prefix


def split_where(where: str) -> tuple[str, str]:
    """Bucket and prefix of what checkpoints are under; the prefix of a whole bucket is empty."""
    if not isinstance(where, str):
        raise InvalidRequest(
            f"the name of a checkpoint is a text, and not a {type(where).__name__}",
            hint='as in "s3://bucket/run/step-100"',
        )
    if not is_unicode(where):
        raise InvalidRequest(f"{where!r} is not Unicode, as the name of a checkpoint is")
    scheme, mark, rest = where.partition("://")
    if not mark:
        rest = where
    elif scheme not in _SCHEMES:
        raise InvalidRequest(
            f"{where!r} is not the name of a checkpoint", hint='as in "s3://bucket/run/step-100"'
        )
    bucket, _, prefix = rest.partition("/")
    if not bucket:
        raise InvalidRequest(f"{where!r} names no bucket", hint='as in "s3://bucket/run/step-100"')
    return bucket, prefix.strip("/")


def path_of(bucket: str, prefix: str, **query: str | None) -> str:
    """The path of a request about a checkpoint."""
    given = {name: value for name, value in query.items() if value is not None}
    path = f"/v1/checkpoints/{urllib.parse.quote(bucket, safe='')}/{urllib.parse.quote(prefix)}"
    return f"{path}?{urllib.parse.urlencode(given)}" if given else path


def object_path(bucket: str, key: str) -> str:
    """The path of an object."""
    return f"/v1/objects/{urllib.parse.quote(bucket, safe='')}/{urllib.parse.quote(key)}"


def ask(client: Client, method: str, path: str, body: object = None) -> typing.Any:
    """One request, its answer as JSON; None for an empty one."""
    sent = None if body is None else json.dumps(body).encode()
    answer = bytes(client._call(method, path, sent))
    return json.loads(answer) if answer else None


def _warn(what: str) -> None:
    log.warning("%s", what)


def _number(name: str, value: object, most: float = math.inf) -> float:
    """A finite number of at least 0, which seconds are; not a bool."""
    found = None if real_number(value) is None else seconds(value)
    if found is None or found > most:
        above = "" if most == math.inf else f", and at most {most:g}"
        raise InvalidRequest(f"{name}={value!r}: give a number of seconds of at least 0{above}")
    return found


def checked_patience(retry_for: object) -> float:
    return _number("retry_for", retry_for)


def _whole(digits: str) -> int:
    value = int(digits)
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"{digits} does not fit in 64 bits")
    return value


def checked_meta(format: str, meta: object) -> dict[str, typing.Any]:
    """The ``meta`` of a commit, refused if it would not come back as it is."""
    if not isinstance(meta, (dict, type(None))):
        raise InvalidRequest(f"meta is a dict, and not a {type(meta).__name__}")
    found = {"format": format, **(meta or {})}
    try:
        text = json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = len(text.encode())
        json.loads(text, parse_int=_whole)
    except (TypeError, ValueError, RecursionError) as e:
        raise InvalidRequest(
            f"meta cannot be JSON: {e}",
            hint="texts, finite numbers, booleans, None, and lists and dicts of these",
        ) from e
    if size > _META_BYTES:
        raise InvalidRequest(
            f"meta takes {size} bytes as JSON, and at most {_META_BYTES} are kept",
            hint="put it into the state dict",
        )
    _check_keys(found)
    return found


def _check_keys(meta: dict[str, typing.Any]) -> None:
    """Refuses keys that JSON makes texts of: two of them could become one."""
    left: list[object] = [meta]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise InvalidRequest(
                        f"meta has the key {key!r}, of type {type(key).__name__}, which would come"
                        " back as a text",
                        hint=f"give the text {str(key)!r} as its key",
                    )
            left.extend(value.values())
        elif isinstance(value, (list, tuple)):
            left.extend(value)


def checked_deadline(deadline: object) -> float | None:
    return None if deadline is None else _number("deadline", deadline, _DEADLINE_SECONDS)


def _within(seconds: float, look: Callable[[], T], name: str) -> T:
    """What ``look`` returns. A node that does not answer for so long is left alone: the question
    ends by the client's ``timeout``.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            found = look()
        except BaseException as e:
            done.set_exception(e)
        else:
            done.set_result(found)

    try:
        threading.Thread(target=run, name="forebay-wait", daemon=True).start()
    except RuntimeError:
        # The system gives no more threads, or the interpreter is ending, as in atexit: here it is
        # asked all the same, and the client's ``timeout`` ends it.
        return look()
    wait([done], seconds)
    if not done.done():
        raise Timeout(
            f"{name}: the node does not answer; it is not known how the checkpoint stands",
            hint="see the node's log; if it has it, it goes on with it",
        )
    return done.result()


class Checkpoint:
    """A checkpoint that was saved: whether it is staged on the node's disk, and whether it is
    durable at its origin.

    Attributes:
        name: As in ``"s3://bucket/run/step-100"``.
        id: Among all checkpoints that had this name.
        client: The client of the node that has it.
    """

    def __init__(self, client: Client, name: str, id: str | None = None) -> None:
        check_client(client)
        self.client = client
        self.name = name
        self.id = id
        self._place = split(name)
        # Which node has it, as far as that is known.
        self._route: str | None = None

    def __repr__(self) -> str:
        id = f" {self.id}" if self.id else ""
        return f"<forebay.checkpoint.Checkpoint {self.name}{id}>"

    def status(self) -> dict[str, typing.Any]:
        """How it stands, in one request: ``state`` (``"staging"``, ``"staged"``, ``"flushing"``,
        ``"failed"`` and tried again, ``"durable"``), ``bytes``, ``bytes_at_origin``, ``seconds``
        since the commit, ``error`` (None if there is none) and ``failures`` of the flush, ``late``,
        ``meta``.

        ``"durable"`` means that it came to the origin whole. As long as a copy is on the node's
        disk, the origin is not asked whether another checkpoint has replaced it since, or another
        node has removed it: :func:`list_durable` says what the origin has.

        Raises:
            NotFound: It was given up, or removed by this node; or it was removed or replaced, and
                its copy on the node's disk is gone.
        """
        found: dict[str, typing.Any] = ask(self.client, "GET", path_of(*self._place, id=self.id))
        # The node leaves out what there is not.
        return {"error": None, "meta": None, **found}

    @property
    def staged(self) -> bool:
        """Whether all of it is on the node's disk, synced. (What is durable counts, too.)"""
        return bool(self.status()["staged"])

    @property
    def durable(self) -> bool:
        """Whether all of it came to the origin, manifest included. (What is done to it there later
        is not looked for: see :meth:`status`.)"""
        return bool(self.status()["durable"])

    def wait(self, timeout: float | None = None, *, until: str = "durable") -> Checkpoint:
        """Waits until it is ``"durable"`` or ``"staged"``; returns itself. It goes on while the
        node is started again, whether or not another one answers meanwhile.

        Args:
            timeout: Seconds, and some more for a node that does not answer; None: as long as it
                takes, and each minute a warning says why.

        Raises:
            InvalidRequest: ``timeout`` is not a number.
            Timeout: It is not so far, or the node does not answer. The hint has what its flush
                failed with, if it did.
            NotFound: It was given up.
            ConnectionFailed: The node that has it was not reached until the end of ``timeout``;
                without one, for as long as the client's ``timeout``.
        """
        if until not in ("staged", "durable"):
            raise InvalidRequest(f"until={until!r}: give 'staged' or 'durable'")
        patience = None if timeout is None else real_number(timeout)
        if timeout is not None and (patience is None or patience != patience):
            raise InvalidRequest(f"timeout={timeout!r}: give a number of seconds")
        return self._wait(patience, until, _warn, _TOLD_SECONDS)

    def _wait(
        self,
        timeout: float | None = None,
        until: str = "durable",
        tell: Callable[[str], object] | None = None,
        every: float = math.inf,
    ) -> Checkpoint:
        """:meth:`wait`, which calls ``tell`` with what is still missing, each ``every`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        reached = told = time.monotonic()
        while True:
            left = _WAIT_SECONDS if end is None else max(0.0, end - time.monotonic())
            patience = min(left, every, _WAIT_SECONDS, self.client.timeout / 2)
            path = path_of(*self._place, id=self.id, until=until, wait_s=f"{patience:.3f}")
            look = functools.partial(ask, self.client, "GET", path)
            moves = self.client.moves
            try:
                if end is None:
                    status = look()
                else:
                    status = _within(patience + _GRACE_SECONDS, look, self.name)
            except (ConnectionFailed, Timeout, NotFound) as e:
                is_elsewhere = isinstance(e, NotFound)
                if is_elsewhere and self._is_told(moves):
                    raise
                last = reached + self.client.timeout if end is None else end
                if time.monotonic() >= last:
                    if is_elsewhere:
                        raise ConnectionFailed(
                            f"{self.name}: the node that has it, {self._route}, was not reached",
                            hint=f"another one answers, which does not know of it: {e.message}",
                        ) from e
                    raise
                time.sleep(min(_PAUSE_SECONDS, max(0.0, last - time.monotonic())))
                continue
            reached = time.monotonic()
            self._is_here(status, moves)
            if status[until]:
                return self
            now, error = time.monotonic(), status.get("error")
            so_far = (
                f"it is {status['state']}, {status['bytes_at_origin']} of {status['bytes']} bytes"
                " are at the origin"
            )
            if end is not None and now >= end:
                raise Timeout(
                    f"{self.name} is not {until} after {timeout} s: {so_far}",
                    hint=error or "wait longer; the node goes on with it",
                )
            if tell is not None and now - told >= every:
                told = now
                tell(f"{self.name} is not {until}: {so_far}" + (f" ({error})" if error else ""))

    def _is_here(self, status: dict[str, typing.Any], moves: int) -> None:
        """Notes which node has it, if that is the one that said how it stands, in answer to a
        question that was put when the client had moved so often.
        """
        if status.get("local"):
            # Known as far as it can be asked.
            with contextlib.suppress(Error):
                route = self.client.route
                if moves == self.client.moves:
                    self._route = route

    def _is_told(self, moves: int) -> bool:
        """Whether the node that had it says that it has gone, in answer to a question that was put
        when the client had moved so often. Another one does not know.
        """
        if self._route is None or self.client.nodes == 1:
            return True
        try:
            return moves == self.client.moves and self._route == self.client.route
        except Error:  # None of them answers now.
            return False

    def on_durable(self, callback: Callable[[Checkpoint], object]) -> threading.Thread:
        """Calls ``callback(checkpoint)`` in a thread of its own when it is durable. If it never is
        (it was given up), or this client may not ask, the callback is not called, and a warning
        says so.

        Raises:
            TypeError: ``callback`` is not a function.
        """
        if not callable(callback):
            raise TypeError(f"callback must be a function, not {callback!r}")

        def run() -> None:
            while True:
                try:
                    self.wait()
                    break
                except UNSURE:
                    time.sleep(_PAUSE_SECONDS)
                except Error as e:
                    import warnings

                    what = "will not be durable" if isinstance(e, NotFound) else "is not followed"
                    warnings.warn(f"{self.name} {what}: {e}", stacklevel=1)
                    return
            callback(self)

        thread = threading.Thread(target=run, name="forebay-durable", daemon=True)
        thread.start()
        return thread

    def abandon(self) -> None:
        """Gives it up: it will not become visible, and what the origin has of it is removed. One
        that is durable stays, and only the copy on the node's disk goes. Without an ``id``, it is
        the one that :meth:`status` tells of.

        Raises:
            NotFound: There is none, or it was given up before.
        """
        id = self.status()["id"] if self.id is None else self.id
        try:
            ask(self.client, "DELETE", path_of(*self._place, id=id))
        except NotFound:
            # Of one that is durable, the copy has gone before.
            if not self.durable:
                raise


class Outgoing:
    """A file of a checkpoint that is being staged, as a binary file to write to."""

    def __init__(self, writing: Writing, name: str, size: int | None) -> None:
        path = path_of(*writing.place, id=writing.id, part=writing.part, file=name)
        self._upload = writing.client._upload("PUT", path, size)
        self._writing, self._name = writing, name
        self._at = 0
        self._failure: BaseException | None = None

    def write(self, data: typing.Any) -> int:
        try:
            n = self._upload.write(data)
        except BaseException as e:
            self._failure = e
            raise
        self._at += n
        return n

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        pass

    def finish(self) -> int:
        """Waits until it is on the node's disk, synced; returns its size in bytes."""
        size = int(json.loads(bytes(self._upload.finish()))["size"])
        self._writing.add(self._name, size)
        return size

    def abort(self) -> None:
        self._upload.abort()

    def __enter__(self) -> typing.Self:
        return self

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        if kind is None:
            self.finish()
            return
        self.abort()
        # torch.save says something else when it cannot write to its end.
        if self._failure is not None and value is not self._failure:
            raise self._failure


class Writing:
    """A checkpoint that is being staged: any number of files at once, from any thread."""

    def __init__(
        self,
        client: Client,
        name: str,
        *,
        overwrite: bool = True,
        id: str | None = None,
        part: str | None = None,
        size: int | None = None,
    ) -> None:
        # `size`: about how many bytes will come. Their room is taken now; while others on their way
        # to the origin have it, this waits for as long as the client's timeout.
        self.client, self.name, self.place = client, name, split(name)
        self.part = part
        self.files: dict[str, int] = {}
        self._lock = threading.Lock()
        body = {"replace": overwrite, "id": id, "part": part, "bytes": size}
        status = ask(client, "POST", path_of(*self.place), body)
        self.id: str = status["id"]

    @classmethod
    def joined(cls, client: Client, name: str, id: str) -> Writing:
        """One that somebody else began at the same node."""
        self = cls.__new__(cls)
        self.client, self.name, self.place, self.id = client, name, split(name), id
        self.part, self.files, self._lock = None, {}, threading.Lock()
        return self

    def add(self, name: str, size: int) -> None:
        """A file is there, whoever staged it."""
        with self._lock:
            self.files[name] = size

    def file(self, name: str, size: int | None = None) -> Outgoing:
        """A new file; ``size`` is its length in bytes, if it is known."""
        return Outgoing(self, name, size)

    def put(self, name: str, views: Sequence[typing.Any]) -> int:
        """A whole file of these pieces."""
        size = sum(memoryview(v).nbytes for v in views)
        file = self.file(name, size)
        try:
            for view in views:
                file.write(view)
        except BaseException:
            file.abort()
            raise
        return file.finish()

    def commit(
        self,
        *,
        last: Sequence[str] = (),
        elsewhere: dict[str, int] | None = None,
        meta: dict[str, typing.Any] | None = None,
        deadline: float | None = None,
    ) -> Checkpoint:
        """Ends the staging: from now on it becomes durable, whatever happens to this process."""

        def named(files: dict[str, int]) -> list[dict[str, typing.Any]]:
            return [{"name": name, "size": size} for name, size in sorted(files.items())]

        body = {
            "files": named(self.files),
            "elsewhere": named(elsewhere or {}),
            "last": list(last),
            "meta": meta,
            "deadline_s": deadline,
        }
        path = path_of(*self.place, id=self.id, part=self.part, commit="true")
        moves = self.client.moves
        status = ask(self.client, "POST", path, body)
        saved = Checkpoint(self.client, self.name, self.id)
        saved._is_here(status, moves)
        return saved

    def abandon(self) -> None:
        """Gives it up, as far as the node can be reached."""
        for pause in (*_COMMIT_PAUSES, 0.0):
            try:
                ask(self.client, "DELETE", path_of(*self.place, id=self.id, part=self.part))
            except Conflict:
                # The node is just noting a commit that nobody waits for any more.
                time.sleep(pause)
                continue
            except Error:
                pass  # It gives up what nobody commits.
            return


class _Held(Conflict):
    """An earlier attempt at the same may be what is in the way."""


#: Failures that another attempt may overcome. A node that hangs is started again, too.
_PASSING = (*PASSING, Timeout, _Held)


def again(
    what: str,
    attempt: Callable[[], T],
    retry_for: float,
    failed: list[Error] | None = None,
    stop: Stop | None = None,
) -> T:
    """What ``attempt`` returns, made again for ``retry_for`` seconds while the node is started, or
    does not answer, unless ``stop`` is set. With ``failed``, a warning says so once for all who
    have that list.
    """
    failed = [] if failed is None else failed

    def told() -> T:
        try:
            return attempt()
        except _PASSING as e:
            if retry_for and not failed:
                failed.append(e)
                log.warning("%s: tried again for %g s: %s", what, retry_for, e)
            raise

    return patiently(told, retry_for, stop or Stop(), Meter(), passing=_PASSING)


class Saving:
    """A checkpoint that is begun, written and committed, with patience.

    It is made anew, under another id, if the node fails meanwhile; but not if only the answer to
    its commit was lost. What an attempt left is given up by the next one, or at the end.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        write: Callable[[Writing], object] | None = None,
        *,
        overwrite: bool,
        size: int | None,
        retry_for: float,
        of: str | None = None,
        part: str | None = None,
    ) -> None:
        # `of`: the id of a checkpoint that was begun at another node, of which this is a part.
        self._client, self._name, self._overwrite, self._size = client, name, overwrite, size
        self._retry_for, self._of, self._part = retry_for, of, part
        #: What writes its files; it may be set once it is begun. None: others write them, and it
        #: cannot be made anew.
        self.write_files = write
        #: The one of the last attempt.
        self.writing: Writing | None = None
        self._begins = 0
        # Of that one: nothing goes on with it; all of it is written; it may be committed.
        self._is_over = self._is_written = self._is_told = False

    def begin(self) -> Writing:
        """Begins it, before it is known what is written."""
        return self._again(self._begun)

    def write(self) -> None:
        """Writes its files."""
        self._again(self._write)

    def commit(
        self, *, end: Callable[[Writing], object] | None = None, **said: typing.Any
    ) -> Checkpoint:
        """Writes its files, if that is not done, and ``end``; and commits it."""

        def attempt() -> Checkpoint:
            if self._is_told:
                made = self._committed(said)
                if made is not None:
                    return made
                self._is_over = True
            writing = self._write()
            if end is not None:
                with self._is_known():
                    end(writing)
            self._is_told = True
            with self._is_known():
                return writing.commit(**said)

        return self._again(attempt)

    def give_up(self) -> None:
        """Nothing becomes visible, unless it is durable."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.abandon()

    def _again(self, attempt: Callable[[], T]) -> T:
        try:
            return again(f"saving {self._name}", attempt, self._retry_for)
        except BaseException:
            self.give_up()
            raise

    def _begun(self) -> Writing:
        if self.writing is not None:
            if not self._is_over:
                return self.writing
            self.writing.abandon()
        self.writing = None
        self._is_over = self._is_written = self._is_told = False
        self._begins += 1
        part = self._part
        if part is not None and self._begins > 1:
            # What the last attempt began may still be there.
            part = f"{part}-{self._begins}"
        try:
            self.writing = Writing(
                self._client,
                self._name,
                overwrite=self._overwrite,
                size=self._size,
                id=self._of,
                part=part,
            )
        except Conflict as e:
            if self._begins == 1 or isinstance(e, AlreadyExists):
                raise
            # What an attempt began whose answers were lost gives way soon.
            raise _Held(e.message, hint=e.hint) from e
        return self.writing

    def _write(self) -> Writing:
        writing = self._begun()
        if not self._is_written:
            if self.write_files is not None:
                with self._is_known():
                    self.write_files(writing)
            self._is_written = True
        return writing

    @contextlib.contextmanager
    def _is_known(self) -> Iterator[None]:
        """What fails in here may be done anew if the node does not know any more what was begun."""
        try:
            yield
        except NotFound as e:
            self._is_over |= not self._is_told
            if not self._retry_for or self.write_files is None:
                raise
            raise ConnectionFailed(
                f"{self._name}: the node does not know any more what was begun: {e.message}",
                hint="it was started again meanwhile, or another one answers",
            ) from e
        except BaseException:
            # Files are not written twice.
            self._is_over |= not self._is_written
            raise

    def _committed(self, said: dict[str, typing.Any]) -> Checkpoint | None:
        """The commit once more, which changes nothing if it was made; None if this is not known."""
        assert self.writing is not None
        try:
            return self.writing.commit(**said)
        except NotFound:
            # Durable, perhaps, and its copy on the node's disk gone.
            made = Checkpoint(self._client, self._name, self.writing.id)
            with contextlib.suppress(NotFound, PermissionDenied, ServerError, Timeout):
                if made.durable:
                    return made
            if self.write_files is None:
                raise
            return None
        except Conflict as e:
            # The first one goes on.
            raise _Held(e.message, hint=e.hint) from e


class Replaced(Conflict):
    """Another checkpoint took the place of one that was being read.

    ``by``: the other one, if all who go by the same answer are told the same.
    """

    by: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Bytes of a file from ``start`` on, which go into ``target``."""

    done: Future[None]
    start: int
    target: memoryview

    def shares_block(self, start: int) -> bool:
        """Whether what follows, from ``start`` on, begins in the block in which this ends."""
        end = self.start + self.target.nbytes
        return end <= start and bool(end % _BLOCK_BYTES) and start < end + -end % _BLOCK_BYTES

    def is_cancelled(self) -> bool:
        if not self.done.cancelled():
            return False
        self.done.set_running_or_notify_cancel()  # It tells whoever waits.
        return True


class Reading:
    """A checkpoint that is read: its manifest, and ranges of its files, many at the same time."""

    def __init__(
        self,
        client: Client,
        name: str,
        *,
        durable: bool = False,
        retry_for: float = 0.0,
        first: str | None = None,
        id: str | None = None,
        ahead: bool = False,
    ) -> None:
        # `retry_for`: seconds for which each request is made again while the node is started.
        # `first`: a file that is read whole first. If it is small and on the node's disk, it comes
        # with the manifest.
        # `id`: this one of the name, and not its newest.
        # `ahead`: what is on the node's disk is read while the origin is asked whether it was
        # replaced. `settle` waits for the answer.
        place, only = split(name), "true" if durable else None
        self._manifest = path_of(*place, manifest="true", durable=only)
        path = path_of(
            *place,
            manifest="true",
            durable=only,
            content=first,
            id=id,
            ahead="true" if ahead else None,
        )

        def look() -> dict[str, typing.Any]:
            manifest: dict[str, typing.Any] = ask(client, "GET", path)
            return manifest

        manifest = again(f"loading {name}", look, retry_for)
        self.open(client, name, {f["name"]: f["size"] for f in manifest["files"]}, retry_for)
        self.id: str = manifest["id"]
        self.meta: dict[str, typing.Any] = manifest.get("meta") or {}
        question: str | None = manifest.get("question")
        self.question = question
        #: Whether that was asked.
        self.is_ahead = question is not None
        # Earlier releases of the node do not send it.
        content = manifest.get("content")
        if content is not None:
            found = base64.b64decode(content["base64"])
            if len(found) == self.sizes.get(content["name"]):
                self._came[content["name"]] = found

    def open(
        self, client: Client, name: str, sizes: dict[str, int], retry_for: float = 0.0
    ) -> None:
        self.client, self.name, self.place, self.sizes = client, name, split(name), sizes
        self._retry_for = retry_for
        self._failed: list[Error] = []
        #: What the origin is being asked, whose answer says whether this is the right one; None: it
        #: is.
        self.question = None
        self.is_ahead = False
        # Its answer, which is being fetched.
        self._answering: Future[None] | None = None
        self._answered: str | None = None
        # Files that came with the manifest, until they are read.
        self._came: dict[str, bytes] = {}
        #: Set when nobody waits any more.
        self.stop = Stop()
        self._pool = Pool(_PARALLEL, thread_name_prefix="forebay-read")
        # What the node lends is read without it, by threads for it alone; None: it does not lend
        # the file. The file that was borrowed first is given back first.
        self._borrowed: dict[str, Future[_Borrowed | None]] = {}
        here = min(_PARALLEL, max(2, len(os.sched_getaffinity(0))))
        self._pool_here = Pool(here, thread_name_prefix="forebay-read-lent")
        # The pieces that wait, by file, and the thread that reads each file. One thread reads a
        # file from its beginning to its end, because then the kernel reads ahead. A piece has
        # several parts if they share blocks, each of which is then read once.
        self._waiting: dict[str, deque[list[_Part]]] = {}
        self._readers: dict[str, int] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        # Pieces that were read ahead are not asked for again.
        self.stop.set()
        # The threads of the first one hand over to the second.
        self._pool_here.shutdown(cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)
        self.give_back()

    def give_back(self) -> None:
        """Gives back what was borrowed; what is read later is borrowed again."""
        with self._lock:
            borrowed, self._borrowed = self._borrowed, {}
        for file in borrowed.values():
            file.add_done_callback(_close)

    def file_of(self, relative_path: str) -> str:
        """The name of a file whose key is below the checkpoint's."""
        id, _, file = relative_path.partition("/")
        if id != self.id:
            raise Conflict(
                f"{self.name}: the checkpoint {id} is to be read, and this rank reads {self.id}",
                hint="load it again",
            )
        return file

    def __enter__(self) -> typing.Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def path(self, file: str) -> str:
        return path_of(*self.place, id=self.id, file=file)

    def size(self, file: str) -> int:
        if file not in self.sizes:
            raise NotFound(f"{self.name}: the checkpoint has no file {file!r}")
        return self.sizes[file]

    def submit(self, file: str, start: int, target: memoryview) -> Future[None]:
        """Begins to fill ``target`` with the bytes of a file from ``start`` on."""
        done: Future[None] = Future()
        if not self.lends(file):
            self._pool.submit(_run, done, self._ask_into, file, start, target)
            return done
        with self._lock:
            waiting = self._waiting.get(file)
            if waiting and waiting[-1][-1].shares_block(start):
                waiting[-1].append(_Part(done, start, target))
                return done
            # First, as it may fail: a piece waits only if a thread comes for it.
            self._pool_here.submit(self._read_next)
            self._waiting.setdefault(file, deque()).append([_Part(done, start, target)])
        return done

    def _read_next(self) -> None:
        """Reads one piece: of this thread's own file; if it has none, of a file that no thread
        reads; or else of any."""
        me = threading.get_ident()
        with self._lock:
            mine = (file for file, reader in self._readers.items() if reader == me)
            free = (file for file in self._waiting if file not in self._readers)
            file = next(itertools.chain(mine, free), None)
            if file is None:
                file = next(iter(self._waiting), None)
                if file is None:
                    return  # Giving this work to a thread failed after it was given.
            else:
                self._readers[file] = me
            pieces = self._waiting[file]
            piece = pieces.popleft()
            if not pieces:
                del self._waiting[file]
                self._readers.pop(file, None)
        self._borrow_into(file, piece)

    def _borrow_into(self, file: str, piece: Sequence[_Part]) -> None:
        waiting = deque(part for part in piece if not part.is_cancelled())
        if not waiting:
            return
        # They can be cancelled all along; whoever waits is told when their memory may go.
        try:
            borrowed = self.borrow(file)
            is_read = borrowed is not None and self._read_into(borrowed, file, waiting)
            while not is_read and waiting:
                part = waiting[0]
                self._pool.submit(_run, part.done, self._ask_into, file, part.start, part.target)
                waiting.popleft()
        except BaseException as e:
            # Parts that other threads have been given are theirs.
            for part in waiting:
                if part.done.set_running_or_notify_cancel():
                    part.done.set_exception(e)
            return
        for part in waiting:
            if part.done.set_running_or_notify_cancel():
                part.done.set_result(None)

    def _read_into(self, borrowed: _Borrowed, file: str, piece: Sequence[_Part]) -> bool:
        """Whether it could be read without the node."""
        try:
            borrowed.read_into([(part.start, part.target) for part in piece])
        except OSError:
            # The node finds out itself, and says what is wrong or reads it from the origin.
            nothing: Future[_Borrowed | None] = Future()
            nothing.set_result(None)
            with self._lock:
                self._borrowed[file] = nothing
            return False
        except ValueError:
            return False  # It was given back for another one.
        return True

    def _ask_into(self, file: str, start: int, target: memoryview) -> None:
        def attempt() -> None:
            self._ask_once(file, start, target)

        again(f"loading {self.name}", attempt, self._retry_for, self._failed, self.stop)

    def _ask_once(self, file: str, start: int, target: memoryview) -> None:
        for is_last in (False, True):
            try:
                self.client._read_into(self.path(file), start, target)
                return
            except NotFound as e:
                self.check_current()
                raise e
            except Truncated:
                # What is damaged breaks the answer off; the next one comes from the origin.
                if is_last:
                    raise

    def go_by(self, question: str | None, *, shared: bool) -> None:
        """The answer to a question says whether this is the right one. It is fetched from now on;
        ``settle`` waits for it. ``shared``: others go by it too."""
        self.question = question
        if question is None:
            return

        def fetch() -> None:
            self._answered = self.answer(shared=shared)

        self._answering = Future()
        self._pool.submit(_run, self._answering, fetch)

    def answer(self, *, shared: bool) -> str | None:
        """The id of the checkpoint that the origin has, or None if it has none. If the answer is
        lost, and not ``shared``, the origin is asked anew."""
        question, self.question = self.question, None
        if question is None:
            return self.id
        path = path_of(*self.place, manifest="true", question=question)

        def look() -> str | None:
            try:
                found = ask(self.client, "GET", path)
                # A node of an earlier release knows of no questions, and sends a manifest.
                if "files" not in found:
                    return _id_in(found)
            except NotFound:
                pass  # The node was started again, or another one answers.
            if shared:
                raise Conflict(
                    f"{self.name}: the node was started again, or another one answers, before all"
                    " ranks had been told which checkpoint there is",
                    hint="load it again",
                )
            return _id_in(ask(self.client, "GET", self._manifest))

        return again(f"loading {self.name}", look, self._retry_for, self._failed, self.stop)

    def settle(self) -> None:
        """Waits for the answer to the question, if there is one.

        Raises:
            Replaced: The origin has another checkpoint of this name.
            NotFound: It has none.
            Conflict: The answer, which others may have got, is lost.
        """
        answering, self._answering = self._answering, None
        if answering is None:
            return
        answering.result()
        if self._answered is None:
            raise self.gone()
        if self._answered != self.id:
            error = self._replaced(self._answered)
            error.by = self._answered
            raise error

    def gone(self) -> NotFound:
        """What is raised if the origin has no checkpoint of this name any more."""
        return NotFound(
            f"{self.name}: the origin does not have the checkpoint {self.id} any more",
            hint="it was removed elsewhere; forebay ls shows what there is",
        )

    def _replaced(self, by: str) -> Replaced:
        return Replaced(
            f"{self.name}: the checkpoint {self.id} was replaced by {by} while it was being read",
            hint="load it again; a name of its own for each checkpoint is never replaced",
        )

    def check_current(self) -> None:
        """Raises ``Replaced`` if the name is that of another checkpoint by now, whose beginning was
        the end of this one's files, and ``NotFound`` if it is that of none."""
        id = ask(self.client, "GET", self._manifest)["id"]
        if id != self.id:
            raise self._replaced(id)

    def borrow(self, file: str) -> _Borrowed | None:
        """The file, to be read without the node, if the node lends it."""
        if not self.lends(file):
            return None
        first = None
        with self._lock:
            found = self._borrowed.get(file)
            if found is None:
                mine = self._borrowed[file] = Future[_Borrowed | None]()
                if len(self._borrowed) > _BORROWED_FILES:
                    first = self._borrowed.pop(next(iter(self._borrowed)))
        if found is not None:
            return found.result()
        if first is not None:
            first.add_done_callback(_close)
        try:
            mine.set_result(self.client._borrow(self.path(file)))
        except BaseException as e:
            mine.set_result(None)
            # It is asked for, again and again, where it is read.
            if not (self._retry_for and isinstance(e, _PASSING)):
                raise
        return mine.result()

    def borrow_ahead(self) -> None:
        """Borrows files that wait to be read, while threads read others, as long as the node lends
        them."""
        with self._lock:
            files = list(itertools.islice(self._waiting, _BORROWED_FILES // 2))
        for file in files:
            if self.borrow(file) is None:
                return

    def lends(self, file: str) -> bool:
        """Whether the node may lend a file."""
        return self.sizes.get(file, 0) >= _BORROWED_BYTES

    def begin(self, file: str, start: int, target: memoryview) -> list[Future[None]]:
        """Begins to fill memory with a range of a file, in pieces."""
        if target.nbytes == 0:
            return []
        # Cut where the file's blocks end: a block of which a part is wanted is read whole.
        end = start + target.nbytes
        cuts = [start, *range(start - start % _PIECE_BYTES + _PIECE_BYTES, end, _PIECE_BYTES), end]
        return [
            self.submit(file, a, target[a - start : b - start]) for a, b in itertools.pairwise(cuts)
        ]

    def fill(self, jobs: Iterable[tuple[str, int, memoryview]]) -> None:
        """Fills memory with ranges of files: ``(file, start, target)``, in any order."""
        finish([piece for job in jobs for piece in self.begin(*job)], self.stop)

    def read(self, file: str) -> bytes | bytearray:
        """All bytes of a file."""
        came = self._came.pop(file, None)
        if came is not None:
            return came
        found = bytearray(self.size(file))
        self.fill([(file, 0, memoryview(found))])
        return found


def _id_in(answer: dict[str, str | None]) -> str | None:
    return answer["id"]


def _run(done: Future[None], work: Callable[..., None], *args: typing.Any) -> None:
    """Does what ``done`` stands for, if nobody has cancelled it."""
    if not done.set_running_or_notify_cancel():
        return
    try:
        work(*args)
    except BaseException as e:
        done.set_exception(e)
    else:
        done.set_result(None)


def _close(borrowed: Future[_Borrowed | None]) -> None:
    file = borrowed.result()
    if file is not None:
        file.close()


def finish(begun: Sequence[Future[None]], stop: Stop | None = None) -> None:
    """Waits for all, or until one fails, and raises its error. Their memory may go afterwards.
    After a failure, ``stop`` is set: requests that look at it are not made again then.
    """
    try:
        if len(begun) > 1:
            wait(begun, return_when=FIRST_EXCEPTION)
        for future in begun:
            if len(begun) == 1 or future.done():
                future.result()
    except BaseException:
        if stop is not None:
            stop.set()
        for future in begun:
            future.cancel()
        wait(begun)
        raise


def listed(client: Client, where: str, pattern: str = "*") -> list[Checkpoint]:
    """The durable checkpoints directly under a prefix whose last names are like ``pattern``, the
    oldest first."""
    bucket, prefix = split_where(where)
    folders = {
        info.key.rstrip("/")
        for info in client.list(f"{bucket}/{prefix}/" if prefix else bucket, recursive=False)
        if info.key.endswith("/")
    }
    folders = {f for f in folders if fnmatch.fnmatch(f.rsplit("/", 1)[-1], pattern)}

    def look(folder: str) -> tuple[int, str, str] | None:
        try:
            path = path_of(bucket, folder, manifest="true", durable="true")
            manifest = ask(client, "GET", path)
        except (NotFound, InvalidRequest):
            return None  # Or what cannot be the name of a checkpoint.
        except (Damaged, Unsupported) as e:
            # The manifest of something else, or of a later release.
            log.info("passed over: %s", e)
            return None
        return manifest["saved_ms"], folder, manifest["id"]

    with Pool(_PARALLEL) as pool:
        found = sorted(found for found in pool.map(look, sorted(folders)) if found)
    return [_Known(client, f"s3://{bucket}/{folder}", id, ms) for ms, folder, id in found]


class _Known(Checkpoint):
    def __init__(self, client: Client, name: str, id: str, saved_ms: int) -> None:
        super().__init__(client, name, id)
        self.saved_ms = saved_ms


def _checked_last(last: object) -> int:
    found = whole_number(last)
    if found is None:
        raise InvalidRequest(f"last={last!r} is not a whole number")
    if found < 1:
        raise InvalidRequest(f"last={found}: the newest durable checkpoint always stays")
    return found


def keep(
    client: Client,
    where: str,
    *,
    last: int | None,
    max_age: float | datetime.timedelta | None,
    pattern: str,
    retry_for: float,
) -> list[str]:
    if last is None and max_age is None:
        raise InvalidRequest(
            "keep() is told neither how many nor how old", hint="last=3, max_age=86400, or both"
        )
    if last is not None:
        last = _checked_last(last)
    if isinstance(max_age, datetime.timedelta):
        max_age = max_age.total_seconds()
    if max_age is not None:
        max_age = _number("max_age", max_age)
    if not isinstance(pattern, str) or not pattern:
        raise InvalidRequest(f"pattern={pattern!r}: give a text, as in 'step-*'")
    # What was to be removed, of which it is not known whether it was, and what was.
    asked: dict[str, str | None] = {}
    removed: list[str] = []

    def attempt() -> list[str]:
        mine = listed(client, where, pattern)
        left = {checkpoint.name: checkpoint.id for checkpoint in mine}
        for name, id in asked.items():
            if left.get(name) != id:
                removed.append(name)
        asked.clear()
        now_ms = time.time() * 1000
        # The newest always stays.
        for rank, checkpoint in enumerate(reversed(mine[:-1]), start=2):
            age = (now_ms - getattr(checkpoint, "saved_ms", now_ms)) / 1000
            if (last is not None and rank > last) or (max_age is not None and age > max_age):
                asked[checkpoint.name] = checkpoint.id
                try:
                    remove(client, checkpoint.name, checkpoint.id)
                    removed.append(checkpoint.name)
                except (NotFound, Conflict):
                    pass  # Somebody else has removed it, or is replacing it.
                del asked[checkpoint.name]
        return removed[::-1]

    return again(f"removing old ones of {where}", attempt, retry_for)


def remove(client: Client, name: str, id: str | None = None) -> None:
    ask(client, "DELETE", path_of(*split(name), durable="true", id=id))


def remove_patiently(client: Client, name: str, retry_for: float) -> None:
    """Removes a durable checkpoint; with ``retry_for``, the one that is there at the beginning."""
    if not retry_for:
        remove(client, name)
        return
    bucket, prefix = split(name)
    # Whoever takes its place meanwhile is not removed.
    id: str | None = None
    asked = False

    def attempt() -> None:
        nonlocal id, asked
        if id is None:
            try:
                found = ask(client, "GET", path_of(bucket, prefix, manifest="true", durable="true"))
            except NotFound:
                # If one is on its way, the answer to a removal says so.
                remove(client, name)
                return
            id = found["id"]
        was_asked, asked = asked, True
        try:
            remove(client, name, id)
        except NotFound:
            # After an attempt whose answer was lost.
            if not was_asked:
                raise

    return again(f"removing {name}", attempt, retry_for)
