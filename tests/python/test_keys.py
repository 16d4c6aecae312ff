"""Rows by key, with the index at the node: over HTTP, over a restart, and with several nodes."""

from __future__ import annotations

import base64
import json

import forebay
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
from forebay import _keys, _node
from servers import Node, free_port

ROWS = 5000
NO_ROW = 2**64 - 1


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (tmp_path / "bk").mkdir()
    write(tmp_path / "bk", ROWS)
    return tmp_path / "bk"


def write(bucket, rows: int) -> None:
    order = np.random.default_rng(1).permutation(rows)
    texts = pa.array([f"{i:06}" for i in order])
    table = pa.table(
        {
            "key": texts,
            "n": pa.array(order, pa.int32()),
            "raw": texts.cast(pa.binary()),
            "word": pa.array([("a", "b", None)[i % 3] for i in range(rows)]).dictionary_encode(),
            "edge": pa.array([(-(1 << 63), (1 << 63) - 1, None)[i % 3] for i in range(rows)]),
        }
    )
    pq.write_table(table, bucket / "a.parquet", row_group_size=700)
    (bucket / "lines.jsonl").write_text("".join(f'{{"id": {i}}}\n' for i in range(100)))
    pq.write_table(table.slice(0, 0), bucket / "none.parquet")


def node_over(bucket, name: str = "node", port: int = 0) -> Node:
    options, listen = ["--origin", f"file://{bucket}"], f"127.0.0.1:{port}"
    return Node("", [], bucket.parent / name, options=options, listen=listen)


@pytest.fixture
def node(bucket):
    node = node_over(bucket)
    yield node
    node.stop()


def outcomes(node: Node) -> dict[str, float]:
    family = "forebay_row_keys_total{"
    return {k.split('"')[1]: n for k, n in node.metrics().items() if k.startswith(family)}


def test_the_answers_of_the_api(node):
    ds = forebay.open("bk/a.parquet", url=node.url)
    keys = ds.take(range(len(ds))).numpy()["n"].tolist()
    path = f"{node.url}/v1/datasets/{ds.id}/keys"

    def ask(column: str, wanted: object = None, **query: str) -> requests.Response:
        body = None if wanted is None else json.dumps(wanted)
        return requests.post(path, data=body, params={"column": column, **query}, timeout=30)

    def numbers(answer: requests.Response) -> list[int]:
        assert answer.status_code == 200, answer.text
        return np.frombuffer(answer.content, "<u8").tolist()

    missing = ask("n", [1])
    assert missing.status_code == 404 and "without a body" in missing.json()["hint"]
    by_key = f"{node.url}/v1/datasets/{ds.id}/rows?key=n"
    assert requests.post(by_key, json=[1], timeout=30).status_code == 404
    made = ask("n").json()
    assert made == {"rows": ROWS, "of": ROWS, "bytes": 24 * ROWS, "kept": False}
    lines = ask("n", progress="true").text.splitlines()
    assert json.loads(lines[-1]) == {**made, "event": "indexed", "kept": True}
    assert numbers(ask("n", [17, ROWS, "17", -17])) == [keys.index(17), NO_ROW, NO_ROW, NO_ROW]
    assert numbers(ask("n", [])) == []
    raw = [{"bytes": base64.b64encode(b"000017").decode()}, "000017"]
    assert ask("raw").status_code == 200
    assert numbers(ask("raw", raw)) == [keys.index(17), NO_ROW]
    assert ask("word").json()["rows"] == len(range(0, ROWS, 3)) + len(range(1, ROWS, 3))
    assert numbers(ask("word", ["b", "c", "a"])) == [1, NO_ROW, 0]
    found = np.array(numbers(ask("word", ["c", "b"], all="true"))).reshape(-1, 2)
    assert set(found[:, 0]) == {1} and found[:, 1].tolist() == list(range(1, ROWS, 3))
    assert ask("edge").status_code == 200
    assert numbers(ask("edge", [-(1 << 63), (1 << 63) - 1, (1 << 64) - 1])) == [0, 1, NO_ROW]
    for column, wanted, status, says in (
        ("none", None, 400, 'no column "none"'),
        ("none", [1], 400, 'no column "none"'),
        ("n", {}, 400, "a list of keys"),
        ("n", [1.5], 400, "a key: a text"),
        ("n", [True], 400, "a key: a text"),
    ):
        wrong = ask(column, wanted)
        assert wrong.status_code == status and says in wrong.json()["message"], wrong.text
    assert requests.post(path, timeout=30).status_code == 400
    lost = requests.post(by_key, json=[17, ROWS], timeout=30)
    assert lost.status_code == 404 and "key 1 of the 2" in lost.json()["message"]
    none = forebay.open("bk/none.parquet", url=node.url)
    assert len(none.by_key([], column="n")) == 0
    for wrong in (1, {1: 2}, "1"):
        with pytest.raises(TypeError, match="a list of keys"):
            none.by_key(wrong, column="n")
    with pytest.raises(forebay.NotFound, match="no row with n 1"):
        none.by_key([1], column="n")
    lines = forebay.open("bk/lines.jsonl", url=node.url)
    assert lines.by_key([7, 99], column="id").ids.tolist() == [7, 99]


def test_keys_may_be_those_of_other_libraries(node):
    torch = pytest.importorskip("torch")
    ds = forebay.open("bk/a.parquet", url=node.url)
    numbers = [17, 4, 17]
    for keys in (
        pa.array(numbers),
        pa.chunked_array([numbers[:1], numbers[1:]]),
        torch.tensor(numbers),
        np.array(numbers, np.uint8),
        (n for n in numbers),
    ):
        assert ds.by_key(keys, column="n").numpy()["n"].tolist() == numbers
    for texts in (pa.array(["000017", "000004"]), np.array(["000017", "000004"])):
        assert ds.by_key(texts, column="key").numpy()["n"].tolist() == [17, 4]
    for wrong in (pa.array([True]), torch.tensor([True]), torch.tensor([1.5])):
        with pytest.raises(forebay.InvalidRequest, match="a key in column 'n' is of"):
            ds.by_key(wrong, column="n")
    with pytest.raises(forebay.InvalidRequest, match="None is not a key"):
        ds.by_key(pa.array([1, None]), column="n")


def test_an_index_outlives_the_node_and_is_made_again_without_its_disk(bucket):
    # One that the kernel does not give to an outgoing connection meanwhile.
    port = free_port()
    first = node_over(bucket, port=port)
    try:
        ds = forebay.open("bk/a.parquet", url=first.url)
        rows = ds.by_key(["000017", "000004"], column="key")
        assert [row["n"] for row in rows] == [17, 4]
        assert outcomes(first)["computed"] == 1
    finally:
        first.stop()
    again = node_over(bucket, port=port)
    try:
        assert [row["n"] for row in ds.by_key(["000004"], column="key")] == [4]
        assert (outcomes(again)["disk"], outcomes(again)["computed"]) == (1, 0)
    finally:
        again.stop()
    other = node_over(bucket, "other", port)
    try:
        assert [row["n"] for row in ds.by_key(["000004"], column="key")] == [4]
        assert ds.skip(10).by_key(["000017"], column="key")[0]["n"] == 17
        assert outcomes(other)["computed"] == 1
    finally:
        other.stop()


def test_several_nodes_answer(bucket):
    nodes = [node_over(bucket, name) for name in ("one", "two")]
    try:
        ds = forebay.open("bk/a.parquet", url=",".join(node.url for node in nodes))
        for n in range(40):
            assert ds.by_key([f"{n:06}"], column="key")[0]["n"] == n
        nodes[0].stop()
        assert ds.by_key(["000041"], column="key")[0]["n"] == 41
    finally:
        for node in nodes:
            node.stop()


def test_a_version_that_has_gone_is_told_as_that(bucket):
    first = node_over(bucket, port=free_port())
    try:
        ds = forebay.open("bk/a.parquet", url=first.url)
        ds.by_key([1], column="n")
    finally:
        first.stop()
    write(bucket, ROWS - 1)
    other = node_over(bucket, "other", first.port)
    try:
        with pytest.raises(forebay.Changed, match="open it again"):
            ds.by_key([2, 3], column="n")
    finally:
        other.stop()


def test_rows_that_changed_under_an_index(node, monkeypatch):
    ds = forebay.open("bk/a.parquet", url=node.url)
    ds.by_key([1], column="n")

    def changed(*args: object) -> None:
        raise forebay.PreconditionFailed("bk/a.parquet has changed")

    monkeypatch.setattr(_node, "take_by_key", changed)
    with pytest.raises(forebay.Changed, match="open it again"):
        ds.by_key([2], column="n")


def test_a_node_of_an_earlier_release_is_not_asked_again(bucket, node, monkeypatch):
    ds = forebay.open("bk/a.parquet", url=node.url)
    ds.by_key([1], column="n")

    def old(*args: object) -> None:
        raise forebay.Unsupported("POST /v1/datasets/…/keys is not offered here")

    def no_numbers(*args: object) -> None:
        raise forebay.InvalidRequest("a body of 3 bytes is not a list of row numbers")

    monkeypatch.setattr(_node, "take_by_key", no_numbers)
    monkeypatch.setattr(_node, "find_keys", old)
    assert ds.by_key([5, 4], column="n").numpy()["n"].tolist() == [5, 4]
    monkeypatch.setattr(_node, "take_by_key", None)
    assert ds.by_key([6], column="n").numpy()["n"].tolist() == [6]


def test_a_key_with_very_many_rows(node, monkeypatch):
    ds = forebay.open("bk/a.parquet", url=node.url)
    many = ds.repeat(5000)
    assert many.by_key(["b", "a"], column="word").ids.tolist() == [1, 0]
    # Too many for one answer about both.
    find, asked = _node.find_keys, []

    def full(client, dataset, column, keys, every=False):
        asked.append(keys)
        if len(json.loads(keys)) > 1:
            raise forebay.TooLarge("9999999 rows have these keys")
        return find(client, dataset, column, keys, every)

    monkeypatch.setattr(_node, "find_keys", full)
    later = ds.skip(1)
    assert later.by_key(["b", "a"], column="word").ids.tolist() == [0, 2]
    assert len(asked) == 3 and not isinstance(later._keys["word"], _keys._Here)
    # Rows that are there too often to be compared: the index is made here.
    monkeypatch.undo()
    often = ds.take(3).repeat(5000)
    for small, how in ((often.skip(14_000), _keys._AtNode), (often[::-1], _keys._Here)):
        first = [next(i for i, row in enumerate(small[:9]) if row["word"] == w) for w in ("b", "a")]
        assert small.by_key(["b", "a"], column="word").ids.tolist() == first
        assert isinstance(small._keys["word"], how)
