"""From samples to a batch, and from rows to what ``output=`` asks for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np

from ._warn import warn
from .errors import InvalidRequest
from .rows import Rows

#: What a batch is: :class:`forebay.Rows`, or its columns as arrays of one kind or another.
Output: TypeAlias = Literal["rows", "numpy", "torch", "jax", "arrow"]
OUTPUTS: tuple[str, ...] = ("rows", "numpy", "torch", "jax", "arrow")

#: The column that distinguishes rows of the epoch (True) from padding (False), if a loader pads.
REAL = "__real__"

#: Whole numbers up to this are exact as floats of 64 bits.
EXACT_MAX = 1 << 53


def stack(samples: Sequence[Any], name: str = "samples") -> Any:
    """Samples as one batch of NumPy arrays.

    Arrays of one shape, and numbers, become an array of shape ``(len(samples), …)``; dicts, tuples
    and lists are taken apart and become the same of batches; anything else is a list.

    Raises:
        ValueError: Arrays of different shapes, dicts of different keys, tuples or lists of
            different lengths, or one of these where other samples have something else; or whole
            numbers that the one type for all samples does not hold.
    """
    first, types = samples[0], set(map(type, samples))
    for kind in (dict, (tuple, list), np.ndarray):
        if len({issubclass(t, kind) for t in types}) > 1:
            _refuse_different(name, "kinds", {t.__name__ for t in types})
    if isinstance(first, dict):
        if any(s.keys() != first.keys() for s in samples):
            _refuse_different(name, "keys", {", ".join(map(str, s)) or "none" for s in samples})
        return {key: stack([s[key] for s in samples], f"{key!r} of {name}") for key in first}
    if isinstance(first, (tuple, list)):
        if any(len(s) != len(first) for s in samples):
            _refuse_different(name, "lengths", {str(len(s)) for s in samples})
        columns = enumerate(zip(*samples, strict=True))
        parts = [stack(list(part), f"item {i} of {name}") for i, part in columns]
        if isinstance(first, tuple):
            return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
        return parts
    if isinstance(first, np.ndarray):
        if any(s.shape != first.shape for s in samples):
            _refuse_different(name, "shapes", {str(s.shape) for s in samples})
        is_masked = any(isinstance(s, np.ma.MaskedArray) for s in samples)
        batch = np.ma.stack(samples) if is_masked else np.stack(samples)
        _refuse_rounding(name, samples, batch)
        return batch
    # NumPy makes texts of numbers beside one of its own texts.
    of_one = len(types) == 1 and issubclass(type(first), np.generic)
    if of_one or all(issubclass(t, (bool, int, float, np.number, np.bool_)) for t in types):
        batch = np.array(samples)
        if len(types) > 1 or type(first) is int:
            _refuse_rounding(name, samples, batch)
        return batch
    return list(samples)


def _refuse_rounding(name: str, samples: Sequence[Any], batch: np.ndarray) -> None:
    """Raises if whole numbers became others in a batch of floats: beside floats, or beside signed
    ones where they are unsigned.
    """
    if batch.dtype.kind not in "fc":
        return
    for sample, made in zip(samples, batch, strict=True):
        is_array = isinstance(sample, np.ndarray)
        if is_array and (sample.dtype.kind not in "iu" or sample.itemsize < 8):
            continue
        if not is_array and not isinstance(sample, (int, np.integer)):
            continue
        given, kept = np.ma.getdata(sample).reshape(-1), np.ma.getdata(made).reshape(-1).real
        # Up to here, floats of 64 bits hold all of them.
        large = (given > EXACT_MAX) | (given < -EXACT_MAX)
        if isinstance(sample, np.ma.MaskedArray):
            large &= ~np.ma.getmaskarray(sample).reshape(-1)
        for number, float_of_it in zip(given[large].tolist(), kept[large].tolist(), strict=True):
            if number != float_of_it:
                raise ValueError(
                    f"{name} have {number}, which {batch.dtype} does not hold, the type for all of"
                    " them: make them of one type in decode=, or give collate="
                )


def _refuse_different(name: str, what: str, found: set[str]) -> NoReturn:
    shown = "; ".join(sorted(found)[:5]) + ("; …" if len(found) > 5 else "")
    raise ValueError(
        f"{name} have different {what} ({shown}): make them equal in decode=, or give collate="
    )


def collator(output: Output, collate: Callable[[Any], Any] | None) -> Callable[[list[Any]], Any]:
    """What turns a list of samples into a batch."""
    if collate is not None:
        return collate
    if output == "numpy":
        return stack
    if output == "jax":
        return lambda samples: to_jax(stack(samples))
    if output == "torch":
        from torch.utils.data import default_collate

        def tensors(samples: list[Any]) -> Any:
            have_views = False
            for sample in samples:
                have_views |= _looked_through(sample)
            if have_views:
                samples = [owned(sample) for sample in samples]
            try:
                return default_collate(samples)
            except Exception as e:
                e.add_note(
                    f"PyTorch makes no batch of {_culprit(samples, default_collate)}: make them"
                    " alike in decode= or map(), or give collate="
                )
                raise

        return tensors
    return lambda samples: samples


def _culprit(
    samples: Sequence[Any], collate: Callable[[Any], Any], name: str = "these samples"
) -> str:
    """Which part of samples it is that cannot be collated."""
    first = samples[0]
    parts: dict[str, list[Any]] = {}
    if all(isinstance(s, dict) and s.keys() == first.keys() for s in samples):
        parts = {f"{key!r} of {name}": [s[key] for s in samples] for key in first}
    elif all(isinstance(s, (tuple, list)) and len(s) == len(first) for s in samples):
        parts = {f"item {i} of {name}": [s[i] for s in samples] for i in range(len(first))}
    for part, values in parts.items():
        try:
            collate(values)
        except Exception:
            return _culprit(values, collate, part)
    return name


def convert(rows: Rows, output: Output, real: int | None) -> Any:
    """Rows that nobody decodes, as what was asked for. ``real``: how many of them are not padding,
    where a loader pads.
    """
    if output == "rows":
        return rows
    if output == "arrow":
        return rows.arrow()
    columns: dict[str, Any] = rows.torch() if output == "torch" else dict(rows.numpy())
    if real is not None:
        mask = np.arange(len(rows)) < real
        if output == "torch":
            import torch

            columns[REAL] = torch.from_numpy(mask)
        else:
            columns[REAL] = mask
    return to_jax(columns) if output == "jax" else columns


def owned(value: Any) -> Any:
    """The same with ``bytes`` in place of views of received memory, in dicts, tuples, lists and
    arrays of objects: views do not go to other processes, and PyTorch makes lists of numbers of
    them.
    """
    if isinstance(value, memoryview):
        return bytes(value)
    if type(value) is dict:
        return {name: owned(part) for name, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(owned, value))
    if isinstance(value, np.ndarray) and value.dtype == object:
        made = value.copy()
        cells = np.ma.getdata(made).reshape(-1)
        for i, cell in enumerate(cells):
            cells[i] = owned(cell)
        return made
    if not isinstance(value, (dict, tuple, list)):
        return value
    # Named tuples and the like: they are made anew only if they have views.
    if isinstance(value, dict):
        parts = {name: owned(part) for name, part in value.items()}
        if any(parts[name] is not part for name, part in value.items()):
            value = copy.copy(value)
            value.update(parts)
        return value
    items = list(map(owned, value))
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def apart(rows: Rows, output: Output, real: int | None) -> list[Any]:
    """Rows that are not decoded, as a list of samples: dicts of what ``output`` has for one row."""
    if output == "arrow":
        raise ValueError(
            'output="arrow" makes record batches, not samples:'
            ' give output="rows", "numpy" or'
            ' "torch"'
        )
    if output == "rows":
        mark = (lambda i: {REAL: i < real}) if real is not None else (lambda i: {})
        return [{**row, **mark(i)} for i, row in enumerate(rows)]
    columns = convert(rows, output, real)
    return [{name: values[i] for name, values in columns.items()} for i in range(len(rows))]


def _looked_through(value: Any, name: str = "") -> bool:
    """Whether a sample has views of received memory, of each byte of which PyTorch would make a
    number. Raises TypeError if PyTorch would take what lies under a mask for data.
    """
    if isinstance(value, memoryview):
        return True
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name or 'a sample'} has missing items, which a tensor cannot hold: fill them"
            " in decode= (.filled(0)), or give collate="
        )
    have_views = False
    if isinstance(value, dict):
        for key, inner in value.items():
            have_views |= _looked_through(inner, f"{key!r} of a sample")
    elif isinstance(value, (tuple, list)):
        for inner in value:
            have_views |= _looked_through(inner, name)
    return have_views


def to_jax(
    value: Any, place: Callable[[np.ndarray], Any] | None = None, name: str = "a sample"
) -> Any:
    """NumPy arrays, in dicts, tuples and lists, as JAX arrays: on the default device, or where
    ``place`` puts them. What JAX has no type for stays as it is.

    Raises:
        InvalidRequest: A whole number has more bits than JAX keeps.
    """
    import jax

    if isinstance(value, dict):
        return {key: to_jax(v, place, f"{key!r} of a sample") for key, v in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [to_jax(v, place, name) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if place is not None and isinstance(value, jax.Array):
        return place(value)
    if (
        isinstance(value, np.ndarray)
        and not isinstance(value, np.ma.MaskedArray)
        # To NumPy, durations are whole numbers.
        and value.dtype.kind != "m"
        and (value.dtype == bool or jax.numpy.issubdtype(value.dtype, jax.numpy.number))
    ):
        _refuse_wrapping(value, jax.dtypes.canonicalize_dtype(value.dtype), name)
        return (jax.numpy.asarray if place is None else place)(value)
    return value


def _refuse_wrapping(value: np.ndarray, kept: np.dtype, name: str) -> None:
    """Raises if JAX would cut off bits of whole numbers, which it does without a word."""
    if kept == value.dtype or kept.kind not in "iu" or not value.size:
        return
    limits = np.iinfo(kept)
    low, high = int(value.min()), int(value.max())
    if low < limits.min or high > limits.max:
        raise InvalidRequest(
            f"{name} has {low if low < limits.min else high}, and JAX keeps {kept} of"
            f" {value.dtype}",
            hint='jax.config.update("jax_enable_x64", True), or make them smaller in decode=',
        )


def pin(value: Any) -> Any:
    """Tensors, in dicts, tuples and lists, in page-locked memory: a copy to the GPU then overlaps
    with computation.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return value.pin_memory()
    if isinstance(value, dict):
        return {key: pin(v) for key, v in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [pin(v) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def can_pin() -> bool:
    """Whether memory can be page-locked here; warns if it cannot."""
    import torch

    if torch.cuda.is_available():
        return True
    warn("pin_memory: PyTorch does not see a GPU, so batches stay in ordinary memory")
    return False
