"""A real node still says what it was recorded to say: whoever plays a node in a test answers so.

`FOREBAY_RECORD=1` writes `tests/recorded/answers.json` anew; look at what changed before you commit
it.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import struct
import tarfile
import time

import fakes
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import recorded
from scripted_node import tar_of
from servers import Node
from test_policies import locked_node

#: What differs from run to run, by the name of its field or header.
VARIES = {
    "admin",
    "ais-atime",
    "ais-location",
    "bytes",
    "dataset",
    "date",
    "etag",
    "forebay-sources",
    "host_id",
    "id",
    "last-modified",
    "last_modified_ms",
    "memory_bytes",
    "node",
    "node_id",
    "opened_ms",
    "remote_addr",
    "request_id",
    "s3",
    "server-timing",
    "size",
    "unix_socket",
    "version",
    "x-request-id",
}
FRAME_HEADER_BYTES = 64
FRAME_KINDS = {1: "rows", 2: "error", 3: "end", 4: "keep_alive"}


def still(value, name: str = ""):
    """The value without what differs from run to run."""
    if isinstance(value, dict):
        return {k: still(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [still(v) for v in value]
    if name in VARIES and value is not None:
        return f"<{name}>"
    if isinstance(value, str):
        return re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:<port>", value)
    return value


def ask(
    port: int, method: str, path: str, body: bytes | dict = b"", token: str | None = None, **headers
):
    """The answer, and its body as bytes."""
    if isinstance(body, dict):
        body = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
    if token:
        headers["Authorization"] = f"Bearer {token}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
    answer = connection.getresponse()
    return answer, answer.read()


def head(answer) -> dict:
    headers = {k.lower(): v for k, v in answer.getheaders()}
    # It depends on the length of the ids and addresses in the body.
    if headers.get("content-type", "").startswith("application/json"):
        headers.pop("content-length", None)
    return {"status": answer.status, "headers": dict(sorted(still(headers).items()))}


def said(*request, **how) -> dict:
    """An answer of JSON, or without a body."""
    answer, body = ask(*request, **how)
    return {**head(answer), "body": still(json.loads(body)) if body else None}


def frames(body: bytes) -> list[dict]:
    """The frames of a stream: kind, step, and what those without rows say."""
    found = []
    while body:
        magic, kind, _, _, step, rows, _, length = struct.unpack_from("<4sHHQQIIQ", body)
        assert magic == b"FBF1"
        payload = body[FRAME_HEADER_BYTES : FRAME_HEADER_BYTES + length]
        frame = {"kind": FRAME_KINDS[kind], "step": step, "rows": rows}
        if kind != 1:
            # Seconds and bytes of this run: only their names are promised.
            frame["payload"] = sorted(json.loads(payload))
        found.append(frame)
        body = body[FRAME_HEADER_BYTES + -(-length // 64) * 64 :]
    return found


@pytest.fixture(scope="module")
def locked(origin, tmp_path_factory):
    node = locked_node(origin, tmp_path_factory.mktemp("locked"))
    yield node
    node.stop()


@pytest.fixture(scope="module")
def full(origin, tmp_path_factory):
    """A node that takes one request at a time."""
    options = ["--set", "limits.requests_in_flight=1"]
    node = Node(origin.url, ["train"], tmp_path_factory.mktemp("full"), options=options)
    yield node
    node.stop()


@pytest.fixture(scope="module")
def rows(origin_s3):
    out = io.BytesIO()
    table = {"id": range(40), "data": [b"data"] * 40, "text": ["text"] * 40}
    pq.write_table(pa.table(table), out, row_group_size=10)
    origin_s3.put_object(Bucket="scratch", Key="recorded/rows.parquet", Body=out.getvalue())
    return {"sources": ["scratch/recorded/rows.parquet"]}


def busy(node: Node) -> dict:
    """What the node says while an answer that nobody reads is in flight."""
    # Far more than the sockets between us hold.
    names = [{"objname": "big/8MiB"}] * 8
    batch = json.dumps({"mime": ".tar", "in": names, "strm": True})
    connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=60)
    connection.request("POST", "/v1/ml/moss/train", batch, {"Content-Type": "application/json"})
    assert connection.getresponse().status == 200
    time.sleep(0.2)
    answer = said(node.port, "GET", "/v1/objects/train/one")
    connection.close()
    return answer


def stream(node: Node, rows: dict) -> dict:
    dataset = json.loads(ask(node.port, "POST", "/v1/datasets", rows)[1])["id"]
    request = {
        "plan": {"sources": [{"dataset": dataset}], "seed": 7},
        "partition": {"batch": {"rows": 10}},
        "until_epoch": 1,
    }
    answer, body = ask(node.port, "POST", "/v1/datasets/streams", request)
    return {**head(answer), "frames": frames(body)}


def opening(node: Node, rows: dict) -> dict:
    """The last line of an opening; the lines before it depend on how long it takes."""
    answer, body = ask(node.port, "POST", "/v1/datasets?progress=true", rows)
    *_, last = body.splitlines()
    return {**head(answer), "last": still(json.loads(last))}


def shape(node: Node, rows: dict) -> dict:
    """Rows per block, in the form that plans read."""
    dataset = json.loads(ask(node.port, "POST", "/v1/datasets", rows)[1])["id"]
    answer, body = ask(node.port, "GET", f"/v1/datasets/{dataset}/shape")
    return {**head(answer), "hex": body.hex()}


def manifest(node: Node, rows: dict) -> dict:
    dataset = json.loads(ask(node.port, "POST", "/v1/datasets", rows)[1])["id"]
    answer, body = ask(node.port, "GET", f"/v1/datasets/{dataset}/manifest")
    return {**head(answer), "lines": [still(json.loads(line)) for line in body.splitlines()]}


def all_that_is_recorded(node: Node, locked: Node, full: Node, rows: dict) -> dict:
    ask(node.port, "GET", "/v1/objects/train/one")
    ask(node.port, "POST", "/v1/datasets", rows)
    port = node.port
    streams = "/v1/datasets/streams"
    no_dataset = {
        "plan": {"sources": [{"dataset": "0" * 32}], "seed": 7},
        "partition": {"batch": {"rows": 10}},
    }
    return {
        "info": said(port, "GET", "/v1/forebay/info"),
        "object": head(ask(port, "GET", "/v1/objects/train/one")[0]),
        "batch": head(
            ask(
                port,
                "POST",
                "/v1/ml/moss/train",
                {"mime": ".tar", "in": [{"objname": "one"}], "strm": True},
            )[0]
        ),
        "no_such_object": said(port, "GET", "/v1/objects/train/no/such"),
        "bad_batch": said(port, "POST", "/v1/ml/moss/train", {"in": 7}),
        "no_such_range": said(port, "GET", "/v1/objects/train/one", Range="bytes=99999999-"),
        "not_offered": said(port, "POST", "/v1/dreams"),
        "no_key": said(locked.port, "GET", "/v1/objects/train/one"),
        "not_allowed": said(locked.port, "GET", "/v1/objects/train/one", token="token-of-nobody"),
        "busy": busy(full),
        "opening": opening(node, rows),
        "shape": shape(node, rows),
        "manifest": manifest(node, rows),
        "stream": stream(node, rows),
        "no_such_dataset": said(port, "POST", streams, no_dataset),
    }


def test_a_node_says_what_it_was_recorded_to_say(node, locked, full, rows):
    now = all_that_is_recorded(node, locked, full, rows)
    if os.environ.get("FOREBAY_RECORD"):
        recorded.FILE.parent.mkdir(exist_ok=True)
        recorded.FILE.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
    assert now == recorded.answers(), "FOREBAY_RECORD=1 records what nodes say now"


def test_the_shape_of_the_fake_is_the_nodes():
    fake = fakes.Client({"a": pa.table({"id": range(40)})})
    assert fake.dataset_shape("a-v1").hex() == recorded.answers()["shape"]["hex"]


def test_the_archive_of_the_fake_is_the_nodes(node, objects):
    """Byte for byte, including the reason of a missing entry."""
    long = "img/" + "0" * 120
    names = ["one", "img/0001.bin", "no/such", long]
    body = {"mime": ".tar", "in": [{"objname": n} for n in names], "strm": True, "coer": True}
    answer, sent = ask(node.port, "POST", "/v1/ml/moss/train", body, X_Forebay_Entry_Errors="pax")
    assert answer.status == 200
    with tarfile.open(fileobj=io.BytesIO(sent)) as tar:
        found = tar.getmembers()
    why = {m.name: m.pax_headers["FOREBAY.error"] for m in found if m.name.startswith("__404__/")}
    assert list(why) == ["__404__/train/no/such", f"__404__/train/{long}"]
    members = [(f"train/{n}", objects[n]) for n in names[:2]] + [(n, b"") for n in why]
    assert tar_of(members, why, {m.name: int(m.mtime) for m in found}) == sent
