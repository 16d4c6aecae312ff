"""The proxy that keeps the load tests' origin from mixing versions (`honest.py`)."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import honest
import pytest
from conftest import s3_client
from scripted_node import reply
from servers import free_port


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = honest.HonestVersitygw(tmp_path_factory.mktemp("honest"))
    (server.directory / "data").mkdir()
    yield server
    server.stop()


def test_what_a_server_says_rightly_is_passed_on(server):
    s3 = s3_client(server.url)
    s3.put_object(Bucket="data", Key="a/b c", Body=b"0123456789")
    assert s3.get_object(Bucket="data", Key="a/b c")["Body"].read() == b"0123456789"
    assert s3.get_object(Bucket="data", Key="a/b c", Range="bytes=3-5")["Body"].read() == b"345"
    assert s3.head_object(Bucket="data", Key="a/b c")["ContentLength"] == 10
    assert [o["Key"] for o in s3.list_objects_v2(Bucket="data")["Contents"]] == ["a/b c"]
    s3.put_object(Bucket="data", Key="a/b c", Body=b"")
    assert s3.get_object(Bucket="data", Key="a/b c")["Body"].read() == b""
    upload = s3.create_multipart_upload(Bucket="data", Key="large")["UploadId"]
    pieces = [b"x" * (5 << 20), b"y" * 1000]
    parts = [
        {
            "PartNumber": n,
            "ETag": s3.upload_part(
                Bucket="data", Key="large", UploadId=upload, PartNumber=n, Body=piece
            )["ETag"],
        }
        for n, piece in enumerate(pieces, 1)
    ]
    s3.complete_multipart_upload(
        Bucket="data", Key="large", UploadId=upload, MultipartUpload={"Parts": parts}
    )
    assert s3.get_object(Bucket="data", Key="large")["Body"].read() == b"".join(pieces)
    assert (
        s3.get_object(Bucket="data", Key="large", Range=f"bytes={(5 << 20) - 1}-{5 << 20}")[
            "Body"
        ].read()
        == b"xy"
    )
    s3.delete_object(Bucket="data", Key="large")
    with pytest.raises(s3.exceptions.NoSuchKey):
        s3.get_object(Bucket="data", Key="large")
    assert server.held_back() == []


class Mixing(BaseHTTPRequestHandler):
    """Answers with the ETag of the first version and the bytes of the last."""

    protocol_version = "HTTP/1.1"
    bodies: list[bytes] = []

    def do_PUT(self):
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        reply(self, 200, b"")

    def do_GET(self):
        reply(self, 200, self.bodies[-1], {"ETag": f'"{hashlib.md5(self.bodies[0]).hexdigest()}"'})

    def log_message(self, *args):
        pass


def test_an_answer_of_two_versions_is_held_back(capsys):
    upstream = ThreadingHTTPServer(("127.0.0.1", 0), Mixing)
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    port = free_port()
    loop = asyncio.new_event_loop()
    proxy = threading.Thread(
        target=lambda: loop.run_until_complete(honest.serve(port, upstream.server_port)),
        daemon=True,
    )
    proxy.start()

    def request(method: str, body: bytes | None = None) -> bytes:
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            try:
                connection.request(method, "/bucket/key", body)
                return connection.getresponse().read()
            except ConnectionRefusedError:
                continue
            finally:
                connection.close()

    request("PUT", b"first")
    assert request("GET") == b"first"
    request("PUT", b"other")
    with pytest.raises(http.client.RemoteDisconnected):
        request("GET")
    assert capsys.readouterr().out == "/bucket/key whole\n"
    upstream.shutdown()
