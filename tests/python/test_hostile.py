"""The tables of tests/hostile, sent over plain sockets to a node before a real origin. How to add a case: tests/hostile/README.md.

What holds after every group of cases, whatever they were: the node lives and answers a good request at once; memory and descriptors are about where
they were; nothing panicked; and no secret is in anything that the node wrote. Every error says its code and what is wrong.
"""

from __future__ import annotations

import json
import os
import re
import time
from email.utils import format_datetime, parsedate_to_datetime
from datetime import timedelta
from pathlib import Path

import hostile
import pytest
from conftest import s3_client
from hostile import CANARY, Answer, Exchange
from servers import REGION, Node

TOKEN = "CANARY-token-77ab"
ORIGIN_SECRET = "CANARY-origin-secret-90d1"
# What a node may grow by over the cases of one group: an answer's memory is given back, and allocators keep some.
RSS_GROWTH_MAX = 256 << 20
FDS_GROWTH_MAX = 32
GOOD_ANSWER_SECONDS = 5

REQUESTS = hostile.tables("http", "names", "ranges", "conditions", "writes", "batch", "auth")


class Target:
    """A node, what it was like at the start, and everything that it has answered."""

    def __init__(self, node: Node, variables: dict[str, str], signed: bool) -> None:
        self.node, self.signed = node, signed
        self.variables = {**variables, "HOST": f"127.0.0.1:{node.port}", "PORT": str(node.port), "CANARY": CANARY}
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
        began = time.monotonic()
        case = {"request": "GET /hostile/hello"} | ({"sign": {}} if self.signed else {})
        answer = hostile.send(self.node.port, hostile.request_bytes(case, self.variables)).answers[0]
        took = time.monotonic() - began
        assert (answer.status, answer.body) == (200, b"hello, world"), answer
        assert took < GOOD_ANSWER_SECONDS, f"a good request took {took:.1f} s"

    def check_well(self) -> None:
        assert self.node.process.poll() is None, self.node.failed("the node ended")
        self.check_good()
        for what, now, allowed in (("memory", self.memory, self.rss + RSS_GROWTH_MAX), ("descriptors", self.descriptors, self.fds + FDS_GROWTH_MAX)):
            deadline = time.monotonic() + 5
            while (value := now()) > allowed and time.monotonic() < deadline:
                time.sleep(0.05)
                self.check_good()
            assert value <= allowed, f"{what} grew to {value}, {allowed} is the most that may be"
        log = self.node.log.read_bytes()
        assert b"panicked" not in log, self.node.failed("something panicked")
        assert b"\n2026-01-01T00:00:00Z ERROR forged-line" not in log.replace(b"\r", b"\n"), "a request wrote a line of its own into the log"
        metrics = hostile.send(self.node.admin_port, b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").received
        written = {"log": log, "output": "".join(self.node.lines).encode(), "metrics": metrics, "answers": bytes(self.received)}
        for where, text in written.items():
            at = text.find(CANARY.encode())
            assert at < 0, f"a secret is in the node's {where}: …{text[max(0, at - 300) : at + 60]!r}"


@pytest.fixture(scope="module")
def variables(origin, origin_s3) -> dict[str, str]:
    """The bucket `hostile`, and the facts about it that cases name."""
    for bucket in ("hostile", "unlisted"):
        origin_s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": REGION})
    origin_s3.put_object(Bucket="unlisted", Key="x", Body=b"nobody may see this")
    for key, body in (("hello", b"hello, world"), ("empty", b""), ("big", bytes(range(256)) * (3 << 12)), ("w/there", b"x")):
        origin_s3.put_object(Bucket="hostile", Key=key, Body=body)
    head = origin_s3.head_object(Bucket="hostile", Key="hello")
    modified = parsedate_to_datetime(head["ResponseMetadata"]["HTTPHeaders"]["last-modified"])
    date = lambda days: format_datetime(modified + timedelta(days=days), usegmt=True)  # noqa: E731
    return {"ETAG": head["ETag"], "BARE_ETAG": head["ETag"].strip('"'), "DATE": date(0), "BEFORE": date(-1), "AFTER": date(400)}


@pytest.fixture(scope="module")
def open_node(origin, variables, tmp_path_factory):
    """Without keys, as on loopback; logs as text, everything that there is to say."""
    node = Node(origin.url, ["hostile", "other"], tmp_path_factory.mktemp("open"), options=["--log", "debug"])
    yield Target(node, variables, signed=False)
    node.stop()


@pytest.fixture(scope="module")
def keyed_node(origin, variables, tmp_path_factory):
    """With keys and a token that are canaries."""
    directory = tmp_path_factory.mktemp("keyed")
    config = directory / "forebay.toml"
    config.write_text(
        f'[auth]\nkeys = [{{ access_key = "{hostile.ACCESS}", secret_key = "{hostile.SECRET}" }}]\ntokens = ["{TOKEN}"]\n'
    )
    node = Node(origin.url, ["hostile", "other"], directory, options=["--log", "debug", "--config", str(config)])
    yield Target(node, variables, signed=True)
    node.stop()


def groups(cases: list[tuple[str, dict]]):
    """Each case, and behind each group the look at how the node is."""
    for i, (group, case) in enumerate(cases):
        yield pytest.param(group, case, id=f"{group}: {case['name']}")
        if i + 1 == len(cases) or cases[i + 1][0] != group:
            yield pytest.param(group, None, id=f"{group}: and the node is well")


def is_head(case: dict) -> list[bool]:
    return case.get("heads", [case.get("request", case.get("raw", "")).startswith("HEAD ")])


def bytes_of(case: dict, variables: dict[str, str]) -> bytes:
    if "raw_of" in case:
        old, new = (hostile.expand(part, variables) for part in case["raw_of"]["replace"])
        data = hostile.request_bytes(case["raw_of"], variables)
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
    exchange = hostile.send(target.node.port, data, heads=is_head(case), then_close=case.get("half_close", False))
    target.keep(exchange)
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
        assert case["says"].encode() in answer.body.replace(b"&apos;", b"'").replace(b"&quot;", b'"').replace(b"\\\"", b'"'), answer
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
