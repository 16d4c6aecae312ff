"""An S3 server of which no answer mixes two versions of an object: a proxy before one that does so
now and then.

versitygw over a directory reads an object's ETag by its name and opens the file later, so while the
object is overwritten, some answers have the ETag of one version and the bytes of the next. What a
node makes of them cannot be right, and would look like the node's mistake. The proxy remembers what
was written with which ETag. If an answer's body is something else, it breaks the connection
instead.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import sys
from collections import defaultdict, deque
from pathlib import Path

from servers import Process, Versitygw, accepts, free_port

#: Versions of one name that are remembered.
VERSIONS = 8
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HonestVersitygw(Versitygw):
    """versitygw behind the proxy: `url` is the proxy's."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        port = free_port()
        self.proxy = Process(
            "proxy", [sys.executable, __file__, str(port), str(self.port)], {}, directory
        )
        self.proxy.wait_until(lambda: accepts(port), "accepting connections")
        self.url = f"http://127.0.0.1:{port}"

    def stop(self, *args, **more) -> int:
        self.proxy.stop()
        return super().stop(*args, **more)

    def held_back(self) -> list[str]:
        """The requests whose answers were held back."""
        return [line.strip() for line in self.proxy.lines]


class Message:
    """A request or an answer."""

    def __init__(self, head: bytes) -> None:
        self.head, self.body = head, b""
        self.first, *lines = head.decode("latin-1").split("\r\n")
        self.headers = {
            name.strip().lower(): value.strip()
            for name, value in (line.split(":", 1) for line in lines if line)
        }

    @classmethod
    async def request(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Message:
        message = cls(await reader.readuntil(b"\r\n\r\n"))
        if "expect" in message.headers:
            writer.write(CONTINUE)
        await message.read_body(reader)
        return message

    @classmethod
    async def answer(cls, reader: asyncio.StreamReader, method: str) -> Message:
        """The answer to a request of `method`."""
        message = cls(await reader.readuntil(b"\r\n\r\n"))
        if message.status == 100:
            return await cls.answer(reader, method)
        if method != "HEAD" and message.status not in (204, 304):
            await message.read_body(reader)
        return message

    async def read_body(self, reader: asyncio.StreamReader) -> None:
        coding = self.headers.get("transfer-encoding", "") + self.headers.get(
            "content-encoding", ""
        )
        if "chunked" in coding:
            raise ValueError(f"{self.first}: a {coding} body, which this proxy does not read")
        self.body = await reader.readexactly(int(self.headers.get("content-length", 0)))

    @property
    def status(self) -> int:
        return int(self.first.split()[1])


class Written:
    """What was written with which ETag."""

    def __init__(self) -> None:
        self.versions: dict[str, deque[tuple[str, bytes]]] = defaultdict(
            lambda: deque(maxlen=VERSIONS)
        )
        self.parts: dict[str, dict[int, bytes]] = defaultdict(dict)

    def note(self, request: Message) -> None:
        """Called before the request is passed on: its effect may be visible before its answer."""
        method, target, _ = request.first.split()
        path, _, query = target.partition("?")
        upload, part = re.search(r"uploadId=([^&]+)", query), re.search(r"partNumber=(\d+)", query)
        if method == "PUT" and upload and part:
            self.parts[upload[1]][int(part[1])] = request.body
        elif method == "POST" and upload:
            parts = [body for _, body in sorted(self.parts.pop(upload[1], {}).items())]
            sums = b"".join(hashlib.md5(part).digest() for part in parts)
            self.versions[path].append(
                (f"{hashlib.md5(sums).hexdigest()}-{len(parts)}", b"".join(parts))
            )
        elif method == "PUT" and not query:
            self.versions[path].append((hashlib.md5(request.body).hexdigest(), request.body))

    def is_of(self, path: str, answer: Message) -> bool:
        """Whether the answer's bytes are those of its ETag."""
        etag = answer.headers["etag"].strip('"')
        span = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.headers.get("content-range", ""))
        start, size = (int(span[1]), int(span[3])) if span else (0, len(answer.body))
        return any(
            etag == written
            and size == len(body)
            and body[start : start + len(answer.body)] == answer.body
            for written, body in self.versions[path]
        )


async def forward(
    written: Written, upstream: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One connection of a client, and one to the server for it."""
    writers = [writer]
    try:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", upstream, limit=1 << 20)
        writers.append(to_server)
        while True:
            request = await Message.request(reader, writer)
            written.note(request)
            to_server.write(request.head + request.body)
            await to_server.drain()
            method, target, _ = request.first.split()
            answer = await Message.answer(from_server, method)
            path, _, query = target.partition("?")
            # Neither a list nor a bucket's properties: an object.
            if (
                method == "GET"
                and not query
                and path.count("/") > 1
                and answer.status in (200, 206)
                and not written.is_of(path, answer)
            ):
                print(target, request.headers.get("range", "whole"), flush=True)
                return
            writer.write(answer.head + answer.body)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        # One of the two ended the connection, so the other one ends too.
        pass
    finally:
        for one in writers:
            one.close()


async def serve(port: int, upstream: int) -> None:
    written = Written()
    server = await asyncio.start_server(
        lambda r, w: forward(written, upstream, r, w), "127.0.0.1", port, limit=1 << 20
    )
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    try:
        asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2])))
    except KeyboardInterrupt:
        pass
