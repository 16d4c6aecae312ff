"""A server that speaks the Hugging Face Hub's HTTP API for reading data sets, as far as `hf://` and
the Hub's own library use it; `test_hub.py` reads it by both.

One repository. Its large files are elsewhere, as the Hub's are: at a second server, by addresses
that are signed and expire.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

#: Files of so many bytes or more are large (LFS).
LARGE_BYTES = 1000


def git_id(data: bytes) -> str:
    """What git calls a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub:
    """`files` are those of the newest commit. Listings come in pages of `page` names.

    As the Hub does it, a file's address leads somewhere else: that of a large one to another host,
    that of a small one to an address of the Hub that has the commit in it.
    """

    def __init__(self, name: str, files: dict[str, bytes], *, page: int = 3) -> None:
        self.name, self.page = name, page
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.commit(files)
        #: Who reads needs it, if there is one.
        self.token: str | None = None
        #: Former names lead to this one.
        self.renamed_from: str | None = None
        self.valid_seconds, self.expired = 3600.0, 0
        #: Method and path of each request to the Hub, and to where the large files are.
        self.asked: list[str] = []
        self.asked_elsewhere: list[str] = []
        #: Names of headers that went elsewhere, in lower case.
        self.sent_elsewhere: set[str] = set()
        #: How many requests for files are refused yet because there were too many.
        self.too_many = 0
        #: The length of each body of a file.
        self.sent_bytes: list[int] = []
        self._elsewhere = _serve(self._answer_elsewhere)
        self._hub = _serve(self._answer)
        self.url = f"http://127.0.0.1:{self._hub.server_port}"

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        text = json.dumps({path: git_id(data) for path, data in sorted(files.items())})
        commit = hashlib.sha1(text.encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.branches[branch] = commit
        return commit

    def stop(self) -> None:
        for server in (self._hub, self._elsewhere):
            server.shutdown()
            server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(f"{request.command} {request.path}")
        path = urlsplit(request.path).path
        if self.renamed_from and f"/{self.renamed_from}/" in path:
            to = request.path.replace(self.renamed_from, self.name)
            return _send(request, 307, b"", {"Location": to})
        is_known = f"/{self.name}/" in f"{path}/"
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            is_known = False
        # The Hub counts files ("resolvers") apart from listings, of which a node makes one at its
        # start.
        if self.too_many and "/resolve" in path:
            self.too_many -= 1
            limit = {"RateLimit": '"resolvers";r=0;t=1', "RateLimit-Policy": '"fixed window"'}
            return _send(request, 429, b"", limit)
        if not is_known and "Authorization" not in request.headers:
            # What is not there and what may not be seen is one.
            return _refuse(request, 401, "", "Invalid username or password.")
        if not is_known:
            return _refuse(request, 404, "RepoNotFound", "Repository not found")
        if path == f"/api/datasets/{self.name}":
            commit = self.branches["main"]
            return _json(request, {"id": self.name, "sha": commit, "siblings": [], "tags": []})
        api = re.fullmatch(rf"/api/datasets/{self.name}/([a-z-]+)/([^/]+)/?(.*)", path)
        file = re.fullmatch(rf"/datasets/{self.name}/resolve/([^/]+)/(.+)", path)
        file = file or re.fullmatch(rf"/api/resolve-cache/{self.name}/([^/]+)/(.+)", path)
        revision = unquote((api[2] if api else file[1]) if api or file else "")
        commit = self.branches.get(revision, revision)
        files = self.commits.get(commit)
        if files is None:
            return _refuse(request, 404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if file:
            return self._file(request, commit, files, unquote(file[2]))
        if api and api[1] == "revision":
            return _json(request, {"id": self.name, "sha": commit, "siblings": [], "tags": []})
        if api and api[1] == "paths-info":
            length = int(request.headers["Content-Length"])
            asked = parse_qs(request.rfile.read(length).decode())["paths"]
            found = [e for e in _tree(files, "", recursive=True) if e["path"] in asked]
            return _json(request, found)
        if api and api[1] == "tree":
            return self._tree(request, files, unquote(api[3]))
        return _refuse(request, 404, "", "no such thing")

    def _tree(self, request: BaseHTTPRequestHandler, files: dict[str, bytes], path: str) -> None:
        query = {key: values[0] for key, values in parse_qs(urlsplit(request.path).query).items()}
        recursive = query.get("recursive", "").lower() in ("true", "1")
        entries = _tree(files, f"{path}/" if path else "", recursive)
        if not entries:
            return _refuse(request, 404, "EntryNotFound", f"{path} does not exist")
        begin = int(query.get("cursor", "0"))
        end = begin + self.page
        headers = {}
        if end < len(entries):
            address = f"{self.url}{urlsplit(request.path).path}?recursive={recursive}&cursor={end}"
            headers["Link"] = f'<{address}>; rel="next"'
        return _json(request, entries[begin:end], headers)

    def _file(
        self, request: BaseHTTPRequestHandler, commit: str, files: dict[str, bytes], path: str
    ) -> None:
        data = files.get(path)
        if data is None:
            return _refuse(request, 404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit}
        if len(data) < LARGE_BYTES:
            etag = f'"{git_id(data)}"'
            if not request.path.startswith("/api/"):
                to = f"/api/resolve-cache/{self.name}/{commit}/{quote(path)}"
                headers |= {"X-Linked-Etag": etag, "Location": to}
                return _send(request, 307, b"Temporary Redirect", headers)
            if request.headers.get("If-None-Match") == etag:
                return _send(request, 304, b"", headers | {"ETag": etag})
            return self._bytes(request, data, headers | {"ETag": etag})
        digest = hashlib.sha256(data).hexdigest()
        until = time.time() + self.valid_seconds
        place = f"http://127.0.0.1:{self._elsewhere.server_port}/{digest}?until={until}"
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        headers |= {"ETag": f'"{git_id(b"a pointer to " + digest.encode())}"', "Location": place}
        return _send(request, 302, b"Found. Redirecting", headers)

    def _answer_elsewhere(self, request: BaseHTTPRequestHandler) -> None:
        self.asked_elsewhere.append(f"{request.command} {urlsplit(request.path).path}")
        self.sent_elsewhere |= {name.lower() for name in request.headers}
        parts = urlsplit(request.path)
        if float(parse_qs(parts.query)["until"][0]) < time.time():
            self.expired += 1
            return _send(request, 403, b"Request has expired", {})
        for files in self.commits.values():
            for data in files.values():
                if hashlib.sha256(data).hexdigest() == parts.path[1:]:
                    # Its own ETag is of no use.
                    return self._bytes(request, data, {"ETag": '"of-another-kind"'})
        return _send(request, 404, b"", {})

    def _bytes(self, request: BaseHTTPRequestHandler, data: bytes, headers: dict[str, str]) -> None:
        headers = {**headers, "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if asked is None:
            return self._body(request, 200, data, headers)
        begin, end = int(asked[1]), min(int(asked[2] or len(data)) + 1, len(data))
        if begin >= len(data):
            return _send(request, 416, b"", {"Content-Range": f"bytes */{len(data)}"})
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        return self._body(request, 206, data[begin:end], headers)

    def _body(
        self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]
    ) -> None:
        if request.command == "GET":
            self.sent_bytes.append(len(body))
        _send(request, status, body, headers)


def _tree(files: dict[str, bytes], prefix: str, recursive: bool) -> list[dict]:
    entries = {}
    for path, data in files.items():
        if not path.startswith(prefix):
            continue
        rest = path[len(prefix) :].split("/")
        directories = rest[:-1] if recursive else rest[:1] if len(rest) > 1 else []
        for depth in range(len(directories)):
            directory = prefix + "/".join(rest[: depth + 1])
            entries[directory] = {"type": "directory", "oid": "0" * 40, "size": 0}
        if recursive or len(rest) == 1:
            entry = {"type": "file", "oid": git_id(data), "size": len(data)}
            if len(data) >= LARGE_BYTES:
                digest = hashlib.sha256(data).hexdigest()
                entry["oid"] = git_id(b"a pointer to " + digest.encode())
                entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 130}
            entries[path] = entry
    # The order is git's, in which a directory's name ends in a slash.
    order = sorted(entries, key=lambda p: p + "/" * (entries[p]["type"] == "directory"))
    return [{**entries[path], "path": path} for path in order]


def _serve(answer: Callable[[BaseHTTPRequestHandler], None]) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            answer(self)

        do_HEAD = do_POST = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _send(
    request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]
) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


def _json(request: BaseHTTPRequestHandler, value, headers: dict[str, str] | None = None) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8", **(headers or {})}
    _send(request, 200, json.dumps(value).encode(), headers)


def _refuse(request: BaseHTTPRequestHandler, status: int, code: str, message: str) -> None:
    headers = {"X-Error-Code": code, "X-Error-Message": message}
    _send(request, status, json.dumps({"error": message}).encode(), headers)
