"""The filesystem ``forebay://`` for fsspec, and so for pandas, Dask, Hugging Face datasets, PyArrow
and others.

::

    import fsspec

    with fsspec.open("forebay://bucket/table.csv", url="http://127.0.0.1:8080") as file:
        ...
    fs = fsspec.filesystem("forebay", url="http://127.0.0.1:8080")
    fs.cat(["bucket/a", "bucket/b"])          # one GetBatch

The node is the one in ``url``, or in the environment variable ``FOREBAY_NODE``. Libraries that
pass ``storage_options`` on beside an argument that is called ``url`` (pandas, Hugging Face
datasets, PyTorch's distributed checkpoints) take it as ``node``::

    pandas.read_parquet("forebay://bucket/t.parquet", storage_options={"node": "http://node:8080"})

Installing the package registers the protocol.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from glob import has_magic
from typing import IO, Any, TypeVar
from urllib.parse import quote

from ._needs import needs

with needs("forebay.fsspec"):
    from fsspec.callbacks import DEFAULT_CALLBACK
    from fsspec.config import conf
    from fsspec.spec import AbstractBufferedFile, AbstractFileSystem, _Cached
    from fsspec.utils import isfilelike, stringify_path, tokenize

from ._forebay import Buffer, Client, ObjectInfo
from ._pools import Pool, is_exiting
from .errors import (
    Changed,
    Conflict,
    Error,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
    RangeNotSatisfiable,
    Unsupported,
)

__all__ = ["ForebayFile", "ForebayFileSystem"]


def __dir__() -> list[str]:
    return sorted(__all__)


#: A file being written is held in memory up to this many bytes, then in a temporary file.
SPOOL_MAX_BYTES = 64 << 20
#: Larger objects are transferred in pieces of this many bytes.
PIECE_BYTES = 8 << 20
#: How many files are transferred at the same time, if neither `batch_size` nor fsspec's setting
#: `gather_batch_size` says so; and at most.
AT_ONCE = 32
AT_ONCE_MAX = 128
#: How slow a copy may be that the node makes of a large object: it says nothing until its end.
COPY_BYTES_A_SECOND = 4 << 20
#: Options of fsspec itself, which any filesystem takes.
OF_FSSPEC = frozenset(
    {
        "add_aliases",
        "add_docs",
        "asynchronous",
        "batch_size",
        "listings_expiry_time",
        "loop",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
    }
)
#: Options that s3fs and others have, and what is in their place.
_CREDENTIALS = "the node has the credentials of buckets; token= is a key of the node"
ELSEWHERE = {
    "anon": _CREDENTIALS,
    "client_kwargs": "url=",
    "endpoint_url": "url=",
    "key": _CREDENTIALS,
    "profile": _CREDENTIALS,
    "secret": _CREDENTIALS,
}
#: Schemes before a bucket: all mean that bucket of the node.
SCHEMES = ("forebay", "s3", "gs", "az", "ais")
#: What Hugging Face's datasets adds to the dict of options that it is given.
OF_DATASETS = frozenset({"hf"})

T = TypeVar("T")
R = TypeVar("R")


class _Kept(_Cached):
    """fsspec keeps filesystems by the texts of their arguments, and those with the same texts are
    equal. The text of a client says nothing of its token and its options: a filesystem with one is
    not kept, and is equal to those that have the same client.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        client = kwargs.get("client")
        if client is None:
            return super().__call__(*args, **kwargs)
        made = super().__call__(*args, **{**kwargs, "skip_instance_cache": True})
        made._fs_token_ = tokenize(made._fs_token_, id(client))
        return made


class ForebayFileSystem(AbstractFileSystem, metaclass=_Kept):
    """Buckets of a node as a filesystem; paths are ``bucket/key``.

    Args:
        url: The node, or several, as for :class:`forebay.Client`.
        node: Another name of ``url``, for ``storage_options``.
        client: A client to use instead.
        **options: Further options of the client: ``token``, ``ca``, ``timeout``, ``origin``,
            ``cache``. Of those of fsspec itself, ``batch_size`` is how many files are transferred
            at the same time (32; -1 stands for 128, which is the most), and the others do nothing
            here; any other one is a ``TypeError``.

    Errors are :class:`forebay.Error`; a missing object is a ``FileNotFoundError``. Directories are
    the parts of keys before a ``/``: they exist as long as something is in them, and making or
    removing one does nothing. To open one to read is an ``IsADirectoryError``.
    """

    protocol = "forebay"
    root_marker = ""
    async_impl = False

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        node: str | Sequence[str] | None = None,
        client: Client | None = None,
        token: str | None = None,
        ca: str | None = None,
        timeout: float = 60.0,
        origin: str | None = None,
        cache: str | None = None,
        **storage_options: Any,
    ) -> None:
        super().__init__(**storage_options)
        if unknown := sorted(storage_options.keys() - OF_FSSPEC - OF_DATASETS):
            said = ELSEWHERE.get(unknown[0], "url, node, client, token, ca, timeout, origin, cache")
            raise TypeError(f"the filesystem forebay:// has no option {unknown[0]!r} ({said})")
        if url is not None and node is not None:
            raise InvalidRequest("url= and node= are two names of one option", hint="give one")
        where = node if url is None else url
        self.batch_size: int | None = storage_options.get("batch_size")
        self._token = token
        self.client = client or Client(
            where, token=token, ca=ca, timeout=timeout, origin=origin, cache=cache
        )

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """Paths without a scheme; ``s3://bucket/key`` and the like mean what they do elsewhere."""
        if isinstance(path, list):
            return [cls._strip_protocol(p) for p in path]
        scheme, mark, rest = stringify_path(path).partition("://")
        return super()._strip_protocol(rest if mark and scheme in SCHEMES else path)

    @property
    def fsid(self) -> str:
        return f"forebay_{self.client.url}"

    @staticmethod
    def _split(path: str) -> tuple[str, str]:
        bucket, _, key = path.partition("/")
        return bucket, key

    # Reading what there is

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """What is directly under a path: objects, and directories (into which deeper keys are
        folded).
        """
        path = self._strip_protocol(path)
        if not path:
            found = [_directory(bucket) for bucket in self.client.buckets()]
        else:
            found = self._children(path)
            # One that only a marker stands for, or an empty bucket, has nothing in it.
            if not found and (info := self.info(path))["type"] == "file":
                found = [info]
        return found if detail else [entry["name"] for entry in found]

    def _children(self, path: str) -> list[dict[str, Any]]:
        bucket, key = self._split(path)
        prefix = f"{key}/" if key else ""
        files: list[dict[str, Any]] = []
        directories: dict[str, None] = {}
        for info in self.client.list(f"{bucket}/{prefix}" if prefix else bucket, recursive=False):
            head, slash, _ = info.key[len(prefix) :].partition("/")
            if slash:
                directories.setdefault(f"{bucket}/{prefix}{head}")
            elif head and not _is_marker(info):
                files.append(_file(info))
        return sorted([*files, *map(_directory, directories)], key=lambda entry: entry["name"])

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        prefix: str = "",
        **kwargs: Any,
    ) -> Any:
        """All objects under a path, and with ``withdirs`` the directories too: from one listing, or
        with ``maxdepth`` from one of each directory. With ``prefix`` those whose names go on like
        that, as in s3fs.
        """
        path = self._strip_protocol(path)
        if prefix and (withdirs or maxdepth is not None or not path):
            raise ValueError("prefix= goes with a path, and not with withdirs= or maxdepth=")
        if not path:
            return super().find(path, maxdepth=maxdepth, withdirs=withdirs, detail=detail, **kwargs)
        if prefix:
            with contextlib.suppress(NotFound):
                listed = self.client.list(f"{path}/{prefix}")
                found = {info.name: _file(info) for info in listed if not _is_marker(info)}
                return found if detail else [*found]
            return {} if detail else []
        found, directories = self._under(path, maxdepth)
        if withdirs:
            for name in directories:
                found.setdefault(name, _directory(name))
        return {name: found[name] for name in sorted(found)} if detail else sorted(found)

    def _under(
        self, path: str, maxdepth: int | None = None
    ) -> tuple[dict[str, dict[str, Any]], set[str]]:
        """The objects at a path and under it, and the directories, itself if it is one."""
        _check_depth(maxdepth)
        bucket, key = self._split(path)
        found: dict[str, dict[str, Any]] = {}
        directories: set[str] = set()
        if maxdepth is None:
            with contextlib.suppress(NotFound):
                # With its slash: a key may be allowed no more, and what begins alike may be much
                # more.
                for info in self.client.list(f"{path}/" if key else bucket):
                    directories.update(
                        itertools.takewhile(lambda d: d != path, _parents(info.name))
                    )
                    directories.add(path)
                    if not _is_marker(info):
                        found[info.name] = _file(info)
                if not key:
                    directories.add(path)
        else:
            level = [path]
            for _ in range(maxdepth):
                listed = [e for some in self._each(self._listed, level) for e in some]
                found |= {e["name"]: e for e in listed if e["type"] == "file"}
                level = [e["name"] for e in listed if e["type"] == "directory"]
                if not level:
                    break
                directories.update(level)
            if found or directories or (not key and self.isdir(path)):
                directories.add(path)
        if key:
            with contextlib.suppress(NotFound, InvalidRequest, PermissionDenied):
                found[path] = _file(self.client.head((bucket, key)))
            if maxdepth is not None and not (found or directories) and self.isdir(path):
                directories.add(path)
        # This filesystem does not show a directory whose name has an empty part (`a//b`).
        directories = {name for name in directories if not name.endswith("/")}
        for name in directories & found.keys():
            found[name] = _Both(found[name])
        return found, directories

    def _listed(self, path: str) -> list[dict[str, Any]]:
        """What is directly in a directory; nothing, if it is not there."""
        try:
            return [entry for entry in self._children(path) if entry["name"] != path]
        except NotFound:
            return []

    def expand_path(
        self, path: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any
    ) -> list[str]:
        """The paths that names and patterns stand for; with ``recursive`` also what is under
        them.
        """
        return sorted(self._expand(path, recursive, maxdepth, **kwargs))

    def _expand(
        self, path: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any
    ) -> dict[str, dict[str, Any] | None]:
        """As expand_path, with what the listings said of each; None where nothing was asked."""
        _check_depth(maxdepth)
        is_literal = kwargs.pop("assume_literal", False)
        given = [path] if isinstance(path, str | os.PathLike) else path
        expanded: dict[str, dict[str, Any] | None] = {}
        # Paths under which to look, and how deep.
        roots: dict[tuple[str, int | None], None] = {}
        for name in map(self._strip_protocol, given):
            if not is_literal and has_magic(name):
                found = self.glob(name, maxdepth=maxdepth, **{**kwargs, "detail": True})
                expanded |= found
                if maxdepth is None or maxdepth > 1:
                    deeper = None if maxdepth is None else maxdepth - 1
                    roots |= {(n, deeper): None for n, e in found.items() if _has_more(e)}
            elif recursive:
                roots[name, maxdepth] = None
            else:
                expanded.setdefault(name, None)
        if recursive:
            # With a depth, the directories of each are listed at the same time.
            at_once = None if maxdepth is None else 1
            for under in self._each(lambda root: self._within(*root), [*roots], at_once):
                expanded |= under
        if not expanded:
            raise FileNotFoundError(path)
        return expanded

    def _within(self, path: str, maxdepth: int | None) -> dict[str, dict[str, Any]]:
        """A path and what is under it, directories too."""
        found: dict[str, dict[str, Any]] = self.find(
            path, maxdepth=maxdepth, withdirs=True, detail=True
        )
        return found

    def du(
        self,
        path: str,
        total: bool = True,
        maxdepth: int | None = None,
        withdirs: bool = False,
        **kwargs: Any,
    ) -> int | dict[str, int]:
        """The bytes of what is under a path: of all objects together, or with ``total=False`` of
        each.
        """
        found = self.find(path, maxdepth=maxdepth, withdirs=withdirs, detail=True, **kwargs)
        sizes = {name: entry["size"] for name, entry in found.items()}
        return sum(sizes.values()) if total else sizes

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """``name``, ``size`` in bytes, ``type`` (``file`` or ``directory``), and for files ``ETag``
        and ``LastModified`` (a ``datetime``, as in s3fs) where known.
        """
        path = self._strip_protocol(path)
        bucket, key = self._split(path)
        if key:
            try:
                return _file(self.client.head((bucket, key)))
            except NotFound:
                pass
            except PermissionDenied:
                # A key for what is in the directory may not be one for its name.
                with contextlib.suppress(PermissionDenied):
                    if self._has_any(f"{bucket}/{key}/"):
                        return _directory(path)
                raise
        # A directory is there as long as an object is under it; listing a bucket that does not
        # exist is NotFound.
        if not path or self._has_any(f"{bucket}/{key}/" if key else bucket):
            return _directory(path)
        if not key and bucket in self.client.buckets():
            return _directory(path)
        raise FileNotFoundError(path)

    def _has_any(self, prefix: str) -> bool:
        return any(True for _ in self.client.list(prefix, page_size=1))

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether something is there. Raises what keeps the node from saying so."""
        return self._kind(path) is not None

    def _kind(self, path: str) -> str | None:
        """Whether it is a ``file`` or a ``directory``; None if nothing is there."""
        try:
            return str(self.info(path)["type"])
        except (FileNotFoundError, InvalidRequest):
            return None

    def isdir(self, path: str) -> bool:
        """Whether it is a directory. Raises what keeps the node from saying so; but what this key
        may not see is none.
        """
        try:
            return self._kind(path) == "directory"
        except PermissionDenied:
            return False

    def isfile(self, path: str) -> bool:
        """Whether it is an object; as for :meth:`isdir`."""
        try:
            return self._kind(path) == "file"
        except PermissionDenied:
            return False

    def walk(
        self,
        path: str,
        maxdepth: int | None = None,
        topdown: bool = True,
        on_error: Any = "omit",
        **kwargs: Any,
    ) -> Iterator[Any]:
        """As fsspec's, but ``omit`` leaves out only what is not there: a directory that cannot be
        listed is an error.
        """
        handler = _only_missing if on_error == "omit" else on_error
        return super().walk(path, maxdepth, topdown, handler, **kwargs)

    def modified(self, path: str) -> datetime:
        """When the object was last changed at its origin."""
        when = _time(self.client.head(self._strip_protocol(path)).last_modified)
        return datetime.fromtimestamp(0, UTC) if when is None else when

    def ukey(self, path: str) -> str:
        """The object's version: changes when its bytes do."""
        info = self.client.head(self._strip_protocol(path))
        return f"{info.etag}-{info.size}"

    checksum = ukey

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        name = self._strip_protocol(path)
        if start is None and end is None:
            return bytes(self.client.get(name))
        if (start or 0) < 0 or (end or 0) < 0:
            size = self.client.head(name).size
            start = max(0, size + start) if start is not None and start < 0 else start
            end = max(0, size + end) if end is not None and end < 0 else end
        begin = start or 0
        if end is not None and end <= begin:
            return b""
        length = None if end is None else end - begin
        try:
            return bytes(self.client.get(name, start=begin, length=length))
        except RangeNotSatisfiable:
            # Past the end there is nothing, as in a slice: so it is for fsspec's other filesystems.
            return b""

    def cat(
        self, path: str | list[str], recursive: bool = False, on_error: str = "raise", **kwargs: Any
    ) -> Any:
        """The bytes of one object, or of several as ``{path: bytes}``: several are one GetBatch."""
        if recursive:
            # Directories have no bytes.
            within = self._expand(path, recursive=True)
            paths = sorted(name for name, entry in within.items() if _is_file(entry))
            if not paths:
                raise FileNotFoundError(path)
            if paths == [self._strip_protocol(path)]:
                return self.cat_file(paths[0], **kwargs)
        else:
            paths = self.expand_path(path)
            if len(paths) < 2:
                return super().cat(path, on_error=on_error, **kwargs)
        if kwargs:
            starts, ends = kwargs.get("start"), kwargs.get("end")
            found = self.cat_ranges(paths, starts, ends, on_error=on_error)
        else:
            found = self._batch(paths, on_error, lambda i: self.cat_file(paths[i]))
        return {
            name: value
            for name, value in zip(paths, found, strict=True)
            if on_error == "return" or not isinstance(value, Exception)
        }

    def _batch(
        self, wanted: Sequence[Any], on_error: str, one: Callable[[int], bytes]
    ) -> list[bytes | Exception]:
        """The bytes of entries, from one GetBatch. Entries that it does not bring are requested one
        by one (``one``, with the index): this distinguishes missing entries from unreadable ones,
        and a batch with more failures than a node accepts does not fail the others.
        """
        found: list[bytes | Exception | None] = [None] * len(wanted)
        try:
            batch = self.client.batch(wanted, continue_on_error=on_error != "raise")
            for i, item in enumerate(batch):
                if item.error is None:
                    found[i] = bytes(item)
        except Error as e:
            # A range past the end is no failure, and the others are asked for one by one too.
            if on_error == "raise" and not isinstance(e, RangeNotSatisfiable):
                raise
        missing = [i for i, value in enumerate(found) if value is None]

        def again(index: int) -> bytes | Exception:
            try:
                return one(index)
            except Exception as e:
                if on_error == "raise":
                    raise
                return e

        for i, value in zip(missing, self._each(again, missing), strict=True):
            found[i] = value
        return [value for value in found if value is not None]

    def cat_ranges(
        self,
        paths: list[str],
        starts: int | list[int] | None,
        ends: int | list[int] | None,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        """Byte ranges of objects, in one GetBatch."""
        first = starts if isinstance(starts, Iterable) else [starts] * len(paths)
        last = ends if isinstance(ends, Iterable) else [ends] * len(paths)
        ranges = list(zip(map(self._strip_protocol, paths), first, last, strict=True))
        # From the end, or empty: the node's ranges are neither.
        if not ranges or any(
            (s or 0) < 0 or (e is not None and (e < 0 or e <= (s or 0))) for _, s, e in ranges
        ):
            return super().cat_ranges(
                paths, list(first), list(last), max_gap=max_gap, on_error=on_error, **kwargs
            )
        wanted = [
            {"objname": p, "start": s or 0, "length": -1 if e is None else e - (s or 0)}
            for p, s, e in ranges
        ]
        return self._batch(wanted, on_error, lambda i: self.cat_file(*ranges[i]))

    # Writing

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self._put(self._strip_protocol(path), value, mode == "create")

    def _put(self, name: str, value: Any, is_new: bool) -> None:
        """Writes an object, with ``is_new`` only where none is."""
        # Not every origin knows the condition.
        if is_new and self.client.exists(name):
            raise FileExistsError(name)
        try:
            self.client.put(name, value, if_absent=is_new)
        except PreconditionFailed as e:
            raise FileExistsError(name) from e

    def pipe(self, path: str | dict[str, bytes], value: bytes | None = None, **kwargs: Any) -> None:
        """Writes one object, or several (``{path: bytes}``), some at the same time."""
        batch_size = kwargs.pop("batch_size", None)
        if not isinstance(path, dict):
            super().pipe(path, value, **kwargs)
            return
        self._each(
            lambda one: self.pipe_file(self._strip_protocol(one[0]), one[1], **kwargs),
            [*path.items()],
            batch_size,
        )

    # Many files

    def _each(
        self,
        call: Callable[[T], R],
        items: Sequence[T],
        batch_size: int | None = None,
        over: threading.Event | None = None,
    ) -> list[R]:
        """What ``call`` makes of each, some at the same time, in the order of the items. After an
        error nothing is begun any more, ``over`` tells what goes on, and the first error in that
        order is raised.
        """
        if batch_size is None:
            batch_size = self.batch_size
        if batch_size is None:
            batch_size = int(conf.get("gather_batch_size", AT_ONCE))
        if batch_size == 0 or batch_size < -1:
            raise ValueError(f"batch_size is {batch_size}: give 1 or more, or -1 for as many as go")
        most = AT_ONCE_MAX if batch_size == -1 else min(batch_size, AT_ONCE_MAX)
        # What runs when the interpreter ends gets no threads.
        if len(items) < 2 or most == 1 or is_exiting():
            return [call(item) for item in items]
        over = over or threading.Event()
        with Pool(min(most, len(items)), thread_name_prefix="forebay-files") as pool:
            begun: list[Future[R]] = []
            try:
                # Also Ctrl-C among these begins nothing any more.
                begun.extend(pool.submit(call, item) for item in items)
                done, _ = wait(begun, return_when=FIRST_EXCEPTION)
                is_whole = len(done) == len(begun) and not any(one.exception() for one in done)
            except BaseException:
                is_whole = False
                raise
            finally:
                if not is_whole:
                    over.set()
                    for one in begun:
                        one.cancel()
        errors = [e for one in begun if not one.cancelled() and (e := one.exception())]
        if errors:
            raise next((e for e in errors if not isinstance(e, _GivenUp)), errors[0])
        return [one.result() for one in begun]

    def _transfer(
        self,
        pairs: Sequence[tuple[Any, Any]],
        call: Callable[[Any, Any, Any], None],
        callback: Any,
        batch_size: int | None,
    ) -> None:
        """Transfers files, some at the same time. Of those with one target, one after the other."""
        callback.set_size(len(pairs))
        # Callbacks need not be made for several threads.
        lock, over = threading.Lock(), threading.Event()
        targets: dict[Any, list[tuple[Any, Any]]] = {}
        for source, target in pairs:
            targets.setdefault(target, []).append((source, target))

        def transfer(of_one: list[tuple[Any, Any]]) -> None:
            for source, target in of_one:
                with lock:
                    branch = callback.branched(source, target)
                    child = branch.__enter__()
                try:
                    call(source, target, _Told(child, lock, over))
                finally:
                    with lock:
                        branch.__exit__(*sys.exc_info())
                with lock:
                    callback.relative_update(1)

        self._each(transfer, [*targets.values()], batch_size, over)

    def get(
        self,
        rpath: Any,
        lpath: Any,
        recursive: bool = False,
        callback: Any = DEFAULT_CALLBACK,
        maxdepth: int | None = None,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        """As fsspec's, but ``batch_size`` files are transferred at the same time."""
        lpath = os.fspath(lpath) if isinstance(lpath, os.PathLike) else lpath
        plan = _Plan.of(self)
        plan.get(rpath, lpath, recursive=recursive, maxdepth=maxdepth, **kwargs)

        def one(source: str, target: Any, callback: Any) -> None:
            entry = plan.known.get(self._strip_protocol(source))
            if entry is not None and entry["type"] == "directory":
                os.makedirs(target, exist_ok=True)
            else:
                self.get_file(source, target, callback=callback, **kwargs)

        self._transfer(plan.pairs, one, callback, batch_size)

    def get_file(
        self,
        rpath: str,
        lpath: Any = None,
        callback: Any = DEFAULT_CALLBACK,
        outfile: Any = None,
        **kwargs: Any,
    ) -> None:
        """Reads an object into a local file, which is replaced once all of it is there. If it
        cannot be read to its end, no part is left, and what was there before stays.
        """
        if kwargs:
            super().get_file(rpath, lpath, callback=callback, outfile=outfile, **kwargs)
            return
        if outfile is None and isfilelike(lpath):
            outfile = lpath
        name = self._strip_protocol(rpath)
        try:
            # A list gives it away: each piece is let go before the next one is read.
            first = [self._piece(name, 0, PIECE_BYTES)]
        except (NotFound, InvalidRequest, PermissionDenied):
            if not self.isdir(name):
                raise
            if outfile is not None:
                raise IsADirectoryError(self._why_no_file(name)) from None
            os.makedirs(lpath, exist_ok=True)
            return
        size = self._size(name, first[0])
        # What is given up now has not touched the local file.
        callback.set_size(size)
        if outfile is not None:
            self._receive(name, first, size, outfile, callback)
            return
        os.makedirs(os.path.dirname(lpath) or ".", exist_ok=True)
        with _replacing(lpath) as file:
            self._receive(name, first, size, file, callback)

    def _piece(self, name: str, start: int, length: int) -> Buffer:
        try:
            return self.client.get(name, start=start, length=length)
        except RangeNotSatisfiable:
            if start:
                raise
            # It is empty.
            return self.client.get(name)

    def _size(self, name: str, first: Buffer) -> int:
        """The bytes of an object that begins with a piece."""
        if len(first) < PIECE_BYTES:
            return len(first)
        about = self.client.head(name)
        _check_version(name, first.etag, about)
        return about.size

    def _receive(
        self, name: str, first: list[Buffer], size: int, file: IO[bytes], callback: Any
    ) -> None:
        """Writes an object, of which the first piece is taken, into a file."""
        piece = first.pop()
        opened, at = piece.etag, len(piece)
        while True:
            # First: it may give up.
            callback.relative_update(len(piece))
            file.write(memoryview(piece))
            if at >= size:
                return
            del piece
            try:
                piece = self._piece(name, at, min(PIECE_BYTES, size - at))
            except RangeNotSatisfiable as e:
                # It was overwritten by one that is smaller.
                raise _changed(name, opened) from e
            _check_version(name, opened, piece)
            at += len(piece)

    def put(
        self,
        lpath: Any,
        rpath: Any,
        recursive: bool = False,
        callback: Any = DEFAULT_CALLBACK,
        maxdepth: int | None = None,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        """As fsspec's, but ``batch_size`` files are transferred at the same time."""
        lpath = os.fspath(lpath) if isinstance(lpath, os.PathLike) else lpath
        plan = _Plan.of(self)
        plan.put(lpath, rpath, recursive=recursive, maxdepth=maxdepth, **kwargs)

        def one(source: Any, target: str, callback: Any) -> None:
            self.put_file(source, target, callback=callback, **kwargs)

        # What a transaction has are files that are written at its end.
        self._transfer(plan.pairs, one, callback, 1 if self._intrans else batch_size)

    def put_file(
        self,
        lpath: Any,
        rpath: str,
        callback: Any = DEFAULT_CALLBACK,
        mode: str = "overwrite",
        **kwargs: Any,
    ) -> None:
        """Writes a local file as an object."""
        if kwargs or self._intrans:
            # fsspec before 2024.12 does not know of it.
            given = kwargs if mode == "overwrite" else {**kwargs, "mode": mode}
            super().put_file(lpath, rpath, callback=callback, **given)
            return
        if os.path.isdir(lpath):
            return
        name, is_new = self._strip_protocol(rpath), mode == "create"
        with open(lpath, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            callback.set_size(size)
            if size > PIECE_BYTES:
                self._put(name, _Sent(name, file, size, callback), is_new)
            else:
                data = file.read()
                self._put(name, data, is_new)
                callback.relative_update(len(data))

    def copy(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        on_error: str | None = None,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        """As fsspec's, but ``batch_size`` objects are copied at the same time."""
        plan = _Plan.of(self)
        plan.copy(path1, path2, recursive=recursive, maxdepth=maxdepth, **kwargs)
        skips = on_error == "ignore" or (on_error is None and recursive)

        def one(source: str, target: str, callback: Any) -> None:
            entry = plan.known.get(self._strip_protocol(source))
            with contextlib.suppress(*[FileNotFoundError] if skips else []):
                if entry is None:
                    self.cp_file(source, target, **kwargs)
                elif entry["type"] != "directory":
                    self._copy_object(source, target, entry["size"])

        self._transfer(plan.pairs, one, DEFAULT_CALLBACK, batch_size)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copies an object, with its content type and what users have noted with it. Within a
        bucket, the origin makes the copy if it can; otherwise the node does.
        """
        info = self.info(path1)
        if info["type"] != "directory":
            self._copy_object(path1, path2, info["size"])

    def _copy_object(self, source: str, target: str, size: int) -> None:
        name, to = self._strip_protocol(source), self._strip_protocol(target)
        if name == to:
            return
        client = self.client
        if size > SPOOL_MAX_BYTES:
            # Until its end the node says nothing.
            rebuilt: Any = client.__reduce__()
            given: dict[str, Any] = rebuilt[1][1]
            seconds = client.timeout + size / COPY_BYTES_A_SECOND
            patient = Client(**{**given, "timeout": seconds}, token=self._token)
            client = patient if patient._is_like(client) else client
        client._call("PUT", f"/v1/objects/{quote(name)}?object_to={quote(f'ais/@#/{to}', safe='')}")

    def rm_file(self, path: str) -> None:
        self.client.delete(self._strip_protocol(path))

    _rm = rm_file

    def rm(
        self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None
    ) -> None:
        """Removes objects; with ``recursive`` all objects under the paths."""
        if not recursive:
            self._each(self.rm_file, self.expand_path(path, maxdepth=maxdepth))
            return
        found = self._expand(path, recursive=True, maxdepth=maxdepth)

        def remove(name: str) -> None:
            # Somebody else may have removed it meanwhile.
            with contextlib.suppress(NotFound):
                self.rm_file(name)

        def remove_marker(name: str) -> None:
            for info in itertools.islice(self.client.list(f"{name}/", page_size=1), 1):
                if _is_marker(info) and info.name == f"{name}/":
                    self.client.delete(info.name)

        self._each(remove, [name for name, entry in found.items() if _is_file(entry)])
        # Directories go with what is in them, and with the object that stands for one.
        directories = {name for name, entry in found.items() if _has_more(entry)}
        self._each(remove_marker, sorted(directories))

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Does nothing: directories exist once something is in them."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Does nothing: directories exist once something is in them."""

    def rmdir(self, path: str) -> None:
        """Does nothing: directories disappear with what is in them."""

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any
    ) -> ForebayFile:
        if mode not in ("rb", "wb", "xb", "ab"):
            raise ValueError(
                f"mode {mode!r} is not offered: give rb, wb, xb or ab, for objects are written"
                " whole"
            )
        if mode == "xb" and self.exists(path):
            raise FileExistsError(path)
        about = None
        if mode == "ab":
            # Before there is a file: one that is dropped is written.
            with contextlib.suppress(FileNotFoundError):
                about = self.info(path)
        file = ForebayFile(
            self, path, "wb" if mode == "xb" else mode, block_size or "default", **kwargs
        )
        file.is_new = mode == "xb"
        if mode == "ab":
            file.append_to(about if about is not None and about["type"] == "file" else None)
        if mode == "rb" and not file.size and file.details["type"] == "directory":
            raise IsADirectoryError(self._why_no_file(path))
        return file

    def _why_no_file(self, path: str) -> str:
        """What to say to whoever opens a directory."""
        if self._is_checkpoint(path):
            name = f"s3://{path}"
            hint = f"forebay.checkpoint.load({name!r}) reads the checkpoint that it is"
        else:
            hint = f"ls({path!r}) shows what is in it"
        return f"forebay://{path} is a directory, which has no bytes of its own ({hint})"

    def _is_checkpoint(self, path: str) -> bool:
        """Whether a directory has the manifest of a checkpoint, which says so at its beginning."""
        try:
            return b'"forebay_checkpoint"' in self.cat_file(f"{path}/manifest.json", 0, 64)
        except (Error, FileNotFoundError):
            return False


class ForebayFile(AbstractBufferedFile):
    """An object opened for reading (by ranges, with read-ahead) or for writing (kept aside, and
    written as a whole when it is closed; with what it had before, if it was opened to append).
    """

    #: Whether it is only written where no object is.
    is_new = False
    #: What is appended to: an object of so many bytes.
    had: int | None = None

    def append_to(self, about: dict[str, Any] | None) -> None:
        """Goes on after what an object has; None: there is none."""
        if about is None:
            self.had, self.is_new = 0, True
            return
        self.details = about
        self.had = self.loc = about["size"]

    def _fetch_range(self, start: int, end: int) -> bytes:
        """Bytes of the version that was opened.

        Raises:
            Changed: The object has changed since.
        """
        if end <= start:
            return b""
        got = self.fs.client.get(self.path, start=start, length=end - start)
        _check_version(self.path, self.details.get("ETag"), got)
        return bytes(got)

    def _initiate_upload(self) -> None:
        self._spool = tempfile.SpooledTemporaryFile(max_size=SPOOL_MAX_BYTES)
        had = self.had or 0
        for at in range(0, had, PIECE_BYTES):
            self._spool.write(self._fetch_range(at, min(at + PIECE_BYTES, had)))

    def _upload_chunk(self, final: bool = False) -> bool:
        self._spool.write(self.buffer.getvalue())
        if final and self.autocommit:
            self.commit()
        return True

    def commit(self) -> None:
        """Writes the object."""
        if not self.forced:
            # A transaction ends before its file was closed.
            self.autocommit = False
            self.flush(force=True)
        self._spool.seek(0)
        if self.had is None:
            self.fs._put(self.path, self._spool, self.is_new)
        else:
            self._append()
        self._spool.close()

    def _append(self) -> None:
        """Writes what there was and more, unless somebody else has written meanwhile."""
        if self.is_new:
            try:
                self.fs._put(self.path, self._spool, True)
            except FileExistsError as e:
                raise Changed(
                    f"{self.path} was written while it was open: nothing was there when it was"
                    " opened",
                    hint="open it again",
                ) from e
            except Unsupported:
                # Not every origin knows the condition; nothing was there just now.
                self._spool.seek(0)
                self.fs._put(self.path, self._spool, False)
            return
        client, opened = self.fs.client, self.details.get("ETag")
        try:
            client.put(self.path, self._spool, if_match=opened)
        except PreconditionFailed as e:
            raise _changed(self.path, opened) from e
        except Unsupported:
            # Not every origin knows the condition.
            if client.head(self.path).etag != opened:
                raise _changed(self.path, opened) from None
            self._spool.seek(0)
            client.put(self.path, self._spool)

    def discard(self) -> None:
        """Discards what was written."""
        # There is no upload before a whole block was written.
        if (spool := getattr(self, "_spool", None)) is not None:
            spool.close()
        # Neither is it written when it is collected.
        self.closed = True


@contextlib.contextmanager
def _replacing(path: Any) -> Iterator[IO[bytes]]:
    """A new file beside a local one, whose place it takes once it is written. If that fails, it is
    removed. The new file has the old one's mode, and a symbolic link then points to it. It writes
    directly to what is not a regular file, such as a pipe, and where it may not create a file.
    """
    try:
        before = os.stat(path)
    except FileNotFoundError:
        before = None
    made: tuple[int, str] | None = None
    if before is None or stat.S_ISREG(before.st_mode):
        made = _beside(path, before)
    if made is None:
        with open(path, "wb") as file:
            yield file
        return
    fd, new = made
    try:
        with open(fd, "wb") as file:
            yield file
            if before is not None:
                os.fchmod(fd, before.st_mode & 0o777)
        os.replace(new, os.path.realpath(path))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


def _beside(path: Any, before: os.stat_result | None) -> tuple[int, str] | None:
    """A new file beside a local one, as private as that; None if only that may be written."""
    where = os.path.realpath(path)
    new = os.path.join(os.path.dirname(where), f".forebay-get-{secrets.token_hex(6)}")
    mode = 0o666 if before is None else before.st_mode & 0o777
    try:
        return os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), new
    except OSError as e:
        if before is not None and isinstance(e, PermissionError):
            return None
        raise type(e)(e.errno, e.strerror, os.fspath(path)) from None


class _Plan(ForebayFileSystem):
    """A filesystem as fsspec's get, put and copy see it, which say what goes where: it only notes
    that, and asks nothing twice of a path.
    """

    #: What listings said of paths.
    known: dict[str, dict[str, Any]]
    #: Sources and targets.
    pairs: list[tuple[Any, Any]]

    @classmethod
    def of(cls, fs: ForebayFileSystem) -> _Plan:
        # Not one more that fsspec keeps.
        plan = object.__new__(cls)
        own = vars(cls)
        plan.__dict__.update((k, v) for k, v in vars(fs).items() if k not in own)
        plan.known, plan.pairs = {}, []
        return plan

    def expand_path(self, path: Any, *args: Any, **kwargs: Any) -> list[str]:
        found = self._expand(path, *args, **kwargs)
        self.known |= {name: entry for name, entry in found.items() if entry is not None}
        return sorted(found)

    def isdir(self, path: str) -> bool:
        name = self._strip_protocol(path)
        if name not in self.known:
            try:
                self.known[name] = self.info(name)
            except (FileNotFoundError, InvalidRequest, PermissionDenied):
                return False
        return bool(self.known[name]["type"] == "directory")

    def get_file(self, rpath: Any, lpath: Any = None, *args: Any, **kwargs: Any) -> None:
        self.pairs.append((rpath, lpath))

    def put_file(self, lpath: Any, rpath: Any, *args: Any, **kwargs: Any) -> None:
        self.pairs.append((lpath, rpath))

    def cp_file(self, path1: Any, path2: Any, **kwargs: Any) -> None:
        self.pairs.append((path1, path2))

    # The copying itself is the other filesystem's.
    get = AbstractFileSystem.get
    put = AbstractFileSystem.put
    copy = AbstractFileSystem.copy


class _GivenUp(Exception):
    """Another transfer has failed, or all of them were interrupted."""


class _Told:
    """The callback of one transfer among several: it is called by one thread at a time, and gives
    the transfer up once all of them are over.
    """

    def __init__(self, callback: Any, lock: threading.Lock, over: threading.Event) -> None:
        self._callback, self._lock, self._over = callback, lock, over

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._callback, name)
        return functools.partial(self._call, value) if callable(value) else value

    def _call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._over.is_set():
                raise _GivenUp
            return call(*args, **kwargs)


class _Sent:
    """A local file that is being sent, as long as it was at first, and tells how far it is."""

    def __init__(self, name: str, file: IO[bytes], size: int, callback: Any) -> None:
        self._name, self._file, self._size, self._callback = name, file, size, callback
        self._at = 0

    def read(self, size: int) -> bytes:
        data = self._file.read(min(size, self._size - self._at))
        self._at += len(data)
        if not data and self._at < self._size:
            raise Conflict(
                f"{self._name}: the local file has become shorter: it had {self._size} bytes",
                hint="nothing was written; put it again when nobody writes to the file",
            )
        self._callback.relative_update(len(data))
        return data


class _Both(dict[str, Any]):
    """What is known of an object under whose name there is a directory, too."""


def _is_file(entry: dict[str, Any] | None) -> bool:
    return entry is None or entry["type"] == "file"


def _has_more(entry: dict[str, Any] | None) -> bool:
    """Whether something may be under it."""
    return entry is not None and (entry["type"] == "directory" or isinstance(entry, _Both))


def _check_depth(maxdepth: int | None) -> None:
    if maxdepth is not None and maxdepth < 1:
        raise ValueError("maxdepth must be at least 1")


def _check_version(name: str, opened: str | None, got: Buffer | ObjectInfo) -> None:
    """Raises Changed for bytes of another version than that which was opened."""
    if opened and got.etag and got.etag != opened:
        raise _changed(name, opened, f", and the node now has version {got.etag}")


def _changed(name: str, opened: str | None, now: str = "") -> Changed:
    return Changed(
        f"{name} was overwritten while it was open: version {opened} was opened{now}",
        hint="open it again",
    )


def _parents(path: str) -> Iterator[str]:
    """The directories that a path is in."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _only_missing(error: OSError) -> None:
    """Raises what does not mean that nothing is there."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _is_marker(info: ObjectInfo) -> bool:
    """Whether an object only stands for a directory."""
    return info.key.endswith("/") and info.size == 0


def _time(text: str | None) -> datetime | None:
    try:
        return parsedate_to_datetime(text) if text else None
    except ValueError:
        return None


def _file(info: ObjectInfo) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": info.name, "size": info.size, "type": "file"}
    if info.etag:
        entry["ETag"] = info.etag
    # Not as the text that HTTP has, whose order is that of the days of the week.
    if (when := _time(info.last_modified)) is not None:
        entry["LastModified"] = when
    return entry


def _directory(name: str) -> dict[str, Any]:
    return {"name": name.rstrip("/"), "size": 0, "type": "directory"}
