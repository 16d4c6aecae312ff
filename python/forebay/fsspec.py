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
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem, _Cached
from fsspec.utils import tokenize

from ._forebay import Client, ObjectInfo
from ._pools import Pool
from .errors import (
    Changed,
    Error,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
    RangeNotSatisfiable,
)

__all__ = ["ForebayFile", "ForebayFileSystem"]


def __dir__() -> list[str]:
    return sorted(__all__)


#: A file being written is held in memory up to this many bytes, then in a temporary file.
SPOOL_MAX_BYTES = 64 << 20
#: How slow a copy may be that the node makes of a large object: it says nothing until its end.
COPY_BYTES_A_SECOND = 4 << 20
#: Concurrent requests for entries that a batch did not bring.
SINGLE_REQUESTS = 8
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
#: What Hugging Face's datasets adds to the dict of options that it is given.
OF_DATASETS = frozenset({"hf"})


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
            ``cache``. Those of fsspec itself do nothing here; any other one is a ``TypeError``.

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
            raise TypeError(
                f"the filesystem forebay:// has no option {unknown[0]!r} (url, node, client, token,"
                " ca, timeout, origin, cache)"
            )
        if url is not None and node is not None:
            raise InvalidRequest("url= and node= are two names of one option", hint="give one")
        where = node if url is None else url
        self._token = token
        self.client = client or Client(
            where, token=token, ca=ca, timeout=timeout, origin=origin, cache=cache
        )

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
        **kwargs: Any,
    ) -> Any:
        """All objects under a path, and with ``withdirs`` the directories too, from one listing."""
        path = self._strip_protocol(path)
        if not path or maxdepth is not None:
            return super().find(path, maxdepth=maxdepth, withdirs=withdirs, detail=detail, **kwargs)
        bucket, key = self._split(path)
        found: dict[str, dict[str, Any]] = {}
        directories: set[str] = set()
        try:
            # With its slash: a key may be allowed no more, and what begins alike may be much more.
            for info in self.client.list(f"{path}/" if key else bucket):
                directories.update(itertools.takewhile(lambda d: d != path, _parents(info.name)))
                directories.add(path)
                if not _is_marker(info):
                    found[info.name] = _file(info)
            if not key:
                directories.add(path)
        except NotFound:
            pass
        if key:
            with contextlib.suppress(NotFound, InvalidRequest, PermissionDenied):
                found[path] = _file(self.client.head((bucket, key)))
        if withdirs:
            # This filesystem does not show a directory whose name has an empty part (`a//b`).
            for name in directories:
                if not name.endswith("/"):
                    found.setdefault(name, _directory(name))
        return {name: found[name] for name in sorted(found)} if detail else sorted(found)

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
            # Not by expand_path, which has the directories too: they have no bytes.
            paths = sorted({name for each in self.expand_path(path) for name in self.find(each)})
            if not paths:
                raise FileNotFoundError(path)
            if paths == [self._strip_protocol(path)]:
                return self.cat_file(paths[0], **kwargs)
        else:
            paths = self.expand_path(path, **kwargs)
            if len(paths) < 2 or kwargs:
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

        if missing:
            with Pool(SINGLE_REQUESTS, thread_name_prefix="forebay-cat") as pool:
                for i, value in zip(missing, pool.map(again, missing), strict=True):
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
        paths = self.expand_path(path, recursive=recursive, maxdepth=maxdepth)
        if not recursive:
            for name in paths:
                self.rm_file(name)
            return

        def removed(name: str) -> bool:
            if "/" not in name:
                return False
            try:
                self.rm_file(name)
            except NotFound:
                # A directory; or somebody else has removed it meanwhile.
                return False
            return True

        # Directories go with what is in them, and with the object that stands for one.
        directories = {parent for name in paths for parent in _parents(name)}.intersection(paths)
        with Pool(SINGLE_REQUESTS, thread_name_prefix="forebay-rm") as pool:
            for name, was_there in zip(paths, pool.map(removed, paths), strict=True):
                if not was_there:
                    directories.add(name)
        for name in directories:
            for info in itertools.islice(self.client.list(f"{name}/", page_size=1), 1):
                if _is_marker(info) and info.name == f"{name}/":
                    self.client.delete(info.name)

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Does nothing: directories exist once something is in them."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Does nothing: directories exist once something is in them."""

    def rmdir(self, path: str) -> None:
        """Does nothing: directories disappear with what is in them."""

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any
    ) -> ForebayFile:
        if mode not in ("rb", "wb", "xb"):
            raise ValueError(
                f"mode {mode!r} is not offered: give rb, wb or xb, for objects are written whole"
            )
        if mode == "xb" and self.exists(path):
            raise FileExistsError(path)
        file = ForebayFile(
            self, path, "wb" if mode == "xb" else mode, block_size or "default", **kwargs
        )
        file.is_new = mode == "xb"
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
    written as a whole when it is closed).
    """

    #: Whether it is only written where no object is.
    is_new = False

    def _fetch_range(self, start: int, end: int) -> bytes:
        """Bytes of the version that was opened.

        Raises:
            Changed: The object has changed since.
        """
        if end <= start:
            return b""
        got = self.fs.client.get(self.path, start=start, length=end - start)
        opened = self.details.get("ETag")
        if opened and got.etag and got.etag != opened:
            raise Changed(
                f"{self.path} was overwritten while it was open: version {opened} was"
                f" opened, and the node now has version {got.etag}",
                hint="open it again",
            )
        return bytes(got)

    def _initiate_upload(self) -> None:
        self._spool = tempfile.SpooledTemporaryFile(max_size=SPOOL_MAX_BYTES)

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
        self.fs._put(self.path, self._spool, self.is_new)
        self._spool.close()

    def discard(self) -> None:
        """Discards what was written."""
        # There is no upload before a whole block was written.
        if (spool := getattr(self, "_spool", None)) is not None:
            spool.close()
        # Neither is it written when it is collected.
        self.closed = True


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
