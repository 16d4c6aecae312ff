"""What to install where a package is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

#: What a package is called, and how it is installed.
PACKAGES = {
    "fsspec": "fsspec: pip install fsspec",
    "jax": "JAX: pip install jax",
    "numpy": "NumPy: pip install numpy",
    "torch": "PyTorch: pip install torch",
}


@contextmanager
def needs(what: str) -> Iterator[None]:
    """Around imports: if one of :data:`PACKAGES` is missing, the error says what to install."""
    try:
        yield
    except ModuleNotFoundError as e:
        if e.name not in PACKAGES:
            raise
        raise ModuleNotFoundError(f"{what} needs {PACKAGES[e.name]}", name=e.name) from e
