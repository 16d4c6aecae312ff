"""A node whose every answer is scripted: for what a healthy node does not do (refuse, stall, break
off, answer the wrong thing).

It speaks just enough of the wire format for the client to be tested against faults, in the words
that a real node was recorded to say (`recorded.py`). What a healthy node does is tested against the
real one.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

import recorded

BLOCK = 512


def tar_block(name: bytes, prefix: bytes, size: int, mtime: int, kind: bytes) -> bytes:
    """One header, as the node writes it: mode 0644, owner 0, no names of users."""
    fields = [
        name.ljust(100, b"\0"),
        b"0000644\0" + b"0000000\0" * 2,
        b"%011o\0%011o\0" % (size, mtime),
        b" " * 8,
        kind.ljust(101, b"\0"),
        b"ustar\x0000".ljust(72, b"\0"),
        b"0000000\0" * 2,
        prefix.ljust(155, b"\0"),
    ]
    block = b"".join(fields).ljust(BLOCK, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def tar_records(records: dict[str, str]) -> bytes:
    """PAX records. Each begins with its length, which counts its own digits."""
    out = b""
    for keyword, value in records.items():
        rest = f" {keyword}={value}\n".encode()
        length = len(rest) + len(str(len(rest)))
        length = len(rest) + len(str(length))
        out += str(length).encode() + rest
    return out


def tar_of(
    members: list[tuple[str, bytes]],
    errors: dict[str, str] | None = None,
    mtimes: dict[str, int] | None = None,
) -> bytes:
    """A tar archive, byte for byte as the node sends it (`test_recorded.py` compares them);
    `errors` are PAX records in front of their members.
    """
    out = bytearray()
    for name, data in members:
        prefix, short, records = "", name, {}
        if len(name) > 100:
            slash = name.find("/", len(name) - 101, -1)
            if 1 <= slash <= 155:
                prefix, short = name[:slash], name[slash + 1 :]
            else:
                short, records["path"] = name[:100], name
        if errors and name in errors:
            records["FOREBAY.error"] = errors[name]
        if records:
            text = tar_records(records)
            out += tar_block(b"././@PaxHeader", b"", len(text), 0, b"x")
            out += text + bytes(-len(text) % BLOCK)
        mtime = (mtimes or {}).get(name, 0)
        out += tar_block(short.encode(), prefix.encode(), len(data), mtime, b"0")
        out += data + bytes(-len(data) % BLOCK)
    return bytes(out) + bytes(2 * BLOCK)


class ScriptedNode:
    """Serves `objects` ({"bucket/key": bytes}); `script` is a list of functions, each taking over
    one batch request.
    """

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self.objects = dict(objects or {})
        self.script: list = []
        self.requests: list[tuple[str, str, bytes]] = []
        self.headers: list = []
        self.info: dict | None = None
        node = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args) -> None:
                pass

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                node.requests.append((self.command, self.path, body))
                node.headers.append(dict(self.headers))
                node.answer(self, body)

            do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = handle_any

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request, client_address) -> None:
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def answer(self, http, body: bytes) -> None:
        if http.path == "/v1/forebay/info":
            # Without it: a server that does not know this question.
            if self.info is None:
                return reply(http, 404, b"")
            return reply(http, 200, json.dumps(self.info).encode())
        if http.path.startswith("/v1/ml/moss"):
            request = json.loads(body)
            if self.script:
                return self.script.pop(0)(http, request)
            return chunked(http, tar_of(self.members(http.path, request)))
        name = http.path.removeprefix("/v1/objects/")
        if self.script:
            return self.script.pop(0)(http, body)
        if name not in self.objects:
            status, document, headers = recorded.refusal("no_such_object")
            return reply(http, status, document, headers)
        reply(http, 200, self.objects[name])

    def members(self, path: str, request: dict) -> list[tuple[str, bytes]]:
        default = path.removeprefix("/v1/ml/moss").strip("/")
        members = []
        for entry in request["in"]:
            name = f"{entry.get('bucket', default)}/{entry['objname']}"
            if entry.get("archpath"):
                name += "/" + entry["archpath"]
            data = self.objects.get(name)
            members.append((name, data) if data is not None else (f"__404__/{name}", b""))
        return members


def reply(http, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    http.send_response(status)
    http.send_header("Content-Length", str(len(body)))
    http.send_header("X-Request-Id", "scripted-1")
    for name, value in (headers or {}).items():
        http.send_header(name, value)
    http.end_headers()
    if http.command != "HEAD":
        http.wfile.write(body)


def chunked(
    http, body: bytes, *, piece: int = 1000, pause: float = 0, cut_at: int | None = None
) -> None:
    """Sends `body` in chunks; `cut_at` breaks the connection off after so many bytes."""
    http.send_response(200)
    http.send_header("Transfer-Encoding", "chunked")
    http.send_header("X-Request-Id", "scripted-1")
    http.end_headers()
    for at in range(0, len(body) if cut_at is None else cut_at, piece):
        part = body[at : min(at + piece, len(body) if cut_at is None else cut_at)]
        http.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        http.wfile.flush()
        if pause:
            time.sleep(pause)
    if cut_at is None:
        http.wfile.write(b"0\r\n\r\n")
    else:
        http.close_connection = True
        http.connection.shutdown(socket.SHUT_RDWR)
