"""Uploads to a node with keys: what they cost of its memory while they come, and that what is wrong
with them is found.
"""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
from hostile import signed
from servers import Node

MIB = 1 << 20
BUDGET = 64 * MIB
# Besides the buffers: the heap's slack, and what each thread keeps.
SLACK = 48 * MIB


@pytest.fixture
def node(tmp_path):
    (tmp_path / "data").mkdir()
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\naccess_key = "AK"\nsecret_key = "secret"\n')
    keys.chmod(0o600)
    options = ["--origin", f"file://{tmp_path / 'data'}", "--set", f"auth.keys_file={keys}"]
    options += ["--memory", "64MiB"]
    server = Node("", [], tmp_path / "node", options=options)
    server.data = tmp_path / "data"
    yield server
    server.stop()


def head(node: Node, key: str, payload: str, length: int, decoded: int, more=()) -> bytes:
    variables = {"HOST": f"127.0.0.1:{node.port}"}
    lines = [b"x-amz-decoded-content-length: %d" % decoded, b"content-encoding: aws-chunked", *more]
    options = {"access": "AK", "secret": "secret", "payload": payload}
    target, lines = signed(options, b"PUT", f"/data/{key}".encode(), lines, b"", variables)
    lines.append(b"Content-Length: %d" % length)
    return b"\r\n".join([b"PUT " + target + b" HTTP/1.1", *lines, b"", b""])


def anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


def send(node: Node, first: bytes, size: int, last: bytes) -> tuple[str, int]:
    """Sends `first`, `size` bytes and `last`; the answer, and by how much the node's memory grew at
    most.
    """
    pid, stop = node.process.pid, threading.Event()
    before = anonymous_bytes(pid)
    most = [before]

    def watch():
        while not stop.wait(0.01):
            most[0] = max(most[0], anonymous_bytes(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with socket.create_connection(("127.0.0.1", node.port), timeout=60) as connection:
            try:
                connection.sendall(first)
                piece = b"x" * MIB
                for _ in range(size // MIB):
                    connection.sendall(piece)
                connection.sendall(last)
            except OSError:
                pass  # The node had enough.
            answer = b""
            deadline = time.monotonic() + 60
            while b"\r\n\r\n" not in answer and time.monotonic() < deadline:
                got = connection.recv(65536)
                if not got:
                    break
                answer += got
            return answer.decode("latin-1"), most[0] - before
    finally:
        stop.set()
        watcher.join()


def test_a_large_unsigned_chunk_takes_no_memory_on_a_node_with_keys(node):
    size = 256 * MIB
    chunk, end = b"%x\r\n" % size, b"\r\n0\r\nx-amz-checksum-crc32:%s\r\n\r\n"
    import base64
    import zlib

    crc = 0
    for _ in range(size // MIB):
        crc = zlib.crc32(b"x" * MIB, crc)
    for name, sum_, status in [("good", crc, 200), ("bad", crc ^ 1, 400)]:
        last = end % base64.b64encode(sum_.to_bytes(4, "big"))
        length = len(chunk) + size + len(last)
        first = head(
            node,
            name,
            "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
            length,
            size,
            [b"x-amz-trailer: x-amz-checksum-crc32"],
        )
        answer, grown = send(node, first + chunk, size, last)
        assert answer.startswith(f"HTTP/1.1 {status}"), answer
        assert grown < BUDGET + SLACK, f"{grown >> 20} MiB"
    assert (node.data / "good").stat().st_size == size
    assert not (node.data / "bad").exists()


def test_a_chunk_that_is_signed_by_itself_is_not_too_large(node):
    size = 128 * MIB
    chunk = b"%x;chunk-signature=%s\r\n" % (size, b"0" * 64)
    first = head(node, "k", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD", len(chunk) + size + 100, size)
    answer, grown = send(node, first + chunk, size, b"\r\n")
    assert answer.startswith("HTTP/1.1 400"), answer
    assert grown < SLACK, f"{grown >> 20} MiB"
    assert not (node.data / "k").exists()
