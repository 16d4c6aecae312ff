"""State dicts as files: what ``torch.save`` writes, and safetensors."""

from __future__ import annotations

import io
import json
import math
import typing
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

from .._needs import needs

with needs("forebay.checkpoint"):
    import torch

from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._arguments import is_unicode
from ..errors import InvalidRequest, Unsupported
from ._wire import Checkpoint, Reading, Writing, finish

#: What the file is called, by format.
FILES = {"torch": "state.pt", "safetensors": "model.safetensors"}

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
}
#: Two numbers in each byte; PyTorch counts the bytes, and safetensors count the numbers.
_PAIRS = getattr(torch, "float4_e2m1fn_x2", None)
#: Of newer releases of PyTorch.
_NEWER = ("F8_E8M0", "F4")
if hasattr(torch, "float8_e8m0fnu"):
    _DTYPES[torch.float8_e8m0fnu] = "F8_E8M0"
if _PAIRS is not None:
    _DTYPES[_PAIRS] = "F4"
_NAMES = {name: dtype for dtype, name in _DTYPES.items()}

#: Items of DCP, and the first tensor of safetensors, begin at multiples of this in their files, as
#: tensors do in memory and in what ``torch.save`` writes: to copy to a place that is aligned
#: otherwise takes markedly longer.
ALIGNED_BYTES = 64

#: Tensors of this size are read straight into their memory; smaller ones together.
DIRECT_BYTES = 64 << 10

#: A file is read ahead in chunks of this size, so many at a time.
_CHUNK_BYTES = 8 << 20
_AHEAD = 8


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, writable; no copy."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    # Dimensions of one element may have any stride.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return memoryview(flat.numpy())


def bytes_of(state: object) -> int:
    """About what the tensors of nested dicts, lists and tuples take as a file of ``torch.save``, in
    bytes: it writes each storage once, whole."""
    total, left, seen, storages = 1 << 20, [state], set(), set()
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            total += 512
            if is_lazy(value) or value.is_meta:
                pass  # Without data.
            elif value.layout == torch.strided:
                storage = value.untyped_storage()
                total += 0 if storage._cdata in storages else storage.nbytes()
                storages.add(storage._cdata)
            elif value.layout == torch.sparse_coo:
                left += [value._indices(), value._values()]
            elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
                left += [value.crow_indices(), value.col_indices(), value.values()]
            elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
                left += [value.ccol_indices(), value.row_indices(), value.values()]
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            left.extend(value.values() if isinstance(value, dict) else value)
    return total


def bytes_of_safetensors(state: dict[str, torch.Tensor]) -> int:
    """About what tensors take as safetensors, each by itself."""
    return (1 << 20) + sum(512 + tensor.nbytes for tensor in state.values())


def save_torch(writing: Writing, state: object) -> None:
    with writing.file(FILES["torch"]) as file:
        torch.save(state, typing.cast(typing.IO[bytes], file))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """As a reader takes the bytes: it knows nothing of what a view does to them."""
    if tensor.dtype == _PAIRS:
        # PyTorch copies no others of it.
        tensor = tensor.view(torch.uint8)
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def _shape(tensor: torch.Tensor) -> list[int]:
    """The shape as safetensors count it."""
    shape = list(tensor.shape)
    return [*shape[:-1], 2 * shape[-1]] if tensor.dtype == _PAIRS else shape


def save_safetensors(writing: Writing, state: dict[str, torch.Tensor]) -> None:
    header: dict[str, typing.Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in state.items():
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": _shape(tensor),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED_BYTES)
    with writing.file(FILES["safetensors"], 8 + len(text) + at) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in state.values():
            # A copy has no name here: with one, it would stay until the next one is there.
            file.write(memory_of(_plain(tensor)))


def check_safetensors(state: object) -> None:
    """Refuses what safetensors cannot hold, before anything is sent."""
    if not isinstance(state, dict):
        raise InvalidRequest(
            f"safetensors hold a dict of tensors, not a {type(state).__name__}",
            hint='format="torch" saves anything',
        )
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise InvalidRequest(
                f"safetensors hold tensors by name; {name!r} is a {type(value).__name__}",
                hint='format="torch" saves anything',
            )
        if name == "__metadata__":
            raise InvalidRequest(
                f"safetensors cannot hold a tensor named {name!r}, which is the header's own",
                hint='rename it, or give format="torch", which saves anything',
            )
        if not is_unicode(name):
            raise InvalidRequest(
                f"safetensors cannot hold a tensor named {name!r}, which is not Unicode",
                hint='rename it, or give format="torch", which saves anything',
            )
        if is_lazy(value):
            raise InvalidRequest(
                f"safetensors cannot hold {name!r}: it is not initialized, and has no data",
                hint="call the module with a batch first, or leave it out",
            )
        if value.dtype not in _DTYPES or value.layout != torch.strided:
            raise InvalidRequest(
                f"safetensors cannot hold {name!r}: {value.dtype}, {value.layout}",
                hint='format="torch" saves anything',
            )
        if value.dtype == _PAIRS and not value.ndim:
            raise InvalidRequest(
                f"safetensors cannot hold {name!r}: {value.dtype} without dimensions, of which they"
                " would count the pairs",
                hint="give it as one of shape (1,), or leave it out",
            )
        if value.is_meta:
            raise InvalidRequest(
                f"safetensors cannot hold {name!r}: it is on the device meta, and has no data",
                hint="load or initialize it first, or leave it out",
            )
        if is_traceable_wrapper_subclass(value):
            raise InvalidRequest(
                f"safetensors cannot hold {name!r}: a {type(value).__name__} has other tensors in"
                " place of data",
                hint="give full_tensor() of a DTensor; torch.distributed.checkpoint.save with"
                " forebay.checkpoint.StorageWriter saves the shards of all ranks",
            )


def device_of(map_location: object) -> torch.device:
    """Where tensors of safetensors go to."""
    if map_location is None:
        return torch.device("cpu")
    if not isinstance(map_location, (str, torch.device)):
        raise InvalidRequest(
            f"map_location of safetensors is one device, and not a {type(map_location).__name__}",
            hint='as in map_location="cuda:0"; tensor.to(device) moves each tensor elsewhere',
        )
    return torch.device(map_location)


def load_safetensors(reading: Reading) -> dict[str, torch.Tensor]:
    file = FILES["safetensors"]
    size = reading.size(file)
    head = bytearray(min(size, 1 << 20))
    reading.fill([(file, 0, memoryview(head))])
    length = int.from_bytes(head[:8], "little")
    if 8 + length > size:
        raise InvalidRequest(f"{reading.name}: {file} is not in the format of safetensors")
    if 8 + length > len(head):
        more = bytearray(8 + length - len(head))
        reading.fill([(file, len(head), memoryview(more))])
        head += more
    try:
        header = json.loads(bytes(head[8 : 8 + length]))
    except ValueError as e:
        raise InvalidRequest(f"{reading.name}: the header of {file} is not JSON: {e}") from e
    if not isinstance(header, dict):
        raise InvalidRequest(f"{reading.name}: the header of {file} is not a JSON object")
    header.pop("__metadata__", None)
    found, jobs = {}, []
    small: list[tuple[int, memoryview]] = []
    for name, about in header.items():
        try:
            kind, shape, (begin, end) = about["dtype"], about["shape"], about["data_offsets"]
            numbers = [*shape, begin, end]
        except (KeyError, TypeError, ValueError):
            kind, numbers = "", [-1]
        if not isinstance(kind, str) or not all(type(n) is int and n >= 0 for n in numbers):
            raise InvalidRequest(f"{reading.name}: the header of {file} does not describe {name!r}")
        if kind in _NEWER and kind not in _NAMES:
            raise Unsupported(
                f"{reading.name}: {name!r} is of the type {kind}, which PyTorch {torch.__version__}"
                " does not have",
                hint="pip install --upgrade torch",
            )
        if kind not in _NAMES:
            raise Unsupported(
                f"{reading.name}: {name!r} is of the type {kind}, which this release of Forebay"
                " does not know",
                hint=f"upgrade, or read {file} with the library safetensors",
            )
        dtype = _NAMES[kind]
        if dtype == _PAIRS:
            if not shape or shape[-1] % 2:
                raise Unsupported(
                    f"{reading.name}: {name!r} is of the type {kind} and the shape {shape}, and"
                    " PyTorch has numbers of 4 bits in pairs alone",
                    hint=f"read {file} as bytes",
                )
            shape = [*shape[:-1], shape[-1] // 2]
        # Before memory is taken for it.
        if end - begin != math.prod(shape) * dtype.itemsize or 8 + length + end > size:
            raise InvalidRequest(f"{reading.name}: the header of {file} does not fit {name!r}")
        tensor = torch.empty(shape, dtype=dtype)
        found[name] = tensor
        if tensor.nbytes >= DIRECT_BYTES:
            jobs.append((file, 8 + length + begin, memory_of(tensor)))
        else:
            small.append((8 + length + begin, memory_of(tensor)))
    reading.fill(jobs)
    _fill_together(reading, file, small)
    return found


def _fill_together(reading: Reading, file: str, targets: Iterable[tuple[int, memoryview]]) -> None:
    """Fills small pieces of memory, each from its place on: those that lie next to each other are
    one range, and ranges are read at the same time."""
    left = deque(sorted(targets, key=lambda each: each[0]))
    while left:
        jobs: list[tuple[str, int, memoryview]] = []
        copies: list[tuple[memoryview, memoryview]] = []
        taken = 0
        while left and taken < _CHUNK_BYTES * _AHEAD:
            begin = end = left[0][0]
            members: list[tuple[int, memoryview]] = []
            while left and left[0][0] - end < DIRECT_BYTES and end - begin < _CHUNK_BYTES:
                members.append(left.popleft())
                end = max(end, members[-1][0] + members[-1][1].nbytes)
            held = memoryview(bytearray(end - begin))
            jobs.append((file, begin, held))
            copies += [(to, held[at - begin : at - begin + to.nbytes]) for at, to in members]
            taken += end - begin
        reading.fill(jobs)
        for to, data in copies:
            to[:] = data


class Incoming(io.RawIOBase):
    """A file of a checkpoint, to be read from front to back. What is asked for goes straight to
    where it is wanted, in parallel ranges, and what comes next is read ahead."""

    def __init__(self, reading: Reading, file: str) -> None:
        self._reading, self._file = reading, file
        self._size = reading.size(file)
        self._at = 0
        self._chunks: dict[int, tuple[bytearray, Future[None]]] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def _chunk(self, number: int) -> tuple[bytearray, Future[None]]:
        if number not in self._chunks:
            begin = number * _CHUNK_BYTES
            data = bytearray(min(_CHUNK_BYTES, self._size - begin))
            future = self._reading.submit(self._file, begin, memoryview(data))
            self._chunks[number] = (data, future)
        return self._chunks[number]

    def readinto(self, target: typing.Any) -> int:
        view = memoryview(target).cast("B")
        begin, end = self._at, min(self._at + view.nbytes, self._size)
        if end <= begin:
            return 0
        first, after = begin // _CHUNK_BYTES, -(-end // _CHUNK_BYTES)
        # What lies behind is not read again, except for the directory at the end.
        for old in [n for n in self._chunks if n < first - 1 or n > after + 2 * _AHEAD]:
            self._chunks.pop(old)
        begun, copies = [], []
        for number in range(first, after):
            at = number * _CHUNK_BYTES
            low, high = max(begin, at), min(end, at + _CHUNK_BYTES)
            whole = low == at and high == min(at + _CHUNK_BYTES, self._size)
            part = view[low - begin : high - begin]
            if whole and number not in self._chunks:
                begun.append(self._reading.submit(self._file, low, part))
            else:
                data, future = self._chunk(number)
                begun.append(future)
                copies.append((part, data, low - at))
        if begin > 0:
            last = -(-self._size // _CHUNK_BYTES)
            for number in range(after, min(after + _AHEAD, last)):
                self._chunk(number)
        finish(begun, self._reading.stop)
        for part, data, at in copies:
            part[:] = memoryview(data)[at : at + part.nbytes]
        self._at = end
        return end - begin


def load_torch(reading: Reading, *, map_location: typing.Any, weights_only: bool) -> typing.Any:
    file = typing.cast(typing.IO[bytes], Incoming(reading, FILES["torch"]))
    return torch.load(file, map_location=map_location, weights_only=weights_only)


__all__ = [
    "FILES",
    "Checkpoint",
    "Incoming",
    "check_safetensors",
    "load_safetensors",
    "load_torch",
    "memory_of",
    "save_safetensors",
    "save_torch",
]
