"""Rows by their numbers, over a real node: the compiled client's `take`, record batches in Arrow,
NumPy and plain Python, and hostile requests.
"""

from __future__ import annotations

import io
import json
import struct
import threading
import urllib.error
import urllib.request
from itertools import pairwise

import forebay
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

BUCKET = "scratch"
PREFIX = "rows-by-number"
ROWS = 2000


@pytest.fixture(scope="module")
def bucket_writer(origin_s3):
    return lambda key, body: origin_s3.put_object(Bucket=BUCKET, Key=f"{PREFIX}/{key}", Body=body)


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(7)
    texts = [f"{i} " + "x" * int(n) for i, n in enumerate(rng.integers(0, 3000, ROWS))]
    return pa.table(
        {
            "id": pa.array(range(ROWS), pa.int64()),
            "text": pa.array([None if i % 97 == 5 else t for i, t in enumerate(texts)]),
            "blob": pa.array([rng.bytes(i % 50) for i in range(ROWS)], pa.binary()),
            "score": pa.array(rng.random(ROWS), pa.float32()),
            "list": pa.array([list(range(i % 4)) for i in range(ROWS)], pa.list_(pa.int32())),
            "vector": pa.array([[i, i + 1] for i in range(ROWS)], pa.list_(pa.int64(), 2)),
            "flag": pa.array([None if i % 10 == 3 else i % 3 == 0 for i in range(ROWS)]),
        }
    )


@pytest.fixture(scope="module")
def dataset(client, bucket_writer, table):
    """Two Parquet files, one with a page index and one without."""
    for name, part, pages in (("a", table.slice(0, 1200), True), ("b", table.slice(1200), False)):
        out = io.BytesIO()
        pq.write_table(
            part, out, row_group_size=500, write_page_index=pages, data_page_size=16 << 10
        )
        bucket_writer(f"rows/{name}.parquet", out.getvalue())
    return json.loads(
        bytes(client.open_dataset(json.dumps({"sources": [f"{BUCKET}/{PREFIX}/rows/*.parquet"]})))
    )


def expected(table, ids, columns=None):
    wanted = table.take(pa.array(ids)).combine_chunks()
    return (
        (wanted.select(columns) if columns else wanted).to_batches()[0]
        if len(ids)
        else table.schema.empty_table()
    )


def test_rows_come_in_the_order_of_their_numbers(client, dataset, table):
    rng = np.random.default_rng(11)
    for ids in (
        [3, 3, 1999, 0, 1200, 1199],
        rng.integers(0, ROWS, 128),
        np.arange(100, 400),
        np.arange(1999, -1, -1),
    ):
        for dtype in (np.int64, np.uint64):
            batch = client.take(dataset["id"], np.asarray(ids, dtype))
            assert len(batch) == batch.num_rows == len(ids)
            got = pa.record_batch(batch)
            got.validate(full=True)
            assert got.to_pylist() == expected(table, np.asarray(ids)).to_pylist()


def test_columns_are_projected_in_the_order_that_is_asked_for(client, dataset, table):
    batch = client.take(dataset["id"], [5, 1], ["blob", "id"])
    assert batch.column_names == ["blob", "id"] and batch.num_columns == 2
    assert pa.record_batch(batch).to_pylist() == expected(table, [5, 1], ["blob", "id"]).to_pylist()
    assert len(client.take(dataset["id"], [5, 1], [])) == 2
    assert len(client.take(dataset["id"], [])) == 0
    assert pa.record_batch(client.take(dataset["id"], [])).schema.names == table.schema.names


def test_arrow_takes_the_memory_without_a_copy(client, dataset):
    batch = client.take(dataset["id"], np.arange(64))
    values = batch.column("score").buffers()[1]
    taken = pa.record_batch(batch)
    mine = np.frombuffer(values, np.float32)
    assert taken.column("score").buffers()[1].address == mine.__array_interface__["data"][0]
    assert all(
        b is None or b.address % 64 == 0
        for c in taken.columns
        for b in c.buffers()
        if b is None or b.size
    )
    # What was taken keeps the memory alive.
    del batch, values
    assert np.array_equal(np.asarray(taken.column("score")), mine)
    assert mine.flags.writeable


def test_large_answers_take_memory_that_others_were_in(client, bucket_writer):
    rng = np.random.default_rng(3)
    values = [rng.bytes(5 << 20) for _ in range(5)]
    for i, value in enumerate(values):
        bucket_writer(f"large/{i}.bin", value)
    request = {"sources": [f"{BUCKET}/{PREFIX}/large/*"], "format": "objects"}
    opened = json.loads(bytes(client.open_dataset(json.dumps(request))))

    def take(rows):
        batch = client.take(opened["id"], rows, ["data"])
        return pa.record_batch(batch).column(0)

    kept = take([3, 1, 2, 0])
    addresses = set()
    for rows in ([0, 1, 2, 3], [4, 3, 4, 1], [2, 2, 2, 2], [1, 4, 0, 3]):
        column = take(rows)
        addresses.add(column.buffers()[-1].address)
        assert [v.as_py() for v in column] == [values[row] for row in rows]
        del column
    # One that is held stays what it is; the others came after each other, in one place.
    assert [v.as_py() for v in kept] == [values[row] for row in (3, 1, 2, 0)]
    assert len(addresses) == 1
    assert kept.buffers()[-1].address not in addresses


def test_columns_are_buffers_for_numpy(client, dataset, table):
    batch = client.take(dataset["id"], [10, 20, 30])
    column = batch.column("text")
    validity, offsets, data = column.buffers()
    assert (
        validity is None
        and column.null_count == 0
        and column.type == "Utf8"
        and len(column) == 3
        and column.offset == 0
    )
    ends = np.frombuffer(offsets, np.int32)
    whole = bytes(data)
    assert [whole[a:b].decode() for a, b in pairwise(ends[:4])] == table["text"].take(
        pa.array([10, 20, 30])
    ).to_pylist()
    assert np.array_equal(np.frombuffer(batch.column(0).buffers()[1], np.int64)[:3], [10, 20, 30])
    assert pa.array(column).to_pylist() == column.to_list()
    with pytest.raises(KeyError, match="id, text"):
        batch.column("nothing")
    with pytest.raises(KeyError):
        batch.column(7)


def test_dicts_have_plain_values_and_views(client, dataset, table):
    ids = [0, 5, 13, 1999]
    rows = client.take(dataset["id"], ids).to_dicts()
    assert all(isinstance(row["blob"], memoryview) for row in rows)
    plain = [{**row, "blob": bytes(row["blob"])} for row in rows]
    assert plain == expected(table, ids).to_pylist()
    assert rows[1]["text"] is None and rows[2]["flag"] is None


def test_row_numbers_that_make_no_sense(client, dataset):
    take, name = client.take, dataset["id"]
    with pytest.raises(forebay.RangeNotSatisfiable, match=r"row 2000 .*2000 rows"):
        take(name, [0, ROWS])
    with pytest.raises(forebay.InvalidRequest, match="negative"):
        take(name, np.array([-1]))
    with pytest.raises(forebay.InvalidRequest, match="negative"):
        take(name, [-1])
    with pytest.raises(forebay.InvalidRequest, match='"nothing" does not exist'):
        take(name, [0], ["nothing"])
    with pytest.raises(forebay.NotFound):
        take("0" * 32, [0])
    with pytest.raises(TypeError):
        take(name, ["a"])
    with pytest.raises(TypeError):
        take(name, 5)
    with pytest.raises(TypeError):
        take(name, np.zeros((2, 2), np.int64))
    with pytest.raises(TypeError):
        take(name, np.zeros(2, np.float64))
    with pytest.raises(forebay.TooLarge, match="1048576"):
        take(name, np.zeros((1 << 20) + 1, np.uint64))
    assert len(take(name, np.zeros(1 << 20, np.uint64), ["id"])) == 1 << 20


def post(url, body, expect):
    request = urllib.request.Request(url, data=body, method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    assert caught.value.code == expect, caught.value.read()
    error = json.loads(caught.value.read())
    return f"{error['message']} ({error.get('hint')})"


def test_hostile_requests_are_answered_clearly(node, dataset):
    url = f"{node.url}/v1/datasets/{dataset['id']}/rows"
    assert "8 bytes each" in post(url, b"1234567", 400)
    assert "1048576" in post(url, bytes(8 * (1 << 20) + 8), 413)
    assert "row 18446744073709551615" in post(url, struct.pack("<Q", 2**64 - 1), 416)
    assert "exclude" in post(url + "?columns=id&column=text", struct.pack("<Q", 0), 400)
    assert "does not exist" in post(url + "?columns=id,nix", struct.pack("<Q", 0), 400)
    assert "does not know" in post(
        f"{node.url}/v1/datasets/nothing/rows", struct.pack("<Q", 0), 404
    )
    # And it goes on.
    request = urllib.request.Request(
        url + "?columns=id", data=struct.pack("<QQ", 7, 5), method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        body = answer.read()
        assert answer.headers["content-type"] == "application/vnd.forebay.frame"
    assert body[:4] == b"FBF1" and len(body) % 64 == 0 and struct.unpack("<I", body[24:28]) == (2,)
    assert pa.ipc.open_stream(body[64:]).read_all().to_pydict() == {"id": [7, 5]}


def test_a_file_that_changes_is_an_error_that_says_so(client, bucket_writer):
    def write(number, seed):
        # Of several MiB: opening reads the footer, and no rows come along with it.
        blobs = [np.random.default_rng([seed, i]).bytes(300_000) for i in range(10)]
        out = io.BytesIO()
        pq.write_table(
            pa.table({"seed": [seed] * 10, "blob": blobs}),
            out,
            row_group_size=2,
            compression="none",
        )
        bucket_writer(f"changing/{number}.parquet", out.getvalue())

    def opened():
        return json.loads(
            bytes(
                client.open_dataset(
                    json.dumps({"sources": [f"{BUCKET}/{PREFIX}/changing/*.parquet"]})
                )
            )
        )

    for i in range(3):
        write(i, i)
    first = opened()
    assert client.take(first["id"], [0], ["seed"]).column(0).to_list() == [0]
    write(1, 11)
    with pytest.raises(
        forebay.PreconditionFailed, match=r"row 15: .*changing/1\.parquet changed after"
    ):
        client.take(first["id"], [0, 15])
    assert client.take(first["id"], [0, 25], ["seed"]).column(0).to_list() == [0, 2]
    again = opened()
    assert again["id"] != first["id"]
    assert client.take(again["id"], [15, 25], ["seed"]).column(0).to_list() == [11, 2]


def test_many_threads_take_at_once(client, dataset, table):
    failures = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(20):
                ids = rng.integers(0, ROWS, 50)
                got = pa.record_batch(client.take(dataset["id"], ids, ["id", "text"]))
                assert got.column("id").to_pylist() == ids.tolist()
                assert (
                    got.column("text").to_pylist() == table["text"].take(pa.array(ids)).to_pylist()
                )
        except Exception as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failures, failures[0]
