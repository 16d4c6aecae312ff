"""Ray Data on a local cluster: reads from a node, and writes new shards with a manifest."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
from types import SimpleNamespace

import forebay
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from servers import Node

ROWS = 600


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    root = tmp_path_factory.mktemp("ray")
    bucket = root / "bucket"
    (bucket / "in").mkdir(parents=True)
    for part in range(3):
        ids = np.arange(part, ROWS, 3)
        table = pa.table(
            {
                "id": ids,
                "text": [f"row {i}" for i in ids],
                "data": [b"%d" % i * 50 for i in ids],
            }
        )
        pq.write_table(table, bucket / "in" / f"{part}.parquet", row_group_size=50)
    node = Node("", [], root / "node", options=["--origin", f"file://{bucket}"])
    yield node
    node.stop()


@pytest.fixture(scope="module")
def ray(node):
    os.environ["RAY_DEDUP_LOGS"] = "0"
    import ray

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        object_store_memory=200 << 20,
        runtime_env={"env_vars": {"FOREBAY_NODE": node.url}},
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    yield ray
    ray.shutdown()


@pytest.fixture
def ds(node):
    return forebay.open("bucket/in/*.parquet", url=node.url)


def test_rows_are_read_in_the_order_of_a_plan_with_exact_counts(ray, ds):
    for order in (None, forebay.Block(2)):
        data = forebay.ray.read(ds, order=order, seed=3, override_num_blocks=4)
        assert data.count() == ROWS
        loader = ds.loader(50, shuffle=order, seed=3)
        expected = [i for batch in loader for i in batch.numpy()["id"].tolist()]
        assert [row["id"] for row in data.take_all()] == expected
    blocks = list(data.iter_batches(batch_size=None, batch_format="pyarrow"))
    assert all(isinstance(block, pa.Table) for block in blocks)
    assert blocks[0].column_names == ["id", "text", "data"]


def test_all_blocks_of_a_mix_have_one_schema(ray, tmp_path):
    """Also where a dataset has nothing in a column, or the same values in another type."""
    kinds = {
        "full": ([[0.5, None], [1.5]], pa.list_(pa.float64()), pa.string()),
        "empty": ([[], None], pa.list_(pa.null()), pa.large_string()),
        "none": ([None, None], pa.null(), pa.string()),
    }
    for name, (values, kind, text) in kinds.items():
        (tmp_path / "kinds" / name).mkdir(parents=True)
        texts = pa.array([name] * 2, text)
        table = pa.table({"values": pa.array(values, kind), "text": texts})
        pq.write_table(table, tmp_path / "kinds" / name / "0.parquet")
    origin = ["--origin", f"file://{tmp_path / 'kinds'}"]
    node = Node("", [], tmp_path / "node", options=origin)
    try:
        parts = [forebay.open(f"kinds/{name}/*.parquet", url=node.url) for name in kinds]
        mixed = forebay.mix([*parts])
        rows = [{"values": v, "text": name} for name in kinds for v in kinds[name][0]]
        for columns in (None, ["values"], ["text", "values"]):
            data = forebay.ray.read(mixed, columns=columns, override_num_blocks=6)
            blocks = list(data.iter_batches(batch_size=None, batch_format="pyarrow"))
            assert len({str(block.schema) for block in blocks}) == 1
            assert blocks[0].schema.field("values").type.value_type == pa.float64()
            found = data.take_all()
            assert len(found) == len(mixed)
            wanted = [[row[name] for name in columns or ("values", "text")] for row in rows]
            assert all([row[n] for n in columns or ("values", "text")] in wanted for row in found)
        assert "double" in mixed.interleaved().schema["values"]
        named = forebay.ray.read(mixed).rename_columns({"values": "v"})
        assert len({str(b.schema) for b in named.iter_batches(batch_format="pyarrow")}) == 1
    finally:
        node.stop()


def test_a_map_is_refused(ds):
    from forebay.ray import ForebayDatasource

    with pytest.raises(forebay.InvalidRequest, match="has a map, and forebay.ray takes the rows"):
        ForebayDatasource(ds.map(lambda row: row))


def test_columns_and_limits_reach_the_node(ray, ds, node):
    source = forebay.ray.ForebayDatasource(ds)
    tasks = source.apply_projection({"text": "text"}).get_read_tasks(4)
    assert sum(task.metadata.num_rows for task in tasks) == ROWS and len(tasks) == 4
    (first, *_) = list(tasks[0]())
    assert first.column_names == ["text"] and len(first) == 150
    few = source.get_read_tasks(2, per_task_row_limit=7)
    tables = list(few[1]())
    assert sum(map(len, tables)) == 7 and tables[0]["id"][0].as_py() == ds[300]["id"]
    none = list(source.apply_projection({}).get_read_tasks(1)[0]())
    assert sum(map(len, none)) == ROWS and not set(none[0].column_names) & set(ds.columns)
    assert forebay.ray.read(ds).select_columns([]).count() == ROWS
    # Ray 2.50, 2.51, and some later ones.
    for projected, name in [
        (source.apply_projection(["text", "id"]), "text"),
        (source.apply_projection(["text", "id"], {"text": "words"}), "words"),
        (source.apply_projection(["text", "id"]).apply_projection(None, {"text": "t"}), "t"),
    ]:
        (task,) = projected.get_read_tasks(1)
        assert task.schema.names == next(iter(task())).column_names == [name, "id"]
        assert projected.get_current_projection() == ["text", "id"]
    chosen = forebay.ray.read(ds, columns=["id"]).select_columns(["id"]).limit(10)
    assert chosen.take_all() == [{"id": ds[i]["id"]} for i in range(10)]
    with pytest.raises(forebay.InvalidRequest, match="no column 'nothing'"):
        forebay.ray.read(ds, columns=["nothing"])
    with pytest.raises(Exception, match="no column 'text'"):
        forebay.ray.read(ds, columns=["id"]).select_columns(["text"]).take(1)


@pytest.mark.parametrize("format", ["parquet", "tar", "jsonl", "mds", "tfrecord"])
def test_what_ray_made_is_written_with_a_manifest(ray, ds, node, format):
    client = forebay.Client(node.url)
    data = forebay.ray.read(ds, override_num_blocks=3).filter(lambda row: row["id"] % 2 == 0)
    if format == "jsonl":
        data = data.drop_columns(["data"])
    done = forebay.ray.write(data, f"bucket/out-{format}/", format, client=client)
    assert (done.rows, done.format) == (ROWS // 2, format) and done.shards >= 1 and done.seconds > 0
    names = [info.key for info in client.list(f"bucket/out-{format}/")]
    shards = [n for n in names if n.split("/")[1].startswith("shard-") and not n.endswith(".idx")]
    assert len(shards) == done.shards and f"out-{format}/_manifest" in names
    assert not any("_forebay" in name for name in names)
    if format == "mds":
        assert f"out-{format}/index.json" in names
    again = forebay.open(done.source, client=client, example=format == "tfrecord")
    assert len(again) == ROWS // 2
    ids = [int(bytes(row["id"])) if format == "tar" else row["id"] for row in again]
    expected = [row["id"] for row in ds if row["id"] % 2 == 0]
    assert ids == expected


def test_options_of_a_format_reach_the_shards_that_ray_writes(ray, ds, node):
    client = forebay.Client(node.url)
    data = forebay.ray.read(ds, override_num_blocks=2)
    given = {"columns": {"id": "str_int"}, "hashes": ["sha1"]}
    forebay.ray.write(data, "bucket/encoded/", "mds", client=client, format_options=given)
    index = json.loads(bytes(client.get("bucket/encoded/index.json")))
    for shard in index["shards"]:
        encodings = dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
        assert encodings["id"] == "str_int"
        stored = bytes(client.get(f"bucket/encoded/{shard['raw_data']['basename']}"))
        assert shard["raw_data"]["hashes"] == {"sha1": hashlib.sha1(stored).hexdigest()}
    for format, options in [("mds", {"size_limit": 5}), ("tar", {"maxcount": 5}), ("tar", given)]:
        with pytest.raises(forebay.InvalidRequest):
            forebay.ray.write(
                data, "bucket/refused/", format, client=client, format_options=options
            )
    with pytest.raises(forebay.InvalidRequest, match="format_options is"):
        forebay.ray.write(data, "bucket/refused/", "mds", client=client, format_options=["sha1"])
    with pytest.raises(forebay.InvalidRequest, match="hashes= is an option of a format") as refused:
        forebay.ray.write(data, "bucket/refused/", "mds", client=client, hashes=["sha1"])
    assert "format_options=" in refused.value.hint
    assert not list(client.list("bucket/refused/"))


def test_a_write_that_fails_leaves_nothing_and_a_full_target_is_refused(ray, ds, node):
    client = forebay.Client(node.url)

    def breaks(batch):
        if 500 in batch["id"]:
            raise ValueError("as asked")
        return batch

    data = forebay.ray.read(ds, columns=["id"], override_num_blocks=4).map_batches(breaks)
    with pytest.raises(Exception, match="as asked"):
        forebay.ray.write(data, "bucket/broken/", client=client)
    assert not list(client.list("bucket/broken/"))
    data = forebay.ray.read(ds, override_num_blocks=2)
    with pytest.raises(Exception, match="not empty"):
        forebay.ray.write(data, "bucket/in/", client=client)
    with pytest.raises(forebay.InvalidRequest, match="jsonl cannot hold column 'data'"):
        forebay.ray.write(data, "bucket/refused/", "jsonl", client=client)
    # Where nobody knows the columns before.
    with pytest.raises(Exception, match="jsonl cannot hold column 'data'"):
        forebay.ray.write(data.map(lambda row: row), "bucket/refused/", "jsonl", client=client)
    assert not list(client.list("bucket/refused/"))
    assert len(list(client.list("bucket/in/"))) == 3


def test_what_was_left_out_before_the_write_is_not_looked_at(ray, node):
    """Ray does the last steps in the tasks that write, and says what the first of them gets."""
    client = forebay.Client(node.url)
    data = ray.data.from_items([{"id": i, "l": [i]} for i in range(20)], override_num_blocks=2)
    for name, chosen in (
        ("select", data.select_columns(["id"])),
        ("drop", data.drop_columns(["l"])),
        ("map", data.map(lambda row: {"id": row["id"]})),
    ):
        done = forebay.ray.write(chosen, f"bucket/chosen-{name}/", "tar", key=None, client=client)
        found = forebay.open(done.source, client=client)
        assert sorted(int(bytes(row["id"])) for row in found) == list(range(20))


# What the sink does, called as Ray calls it.


class Fails:
    """A client one of whose methods fails for names that end so; ``is_done``: after it was done."""

    def __init__(self, client, method: str, end: str, is_done: bool = False) -> None:
        self.client, self.method, self.end, self.is_done = client, method, end, is_done
        #: For which what fails is asked for again.
        self.timeout = 0.3

    def __getattr__(self, name):
        found = getattr(self.client, name)
        if name != self.method:
            return found

        def call(where, *arguments, **options):
            if not where[1].endswith(self.end):
                return found(where, *arguments, **options)
            if self.is_done:
                found(where, *arguments, **options)
            raise forebay.ServerError("as asked")

        return call


def begun(client, prefix: str, format: str = "parquet"):
    sink = forebay.ray.ForebayDatasink(f"bucket/{prefix}/", format, client=client)
    sink.on_write_start()
    return sink


def task(sink, number: int, *tables) -> list:
    return sink.write(tables, SimpleNamespace(task_idx=number))


def complete(sink, *results) -> None:
    sink.on_write_complete(SimpleNamespace(write_returns=list(results)))


def numbers(*values) -> pa.Table:
    return pa.table({"n": list(values)})


@pytest.mark.parametrize(
    "failure", [("delete", "unfinished.json"), ("put", "_manifest", True)], ids=["delete", "put"]
)
def test_what_was_committed_stays(node, failure):
    client = forebay.Client(node.url)
    prefix = f"committed-{failure[0]}"
    sink = begun(Fails(client, *failure), prefix)
    complete(sink, task(sink, 0, numbers(1, 2)), task(sink, 1, numbers(3)))
    # Whatever fails afterwards.
    sink.on_write_failed(ValueError("as asked"))
    again = forebay.open(sink.written.source, client=client)
    assert [row["n"] for row in again] == [1, 2, 3]


class Passing:
    """A client of which the first call of each method for each name fails as when the node or the
    bucket is gone: before it was done, or after.
    """

    def __init__(self, client, is_done: bool) -> None:
        self.client, self.is_done, self.timeout = client, is_done, 30.0
        self.failed: set[tuple[str, str]] = set()
        self.failures = itertools.cycle((forebay.ConnectionFailed, forebay.ServerError))

    def __getattr__(self, name):
        found = getattr(self.client, name)
        if name not in ("put", "get", "delete", "exists", "head", "list"):
            return found

        def call(where, *arguments, **options):
            # Shards have a new name each time.
            one = (name, re.sub("shard-.*", "shard", str(where)))
            if name == "head" or one in self.failed:
                return found(where, *arguments, **options)
            self.failed.add(one)
            if self.is_done:
                found(where, *arguments, **options)
            raise next(self.failures)("as asked")

        return call


@pytest.mark.parametrize("is_done", [False, True], ids=["not done", "its answer lost"])
def test_a_node_that_starts_again_ends_no_write(node, is_done):
    client = forebay.Client(node.url)
    prefix = f"passing-{is_done}"
    passing = Passing(client, is_done)
    sink = begun(passing, prefix, "tfrecord")
    complete(sink, task(sink, 0, numbers(1, 2)), task(sink, 1, numbers(3)))
    assert {name for name, _ in passing.failed} >= {"put", "get", "list", "delete"}
    assert len(forebay.open(sink.written.source, client=client)) == sink.written.rows == 3
    left = [i.key for i in client.list(f"bucket/{prefix}/") if not i.key.endswith("/")]
    shards = [key for key in left if "shard-" in key and not key.endswith(".idx")]
    assert len(shards) == 2 and not any("_forebay" in key for key in left)
    again = Passing(client, is_done)
    other = begun(again, f"{prefix}-failed")
    task(other, 0, numbers(1))
    again.failed.clear()
    other.on_write_failed(ValueError("as asked"))
    assert not list(client.list(f"bucket/{prefix}-failed/"))


@pytest.mark.parametrize("failure", [forebay.ConnectionFailed, forebay.ServerError])
def test_reads_outlive_a_node_that_starts_again(ds, monkeypatch, failure):
    from forebay import ray as of_ray

    source = of_ray.ForebayDatasource(ds)
    (read,) = source.get_read_tasks(1)
    real, failed = of_ray.read_rows, []

    def fails_first(*arguments):
        if not failed:
            failed.append(arguments)
            raise failure("as asked")
        return real(*arguments)

    monkeypatch.setattr(of_ray, "read_rows", fails_first)
    assert sum(map(len, read())) == ROWS and failed


def test_a_commit_that_fails_leaves_nothing(node):
    client = forebay.Client(node.url)
    sink = begun(Fails(client, "put", "_manifest"), "uncommitted", "mds")
    result = task(sink, 0, numbers(1, 2))
    with pytest.raises(forebay.ServerError, match="as asked") as e:
        complete(sink, result)
    assert [i.key for i in client.list("bucket/uncommitted/")] != []
    sink.on_write_failed(e.value)
    assert [i.key for i in client.list("bucket/uncommitted/")] == []


def test_ctrl_c_ends_a_write_that_leaves_nothing(node):
    client = forebay.Client(node.url)
    late = []

    class Interrupted:
        """A dataset of Ray's whose writer presses Ctrl-C when one task has ended."""

        def schema(self, fetch_if_missing):
            return None

        def write_datasink(self, sink):
            sink.on_write_start()
            task(sink, 0, numbers(1, 2))
            late.append(sink)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        forebay.ray.write(Interrupted(), "bucket/interrupted/", client=client)
    with pytest.raises(forebay.Conflict, match="given up or ended meanwhile"):
        task(late[0], 1, numbers(3))
    assert not list(client.list("bucket/interrupted/"))


def test_a_task_that_ends_after_its_write_was_given_up_leaves_nothing(node):
    client = forebay.Client(node.url)
    late = begun(client, "late", "tfrecord")
    task(late, 0, numbers(1))
    late.on_write_failed(ValueError("as asked"))
    with pytest.raises(forebay.Conflict, match="given up or ended meanwhile"):
        task(late, 1, numbers(2))
    assert not list(client.list("bucket/late/"))
    # Nor does it touch what another job writes there now.
    other = begun(client, "late", "tfrecord")
    kept = task(other, 0, numbers(3))
    with pytest.raises(forebay.Conflict, match="given up or ended meanwhile"):
        task(late, 2, numbers(2))
    late.on_write_failed(ValueError("again"))
    complete(other, kept)
    assert other.written.rows == 1
    assert len(forebay.open(other.written.source, client=client)) == 1


def test_an_attempt_that_ends_after_its_write_leaves_nothing(node):
    """Ray has repeated a task that it took for lost; the first attempt ends amid the commit, when
    what others left has been removed.
    """
    client = forebay.Client(node.url)
    late = begun(client, "zombie", "tfrecord")
    kept = task(late, 0, numbers(1))
    ended = []

    class Zombie:
        timeout = client.timeout

        def __getattr__(self, name):
            return getattr(client, name)

        def put(self, where, *arguments, **options):
            if where[1].endswith("_manifest"):
                with pytest.raises(forebay.Conflict, match="given up or ended meanwhile"):
                    task(late, 0, numbers(1))
                ended.append(where)
            return client.put(where, *arguments, **options)

    sink = forebay.ray.ForebayDatasink("bucket/zombie/", "tfrecord", client=client)
    sink.write_id, sink.claimed, sink.claim_etag = late.write_id, True, late.claim_etag
    sink.client = Zombie()
    complete(sink, kept)
    there = [i.key for i in client.list("bucket/zombie/") if not i.key.endswith("/")]
    assert ended and sorted(key.rpartition(".")[2] for key in there) == [
        "idx",
        "tfrecord",
        "zombie/_manifest",
    ]


def test_what_a_driver_left_that_was_killed_is_told(node):
    client = forebay.Client(node.url)
    sink = begun(client, "left")
    task(sink, 0, numbers(1))
    ds = forebay.open("bucket/in/*.parquet", client=client)
    with pytest.raises(forebay.Conflict, match="not finished; forebay.ray.write began it") as e:
        ds.write("bucket/left/")
    assert e.value.hint.startswith("remove what is below the prefix")
    with pytest.raises(forebay.Conflict, match="is not empty"):
        begun(client, "left")
    sink.on_write_failed(ValueError("as asked"))


def test_a_target_that_the_bucket_refuses_is_not_written_by_another_process(node):
    class Refuses:
        """As a bucket that keeps objects as files, where one is called as the target."""

        def __init__(self, client):
            self.client, self.timeout = client, client.timeout

        def __getattr__(self, name):
            return getattr(self.client, name)

        def put(self, where, *arguments, **options):
            raise forebay.PreconditionFailed("parent is an object", status=412)

    client = forebay.Client(node.url)
    sink = forebay.ray.ForebayDatasink("bucket/refused/", client=client)
    sink.client = Refuses(client)
    with pytest.raises(forebay.Conflict, match="nothing can be written to bucket/refused/") as e:
        sink.on_write_start()
    assert "parent is an object" in e.value.message and e.value.status == 412
    # Where another job is at work, or has ended, it is that.
    other = begun(client, "refused")
    with pytest.raises(forebay.Conflict, match="another process writes"):
        sink._claim("begun", None)
    complete(other, task(other, 0, numbers(1)))
    with pytest.raises(forebay.Conflict, match="another process writes"):
        sink._claim("begun", None)


def test_blocks_without_values_of_a_column_have_the_type_of_the_others(node):
    client = forebay.Client(node.url)
    said = pa.field("said", pa.string(), metadata={"ARROW:extension:name": "arrow.json"})
    schema = pa.schema([("id", pa.int64()), ("n", pa.int64()), ("l", pa.list_(pa.int32())), said])
    values = {"id": [0, 1], "n": [1, 2], "l": [[3], []], "said": ["{}", "1"]}
    some = pa.table(values, schema)
    none = pa.table({"id": [2]} | {name: pa.nulls(1) for name in schema.names[1:]})
    rows = [*some.to_pylist(), *none.to_pylist()]

    def stored(schema):
        return [getattr(kind, "storage_type", kind) for kind in schema.types]

    for format in ("parquet", "tar", "tfrecord"):
        columns = schema.names if format == "parquet" else ["id", "n"]
        one, other = some.select(columns), none.select(columns)
        for at, tables in enumerate(([one, other], [other, one], [other.to_pandas(), one])):
            sink = begun(client, f"nothing-{format}-{at}", format)
            complete(sink, task(sink, 0, *tables))
            again = forebay.open(sink.written.source, client=client)
            assert len(again) == 3
            if format == "parquet":
                found = again.take(range(3)).arrow()
                assert stored(found.schema) == schema.types
                assert found.to_pylist() == (rows if at == 0 else [rows[2], *rows[:2]])
    for at, tables in enumerate(([some, none], [none, some], [none, none, some])):
        sink = begun(client, f"nothing-tasks-{at}")
        complete(sink, *(task(sink, number, table) for number, table in enumerate(tables)))
        again = forebay.open(sink.written.source, client=client)
        assert stored(again.take(range(len(again))).arrow().schema) == schema.types
        assert sorted(row["n"] or 0 for row in again) == [0] * (len(tables) - 1) + [1, 2]
        for format in ("tar", "tfrecord"):
            sink = begun(client, f"nothing-tasks-{format}-{at}", format)
            numbered = [table.select(["id", "n"]) for table in tables]
            complete(sink, *(task(sink, number, table) for number, table in enumerate(numbered)))
            again = list(forebay.open(sink.written.source, client=client))
            assert len(again) == sink.written.rows == len(tables) + 1
            if format == "tar":
                found = [None if row["n"] is None else bytes(row["n"]) for row in again]
                missing = [[None]] * len(tables)
                missing[next(i for i, of in enumerate(tables) if of is some)] = [b"1", b"2"]
                assert found == sum(missing, [])
    # Ray may say at the start what the first block is.
    first = forebay.ray.ForebayDatasink("bucket/nothing-first/", "tar", client=client)
    first.check_columns(none.select(["id", "n"]).schema)
    # No task says what it is.
    sink = begun(client, "nothing-at-all", "tar")
    with pytest.raises(forebay.InvalidRequest, match="null"):
        complete(sink, task(sink, 0, none.select(["id", "n"])))
    # What differs besides is refused as ever.
    sink = begun(client, "nothing-others")
    parts = [task(sink, 0, numbers(None)), task(sink, 1, numbers(1)), task(sink, 2, numbers(1.5))]
    with pytest.raises(forebay.InvalidRequest, match="'n' is int64 in some and float64"):
        complete(sink, *parts)


def test_rows_of_other_types_are_refused_by_column(node):
    client = forebay.Client(node.url)
    whole, broken = numbers(1, 2), numbers(1.5)
    for format in ("mds", "tar", "parquet"):
        sink = begun(client, f"types-{format}", format)
        with pytest.raises(forebay.InvalidRequest, match="'n' is int64 in some and float64") as e:
            task(sink, 0, whole, broken)
        assert "cast" in e.value.hint
        parts = task(sink, 1, whole), task(sink, 2, broken)
        with pytest.raises(forebay.InvalidRequest, match="'n' is int64 in some and float64"):
            complete(sink, *parts)
        sink.on_write_failed(e.value)
        assert not list(client.list(f"bucket/types-{format}/"))
    two = pa.table({"a": [1], "b": [2]})
    sink = begun(client, "types-order")
    with pytest.raises(forebay.InvalidRequest, match="in another order"):
        task(sink, 0, two, two.select(["b", "a"]))
    # A line of JSON says itself what it holds.
    sink = begun(client, "types-jsonl", "jsonl")
    complete(sink, task(sink, 0, whole, broken), task(sink, 1, broken))
    again = forebay.open(sink.written.source, client=client)
    assert [row["n"] for row in again] == [1, 2, 1.5, 1.5]
    # Nothing in a tar says which of its texts are JSON.
    said = pa.field("a", pa.string(), metadata={"ARROW:extension:name": "arrow.json"})
    of_json = pa.table([pa.array(["1"])], pa.schema([said]))
    sink = begun(client, "types-texts", "tar")
    complete(sink, task(sink, 0, of_json, pa.table({"a": ["t"]})))
    again = forebay.open(sink.written.source, client=client)
    assert [bytes(row["a"]) for row in again] == [b"1", b"t"]
