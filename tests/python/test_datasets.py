"""Datasets at a node before a real S3 server: opening, versions, errors, who may, and the command
line.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import forebay as client
import pyarrow
import pyarrow.parquet
import pytest
import requests
from forebay import Client, InvalidRequest, NotFound
from forebay import open as open_dataset
from servers import Node, forebay_program
from test_policies import keys_toml, replace


def parquet(rows: int, group: int = 10, column: str = "id", kind=None) -> bytes:
    out = io.BytesIO()
    ids = pyarrow.array(
        [str(i) for i in range(rows)] if kind == "text" else list(range(rows)),
        pyarrow.string() if kind == "text" else pyarrow.int64(),
    )
    table = pyarrow.table(
        {column: ids, "text": pyarrow.array([f"row {i}" for i in range(rows)], pyarrow.string())}
    )
    pyarrow.parquet.write_table(table, out, row_group_size=group)
    return out.getvalue()


def webdataset(samples: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for i in range(samples):
            for extension, data in (("jpg", bytes([i]) * 50), ("cls", str(i).encode())):
                info = tarfile.TarInfo(f"{i:04}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def post(node, spec, **options) -> requests.Response:
    spec = spec if isinstance(spec, dict) else {"source": spec}
    return requests.post(f"{node.url}/v1/datasets", json=spec, timeout=60, **options)


def opened(node, spec) -> dict:
    answer = post(node, spec)
    assert answer.status_code == 200, answer.text
    return answer.json()


def get(node, path: str) -> requests.Response:
    return requests.get(f"{node.url}/v1/datasets{path}", timeout=60)


def forebay(node, *args: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "FOREBAY_NODE": node.url}
    return subprocess.run(
        [forebay_program(), *args], capture_output=True, text=True, timeout=60, env=env
    )


@pytest.fixture
def put(origin_s3, scratch):
    """Writes an object to the origin directly, below this test's prefix; returns its name."""

    def put(key: str, data: bytes) -> str:
        origin_s3.put_object(Bucket="scratch", Key=f"{scratch}/{key}", Body=data)
        return f"scratch/{scratch}/{key}"

    return put


def test_a_dataset_is_opened_and_described(node, put, scratch):
    for i, rows in enumerate([25, 0, 10]):
        put(f"part-{i}.parquet", parquet(rows))
    put("_SUCCESS", b"")
    answer = opened(node, f"s3://scratch/{scratch}/**")
    assert (
        answer["format"],
        answer["rows"],
        answer["files"],
        answer["indexed_files"],
        answer["reused_files"],
    ) == ("parquet", 35, 3, 3, 0)
    assert answer["schema"] == [
        {"name": "id", "type": "Int64", "nullable": True},
        {"name": "text", "type": "Utf8", "nullable": True},
    ]
    assert (answer["previous"], answer["skipped"]) == (None, [])
    described = get(node, f"/{answer['id']}").json()
    assert described == {k: answer[k] for k in described}
    assert answer["id"] in [d["id"] for d in get(node, "").json()["datasets"]]
    shape = get(node, f"/{answer['id']}/shape")
    assert shape.headers["content-type"] == "application/octet-stream" and shape.content.startswith(
        b"FBS"
    )
    head, *files = [
        json.loads(line) for line in get(node, f"/{answer['id']}/manifest").text.splitlines()
    ]
    assert head["forebay_manifest"] == 1 and head["dataset"] == answer["id"]
    assert [f["rows"] for f in files] == [25, 0, 10]
    assert all(f["size"] and f["etag"] for f in files)
    missing = get(node, f"/{'0' * 32}")
    assert missing.status_code == 404 and "does not know the dataset" in missing.json()["message"]
    assert node.metrics()["forebay_datasets_kept"] >= 1


def test_rows_of_blocks_are_refused_for_files_that_have_blocks(node, put):
    name, lines = put("a.parquet", parquet(25)), put("lines.jsonl", b'{"a": 1}\n{"a": 2}\n')
    for given in ({}, {"format": "parquet"}):
        with pytest.raises(InvalidRequest, match="block_rows.*format.*is parquet"):
            open_dataset(name, url=node.url, block_rows=5, **given)
    assert open_dataset(lines, url=node.url, block_rows=1).info["blocks"] == 2


def test_formats_are_told_by_names_and_first_bytes(node, put, scratch):
    batch = pyarrow.RecordBatch.from_pydict({"x": [1, 2, 3]})
    for name, writer in (("file", pyarrow.ipc.new_file), ("stream", pyarrow.ipc.new_stream)):
        out = io.BytesIO()
        with writer(out, batch.schema) as w:
            w.write_batch(batch)
        put(f"{name}/a.arrow", out.getvalue())
    put("tar/a.tar", webdataset(4))
    put("jsonl/a.jsonl", b'{"a": 1}\n{"a": 2}\n')
    put("plain/a", parquet(5))
    put("images/cat/1.jpg", b"\xff\xd8\xff")
    for what, spec, expected in [
        ("file", {}, ("arrow-file", 3, ["x"])),
        ("stream", {}, ("arrow-stream", 3, ["x"])),
        ("tar", {}, ("tar", 4, ["__key__", "cls", "jpg"])),
        ("tar", {"format": "objects"}, ("objects", 1, ["key", "data"])),
        ("jsonl", {}, ("jsonl", 2, ["a"])),
        ("plain", {}, ("parquet", 5, ["id", "text"])),
        ("images", {"labels": {"from": "path"}}, ("objects", 1, ["key", "data", "label"])),
    ]:
        answer = opened(node, {"source": f"scratch/{scratch}/{what}/", **spec})
        assert (
            answer["format"],
            answer["rows"],
            [c["name"] for c in answer["schema"]],
        ) == expected, what


@pytest.mark.parametrize("place", ["", "nowhere/"])
def test_what_is_missing_is_told_with_the_argument_that_named_it(node, put, scratch, place):
    put("1.jpg", b"\xff\xd8\xff")
    here = f"scratch/{scratch}"
    missing = f"{place or here + '/'}none.csv"
    # Long names are cut in messages.
    told = re.escape(missing[:60])
    with pytest.raises(client.NotFound, match=f"^labels {told}.*: .*") as caught:
        client.open(f"{here}/", url=node.url, labels=f"s3://{missing}")
    assert caught.value.status == 404 and caught.value.hint
    with pytest.raises(client.NotFound, match=f"^manifest {told}.*: "):
        client.open([f"{here}/1.jpg", f"manifest:{missing}"], url=node.url)
    # What is said of other files names them.
    with pytest.raises(client.NotFound, match=r"^(?!labels|manifest).*none/"):
        client.open(f"{here}/none/*", url=node.url, labels=f"{here}/1.jpg")


def test_a_changed_file_is_a_new_version_and_only_it_is_read(node, put, scratch):
    for i in range(6):
        put(f"{i}.parquet", parquet(10))
    source = f"scratch/{scratch}/{{0..5}}.parquet"
    first, again = opened(node, source), opened(node, source)
    assert first["id"] == again["id"] and (again["indexed_files"], again["reused_files"]) == (0, 6)
    put("3.parquet", parquet(11))
    changed = opened(node, source)
    assert (changed["indexed_files"], changed["reused_files"], changed["previous"]) == (
        1,
        5,
        first["id"],
    )
    assert changed["id"] != first["id"] and changed["rows"] == 61
    assert get(node, f"/{first['id']}").json()["rows"] == 60


def test_sixty_four_open_at_once(node, put, scratch):
    for i in range(20):
        put(f"{i}.parquet", parquet(10))
    before = node.metrics()
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda _: opened(node, f"scratch/{scratch}/*.parquet"), range(64)))
    assert len({a["id"] for a in answers}) == 1
    after = node.metrics()
    indexed = 'forebay_datasets_files_total{how="indexed"}'
    assert after[indexed] - before.get(indexed, 0) == 20


def test_progress_is_told_in_lines(node, put, scratch):
    put("a.parquet", parquet(10))
    answer = post(node, f"scratch/{scratch}/", params={"progress": "true"})
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines[-1]["event"] == "opened" and lines[-1]["rows"] == 10
    assert all(line["event"] == "progress" for line in lines[:-1])
    answer = post(node, f"scratch/{scratch}/nothing/", params={"progress": "true"})
    last = json.loads(answer.text.splitlines()[-1])
    assert (answer.status_code, last["event"], last["status"]) == (200, "error", 404)


def test_manifests_are_written_and_read(node, put, scratch):
    for i in range(3):
        put(f"d/{i}.parquet", parquet(10 + i))
    first = opened(node, f"scratch/{scratch}/d/")
    written = requests.post(
        f"{node.url}/v1/datasets/{first['id']}/manifest",
        params={"to": f"scratch/{scratch}/m.jsonl"},
        timeout=30,
    )
    assert written.status_code == 200 and written.json()["files"] == 3
    again = opened(node, f"manifest:scratch/{scratch}/m.jsonl")
    assert again["id"] == first["id"]


def test_what_is_wrong_is_said(node, put, scratch):
    good = parquet(10)
    put("bad/a.parquet", good)
    put("bad/b.parquet", good[:-3])
    put("mixed/a.parquet", good)
    put("mixed/b.parquet", parquet(3, kind="text"))
    put("kinds/a.parquet", good)
    put("kinds/b.tar", webdataset(1))
    here = f"scratch/{scratch}"
    for spec, status, *parts in [
        (f"{here}/none/*.parquet", 404, "no files match", "none/*.parquet"),
        (f"{here}/bad/", 502, "bad/b.parquet", "on_damaged"),
        (f"{here}/mixed/", 400, "mixed/b.parquet", "column", "id", "Int64"),
        (f"{here}/kinds/", 400, "more than one kind", "narrow the pattern"),
        (f"{here}/bad/{{a,x,y}}.parquet", 404, "2 of the", "x.parquet"),
        ("nowhere/x/", 404, "nowhere"),
        ("scratch*/x", 400, "not a bucket name"),
        ("scratch/[", 400, "not a pattern"),
        ("scratch/{0..9999999}", 400, "more than"),
        ({"sources": []}, 400, "no sources"),
        ({"source": here, "frmat": "tar"}, 400, "frmat"),
        ({"source": here, "format": "rar"}, 400, "rar"),
        ({"source": f"{here}/bad/a.parquet", "labels": {"from": "path"}}, 400, "labels"),
        (f"manifest:{here}/none", 404, "none"),
    ]:
        answer = post(node, spec)
        told = answer.json()
        message = f"{told['message']} ({told.get('hint')})"
        assert answer.status_code == status and all(p in message for p in parts), (
            spec,
            answer.status_code,
            message,
        )
    for body in (b"", b"{", b"[1]", b"\xff"):
        assert requests.post(f"{node.url}/v1/datasets", data=body, timeout=30).status_code == 400
    skipped = opened(node, {"source": f"{here}/bad/", "on_damaged": "skip"})
    assert (skipped["rows"], skipped["skipped_files"]) == (10, 1)
    left_out = skipped["skipped"][0]
    assert left_out["name"].endswith("bad/b.parquet") and "b.parquet" not in left_out["message"]


def test_a_restarted_node_knows_its_datasets(origin, origin_s3, scratch, tmp_path):
    for i in range(5):
        origin_s3.put_object(Bucket="scratch", Key=f"{scratch}/{i}.parquet", Body=parquet(10))
    node = Node(origin.url, ["scratch"], tmp_path)
    try:
        first = opened(node, f"scratch/{scratch}/")
    finally:
        node.stop()
    node = Node(origin.url, ["scratch"], tmp_path)
    try:
        assert get(node, f"/{first['id']}").json()["rows"] == 50
        again = opened(node, f"scratch/{scratch}/")
        assert (again["id"], again["indexed_files"], again["reused_files"]) == (first["id"], 0, 5)
    finally:
        node.stop()


def test_files_whose_schemas_differ_are_read_after_a_restart(origin, origin_s3, scratch, tmp_path):
    def put(name: str, field: pyarrow.Field, values: list) -> None:
        out = io.BytesIO()
        array = pyarrow.array(values, field.type)
        table = pyarrow.table([array], schema=pyarrow.schema([field]))
        pyarrow.parquet.write_table(table, out, use_compliant_nested_type="item" not in name)
        origin_s3.put_object(Bucket="scratch", Key=f"{scratch}/{name}", Body=out.getvalue())

    x, lists = pyarrow.field("x", pyarrow.int64()), pyarrow.list_(pyarrow.int32())
    put("x/a.parquet", x.with_nullable(False), [1, 2])
    put("x/b.parquet", x.with_metadata({"PARQUET:field_id": "7"}), [3, None])
    put("x/c.parquet", x.with_type(pyarrow.int32()), [4])
    put("l/element.parquet", pyarrow.field("x", lists), [[1], [2, 3]])
    put("l/item.parquet", pyarrow.field("x", lists), [[], [4]])
    expected = {"x": [1, 2, 3, None, 4], "l": [[1], [2, 3], [], [4]]}

    def rows(node: Node, what: str) -> list:
        ds = client.open(f"scratch/{scratch}/{what}/", url=node.url)
        return pyarrow.record_batch(ds.take(range(len(ds))).arrow())["x"].to_pylist()

    for _ in range(3):
        node = Node(origin.url, ["scratch"], tmp_path)
        try:
            for what, values in expected.items():
                assert rows(node, what) == values
        finally:
            node.stop()


def test_jsonl_has_columns_and_its_lines_by_name(node, put, scratch):
    lines = [{"text": "a", "tokens": [1, 2], "n": 1}, {"text": "b", "n": 2.5, "o": {"k": "v"}}]
    put("a.jsonl", "\n".join(json.dumps(line) for line in lines).encode())
    put("b.jsonl", json.dumps({"n": "three", "text": None}).encode())
    source = f"scratch/{scratch}/*.jsonl"
    ds = client.open(source, url=node.url)
    assert list(ds.schema) == ["text", "tokens", "n", "o"] and ds.schema["n"] == "Json"
    assert [r["text"] for r in ds] == ["a", "b", None]
    assert [r["n"] for r in ds] == ["1", "2.5", '"three"']
    assert ds[0]["tokens"].tolist() == [1, 2] and ds[1]["o"] == {"k": "v"} and ds[2]["o"] is None
    assert json.loads(ds.select(["json"])[1]["json"]) == lines[1]
    chosen = client.open(f"scratch/{scratch}/a.jsonl", columns=["text"], url=node.url)
    assert chosen[1] == {"text": "b"}
    schema = pyarrow.schema([("n", pyarrow.float32()), ("tokens", pyarrow.list_(pyarrow.int16()))])
    typed = client.open(f"scratch/{scratch}/a.jsonl", schema=schema, url=node.url)
    assert pyarrow.record_batch(typed.take([0, 1]).arrow()).schema.types == schema.types
    put("c/c.jsonl", b'{"u": -0}\n{"u": 18446744073709551615}\n{"u": null}\n{"u": -1}\n')
    unsigned = client.open(f"scratch/{scratch}/c/", schema={"u": "uint64"}, url=node.url)
    assert [r["u"] for r in unsigned.take([0, 1, 2])] == [0, 2**64 - 1, None]
    with pytest.raises(client.ServerError):
        unsigned[3]
    inferred = client.open(f"scratch/{scratch}/c/", url=node.url)
    assert inferred.schema["u"] == "Json" and inferred[1]["u"] == str(2**64 - 1)
    put("e/a.jsonl", b'{"u": 1}\n{"u": 0}\n')
    put("e/b.jsonl", b'{"u": 2}\n{"u": 18446744073709551615}\n')
    natural = client.open(f"scratch/{scratch}/e/", url=node.url)
    assert natural.schema["u"] == "UInt64"
    assert [r["u"] for r in natural] == [1, 0, 2, 2**64 - 1]
    put("f/a.jsonl", b'{"u": [1], "o": {"h": 7, "i": -1}}\n')
    put("f/b.jsonl", b'{"u": [18446744073709551615], "o": {"h": 9223372036854775808, "i": 2}}\n')
    deep = list(client.open(f"scratch/{scratch}/f/", url=node.url))
    assert [list(r["u"]) for r in deep] == [[1], [2**64 - 1]]
    assert [r["o"] for r in deep] == [{"h": 7, "i": -1}, {"h": 2**63, "i": 2}]
    put("d/d.jsonl", b'{"o": {"c": 1, "n": 2}}\n{"o": {"c": "x"}}\n')
    nested = client.open(f"scratch/{scratch}/d/", url=node.url)
    again = client.open(f"scratch/{scratch}/d/", schema=nested.schema, url=node.url)
    assert again.schema == nested.schema and "json" in nested.schema["o"]
    assert list(again) == list(nested)
    raw = client.open(source, schema={"json": "string"}, url=node.url)
    assert [json.loads(r["json"]) for r in raw][:2] == lines
    with pytest.raises(client.ServerError, match="row 0 of the file.*a string cannot be read"):
        client.open(source, schema={"n": pyarrow.float64()}, url=node.url)[2]


def test_nobody_opens_what_his_key_may_not_read(origin, origin_s3, scratch, tmp_path):
    for prefix in ("a", "b"):
        origin_s3.put_object(
            Bucket="scratch", Key=f"{scratch}/{prefix}/1.parquet", Body=parquet(10)
        )
    policies = {
        "root": None,
        "reader": [{"bucket": "scratch", "prefix": f"{scratch}/a/", "actions": ["read", "list"]}],
        "unlisted": [{"bucket": "scratch", "prefix": f"{scratch}/a/", "actions": ["read"]}],
    }
    keys = tmp_path / "keys.toml"
    replace(keys, keys_toml(policies))
    node = Node(origin.url, ["scratch"], tmp_path, options=["--set", f"auth.keys_file={keys}"])

    def ask(key: str, method: str, path: str, **kwargs) -> requests.Response:
        return requests.request(
            method,
            f"{node.url}/v1/datasets{path}",
            headers={"Authorization": f"Bearer token-of-{key}"},
            timeout=30,
            **kwargs,
        )

    try:
        of = {
            p: {"source": f"scratch/{scratch}/{p}"}
            for p in ("", "a/", "b/", "b/none*", "a/1.parquet")
        }
        everything = ask("root", "POST", "", json=of[""])
        mine = ask("reader", "POST", "", json=of["a/"])
        assert (everything.status_code, mine.status_code) == (200, 200)
        denied = [ask("reader", "POST", "", json=of[p]) for p in ("", "b/", "b/none*")]
        assert [d.status_code for d in denied] == [403] * 3
        assert ask("unlisted", "POST", "", json=of["a/"]).status_code == 403
        assert ask("unlisted", "POST", "", json=of["a/1.parquet"]).status_code == 200
        for what in ("", "/shape", "/manifest"):
            assert ask("reader", "GET", f"/{everything.json()['id']}{what}").status_code == 403
            assert ask("reader", "GET", f"/{mine.json()['id']}{what}").status_code == 200
        assert (
            len(ask("root", "GET", "").json()["datasets"])
            > len(ask("reader", "GET", "").json()["datasets"])
            > 0
        )
        assert (
            ask(
                "reader",
                "POST",
                f"/{mine.json()['id']}/manifest",
                params={"to": f"scratch/{scratch}/a/m"},
            ).status_code
            == 403
        )
        assert (
            requests.post(f"{node.url}/v1/datasets", json=of["a/"], timeout=30).status_code == 401
        )
    finally:
        node.stop()


def test_the_index_command(node, put, scratch):
    for i in range(3):
        put(f"d/{i}.parquet", parquet(25))
    put("d/bad.parquet", b"x" * 100)
    done = forebay(
        node,
        "index",
        f"s3://scratch/{scratch}/d/{{0..2}}.parquet",
        "--write-manifest",
        f"scratch/{scratch}/m",
    )
    assert done.returncode == 0, done.stderr
    assert (
        "75" in done.stdout and "id: Int64" in done.stdout and f"scratch/{scratch}/m" in done.stdout
    )
    answer = json.loads(forebay(node, "index", f"manifest:scratch/{scratch}/m", "--json").stdout)
    assert (answer["rows"], answer["files"], answer["format"]) == (75, 3, "parquet")
    failed = forebay(node, "index", f"scratch/{scratch}/d/")
    assert (
        failed.returncode == 1
        and "d/bad.parquet" in failed.stderr
        and "on_damaged" in failed.stderr
    )
    skipped = forebay(node, "index", f"scratch/{scratch}/d/", "--skip-damaged")
    assert (
        skipped.returncode == 0
        and "left out" in skipped.stdout
        and skipped.stdout.count("d/bad.parquet") == 1
    )
    assert forebay(node, "index", f"scratch/{scratch}/none/").returncode == 1
    assert forebay(node, "index").returncode == 2


def test_an_opening_takes_longer_than_the_timeout(origin, origin_s3, tmp_path, capsys):
    for i in range(20):
        body = b'{"id": %d}\n' % i
        origin_s3.put_object(Bucket="scratch", Key=f"slow-opening/{i:02}.jsonl", Body=body)
    node = Node(origin.url, ["scratch"], tmp_path)
    try:
        client = Client(node.url, timeout=5)
        assert client.buckets() == ["scratch"] and client.timeout == 5
        # The origin is silent for longer than the client waits for a silent node.
        origin.process.send_signal(signal.SIGSTOP)
        threading.Timer(11, lambda: origin.process.send_signal(signal.SIGCONT)).start()
        began = time.monotonic()
        ds = open_dataset("scratch/slow-opening/*.jsonl", client=client, progress=True)
        assert len(ds) == 20 and time.monotonic() - began > 9
        drawn = capsys.readouterr().err
        assert "opening scratch/slow-opening/*.jsonl" in drawn and "files" in drawn
        with pytest.raises(NotFound) as e:
            open_dataset("scratch/nothing-there/*.jsonl", client=client)
        assert e.value.status == 404 and "nothing-there" in str(e.value)
        # What describes no dataset is refused before the node is asked.
        with pytest.raises(InvalidRequest, match="nonsense") as e:
            open_dataset("scratch/slow-opening/*.jsonl", client=client, format="nonsense")
        assert e.value.status is None
    finally:
        origin.process.send_signal(signal.SIGCONT)
        node.stop()
