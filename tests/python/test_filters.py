"""Filters that the node computes: the same rows as PyArrow's, once for all who ask, and only for
those who may read them.
"""

from __future__ import annotations

import json
import operator
import os
import random
import signal
import socket
import threading
import time
from datetime import UTC, date, datetime, timedelta, tzinfo
from decimal import Decimal

import forebay
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
from arrow_types import string_view
from forebay import _expr, _filter, _forebay, _node
from servers import Node

SEED = int(os.environ.get("FOREBAY_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
CASES = float(os.environ.get("FOREBAY_TEST_CASES", "1"))
ROWS = 3000
col = forebay.col


def many_types(rng: np.random.Generator) -> pa.Table:
    """Columns of all types that compare with values, with missing ones."""

    def some(values, kind):
        missing = rng.random(ROWS) < rng.choice([0, 0.1, 0.9])
        given = [None if m else v for v, m in zip(values, missing, strict=True)]
        return pa.array(given, kind)

    numbers = rng.integers(-20, 20, ROWS)
    numbers = numbers if rng.random() < 0.5 else np.sort(numbers)
    whole = [int(n) for n in numbers]
    texts = [f"{n:+03}" if n % 5 else "" for n in whole]
    halves = [float("nan") if n == 3 else -0.0 if n == 4 else n / 2 for n in whole]
    times = [datetime(2024, 1, 1, 0, 0, n + 20, 1000 * (n % 3)) for n in whole]
    columns = {
        "row": pa.array(range(ROWS), pa.int64()),
        "i8": some(whole, pa.int8()),
        "i64": some(whole, pa.int64()),
        "u16": some([n + 20 for n in whole], pa.uint16()),
        "f16": some([np.float16(h) for h in halves], pa.float16()),
        "f32": some(halves, pa.float32()),
        "f64": some(halves, pa.float64()),
        "bool": some([n > 0 for n in whole], pa.bool_()),
        "string": some(texts, pa.string()),
        "large": some(texts, pa.large_string()),
        "view": some(texts, string_view()),
        "words": some(texts, pa.string()).dictionary_encode(),
        "binary": some([t.encode() for t in texts], pa.binary()),
        "fixed": some([bytes([n + 20, 7]) for n in whole], pa.binary(2)),
        "ms": some(times, pa.timestamp("ms")),
        "us": some(times, pa.timestamp("us")),
        "ns": some(times, pa.timestamp("ns", "Europe/Berlin")),
        "date": some([date(2024, 1, 1) + timedelta(n + 20) for n in whole], pa.date32()),
        "decimal": some([Decimal(n) / 4 for n in whole], pa.decimal128(12, 2)),
        "long": some([Decimal(n) / 4 for n in whole], pa.decimal128(34, 5)),
        "list": some([[n] for n in whole], pa.list_(pa.int32())),
    }
    return pa.table(columns)


def values_for(name: str, rng: random.Random) -> object:
    n = rng.randrange(-22, 22)
    if name in ("i8", "i64", "u16", "row", "f16", "f32", "f64"):
        return rng.choice([n, n / 2, float(n), -0.0, 1e300, -float("inf"), 1 << 63])
    if name == "bool":
        return n > 0
    if name in ("string", "large", "view", "words"):
        return rng.choice([f"{n:+03}", "", "+", "-1", "ä"])
    if name in ("binary", "fixed"):
        return rng.choice([f"{n:+03}".encode(), b"", bytes([abs(n), 7])])
    if name in ("ms", "us", "ns"):
        zone = UTC if name == "ns" else None
        return datetime(2024, 1, 1, 0, 0, (n + 22) % 60, rng.choice([0, 1000, 1]), tzinfo=zone)
    if name == "date":
        return date(2024, 1, 1 + (n + 22) % 28)
    return rng.choice([Decimal(n) / 4, Decimal("0.001"), n, Decimal(10) ** 20])


def random_expression(names: list[str], rng: random.Random, depth: int) -> forebay.Expression:
    if depth:
        left, right = (random_expression(names, rng, depth - 1) for _ in range(2))
        return rng.choice([left & right, left | right, ~left])
    name = rng.choice(names)
    if name == "list" or rng.random() < 0.1:
        return col(name).is_null()
    value = values_for(name, rng)
    kind = rng.choice(["==", "==", "!=", "<", "<=", ">", ">=", "isin", "starts"])
    if kind == "isin":
        return col(name).isin([values_for(name, rng) for _ in range(rng.randrange(4))])
    if kind == "starts" and name in ("string", "large", "view", "words", "binary"):
        return col(name).startswith(value[: rng.randrange(3)])
    return {
        "!=": lambda: col(name) != value,
        "<": lambda: col(name) < value,
        "<=": lambda: col(name) <= value,
        ">": lambda: col(name) > value,
        ">=": lambda: col(name) >= value,
    }.get(kind, lambda: col(name) == value)()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A node over a directory with files of many types, and others."""
    print("FOREBAY_TEST_SEED =", SEED)
    root = tmp_path_factory.mktemp("filters")
    rng = np.random.default_rng(SEED)
    (root / "bk" / "types").mkdir(parents=True)
    (root / "bk" / "plain").mkdir()
    table = many_types(rng)
    # Older versions have other types for some columns, in all files alike.
    version = ["1.0", "2.4", "2.6"][int(rng.integers(3))]
    for i, (start, rows) in enumerate([(0, 1000), (1000, 1700), (2700, ROWS - 2700)]):
        pq.write_table(
            table.slice(start, rows),
            root / f"bk/types/{i}.parquet",
            row_group_size=int(rng.integers(50, 700)),
            write_page_index=bool(rng.integers(2)),
            data_page_size=512,
            use_dictionary=bool(rng.integers(2)),
            write_statistics=i != 2,
            version=version,
        )
    ids = pa.table({"id": pa.array(range(10_000), pa.int64()), "text": ["x"] * 10_000})
    pq.write_table(ids, root / "bk/plain/a.parquet", row_group_size=1000)
    node = Node("", [], root / "node", options=["--origin", f"file://{root / 'bk'}"])
    yield node
    node.stop()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Each test is another machine: what an earlier one kept is not there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "forebay"


def test_a_user_without_a_home_gets_no_directory_that_is_called_a_tilde(
    site, tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    # What it returns where HOME is not set and the system does not know the user.
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    ds = forebay.open("bk/plain/*.parquet", url=site.url)
    assert len(ds.filter(col("id") < 10)) == 10
    assert not (tmp_path / "~").exists() and "XDG_CACHE_HOME is not set" in caplog.text


def rows_of(ds: forebay.Dataset, name: str = "id") -> list[int]:
    return [int(i) for i in ds.take(range(len(ds))).numpy()[name]] if len(ds) else []


def outcomes(node: Node, family: str = "forebay_filters_total") -> dict[str, float]:
    found = {}
    for name, value in node.metrics().items():
        if name.startswith(f"{family}{{"):
            found[name.split('"')[1]] = value
    return found


def test_the_node_leaves_the_rows_that_pyarrow_leaves(site, monkeypatch):
    ds = forebay.open("bk/types/*.parquet", url=site.url)
    rng = random.Random(SEED)
    names = [name for name in ds.columns if name != "row"]
    before, compared = sum(outcomes(site).values()), 0
    for _ in range(int(120 * CASES)):
        expression = random_expression(names, rng, rng.randrange(3))
        found = {}
        for where in ("node", "here"):
            with monkeypatch.context() as patched:
                if where == "here":
                    patched.setattr("forebay._filter._by_node", lambda *a: None)
                    patched.setenv("XDG_CACHE_HOME", os.environ["XDG_CACHE_HOME"] + "-here")
                try:
                    found[where] = ds.filter(expression)
                except forebay.InvalidRequest as e:
                    # PyArrow is asked first whether a value makes sense.
                    found[where] = str(e)
        here, node = found["here"], found["node"]
        if isinstance(here, str) or isinstance(node, str):
            assert here == node, expression
            continue
        assert node.id == here.id, f"{expression}: {rows_of(node, 'row')} {rows_of(here, 'row')}"
        compared += 1
    assert sum(outcomes(site).values()) - before >= compared / 2 > 10, "the node was asked"


@pytest.mark.parametrize("where", ["node", "here"])
def test_pyarrow_before_views_were_there_will_do(site, monkeypatch, where):
    for name in ("is_string_view", "is_binary_view"):
        monkeypatch.delattr(pa.types, name, raising=False)
    if where == "here":
        monkeypatch.setattr("forebay._filter._by_node", lambda *a: None)
    ds = forebay.open("bk/plain/*.parquet", url=site.url)
    assert rows_of(ds.filter((col("text") == "x") & (col("id") < 3))) == [0, 1, 2]


def test_files_may_have_columns_of_different_types(tmp_path):
    files = [
        pa.table({"n": pa.array([1, 2, None, 40], pa.int32()), "t": ["a", "b", "c", "d"]}),
        pa.table({"n": pa.array([2, 1 << 40], pa.int64()), "t": pa.array(["b", None])}),
        pa.table({"n": [2.0, 2.5, -1.0], "t": pa.array([None] * 3, pa.string())}),
    ]
    (tmp_path / "bk").mkdir()
    for i, table in enumerate(files):
        pq.write_table(table, tmp_path / f"bk/{i}.parquet", row_group_size=2)
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'bk'}"])
    try:
        ds = forebay.open("bk/*.parquet", url=node.url)
        rows = [dict(row) for row in ds]
        for where, is_left in (
            (col("n") == 2, lambda row: row["n"] == 2),
            (col("n") > 2, lambda row: row["n"] is not None and row["n"] > 2),
            (col("n").is_null(), lambda row: row["n"] is None),
            (col("t") == "b", lambda row: row["t"] == "b"),
            (~(col("t") == "b"), lambda row: row["t"] not in (None, "b")),
            ((col("n") < 0) | col("t").isin(["a"]), lambda row: row["t"] == "a" or row["n"] == -1),
        ):
            expected = [i for i, row in enumerate(rows) if is_left(row)]
            found = ds.filter(where)
            assert [found.locate(i) for i in range(len(found))] == [
                ds.locate(i) for i in expected
            ], where
        assert outcomes(node)["computed"] == 6
    finally:
        node.stop()


def test_others_join_or_find_it_kept_and_a_restart_changes_nothing(site, tmp_path, monkeypatch):
    where = (col("id") >= 7777) & (col("text") == "x")
    before = outcomes(site)
    ids, threads = [], []

    def ask(number: int) -> None:
        ds = forebay.open("bk/plain/*.parquet", url=site.url)
        document = _filter._document(ds, where)
        answer, rows = _node.filter(ds.client, ds.id, document)
        assert answer["rows"] == 10_000 - 7777 and answer["of"] == 10_000
        assert answer["looked_at"] <= 3000, "the other row groups are decided by statistics"
        ids.append((answer["filter"], rows))

    for number in range(6):
        threads.append(threading.Thread(target=ask, args=[number]))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(ids) == 6 and len(set(ids)) == 1
    changed = {how: n - before[how] for how, n in outcomes(site).items()}
    assert changed["computed"] == 1 and changed["failed"] == 0
    told = requests.get(f"{site.url}/v1/forebay/jobs", timeout=60).json()
    datasets = {d["id"]: d for d in told["datasets"]}
    ds = forebay.open("bk/plain/*.parquet", url=site.url)
    assert datasets[ds.id]["origin_bytes"] + datasets[ds.id]["disk_bytes"] > 0, "its account"
    assert changed["joined"] + changed["memory"] + changed["disk"] == 5
    ds = forebay.open("bk/plain/*.parquet", url=site.url)
    found = ds.filter(where)
    assert rows_of(found) == list(range(7777, 10_000))
    assert site.metrics()["forebay_filters_memory_bytes"] < 1 << 20

    # A node that is started anew has it on its disk, where the dataset is too.
    root = site.directory.parent
    directory = tmp_path / "node"
    first = Node("", [], directory, options=["--origin", f"file://{root / 'bk'}"])
    try:
        ds = forebay.open("bk/plain/*.parquet", url=first.url)
        document = _filter._document(ds, where)
        answer, rows = _node.filter(ds.client, ds.id, document)
        assert not answer["kept"]
    finally:
        first.stop()
    again = Node("", [], directory, options=["--origin", f"file://{root / 'bk'}"])
    try:
        client = forebay.Client(again.url)
        told, same = _node.filter(client, ds.id, document)
        assert told == {**answer, "kept": True} and same == rows
        counted = outcomes(again)
        assert (counted["disk"], counted["computed"]) == (1, 0)
        assert outcomes(again, "forebay_filters_rows_total")["looked_at"] == 0
    finally:
        again.stop()


def test_the_answer_of_the_api(site):
    ds = forebay.open("bk/plain/*.parquet", url=site.url)
    path = f"{site.url}/v1/datasets/{ds.id}/filters"
    where = {"op": "compare", "column": "id", "how": "<", "value": {"int": 10}}
    answer = requests.post(path, json=where, timeout=30)
    assert answer.status_code == 200
    said = answer.json()
    assert (said["rows"], said["of"]) == (10, 10_000) and said["looked_at"] <= 1000
    rows = requests.get(f"{path}/{said['filter']}", timeout=30)
    assert rows.headers["content-type"] == "application/octet-stream"
    found = _forebay.RowSet.decode(rows.content)
    assert (len(found), found.universe, 9 in found, 10 in found) == (10, 10_000, True, False)
    lines = requests.post(f"{path}?progress=true", json=where, timeout=30)
    last = json.loads(lines.text.splitlines()[-1])
    assert last["event"] == "filtered" and last["kept"] and last["filter"] == said["filter"]
    for body, status, says in (
        ({**where, "column": "none"}, 400, "none"),
        ({**where, "value": {"string": "x"}}, 400, "does not compare with x"),
        ({**where, "value": 3}, 400, "a value with its type"),
        ({"op": "like"}, 400, '"like" is not offered'),
    ):
        wrong = requests.post(path, json=body, timeout=30)
        assert wrong.status_code == status and says in wrong.json()["message"], wrong.text
        assert wrong.json()["hint"]
        lines = requests.post(f"{path}?progress=true", json=body, timeout=30).text.splitlines()
        assert says in lines[-1].replace('\\"', '"')
    for name in ("0" * 32, "x", "..%2f..%2fetc"):
        assert requests.get(f"{path}/{name}", timeout=30).status_code == 404
    unknown = path.replace(ds.id, "0" * 32)
    assert requests.post(unknown, json=where, timeout=30).status_code == 404


def test_only_who_may_read_the_files_learns_anything(site, tmp_path):
    keys = tmp_path / "keys.toml"
    grants = {"all": "plain/", "some": "types/"}
    keys.write_text(
        "".join(
            f'[[keys]]\naccess_key = "{name}"\nsecret_key = "s-{name}"\ntoken = "t-{name}"\n'
            f'[[keys.allow]]\nbucket = "bk"\nprefix = "{prefix}"\nactions = ["read", "list"]\n'
            for name, prefix in grants.items()
        )
    )
    root = site.directory.parent
    options = ["--origin", f"file://{root / 'bk'}", "--set", f"auth.keys_file={keys}"]
    options += ["--set", "auth.unix_trusted=false"]
    node = Node("", [], tmp_path / "node", options=options)
    try:
        ds = forebay.open("bk/plain/*.parquet", client=forebay.Client(node.url, token="t-all"))
        path = f"{node.url}/v1/datasets/{ds.id}/filters"
        where = {"op": "compare", "column": "id", "how": "<", "value": {"int": 10}}

        def ask(token: str | None, method: str = "POST", rest: str = "") -> int:
            headers = {"authorization": f"Bearer {token}"} if token else {}
            body = where if method == "POST" else None
            answer = requests.request(method, path + rest, json=body, headers=headers, timeout=30)
            return answer.status_code if answer.status_code != 200 else answer.json()["rows"]

        assert ask("t-some") == 403 and ask(None) in (401, 403)
        assert ask("t-all") == 10
        assert ask("t-some") == 403, "that somebody computed it changes nothing"
        name = requests.post(
            path, json=where, headers={"authorization": "Bearer t-all"}, timeout=30
        ).json()["filter"]
        assert ask("t-some", "GET", f"/{name}") == 403
        assert ask(None, "GET", f"/{name}") in (401, 403)
    finally:
        node.stop()


def test_what_the_node_cannot_compute_is_evaluated_here(site, monkeypatch):
    ds = forebay.open("bk/plain/*.parquet", url=site.url)
    before = outcomes(site)["computed"]
    cast = ds.cast({"id": pa.string()})
    assert rows_of(cast.filter(col("id") == "777")) == [777]
    assert outcomes(site)["computed"] == before, "only here it is a text"
    # Another column of it is not cast, and a new name is one of the node's.
    renamed = cast.rename({"text": "letters"})
    assert len(renamed.filter(col("letters").startswith("x"))) == 10_000
    assert outcomes(site)["computed"] == before + 1

    def of_an_older_release(*_: object) -> None:
        raise forebay.Unsupported("POST /v1/datasets/…/filters is not offered here")

    with monkeypatch.context() as patched:
        patched.setattr("forebay._node.filter", of_an_older_release)
        assert rows_of(ds.filter(col("id") < 3)) == [0, 1, 2]
    assert outcomes(site)["computed"] == before + 1


@pytest.mark.parametrize("kind", ["float", "halffloat"])
def test_ends_of_statistics_are_rounded_as_values_are(tmp_path, kind):
    (tmp_path / "bk").mkdir()
    table = pa.table({"x": [0.1, 0.1, 1 / 3, None, 2.0], "t": ["1", "2", "3", "4", "5"]})
    pq.write_table(table, tmp_path / "bk/a.parquet", row_group_size=2)
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'bk'}"])
    try:
        ds = forebay.open("bk/a.parquet", url=node.url, schema={"x": kind, "t": "string"})
        values = [row["x"] for row in ds]
        # With a column that is cast, an expression is evaluated here.
        cast = ds.cast({"t": "int64"})
        for value in (0.1, values[0], 1 / 3, values[2], 2):
            for where, is_left in (
                (col("x") > value, lambda x, value=value: x > value),
                (col("x") < value, lambda x, value=value: x < value),
                (col("x") == value, lambda x, value=value: x == value),
                (col("x") != value, lambda x, value=value: x != value),
                (col("x").isin([value]), lambda x, value=value: x == value),
            ):
                expected = [x for x in values if x is not None and is_left(x)]
                assert [row["x"] for row in ds.filter(where)] == expected, where
                here = cast.filter(where & (col("t") > 0))
                assert [row["x"] for row in here] == expected, where
    finally:
        node.stop()


def test_decimals_compare_with_values_that_have_more_digits_than_their_type(site):
    rng = random.Random(SEED)
    sizes = [(pa.decimal32, 9), (pa.decimal64, 18), (pa.decimal128, 38), (pa.decimal256, 76)]
    compared = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le}
    compared |= {">": operator.gt, ">=": operator.ge}
    for _ in range(max(20, int(500 * CASES))):
        of, most = rng.choice(sizes)
        precision = rng.randrange(1, most + 1)
        scale = rng.choice([0, precision, rng.randrange(precision + 1)])
        last = 10**precision - 1
        few = [0, 1, -1, last, -last]
        units = [rng.choice([*few, rng.randrange(-last, last + 1)]) for _ in "1234"]
        # Not by arithmetic, which rounds.
        values = [Decimal((int(n < 0), tuple(map(int, str(abs(n)))), -scale)) for n in units]
        digits = tuple(rng.randrange(10) for _ in range(rng.randrange(1, 30)))
        value = rng.choice(
            [
                *values,
                Decimal((rng.randrange(2), digits, rng.randrange(-40, 40))),
                Decimal(rng.choice(["1E+30", "-1E+300", "1E-300", "-1E-11", "0E+50", "-0.0"])),
                Decimal(rng.choice(["9" * 60, "1E+999999", "-1E-999999", "0.005"])),
                rng.randrange(-(10**18), 10**18),
            ]
        )
        batch = pa.RecordBatch.from_pydict({"x": pa.array([*values, None], of(precision, scale))})
        for how, is_so in compared.items():
            where = is_so(col("x"), value)
            expected = [is_so(x, value) for x in values] + [None]
            assert where._evaluate(batch).to_pylist() == expected, (batch.schema, where)
    # And at the node.
    ds = forebay.open("bk/types/0.parquet", url=site.url)
    there = [row["row"] for row in ds if row["long"] is not None]
    for value in (Decimal("1E+33"), Decimal("1E+300")):
        assert rows_of(ds.filter(col("long") < value), "row") == there
        assert rows_of(ds.filter(~(col("long") != value)), "row") == []
    above = [row["row"] for row in ds if row["long"] is not None and row["long"] > 0]
    assert rows_of(ds.filter(col("long") >= Decimal("1E-30")), "row") == above


def test_times_that_a_filter_would_round_are_refused():
    fine = pandas.Timestamp(1, unit="ns")
    nanosecond = np.datetime64(2, "ns")
    for make in (
        lambda: col("t") == fine,
        lambda: col("t") >= fine.tz_localize("UTC"),
        lambda: col("t").isin([fine]),
        lambda: col("n") == nanosecond,
        lambda: col("n") == np.timedelta64(2, "ns"),
    ):
        with pytest.raises(forebay.InvalidRequest, match="times of whole microseconds"):
            make()
    # Those that a column of microseconds can hold are taken.
    for whole in (pandas.Timestamp(5000, unit="ns"), np.datetime64(5, "us")):
        assert repr(col("t") == whole) == repr(col("t") == datetime(1970, 1, 1, 0, 0, 0, 5))


class Somewhere(tzinfo):
    """A zone whose text does not say where: that of ``dateutil.tz.tzlocal`` does not, either."""

    def __init__(self, hours: int) -> None:
        self.hours = hours

    def utcoffset(self, of):
        return timedelta(hours=self.hours)

    def dst(self, of):
        return None

    def __repr__(self) -> str:
        return "Somewhere()"


def test_times_of_zones_are_told_by_their_instant():
    """A result is kept under the text of its expression."""

    def told(hour, zone) -> str:
        return repr(col("t") >= datetime(2024, 1, 1, hour, tzinfo=zone))

    assert told(12, Somewhere(1)) != told(12, Somewhere(2)) == told(10, UTC)
    first = datetime(1, 1, 1, tzinfo=Somewhere(5))
    assert "Somewhere()" in repr(col("t") > first)


def test_an_expression_may_not_be_too_deep():
    deep = forebay.col("n") == 0
    for i in range(_expr.DEPTH_MAX + 1):
        deep = deep | (forebay.col("n") == i)
    with pytest.raises(forebay.InvalidRequest, match="more than 100 parts"):
        _ = deep | deep
    negated = forebay.col("n") == 0
    with pytest.raises(forebay.InvalidRequest, match="too many times"):
        for _ in range(_expr.DEPTH_MAX + 2):
            negated = ~negated


def test_a_filter_that_makes_no_sense_is_named(tmp_path):
    table = pa.table({"d": pa.array([Decimal("1.50"), Decimal(9)], pa.decimal128(20, 2))})
    table = table.append_column("s", pa.array(["a", "b"]))
    (tmp_path / "bk").mkdir()
    pq.write_table(table, tmp_path / "bk/a.parquet")
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'bk'}"])
    try:
        ds = forebay.open("bk/a.parquet", url=node.url)
        assert len(ds.filter(col("d") < (1 << 63))) == 2 and len(ds.filter(col("d") > 2)) == 1
        for expression in (
            col("d") < Decimal("Infinity"),
            col("d") == Decimal("NaN"),
            col("s") == "\ud800",
            col("s").startswith("\ud800"),
            col("s").isin(["\ud800"]),
        ):
            with pytest.raises(forebay.InvalidRequest, match="the filter .* cannot be evaluated"):
                ds.filter(expression)
    finally:
        node.stop()


def test_a_column_of_json_is_compared_as_it_is_written(tmp_path):
    (tmp_path / "bk").mkdir()
    (tmp_path / "bk/a.jsonl").write_text('{"tag": "en", "n": 1}\n{"tag": 7, "n": 2}\n')
    node = Node("", [], tmp_path / "node", options=["--origin", f"file://{tmp_path / 'bk'}"])
    try:
        ds = forebay.open("bk/a.jsonl", url=node.url)
        assert ds.schema["tag"] == "Json"
        tag = col("tag")
        # The second is evaluated here, because a column is cast.
        for of, also in ((ds, tag), (ds.cast({"n": "double"}), col("n"))):
            for expression, found in (
                (tag == '"en"', [1]),
                (tag.isin(["7", "8"]), [2]),
                (tag.startswith('"e'), [1]),
                (tag < "8", [1, 2]),
            ):
                left = of.filter(expression & ~also.is_null())
                assert [row["n"] for row in left] == found, expression
        for expression in (tag == "en", tag.isin(["en"]), tag.startswith("e")):
            with pytest.raises(forebay.InvalidRequest, match='"tag" is of Json') as e:
                len(ds.filter(expression))
            assert "quotation marks" in e.value.hint
        with pytest.raises(forebay.InvalidRequest, match="does not compare with 7"):
            ds.filter(tag == 7)
    finally:
        node.stop()


def test_of_compositions_each_base_is_asked(site):
    ds = forebay.open("bk/plain/*.parquet", url=site.url)
    made = forebay.concatenate([ds.skip(9_990), ds.select(range(30, -1, -1))])
    found = made.filter((col("id") >= 9_995) | (col("id") < 3))
    assert rows_of(found) == [*range(9_995, 10_000), 2, 1, 0]


def test_progress_is_drawn_and_ctrl_c_ends_the_wait(site, tmp_path, capsys):
    ds = forebay.open("bk/plain/*.parquet", url=site.url)
    assert len(ds.filter(col("id") != 5, progress=True)) == 9_999
    assert "filter col" in capsys.readouterr().err

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    document = _filter._document(ds, col("id") != 6)
    previous = signal.signal(signal.SIGALRM, interrupted)
    # Whoever asks it waits.
    listener = socket.create_server(("127.0.0.1", 0))
    try:
        slow = forebay.Client(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=30)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            _node.filter(slow, ds.id, document)
        assert time.monotonic() - began < 20
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        listener.close()
    assert _node.filter(ds.client, ds.id, document)[0]["rows"] == 9_999
