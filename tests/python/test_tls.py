"""TLS on the node's ports: unmodified clients, a CA of our own, and certificates that change while
the node runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

import boto3
import forebay
import pytest
import requests
from botocore.config import Config
from botocore.exceptions import SSLError
from certificates import Authority
from servers import Node, forebay_program


def install(files: tuple[Path, Path], at: Path) -> None:
    """Puts certificate and key where the node looks for them, each in one step."""
    for source, name in zip(files, ("node.pem", "node.key"), strict=True):
        shutil.copy(source, at / f"{name}.new")
        (at / f"{name}.new").rename(at / name)


class TlsNode(Node):
    def __init__(self, origin, directory: Path, files: tuple[Path, Path], *settings: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        install(files, directory)
        settings = (
            f"tls.cert={directory / 'node.pem'}",
            f"tls.key={directory / 'node.key'}",
            *settings,
        )
        options = [word for setting in settings for word in ("--set", setting)]
        # Without a Unix socket, to which clients on this machine would switch.
        super().__init__(
            origin.url, ["train", "scratch"], directory, options=options, socket=Path("off")
        )
        self.url = f"https://127.0.0.1:{self.port}"

    def certificate(self) -> bytes:
        """The certificate that a new connection is shown."""
        return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", self.port)))


def der(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "good")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "stranger")


@pytest.fixture(scope="module")
def secure(origin, authority, tmp_path_factory):
    node = TlsNode(origin, tmp_path_factory.mktemp("tls"), authority.issue("first"))
    yield node
    node.stop()


def s3_of(node, verify):
    config = Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1})
    return boto3.client("s3", endpoint_url=node.url, verify=str(verify), config=config)


def test_boto3_trusts_the_ca_that_it_is_given(secure, authority, stranger, objects):
    s3 = s3_of(secure, authority.file)
    assert s3.get_object(Bucket="train", Key="big/8MiB")["Body"].read() == objects["big/8MiB"]
    s3.put_object(Bucket="scratch", Key="tls/put", Body=objects["big/chunk+1"])
    assert s3.get_object(Bucket="scratch", Key="tls/put")["Body"].read() == objects["big/chunk+1"]
    with pytest.raises(SSLError):
        s3_of(secure, stranger.file).list_buckets()


def test_the_python_client_reads_writes_and_batches(secure, authority, objects, monkeypatch):
    client = forebay.Client(secure.url, ca=authority.file)
    assert client.route == secure.url
    assert bytes(client.get("train/big/8MiB")) == objects["big/8MiB"]
    names = [f"img/{i:04}.bin" for i in range(100)]
    assert [bytes(item.data) for item in client.batch(names, bucket="train")] == [
        objects[n] for n in names
    ]
    client.put("scratch/tls/python", objects["big/chunk"])
    assert bytes(client.get("scratch/tls/python")) == objects["big/chunk"]
    assert len(list(client.list("train/img/"))) == 200
    monkeypatch.setenv("FOREBAY_CA_FILE", str(authority.file))
    assert forebay.Client(secure.url).exists("train/one")
    import pickle

    monkeypatch.delenv("FOREBAY_CA_FILE")
    assert pickle.loads(pickle.dumps(client)).exists("train/one")


def test_the_python_client_refuses_whom_it_does_not_know(
    origin, secure, authority, stranger, tmp_path
):
    with pytest.raises(forebay.Unauthenticated, match="not trusted.*UnknownIssuer"):
        forebay.Client(secure.url, ca=stranger.file).get("train/one")
    with pytest.raises(forebay.Unauthenticated, match="not trusted"):
        forebay.Client(secure.url).get("train/one")
    with pytest.raises(forebay.InvalidRequest, match="no-such.pem"):
        forebay.Client(secure.url, ca="/no-such.pem").get("train/one")
    node = TlsNode(origin, tmp_path, authority.issue("elsewhere", san="DNS:elsewhere.example"))
    try:
        with pytest.raises(forebay.Unauthenticated, match="not trusted.*elsewhere.example"):
            forebay.Client(node.url, ca=authority.file).get("train/one")
    finally:
        node.stop()


def test_https_to_a_node_without_tls_says_so(node):
    with pytest.raises(forebay.ConnectionFailed, match="does not speak TLS|handshake"):
        forebay.Client(node.url.replace("http:", "https:")).get("train/one")


def test_fsspec_over_tls(secure, authority, objects):
    import fsspec

    fs = fsspec.filesystem(
        "forebay", url=secure.url, ca=str(authority.file), skip_instance_cache=True
    )
    assert fs.cat_file("train/img/0003.bin") == objects["img/0003.bin"]


def command(*args: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [forebay_program(), *args],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )


def test_the_command_line_over_tls(secure, authority, stranger, objects, tmp_path):
    out = tmp_path / "out"
    done = command(
        "get", "train/img/0004.bin", str(out), "--node", secure.url, "--ca", str(authority.file)
    )
    assert done.returncode == 0 and out.read_bytes() == objects["img/0004.bin"], done.stderr
    done = command(
        "ls", "train/img/", "--json", FOREBAY_NODE=secure.url, FOREBAY_CA_FILE=str(authority.file)
    )
    assert done.returncode == 0 and "0199" in done.stdout, done.stderr
    done = command("status", "--node", secure.url, "--ca", str(stranger.file))
    assert done.returncode == 1 and "not trusted" in done.stderr and "--ca" in done.stderr


def test_versions_and_protocol(secure, authority):
    def connect(**limits):
        context = ssl.create_default_context(cafile=authority.file)
        context.set_alpn_protocols(["h2", "http/1.1"])
        for name, value in limits.items():
            setattr(context, name, value)
        with (
            socket.create_connection(("127.0.0.1", secure.port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as tls,
        ):
            return tls.version(), tls.selected_alpn_protocol()

    assert connect() == ("TLSv1.3", "http/1.1")
    assert connect(maximum_version=ssl.TLSVersion.TLSv1_2) == ("TLSv1.2", "http/1.1")
    with pytest.raises((ssl.SSLError, ConnectionError)), pytest.warns(DeprecationWarning):
        connect(minimum_version=ssl.TLSVersion.TLSv1, maximum_version=ssl.TLSVersion.TLSv1_1)


def test_plain_http_to_the_tls_port_is_told_so(secure):
    answer = requests.put(f"http://127.0.0.1:{secure.port}/scratch/x", data=b"x" * 1000, timeout=60)
    assert answer.status_code == 400 and "https://" in answer.text
    failed = secure.metrics()["forebay_tls_handshakes_failed_total"]
    for junk in (b"\x00\x01\x02", b"\x16\x03\x01\x00\x05hello"):
        with socket.create_connection(("127.0.0.1", secure.port), timeout=10) as s:
            s.sendall(junk)
            with contextlib.suppress(ConnectionResetError):
                while s.recv(1000):
                    pass
    until(lambda: secure.metrics()["forebay_tls_handshakes_failed_total"] >= failed + 2)


def test_a_certificate_that_has_expired_is_a_warning_of_the_check(authority, tmp_path):
    for days in (1, -1):
        cert, key = authority.issue(f"of-{days}-days", days=days)
        settings = (f"--set=tls.cert={cert}", f"--set=tls.key={key}")
        done = command("config", "check", "--json", f"--origin=data={tmp_path}", *settings)
        told = [(p["severity"], p["key"]) for p in json.loads(done.stdout)["problems"]]
        assert done.returncode == 0, "the node would start"
        assert (("warning", "tls.cert") in told) is (days < 0), told


def test_the_expiry_is_a_metric(secure):
    left = secure.metrics()["forebay_tls_certificate_expiry_seconds"]
    assert 9 * 86400 < left <= 10 * 86400 + 60


def until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_certificates_change_under_load_and_no_connection_is_dropped(
    origin, authority, objects, tmp_path
):
    certificates = [authority.issue(name) for name in ("one", "two")]
    node = TlsNode(origin, tmp_path, certificates[0])
    context = ssl.create_default_context(cafile=authority.file)
    stop, failures, done = threading.Event(), [], [0, 0]

    def read_on_one_connection():
        """One TLS connection for the whole test: it must survive every change."""
        import http.client

        connection = http.client.HTTPSConnection(
            "127.0.0.1", node.port, context=context, timeout=30
        )
        connection.connect()
        first = connection.sock
        while not stop.is_set():
            connection.request("GET", "/train/big/chunk")
            if (
                connection.getresponse().read() != objects["big/chunk"]
                or connection.sock is not first
            ):
                failures.append("a connection was dropped")
                return
            done[0] += 1

    def connect_anew():
        while not stop.is_set():
            with urllib.request.urlopen(
                f"{node.url}/train/img/0005.bin", context=context, timeout=30
            ) as answer:
                if answer.read() != objects["img/0005.bin"]:
                    failures.append("a wrong answer")
            done[1] += 1

    def guarded(work):
        try:
            work()
        except Exception as e:
            failures.append(repr(e))

    threads = [
        threading.Thread(target=guarded, args=(work,))
        for work in (read_on_one_connection, connect_anew) * 2
    ]
    try:
        for thread in threads:
            thread.start()
        for i in (1, 0, 1):
            install(certificates[i], tmp_path)
            node.process.send_signal(signal.SIGHUP)
            until(lambda: node.certificate() == der(certificates[i][0]))
        # And without being told.
        install(certificates[0], tmp_path)
        until(lambda: node.certificate() == der(certificates[0][0]))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        code = node.stop(patience=60)
    assert not failures and min(done) > 10 and code == 0


def test_a_certificate_that_cannot_be_used_leaves_the_old_one(origin, authority, tmp_path):
    first, second = authority.issue("before"), authority.issue("after")
    node = TlsNode(origin, tmp_path, first)
    stale = 'forebay_reload_stale{what="certificate"}'
    try:
        install((second[0], first[1]), tmp_path)
        until(lambda: node.metrics()[stale] == 1)
        assert node.certificate() == der(first[0])
        (tmp_path / "node.pem").write_text("nonsense")
        node.process.send_signal(signal.SIGHUP)
        until(lambda: node.metrics()['forebay_reloads_failed_total{what="certificate"}'] >= 2)
        assert node.certificate() == der(first[0]) and "stays in force" in node.log.read_text()
        install(second, tmp_path)
        until(lambda: node.certificate() == der(second[0]))
        assert node.metrics()[stale] == 0
    finally:
        node.stop()


@pytest.mark.parametrize("fault", ["missing", "nonsense", "another key", "no key"])
def test_a_bad_certificate_at_the_start_is_a_clear_error(authority, stranger, tmp_path, fault):
    cert, key = authority.issue(f"bad-{fault.replace(' ', '-')}")
    if fault == "missing":
        cert.unlink()
    elif fault == "nonsense":
        cert.write_text("nonsense")
    elif fault == "another key":
        key = stranger.issue("other")[1]
    settings = ["--set", f"tls.cert={cert}"] + (
        [] if fault == "no key" else ["--set", f"tls.key={key}"]
    )
    done = command(
        "serve",
        "--origin",
        str(tmp_path),
        "--listen",
        "127.0.0.1:0",
        "--admin",
        "off",
        "--unix",
        "off",
        *settings,
    )
    assert done.returncode in (1, 2) and "error: " in done.stderr and "tls." in done.stderr, (
        done.stderr
    )
    named = {"nonsense": [cert], "another key": [cert, key]}.get(fault, [])
    assert all(str(file) in done.stderr for file in named), done.stderr


def test_the_admin_port_speaks_tls_if_it_is_told_to(origin, authority, tmp_path):
    cert, key = authority.issue("admin")
    command_line = [
        forebay_program(),
        "serve",
        "--json",
        "--listen",
        "127.0.0.1:0",
        "--unix",
        "off",
        "--admin",
        "127.0.0.1:0",
    ]
    command_line += [
        "--origin",
        str(tmp_path),
        "--set",
        f"tls.cert={cert}",
        "--set",
        f"tls.key={key}",
        "--set",
        "tls.admin=true",
    ]
    process = subprocess.Popen(
        command_line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        ready = json.loads(process.stdout.readline())
        assert ready["url"].startswith("https://127.0.0.1:")
        admin = ready["admin"]
        assert (
            requests.get(f"https://{admin}/healthz", verify=str(authority.file), timeout=60).text
            == "ok\n"
        )
        assert requests.get(f"http://{admin}/healthz", timeout=60).status_code == 400
    finally:
        process.terminate()
        assert process.wait(60) == 0
