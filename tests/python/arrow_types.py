"""Types that PyArrow has had since 16, and in an older one those that are nearest to them."""

from __future__ import annotations

import pyarrow as pa

binary_view = getattr(pa, "binary_view", pa.binary)
list_view = getattr(pa, "list_view", pa.list_)
string_view = getattr(pa, "string_view", pa.string)
