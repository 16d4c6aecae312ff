"""What type checkers know about the package. mypy reads this file (test_types.py); nothing runs
it.
"""

from collections.abc import Sequence
from typing import Any, assert_type

import forebay
import forebay.jax
import jax
import numpy as np
import pyarrow as pa
import torch
from forebay.torch import LoaderDataset

client = forebay.Client()

# The client.
assert_type(client.get("bucket/key"), forebay.Buffer)
assert_type(client.head("bucket/key").size, int)
assert_type(client.batch(["bucket/key"]), forebay.Batch)
assert_type(client.batch(["bucket/key"])[0].data, memoryview)
assert_type(client.batch(["bucket/key"])[1:], list[forebay.Item])
for info in client.list("bucket/prefix"):
    assert_type(info, forebay.ObjectInfo)

# Rows of a dataset that nobody decodes.
ds = forebay.open("bucket/**.parquet", client=client, columns=["text"])
assert_type(ds, forebay.Dataset[forebay.Row])
assert_type(ds[0], forebay.Row)
assert_type(ds[np.int64(0)], forebay.Row)
assert_type(ds[0:2], forebay.Dataset[forebay.Row])
assert_type(ds[[5, 3]], forebay.Rows)
assert_type(ds[np.arange(3)], forebay.Rows)
assert_type(ds.take([5, 3]), forebay.Rows)
assert_type(ds.take([5, 3])[0], dict[str, Any])
assert_type(ds.take([5, 3]).numpy(), dict[str, np.ndarray])
assert_type(ds.take([5, 3]).torch(), dict[str, torch.Tensor | Any])
assert_type(ds.lengths("n"), np.ndarray)
assert_type(ds.train_test_split(0.1)[0], forebay.Dataset[Any])
assert_type(ds.train_test_split(0.1)["train"], forebay.Dataset[Any])
assert_type(ds.select(["text"]), forebay.Dataset[forebay.Row])
for row in ds:
    assert_type(row, forebay.Row)

# Batches of columns.
for rows in ds.loader(32, shuffle=forebay.Block(16), seed=1):
    assert_type(rows, forebay.Rows)
for arrays in ds.loader(32, output="numpy"):
    assert_type(arrays, dict[str, np.ndarray])
for tensors in ds.loader(32, output="torch", pin_memory=True):
    assert_type(tensors, dict[str, torch.Tensor | Any])
assert_type(ds.loader(32, output="arrow"), forebay.Loader[pa.RecordBatch])
assert_type(ds.loader(32, output="jax"), forebay.Loader[dict[str, jax.Array | Any]])
assert_type(forebay.jax.loader(ds, 32), forebay.jax.JaxLoader[dict[str, jax.Array | Any]])
assert_type(ds.loader(max_total=100, length=ds.lengths("n")), forebay.Loader[forebay.Rows])


class Sample:
    """What a decode makes."""


def decode(row: dict[str, Any]) -> Sample:
    return Sample()


def transform(sample: Sample) -> int:
    return 1


def collate(samples: Sequence[Sample]) -> set[Sample]:
    return set(samples)


# Samples that the loader decodes.
assert_type(ds.loader(32, decode=decode), forebay.Loader[list[Sample]])
assert_type(ds.loader(32, decode=decode, transform=transform), forebay.Loader[list[int]])
assert_type(ds.loader(32, transform=len), forebay.Loader[list[int]])
assert_type(ds.loader(32, decode=decode, collate=collate), forebay.Loader[set[Sample]])
assert_type(ds.loader(32, collate=len, output="numpy"), forebay.Loader[int])
assert_type(ds.loader(32, decode=decode, output="torch"), forebay.Loader[Any])

# Samples that the dataset decodes.
decoded = forebay.open("bucket/", decode=decode)
assert_type(decoded, forebay.Dataset[Sample])
assert_type(decoded[0], Sample)
assert_type(decoded[0:2], forebay.Dataset[Sample])
assert_type(decoded[[0, 1]], forebay.Rows)
assert_type(decoded.__getitems__([1, 2]), list[Sample])
for sample in decoded:
    assert_type(sample, Sample)
assert_type(decoded.loader(32), forebay.Loader[list[Sample]])
assert_type(decoded.loader(32, transform=transform), forebay.Loader[list[int]])
assert_type(decoded.loader(32, output="numpy"), forebay.Loader[Any])
# A decode that makes dicts is a decode.
as_dicts = forebay.open("bucket/", decode=lambda row: row)
assert_type(as_dicts.loader(32), forebay.Loader[list[dict[str, Any]]])

# Mixes, and PyTorch.
assert_type(forebay.mix([ds, ds]), forebay.Mix[forebay.Row])
assert_type(forebay.mix([ds, ds]).loader(32), forebay.Loader[forebay.Rows])
assert_type(forebay.mix([decoded, decoded]).loader(32), forebay.Loader[list[Sample]])
assert_type(ds.loader(32).torch(), LoaderDataset[forebay.Rows])
assert_type(ds.loader(32).torch(samples=True), LoaderDataset[Any])

# Mistakes are found: mypy warns of an ignore that nothing needs.
ds.loader(32, shufle=forebay.Full())  # type: ignore[call-overload]
ds.loader(32, output="pandas")  # type: ignore[call-overload]
ds.loader(32, decode=3)  # type: ignore[call-overload]
forebay.open("bucket/", decode=3)  # type: ignore[call-overload]
