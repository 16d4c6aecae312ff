"""The tables of tests/hostile, sent over plain sockets to a node before a real origin. How to add a
case: tests/hostile/README.md.

What holds after every group of cases, whatever they were: the node lives and answers a good request
at once; memory and descriptors are about where they were; nothing panicked; and no secret is in
anything that the node wrote. Every error says its code and what is wrong.
"""

from __future__ import annotations

import io
import json
import os
import re
import select
import socket
import struct
import subprocess
import tarfile
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from email.utils import format_datetime, parsedate_to_datetime
from pathlib import Path

import hostile
import pytest
from hostile import CANARY, Answer, Exchange
from hostile_archives import ARCHIVES
from servers import REGION, Node, Process, accepts, forebay_program, free_port

TOKEN = "CANARY-token-77ab"
ORIGIN_SECRET = "CANARY-origin-secret-90d1"
# What a node may grow by over the cases of one group: an answer's memory is given back, and
# allocators keep some.
RSS_GROWTH_MAX = 256 << 20
FDS_GROWTH_MAX = 32
GOOD_ANSWER_SECONDS = 5

REQUESTS = hostile.tables("http", "names", "ranges", "conditions", "writes", "batch", "auth")
MEMBERS = hostile.tables("archives")
CLIENTS = hostile.tables("clients")
CONFIGS = hostile.tables("config")
# Larger than all the buffers between a node and a client that does not read.
LARGE_BYTES = 24 << 20


class Target:
    """A node, its state at the start, and everything that it has answered."""

    def __init__(self, node: Node, variables: dict[str, str], signed: bool) -> None:
        self.node, self.signed = node, signed
        self.variables = {
            **variables,
            "HOST": f"127.0.0.1:{node.port}",
            "PORT": str(node.port),
            "CANARY": CANARY,
        }
        self.received = bytearray()
        self.check_good()
        self.rss, self.fds = self.memory(), self.descriptors()

    def memory(self) -> int:
        fields = Path(f"/proc/{self.node.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGESIZE")

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.node.process.pid}/fd").iterdir()))

    def keep(self, exchange: Exchange) -> Exchange:
        self.received += exchange.received
        return exchange

    def check_good(self) -> None:
        case = {"request": "GET /hostile/hello"} | ({"sign": {}} if self.signed else {})
        took: list[float] = []
        # A machine that is busy with something else is not in each of these.
        while not took or took[-1] >= GOOD_ANSWER_SECONDS:
            assert len(took) < 4, f"good requests took {took} s"
            request = hostile.request_bytes(case, self.variables)
            began = time.monotonic()
            answer = hostile.send(self.node.port, request).answers[0]
            took.append(time.monotonic() - began)
            assert (answer.status, answer.body) == (200, b"hello, world"), answer

    def check_well(self) -> None:
        assert self.node.process.poll() is None, self.node.failed("the node ended")
        self.check_good()
        for what, now, allowed in (
            ("memory", self.memory, self.rss + RSS_GROWTH_MAX),
            ("descriptors", self.descriptors, self.fds + FDS_GROWTH_MAX),
        ):
            deadline = time.monotonic() + 60
            while (value := now()) > allowed and time.monotonic() < deadline:
                time.sleep(0.05)
                self.check_good()
            assert value <= allowed, f"{what} grew to {value}, {allowed} is the most that may be"
        log = self.node.log.read_bytes()
        assert b"panicked" not in log, self.node.failed("something panicked")
        metrics = hostile.send(
            self.node.admin_port, b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        ).received
        written = {
            "log": log,
            "output": "".join(self.node.lines).encode(),
            "metrics": metrics,
            "answers": bytes(self.received),
        }
        for where, text in written.items():
            at = text.find(CANARY.encode())
            assert at < 0, (
                f"a secret is in the node's {where}: …{text[max(0, at - 300) : at + 60]!r}"
            )


@pytest.fixture(scope="module")
def variables(origin, origin_s3) -> dict[str, str]:
    """The bucket `hostile`, and the facts about it that cases refer to."""
    for bucket in ("hostile", "unlisted"):
        origin_s3.create_bucket(
            Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": REGION}
        )
    origin_s3.put_object(Bucket="unlisted", Key="x", Body=b"nobody may see this")
    for key, body in (
        ("hello", b"hello, world"),
        ("empty", b""),
        ("big", bytes(range(256)) * (3 << 12)),
        ("large", bytes(LARGE_BYTES)),
    ):
        origin_s3.put_object(Bucket="hostile", Key=key, Body=body)
    head = origin_s3.head_object(Bucket="hostile", Key="hello")
    modified = parsedate_to_datetime(head["ResponseMetadata"]["HTTPHeaders"]["last-modified"])
    date = lambda days: format_datetime(modified + timedelta(days=days), usegmt=True)  # noqa: E731
    return {
        "ETAG": head["ETag"],
        "BARE_ETAG": head["ETag"].strip('"'),
        "DATE": date(0),
        "BEFORE": date(-1),
        "AFTER": date(400),
    }


@pytest.fixture(scope="module")
def open_node(origin, variables, tmp_path_factory):
    """Without keys, as on loopback; logs as text, at the most detailed level."""
    node = Node(
        origin.url,
        ["hostile", "other"],
        tmp_path_factory.mktemp("open"),
        options=["--log", "debug"],
    )
    yield Target(node, variables, signed=False)
    node.stop()


@pytest.fixture(scope="module")
def keyed_node(origin, variables, tmp_path_factory):
    """With keys and a token that are canaries."""
    directory = tmp_path_factory.mktemp("keyed")
    config = directory / "forebay.toml"
    config.write_text(
        f'[auth]\nkeys = [{{ access_key = "{hostile.ACCESS}", secret_key ='
        f' "{hostile.SECRET}" }}]\ntokens = ["{TOKEN}"]\n'
    )
    node = Node(
        origin.url,
        ["hostile", "other"],
        directory,
        options=["--log", "debug", "--config", str(config)],
    )
    yield Target(node, variables, signed=True)
    node.stop()


def limited_node(origin, variables, directory, settings: list[str]):
    options = [part for setting in settings for part in ("--set", setting)]
    node = Node(origin.url, ["hostile"], directory, options=["--log", "debug", *options])
    return Target(node, variables, signed=False)


@pytest.fixture(scope="module")
def tight_node(origin, variables, tmp_path_factory):
    """Impatient."""
    times = [f"limits.{which}_timeout=1s" for which in ("idle", "body", "write")]
    target = limited_node(
        origin, variables, tmp_path_factory.mktemp("tight"), [*times, "limits.slowest_client=1KiB"]
    )
    yield target
    target.node.stop()


@pytest.fixture(scope="module")
def few_node(origin, variables, tmp_path_factory):
    """Takes a hundred connections."""
    target = limited_node(
        origin, variables, tmp_path_factory.mktemp("few"), ["limits.connections=100"]
    )
    yield target
    target.node.stop()


def groups(cases: list[tuple[str, dict]]) -> list:
    """Each case, and after each group a check of the node."""
    params = []
    for i, (group, case) in enumerate(cases):
        params.append(pytest.param(group, case, id=f"{group}: {case['name']}"))
        if i + 1 == len(cases) or cases[i + 1][0] != group:
            params.append(pytest.param(group, None, id=f"{group}: and the node is well"))
    return params


def is_head(case: dict) -> list[bool]:
    return case.get("heads", [case.get("request", case.get("raw", "")).startswith("HEAD ")])


def bytes_of(case: dict, variables: dict[str, str]) -> bytes:
    if "raw_of" in case:
        data = hostile.request_bytes(case["raw_of"], variables) * case["raw_of"].get("times", 1)
        if "replace" not in case["raw_of"]:
            return data
        old, new = (hostile.expand(part, variables) for part in case["raw_of"]["replace"])
        assert data.count(old) == 1, f"{old!r} in {data!r}"
        return data.replace(old, new)
    return hostile.request_bytes(case, variables)


@pytest.mark.parametrize(("group", "case"), groups(REQUESTS))
def test_a_request(group, case, request):
    target: Target = request.getfixturevalue("keyed_node" if group == "auth" else "open_node")
    if case is None:
        target.check_well()
        return
    data = bytes_of(case, target.variables)
    wanted = case.get("each_status") or [case["status"]] * case.get("answers", 1)
    port = target.node.admin_port if case.get("port") == "admin" else target.node.port
    exchange = target.keep(
        hostile.send(
            port,
            data,
            heads=is_head(case),
            then_close=case.get("half_close", False),
            want=case.get("want"),
        )
    )
    check(case, wanted, exchange, target)


def check(case: dict, wanted: list, exchange: Exchange, target: Target) -> None:
    if case.get("status") == "closed":
        assert exchange.closed and all(a.status == 400 for a in exchange.answers), exchange.answers
        return
    assert len(exchange.answers) == len(wanted), exchange.answers
    for answer, status in zip(exchange.answers, wanted, strict=True):
        assert answer.status in (status if isinstance(status, list) else [status]), answer
        assert answer.whole, answer
    answer = exchange.answers[0]
    if answer.status >= 400 and True not in is_head(case):
        check_error(case, answer)
    if "body_is" in case:
        assert answer.body == case["body_is"].encode(), answer
    if "says" in case:
        assert case["says"].encode() in answer.body.replace(b"&apos;", b"'").replace(
            b"&quot;", b'"'
        ).replace(b'\\"', b'"'), answer
    for header in case.get("has", []):
        name, value = header.split(": ", 1)
        assert answer.headers.get(name) == value, answer
    for name in case.get("lacks", []):
        assert name not in answer.headers, answer


def check_error(case: dict, answer: Answer) -> None:
    """An error has a code and says what is wrong, in the form of its protocol."""
    if case.get("bare") or (case.get("may_be_bare") and not answer.body):
        assert not answer.body, answer
        return
    if case.get("plain"):
        assert answer.headers["content-type"] == "text/plain" and answer.body, answer
        return
    if answer.headers.get("content-type") == "application/json":
        body = json.loads(answer.body)
        assert body["status"] == answer.status and len(body["message"]) > 10, answer
        assert "code" not in case, f"{case['name']}: answers under /v1/ have no S3 code"
        return
    found = re.search(rb"<Code>(\w+)</Code>", answer.body)
    assert found, answer
    message = re.search(rb"<Message>(.+?)</Message>", answer.body, re.S)
    assert message and len(message.group(1)) > 10, answer
    if "code" in case:
        codes = case["code"] if isinstance(case["code"], list) else [case["code"]]
        assert found.group(1).decode() in codes, answer


@pytest.fixture(scope="module")
def archives(origin_s3, variables):
    """The archives of the table, at the origin."""
    for key in {case["archive"] for _, case in MEMBERS}:
        origin_s3.put_object(Bucket="hostile", Key=key, Body=ARCHIVES[key]())


@pytest.mark.parametrize(("group", "case"), groups(MEMBERS))
def test_a_member(group, case, open_node, archives):
    """By the object API, cold and again, and by a batch: the same answer."""
    if case is None:
        open_node.check_well()
        return
    member = hostile.expand(case["member"], open_node.variables).decode()
    query = urllib.parse.quote(member, safe="")
    ranges = [f"Range: {case['range']}"] if "range" in case else []
    get = {
        "request": f"GET /v1/objects/hostile/{case['archive']}?archpath={query}",
        "headers": ranges,
    }
    for _ in range(2):
        exchange = open_node.keep(
            hostile.send(open_node.node.port, hostile.request_bytes(get, open_node.variables))
        )
        if case["status"] == "cut":
            (answer,) = exchange.answers
            assert answer.status == 502 or not answer.whole, answer
        else:
            check(case, [case["status"]], exchange, open_node)
    entry = {"objname": case["archive"], "archpath": member} | (
        {"start": 1_000_000, "length": 1} if "range" in case else {}
    )
    post = {
        "request": "POST /v1/ml/moss/hostile",
        "body": json.dumps({"in": [entry], "strm": True}),
    }
    exchange = open_node.keep(
        hostile.send(open_node.node.port, hostile.request_bytes(post, open_node.variables))
    )
    (answer,) = exchange.answers
    statuses = case["status"] if isinstance(case["status"], list) else [case["status"]]
    if answer.status == 200 and answer.whole:
        assert 200 in statuses or 206 in statuses, answer
        with tarfile.open(fileobj=io.BytesIO(answer.body)) as tar:
            content = tar.extractfile(tar.next()).read()
        assert case.get("body_is", content.decode("latin-1")).encode() == content
    else:
        assert "cut" in statuses or answer.status in [*statuses, 400], answer


def send_and_wait(target: Target, case: dict) -> str:
    data = hostile.expand(case["sends"], target.variables)
    return how_it_ended(hostile.send(target.node.port, data))


def drip(target: Target, case: dict) -> str:
    """Sends a byte every 50 ms until the node has had enough."""
    with hostile.connect(target.node.port) as connection:
        connection.sendall(hostile.expand(case.get("at_once", ""), target.variables))
        for byte in hostile.expand(case["sends"], target.variables):
            try:
                connection.sendall(bytes([byte]))
            except OSError:
                break
            if select.select([connection], [], [], 0.05)[0]:
                break
        return how_it_ended(target.keep(hostile.receive(connection)))


def how_it_ended(exchange: Exchange) -> str:
    return str(exchange.answers[0].status) if exchange.answers else "closed"


def read_slowly(target: Target, case: dict) -> None:
    """Reads `bytes` every 20 ms, until the log says that the node has given the connection up.
    (What it has sent before that is still in the kernel's buffers, so that the client does not see
    it for long.)
    """
    data = hostile.expand(case["request"], target.variables)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(hostile.PATIENCE)
        connection.connect(("127.0.0.1", target.node.port))
        connection.setblocking(False)
        peer = b'"peer":"127.0.0.1:%d"' % connection.getsockname()[1]
        given_up = re.compile(rb'[^\n]*"the connection ended"[^\n]*')
        deadline = time.monotonic() + hostile.PATIENCE
        while not any(peer in line for line in given_up.findall(target.node.log.read_bytes())):
            assert time.monotonic() < deadline, (
                "the node still serves a client that takes next to nothing"
            )
            try:
                data = data[connection.send(data) :] if data else data
                if case["bytes"]:
                    connection.recv(case["bytes"])
            except OSError:
                pass  # Nothing to send or to read just now, or never again.
            time.sleep(0.02)


def leave(target: Target, case: dict) -> None:
    """Reads a part of the answer and resets the connection."""
    data = hostile.expand(case["request"], target.variables)

    def once(_) -> None:
        with hostile.connect(target.node.port) as connection:
            connection.sendall(data)
            got = 0
            while got < case["after"] and (piece := connection.recv(65536)):
                got += len(piece)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(once, range(case["times"])))


def after_the_others(target: Target, case: dict) -> None:
    """Asks again until the node has noticed that its clients left."""
    answer = hostile.send(target.node.port, hostile.request_bytes(case, target.variables)).answers[
        0
    ]
    assert answer.status == case["status"], answer


def thousand(target: Target, case: dict) -> None:
    connections = [hostile.connect(target.node.port) for _ in range(case["count"])]
    try:
        data = hostile.expand(
            r"GET /hostile/hello HTTP/1.1\r\nHost: ${HOST}\r\n\r\n", target.variables
        )
        for connection in connections:
            connection.sendall(data)
        for connection in connections:
            (answer,) = hostile.receive(connection, want=1).answers
            assert (answer.status, answer.body) == (200, b"hello, world"), answer
        target.check_good()
    finally:
        for connection in connections:
            connection.close()


def too_many(target: Target, case: dict) -> None:
    """Those that have a place keep it; the others are told so at once, and later there is room
    again.
    """
    data = hostile.expand(r"GET /hostile/hello HTTP/1.1\r\nHost: ${HOST}\r\n\r\n", target.variables)
    kept, refused, slow = [], 0, 0
    try:
        for _ in range(case["count"]):
            connection = hostile.connect(target.node.port)
            began = time.monotonic()
            connection.sendall(data)
            (answer,) = target.keep(hostile.receive(connection, want=1)).answers
            if answer.status == 200:
                kept.append(connection)
                continue
            assert (answer.status, answer.headers["retry-after"]) == (
                503,
                "1",
            ) and b"limits.connections" in answer.body, answer
            slow += time.monotonic() - began >= GOOD_ANSWER_SECONDS
            refused += 1
            connection.close()
        assert (len(kept), refused) == (100, case["count"] - 100)
        # Now and then, the machine is busy with something else.
        assert slow < refused / 10
        assert (
            target.node.metrics()['forebay_requests_refused_total{reason="connections"}'] == refused
        )
    finally:
        for connection in kept:
            connection.close()
    deadline = time.monotonic() + 60
    while (
        hostile.send(target.node.port, data.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        .answers[0]
        .status
        != 200
    ):
        assert time.monotonic() < deadline, (
            "the places of connections that ended were not given back"
        )
        time.sleep(0.05)


@pytest.fixture(scope="module")
def clients(open_node, tight_node, few_node):
    """Runs every client of the table; returns their outcomes by name."""
    nodes = {"open": open_node, "tight": tight_node, "few": few_node}
    with ThreadPoolExecutor(len(CLIENTS)) as pool:
        run = lambda case: pool.submit(globals()[case["how"]], nodes[case["node"]], case)  # noqa: E731
        outcomes = {
            case["name"]: run(case) for _, case in CLIENTS if case["how"] != "after_the_others"
        }
        wait(outcomes.values())
        yield outcomes | {
            case["name"]: run(case) for _, case in CLIENTS if case["how"] == "after_the_others"
        }


@pytest.mark.parametrize(("group", "case"), groups(CLIENTS))
def test_a_client(group, case, clients, open_node, tight_node, few_node):
    if case is None:
        for target in (open_node, tight_node, few_node):
            target.check_well()
            # Whoever was cut off, left or was refused no longer holds anything.
            deadline = time.monotonic() + 60
            held = ("forebay_requests_in_flight", "forebay_connections_open")
            while (
                busy := sum(v for n, v in target.node.metrics().items() if n.startswith(held))
            ) > 0:
                assert time.monotonic() < deadline, (
                    f"{busy} requests and connections are still open"
                )
                time.sleep(0.05)
        return
    outcome = clients[case["name"]].result(timeout=60)
    assert outcome == case.get("ends"), outcome


@pytest.mark.parametrize("case", [case for _, case in CONFIGS], ids=lambda case: case["name"])
def test_a_configuration(case, tmp_path):
    file = tmp_path / "forebay.toml"
    file.write_bytes(hostile.expand(case["file"], {"CANARY": CANARY}))
    run = subprocess.run(
        [forebay_program(), "config", "check", "--config", str(file)],
        capture_output=True,
        timeout=30,
    )
    said = (run.stdout + run.stderr).decode()
    assert (run.returncode == 0) == case.get("ok", False), said
    assert case.get("says", "ok") in said, said
    assert CANARY not in said and "panicked" not in said, said


def test_a_second_process_on_the_same_cache_is_refused_and_the_first_goes_on(origin, open_node):
    cache = open_node.node.directory / "cache"
    command = [
        forebay_program(),
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--admin",
        "off",
        "--cache",
        f"{cache}:2GiB",
    ]
    run = subprocess.run(
        [*command, "--origin", f"s3://hostile?endpoint={origin.url}&region={REGION}"],
        capture_output=True,
        timeout=30,
    )
    said = run.stderr.decode()
    assert run.returncode == 1 and str(cache) in said and "another process" in said, said
    assert "panicked" not in said and CANARY not in said, said
    open_node.check_well()


def test_a_name_writes_no_line_of_its_own_into_a_log_for_people(origin, variables, tmp_path):
    port = free_port()
    command = [
        forebay_program(),
        "serve",
        "--listen",
        f"127.0.0.1:{port}",
        "--admin",
        "off",
        "--unix",
        "off",
        "--log",
        "debug",
    ]
    node = Process(
        "text",
        [*command, "--origin", f"s3://hostile?endpoint={origin.url}&region={REGION}"],
        {},
        tmp_path,
    )
    try:
        node.wait_until(lambda: accepts(port), "accepting connections")
        for target in (
            "/hostile/a%0aERROR%20forged%1b[2J",
            "/v1/objects/hostile/a%0d%0aERROR%20forged",
            "/hostile?list-type=2&prefix=%0aERROR%20forged",
        ):
            answer = hostile.send(
                port, f"GET {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode()
            )
            assert len(answer.answers) == 1, answer
        log = node.log.read_bytes()
        assert log.count(b"forged") >= 2 and b"\x1b[2J" not in log, log.decode()
        assert not [line for line in log.splitlines() if line.startswith(b"ERROR forged")], (
            log.decode()
        )
    finally:
        node.stop()


def test_the_secret_of_an_origin_is_never_shown(origin, variables, tmp_path):
    """A node whose key for the origin is wrong: every read fails, and no failure shows the key."""
    env = {
        "AWS_ACCESS_KEY_ID": "AKORIGIN",
        "AWS_SECRET_ACCESS_KEY": ORIGIN_SECRET,
        "AWS_SESSION_TOKEN": "CANARY-session-token",
    }
    node = Node(origin.url, ["hostile"], tmp_path, options=["--log", "trace"], env=env)
    try:
        lines = [
            "GET /hostile/hello",
            "PUT /hostile/w/x",
            "GET /hostile?list-type=2",
            "GET /v1/objects/hostile/hello",
            "GET /v1/forebay/node",
        ]
        head = "HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        answers = [hostile.send(node.port, f"{line} {head}".encode()) for line in lines]
        assert [a.answers[0].status for a in answers][:4] == [403, 403, 403, 403], answers
        metrics = hostile.send(
            node.admin_port, b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        ).received
        written = b"".join(
            [
                metrics,
                node.log.read_bytes(),
                "".join(node.lines).encode(),
                *(a.received for a in answers),
            ]
        )
        assert CANARY.encode() not in written, written[
            max(0, written.find(CANARY.encode()) - 300) :
        ][:400]
    finally:
        node.stop()
