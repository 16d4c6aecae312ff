"""Several datasets as one, by weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .dataset import Dataset

__all__ = ["Mix", "mix"]
