"""A node whose every answer is scripted: for what a healthy node does not do (refuse, stall, break off, answer the wrong thing).

It speaks just enough of the wire format for the client to be tested against faults. What a healthy node does is tested against the real one.
"""

from __future__ import annotations

import io
import json
import socket
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def tar_of(members: list[tuple[str, bytes]], errors: dict[str, str] | None = None) -> bytes:
    """A tar archive as the node would send it; `errors` become PAX records in front of their members."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            if errors and name in errors:
                info.pax_headers = {"FOREBAY.error": errors[name]}
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


class ScriptedNode:
    """Serves `objects` ({"bucket/key": bytes}); `script` is a list of functions, each taking over one batch request."""

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

    def __enter__(self) -> ScriptedNode:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def answer(self, http, body: bytes) -> None:
        if http.path == "/v1/forebay/info":
            return reply(
                http, 404 if self.info is None else 200, json.dumps(self.info or {}).encode()
            )
        if http.path.startswith("/v1/ml/moss"):
            request = json.loads(body)
            if self.script:
                return self.script.pop(0)(http, request)
            return chunked(http, tar_of(self.members(http.path, request)))
        name = http.path.removeprefix("/v1/objects/")
        if self.script:
            return self.script.pop(0)(http, body)
        if name not in self.objects:
            return reply(
                http,
                404,
                json.dumps(
                    {
                        "message": f"{name}: no such object",
                        "hint": "look at the list",
                        "status": 404,
                    }
                ).encode(),
            )
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
