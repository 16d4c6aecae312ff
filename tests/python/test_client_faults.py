"""The client against a node that refuses, stalls, breaks off or answers the wrong thing: always an
error with a reason, never a shorter batch.
"""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import forebay
import pytest
import recorded
from scripted_node import ScriptedNode, chunked, reply, tar_of
from servers import Node

OBJECTS = {f"bucket/k{i:03}": bytes([i]) * (i * 11) for i in range(100)}
NAMES = list(OBJECTS)


@pytest.fixture(name="real")
def real_node(origin, tmp_path):
    node = Node(origin.url, ["train"], tmp_path / "real")
    yield node
    node.stop()


@pytest.fixture
def node():
    with ScriptedNode(OBJECTS) as node:
        yield node


def cut_at(node: ScriptedNode, at: int):
    return lambda http, request: chunked(http, tar_of(node.members(http.path, request)), cut_at=at)


WHOLE = len(tar_of(list(OBJECTS.items())))


@pytest.mark.parametrize("at", [0, 1, 511, 512, 5000, WHOLE // 2, WHOLE - 1025, WHOLE - 1])
def test_a_stream_that_breaks_off_is_an_error(node, at):
    node.script.append(cut_at(node, at))
    batch = forebay.Client(node.url).batch(NAMES)
    got = []
    with pytest.raises(forebay.Truncated, match=r"of 100 entries had arrived") as caught:
        for item in batch:
            got.append(bytes(item))
    # What was handed out before the cut is right, and the iteration did not end as if that were
    # all.
    assert got == [OBJECTS[n] for n in NAMES[: len(got)]]
    assert caught.value.request_id == "scripted-1"
    with pytest.raises(forebay.Truncated):
        batch.wait()
    with pytest.raises(forebay.Truncated):
        memoryview(batch)


def test_a_stream_that_ends_properly_with_entries_missing_is_an_error(node):
    short = tar_of(list(OBJECTS.items())[:40])
    node.script.append(lambda http, request: chunked(http, short))
    with pytest.raises(forebay.Truncated, match="40 of 100 entries"):
        forebay.Client(node.url).batch(NAMES).wait()


def test_a_stream_without_the_end_of_archive_mark_is_an_error(node):
    unended = tar_of(list(OBJECTS.items())).rstrip(b"\0")
    unended += bytes(-len(unended) % 512)
    node.script.append(lambda http, request: chunked(http, unended))
    with pytest.raises(forebay.Truncated, match="ended early"):
        forebay.Client(node.url).batch(NAMES).wait()


def test_more_entries_than_asked_for_is_an_error(node):
    node.script.append(lambda http, request: chunked(http, tar_of(list(OBJECTS.items()))))
    with pytest.raises(forebay.Truncated, match="more entries"):
        forebay.Client(node.url).batch(NAMES[:99]).wait()


def test_entries_in_another_order_are_an_error(node):
    node.script.append(lambda http, request: chunked(http, tar_of(list(OBJECTS.items())[::-1])))
    with pytest.raises(forebay.Truncated, match="not what was requested"):
        forebay.Client(node.url).batch(NAMES).wait()


def test_a_damaged_header_is_an_error(node):
    damaged = bytearray(tar_of(list(OBJECTS.items())))
    damaged[512 + 3] ^= 0x40
    node.script.append(lambda http, request: chunked(http, bytes(damaged)))
    with pytest.raises(forebay.Truncated, match="checksum"):
        forebay.Client(node.url).batch(NAMES).wait()


def test_the_reason_that_the_node_put_into_the_stream_explains_a_cut(node):
    members = [("bucket/k000", OBJECTS["bucket/k000"]), ("__404__/bucket/k001", b"")]
    stream = tar_of(members, {"__404__/bucket/k001": "the origin closed the connection"})
    node.script.append(lambda http, request: chunked(http, stream, cut_at=len(stream) - 1024))
    with pytest.raises(forebay.Truncated, match="the origin closed the connection"):
        forebay.Client(node.url).batch(NAMES[:2] + ["bucket/never"]).wait()


def test_errors_of_entries_carry_the_nodes_words(node):
    members = [("bucket/k000", b"x"), ("__404__/bucket/k001", b""), ("bucket/k002", b"z")]
    node.script.append(
        lambda http, request: chunked(
            http, tar_of(members, {"__404__/bucket/k001": "403 from the origin"})
        )
    )
    batch = forebay.Client(node.url).batch(NAMES[:3], continue_on_error=True)
    assert [item.error for item in batch] == [None, "403 from the origin", None]
    assert batch.errors == [(1, "403 from the origin")]
    assert node.headers[-1]["x-forebay-entry-errors"] == "pax"
    assert batch[1].size == 0 and not batch[1] and batch[0]
    for use in (lambda: batch[1].data, lambda: bytes(batch[1]), lambda: memoryview(batch[1])):
        with pytest.raises(forebay.EntryFailed, match="403 from the origin"):
            use()


def test_a_refusal_is_retried_as_the_node_says(node):
    node.script += [lambda http, _: reply(http, *recorded.refusal("busy"))]
    began = time.monotonic()
    assert len(forebay.Client(node.url).batch(NAMES[:3]).wait()) == 3
    assert 0.9 < time.monotonic() - began < 30


def test_a_refusal_that_lasts_is_busy(node):
    node.script += [lambda http, _: reply(http, *recorded.refusal("busy"))] * 99
    said = recorded.answers()["busy"]["body"]
    began = time.monotonic()
    with pytest.raises(forebay.Busy, match="in flight") as caught:
        forebay.Client(node.url, timeout=6).batch(NAMES[:3])
    assert time.monotonic() - began < 30
    assert (caught.value.status, caught.value.message, caught.value.hint) == (
        429,
        said["message"],
        said["hint"],
    )


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("bad_batch", forebay.InvalidRequest),
        ("no_key", forebay.Unauthenticated),
        ("not_allowed", forebay.PermissionDenied),
        ("no_such_object", forebay.NotFound),
        ("no_such_range", forebay.RangeNotSatisfiable),
        ("not_offered", forebay.Unsupported),
    ],
)
def test_what_nodes_were_recorded_to_refuse_has_its_exception(node, name, error):
    node.script.append(lambda http, _: reply(http, *recorded.refusal(name)))
    said = recorded.answers()[name]
    with pytest.raises(error) as caught:
        forebay.Client(node.url).batch(NAMES[:1])
    assert type(caught.value) is error
    assert caught.value.status == said["status"]
    assert caught.value.message == said["body"]["message"].removeprefix("ais://")
    assert caught.value.hint == said["body"].get("hint")


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (400, "invalid", forebay.InvalidRequest),
        (401, "unauthenticated", forebay.Unauthenticated),
        (403, "permission_denied", forebay.PermissionDenied),
        (404, "bucket_not_found", forebay.NotFound),
        (409, "conflict", forebay.Conflict),
        (412, "precondition_failed", forebay.PreconditionFailed),
        (413, "too_large", forebay.TooLarge),
        (416, "range_not_satisfiable", forebay.RangeNotSatisfiable),
        (500, "internal", forebay.ServerError),
        (501, "unsupported", forebay.Unsupported),
        (502, "corrupt", forebay.Damaged),
        (504, "timeout", forebay.Timeout),
        # What no node says: the status counts.
        (409, "of_tomorrow", forebay.Conflict),
    ],
)
def test_each_kind_has_its_exception(node, status, code, error):
    document = recorded.error(status, code, "what happened", "what to do")
    node.script.append(lambda http, _: reply(http, status, document))
    with pytest.raises(error, match="what happened") as caught:
        forebay.Client(node.url).batch(NAMES[:1])
    assert type(caught.value) is error
    assert caught.value.status == status
    # The client may add to it.
    assert caught.value.hint.startswith("what to do")


def test_an_object_that_breaks_off_is_an_error(node):
    def half(http, _):
        http.send_response(200)
        http.send_header("X-Request-Id", "scripted-1")
        http.send_header("Content-Length", "1000")
        http.end_headers()
        http.wfile.write(b"x" * 500)
        http.close_connection = True

    node.script.append(half)
    with pytest.raises(forebay.Truncated):
        forebay.Client(node.url).get("bucket/k001")


def test_a_node_that_says_nothing_is_a_timeout(node):
    ends = threading.Event()
    node.script.append(lambda http, _: ends.wait(60))
    began = time.monotonic()
    with pytest.raises(forebay.Timeout, match="did not answer"):
        forebay.Client(node.url, timeout=0.5).batch(NAMES[:1])
    assert time.monotonic() - began < 30
    ends.set()


def test_a_node_that_stops_in_the_middle_is_a_timeout(node):
    ends = threading.Event()

    def stall(http, request):
        whole = tar_of(node.members(http.path, request))
        http.send_response(200)
        http.send_header("X-Request-Id", "scripted-1")
        http.send_header("Transfer-Encoding", "chunked")
        http.end_headers()
        http.wfile.write(b"%x\r\n%s\r\n" % (2000, whole[:2000]))
        http.wfile.flush()
        ends.wait(60)

    node.script.append(stall)
    batch = forebay.Client(node.url, timeout=3).batch(NAMES)
    assert bytes(batch[0]) == OBJECTS[NAMES[0]]
    with pytest.raises(forebay.Timeout, match="in the middle"):
        batch.wait()
    ends.set()


def test_a_kept_connection_that_the_node_has_closed_is_replaced(node):
    client = forebay.Client(node.url)

    def last_answer(http, request):
        chunked(http, tar_of(node.members(http.path, request)))
        http.close_connection = True

    for _ in range(5):
        node.script.append(last_answer)
        assert len(client.batch(NAMES[:2]).wait()) == 2


def test_nobody_there_is_a_connection_error():
    with ScriptedNode() as gone:
        url = gone.url
    with pytest.raises(forebay.ConnectionFailed, match="cannot connect.*is the node running"):
        forebay.Client(url).get("bucket/key")
    with pytest.raises(ConnectionError):
        forebay.Client("unix:/nonexistent/forebay.sock").get("bucket/key")


def test_entries_can_be_read_before_the_last_has_arrived(node):
    go_on = threading.Event()

    def in_two_parts(http, request):
        whole = tar_of(node.members(http.path, request))
        http.send_response(200)
        http.send_header("X-Request-Id", "scripted-1")
        http.send_header("Transfer-Encoding", "chunked")
        http.end_headers()
        for part in (whole[:20_000], whole[20_000:]):
            http.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            http.wfile.flush()
            go_on.wait(60)
        http.wfile.write(b"0\r\n\r\n")

    node.script.append(in_two_parts)
    batch = forebay.Client(node.url).batch(NAMES)
    early = batch[10].data
    assert bytes(early) == OBJECTS[NAMES[10]] and not batch.done and batch.arrived < 100
    with pytest.raises(forebay.Timeout, match="of 100 entries arrived"):
        batch.wait(timeout=0.1)
    go_on.set()
    assert batch.wait().arrived == 100 and bytes(early) == OBJECTS[NAMES[10]]


def test_batches_ahead_are_bounded_in_bytes(node):
    node.objects = {f"bucket/big{i}": bytes([i]) * 2_000_000 for i in range(6)}
    client = forebay.Client(node.url, max_inflight_bytes=3_000_000)
    batches = [client.batch_async([name]) for name in node.objects]
    deadline = time.monotonic() + 60
    while client.inflight_bytes < 3_000_000 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    # A batch that is already reading may exceed the limit by the piece that it is handling.
    assert 3_000_000 <= client.inflight_bytes < 3_000_000 + 6 * 1_100_000
    assert not all(b.done for b in batches)
    # In whatever order they are asked for, each gets through.
    for i in reversed(range(6)):
        assert bytes(batches[i][0]) == bytes([i]) * 2_000_000
    assert client.inflight_bytes == 0


def test_a_batch_that_is_dropped_is_given_up(node):
    begun, stopped = threading.Event(), threading.Event()

    def endless(http, request):
        begun.set()
        http.send_response(200)
        http.send_header("X-Request-Id", "scripted-1")
        http.send_header("Transfer-Encoding", "chunked")
        http.end_headers()
        try:
            while True:
                http.wfile.write(b"3e8\r\n" + bytes(1000) + b"\r\n")
                time.sleep(0.001)
        except OSError:
            stopped.set()

    node.script.append(endless)
    batch = forebay.Client(node.url).batch_async(NAMES)
    assert begun.wait(60)
    time.sleep(0.2)
    del batch
    assert stopped.wait(60)


def test_the_local_socket_is_used_only_if_it_leads_to_the_same_node(node, real, tmp_path):
    host = json.loads(urllib.request.urlopen(f"{real.url}/v1/forebay/info").read())["host_id"]
    # On this machine, by its own account, but with the socket of another node, or a missing one.
    for socket in (real.socket, tmp_path / "none.sock"):
        node.info = recorded.info(node_id="n1", host_id=host, unix_socket=str(socket))
        client = forebay.Client(node.url)
        assert client.route == node.url
        assert bytes(client.get("bucket/k001")) == OBJECTS["bucket/k001"]


class Foreign(BaseHTTPRequestHandler):
    """Another server than a node: its answers have no id, or are pages."""

    answer = (404, "404 page not found", {})

    def handle_any(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, text, headers = self.answer
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text.encode())

    do_GET = do_POST = do_PUT = do_HEAD = handle_any

    def log_message(self, *of) -> None:
        pass


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ((404, "404 page not found\n", {}), "404 page not found"),
        ((404, '{"detail": "Not Found"}', {}), "Not Found"),
        (
            (501, "<!DOCTYPE HTML>\n<html><head><style>x</style></head>No POST</html>", {}),
            "No POST",
        ),
        (
            (
                404,
                "<?xml version='1.0'?><Error><Code>NoSuchBucket</Code></Error>",
                {"x-amz-request-id": "17E"},
            ),
            "NoSuchBucket",
        ),
        # Who answers like this to everything: a portal that one has to sign in at, say.
        ((200, "<html><title>Sign in</title></html>", {}), "it said 200 (Sign in)"),
        ((200, "", {}), "it said 200"),
        ((200, "[]", {}), "it said 200 ([])"),
    ],
)
def test_an_answer_of_another_server_is_told_as_one(answer, shown, monkeypatch):
    monkeypatch.setattr(Foreign, "answer", answer)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Foreign)
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    ).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("FOREBAY_NODE", url)
    try:
        client = forebay.Client()
        for attempt in (
            lambda: forebay.open("bucket/**.parquet"),
            lambda: client.get("bucket/key"),
            lambda: client.put("bucket/key", b"data"),
            lambda: client.buckets(),
            lambda: client.batch(["bucket/key"]).wait(),
            lambda: forebay.checkpoint.load("bucket/checkpoint"),
        ):
            with pytest.raises(forebay.Error, match="is not a Forebay node") as caught:
                attempt()
            said = caught.value
            assert shown in said.message and "<" not in said.message
            assert url.removeprefix("http://") in said.message and said.status == answer[0]
            again = pickle.loads(pickle.dumps(said))
            assert str(again) == str(said) and type(again) is type(said)
    finally:
        server.shutdown()
        server.server_close()


def test_commands_hint_at_the_address_where_something_else_answers(monkeypatch):
    """Also where its answers have an id, as servers behind some proxies give one."""
    page = (200, "<html>Sign in</html>", {"X-Request-Id": "1", "Content-Type": "text/plain"})
    monkeypatch.setattr(Foreign, "answer", page)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Foreign)
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    ).start()
    node = f"--node=http://127.0.0.1:{server.server_address[1]}"
    try:
        for command in (
            "ls",
            "index bk/*.parquet",
            "warm bk/x",
            "show bk/x/",
            "reshard bk/x/ bk/y/",
        ):
            arguments = [sys.executable, "-m", "forebay", *command.split(), node]
            done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
            assert done.returncode == 1, (command, done.stderr)
            assert re.search("hint: check .*Forebay node of this version", done.stderr), command
    finally:
        server.shutdown()
        server.server_close()


def test_memory_that_was_written_can_be_resized_at_once():
    size, writes = 256 << 10, 100
    with ScriptedNode() as node:
        upload = forebay.Client(node.url)._upload("PUT", "/v1/objects/bucket/new", size * writes)
        node.script.append(lambda http, body: reply(http, 200, b"taken"))
        for i in range(writes):
            data = bytearray([i]) * size
            assert upload.write(data) == size
            # Python refuses this while anything has a view of it.
            data.clear()
        assert bytes(upload.finish()) == b"taken"
    assert node.requests[-1][2] == b"".join(bytes([i]) * size for i in range(writes))
