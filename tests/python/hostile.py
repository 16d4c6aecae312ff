"""What the tables of tests/hostile are made of: requests as bytes, signatures, and answers read as
they come, over a plain socket.

Nothing here repairs anything. An HTTP library would refuse to send half of these requests and would
hide half of the answers.
"""

from __future__ import annotations

import gzip
import hashlib
import hmac
import re
import socket
import time
import tomllib
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path

TABLES = Path(__file__).parent.parent / "hostile"
ACCESS, SECRET, REGION = "AKCLIENT", "CANARY-client-secret-3f9a", "us-east-1"
CANARY = "CANARY"
PATIENCE = 20


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool
    raw_head: bytes = b""

    def __repr__(self) -> str:
        return f"{self.status} {self.headers} {self.body[:600]!r}{'' if self.whole else ' (cut)'}"


@dataclass
class Exchange:
    """What came back over one connection."""

    answers: list[Answer] = field(default_factory=list)
    closed: bool = False
    received: bytes = b""


def tables(*names: str) -> list[tuple[str, dict]]:
    """Each case of the named tables, with its table's name; names are unique."""
    found, seen = [], set()
    for name in names:
        for case in tomllib.loads((TABLES / f"{name}.toml").read_text())["case"]:
            assert (name, case["name"]) not in seen, (
                f"{name}.toml: two cases are called {case['name']!r}"
            )
            seen.add((name, case["name"]))
            found.append((name, case))
    return found


def expand(text: str, variables: dict[str, str]) -> bytes:
    r"""`${NAME}` is a variable, `${TEXT*N}` is TEXT N times, `\xNN` is a byte, `\r`, `\n` and `\t`
    are what they are in C.
    """

    def replace(m: re.Match) -> bytes:
        inner = m.group(1).decode()
        if inner in variables:
            return variables[inner].encode()
        what, times = inner.rsplit("*", 1)
        return expand(what.replace("$[", "${").replace("]$", "}"), variables) * int(times)

    data = re.sub(rb"\$\{([^}]*)\}", replace, text.encode())
    escapes = {b"\\r": b"\r", b"\\n": b"\n", b"\\t": b"\t"}
    data = re.sub(rb"\\[rnt]", lambda m: escapes[m.group()], data)
    return re.sub(rb"\\x([0-9a-fA-F]{2})", lambda m: bytes([int(m.group(1), 16)]), data)


# Bodies that are easier to generate than to write out.
MADE_BODIES = {
    "gzip of a valid batch": lambda: gzip.compress(b'{"in":[{"objname":"hello"}],"strm":true}'),
    "gzip of 64 MiB of spaces": lambda: gzip.compress(b" " * (64 << 20), 9),
    "a million entries that are not there": lambda: (
        b'{"in":[' + b",".join([b'{"objname":"nope"}'] * 1_000_000) + b"]}"
    ),
    "a million and one entries": lambda: (
        b'{"in":[' + b",".join([b'{"objname":"a"}'] * 1_000_001) + b"]}"
    ),
    "1001 keys": lambda: delete_xml(1001),
    "1000 keys": lambda: delete_xml(1000),
    "billion laughs": lambda: laughs(),
    "two million empty lists": lambda: (
        b'{"action":"list","value":[' + b",".join([b"[]"] * 2_000_000) + b"]}"
    ),
}


def delete_xml(n: int) -> bytes:
    keys = "".join(f"<Object><Key>gone/{i}</Key></Object>" for i in range(n))
    return f'<Delete xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{keys}</Delete>'.encode()


def laughs() -> bytes:
    entities = ['<!ENTITY a0 "ha">'] + [
        f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 10)
    ]
    return (
        "<?xml version='1.0'?><!DOCTYPE d"
        f" [{''.join(entities)}]><Delete><Object><Key>&a9;</Key></Object></Delete>"
    ).encode()


def request_bytes(case: dict, variables: dict[str, str]) -> bytes:
    """The bytes that a case sends."""
    if "raw" in case:
        return expand(case["raw"], variables)
    method, target = expand(case["request"], variables).split(b" ", 1)
    body = (
        MADE_BODIES[case["body_made"]]()
        if "body_made" in case
        else expand(case.get("body", ""), variables)
    )
    lines = [expand(h, variables) for h in case.get("headers", [])]
    names = {line.split(b":", 1)[0].lower() for line in lines}
    if "sign" in case:
        target, lines = signed(case["sign"], method, target, lines, body, variables)
        names = {line.split(b":", 1)[0].lower() for line in lines}
    elif b"host" not in names:
        lines.insert(0, b"Host: " + variables["HOST"].encode())
    if not names & {b"content-length", b"transfer-encoding"} and (
        body or method in (b"PUT", b"POST")
    ):
        lines.append(b"Content-Length: %d" % len(body))
    if b"connection" not in names:
        lines.append(b"Connection: close")
    return b"\r\n".join([method + b" " + target + b" HTTP/1.1", *lines, b"", b""]) + body


def signed(
    options: dict, method: bytes, target: bytes, lines: list[bytes], body: bytes, variables: dict
) -> tuple[bytes, list[bytes]]:
    """Signs a request with Signature Version 4 and then spoils it as `options` say.

    how: "header" or "presigned". secret, access, region, service: instead of the right ones. skew:
    seconds added to the clock. expires: of a presigned request. payload: instead of the body's
    hash. after: headers that the signature does not cover. drop: what is cut out of the
    authorization (a regular expression). add: what is put after a presigned query. method, target:
    what is sent instead of what was signed.
    """
    secret, access = options.get("secret", SECRET), options.get("access", ACCESS)
    region, service = options.get("region", REGION), options.get("service", "s3")
    now = time.time() + options.get("skew", 0)
    stamp = options.get("date", time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now)))
    day = options.get("day", stamp[:8])
    presigned = options.get("how", "header") == "presigned"
    payload = options.get(
        "payload", "UNSIGNED-PAYLOAD" if presigned else hashlib.sha256(body).hexdigest()
    )
    headers = [
        tuple(part.strip() for part in line.decode("latin-1").split(":", 1)) for line in lines
    ]
    headers.insert(0, ("Host", variables["HOST"]))
    if not presigned:
        headers += [("x-amz-date", stamp), ("x-amz-content-sha256", payload)]
    scope = f"{day}/{region}/{service}/aws4_request"
    names = sorted({n.lower() for n, _ in headers if n.lower() not in options.get("unsigned", [])})
    path, _, query = target.decode("latin-1").partition("?")
    pairs = [tuple((p + "=").split("=")[:2]) for p in query.split("&") if p]
    if presigned:
        pairs += [("X-Amz-Algorithm", options.get("algorithm", "AWS4-HMAC-SHA256"))]
        pairs += [("X-Amz-Credential", urllib.parse.quote(f"{access}/{scope}", safe=""))]
        pairs += [("X-Amz-Date", stamp), ("X-Amz-Expires", str(options.get("expires", 60)))]
        pairs += [("X-Amz-SignedHeaders", urllib.parse.quote(";".join(names), safe=""))]
    canonical = [method.decode(), path, "&".join(f"{n}={v}" for n, v in sorted(pairs))]
    canonical += [f"{n}:{','.join(v for m, v in headers if m.lower() == n)}" for n in names]
    canonical += ["", ";".join(names), payload]
    to_sign = "\n".join(
        [
            "AWS4-HMAC-SHA256",
            stamp,
            scope,
            hashlib.sha256("\n".join(canonical).encode("latin-1")).hexdigest(),
        ]
    )
    key = ("AWS4" + secret).encode()
    for part in (day, region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    if presigned:
        query = "&".join(f"{n}={v}" for n, v in pairs) + f"&X-Amz-Signature={signature}"
        query = re.sub(options["drop"], "", query) if "drop" in options else query
        target = f"{path}?{query}{options.get('add', '')}".encode()
    else:
        value = (
            f"AWS4-HMAC-SHA256 Credential={access}/{scope}, SignedHeaders={';'.join(names)},"
            f" Signature={signature}"
        )
        value = re.sub(options["drop"], "", value) if "drop" in options else value
        headers.append(("Authorization", value))
        headers = [h for h in headers if h[0].lower() not in options.get("drop_headers", [])]
    if "target" in options:
        target = options["target"].encode()
    lines = [f"{n}: {v}".encode("latin-1") for n, v in headers] + [
        expand(h, variables) for h in options.get("after", [])
    ]
    return target, lines


def connect(port: int, timeout: float = PATIENCE) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def send(
    port: int,
    data: bytes,
    *,
    heads: list[bool] = (),
    wait: float = PATIENCE,
    want: int | None = None,
    then_close: bool = False,
) -> Exchange:
    """Sends bytes and reads what comes until the node closes the connection, `want` answers are
    whole, or the time is up (an error).
    """
    with connect(port, wait) as connection:
        try:
            connection.sendall(data)
            if then_close:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # The node had enough; its answer is to be read all the same.
        return receive(connection, heads, wait, want)


def receive(
    connection: socket.socket, heads=(), wait: float = PATIENCE, want: int | None = None
) -> Exchange:
    exchange, deadline = Exchange(), time.monotonic() + wait
    while time.monotonic() < deadline:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            piece = connection.recv(1 << 20)
        except ConnectionResetError:
            piece = b""
        except TimeoutError:
            break
        exchange.received += piece
        exchange.closed = not piece
        if exchange.closed or want is not None:
            exchange.answers = answers(exchange.received, heads, exchange.closed)
        if exchange.closed or (
            want is not None and len([a for a in exchange.answers if a.whole]) >= want
        ):
            return exchange
    raise AssertionError(
        f"the connection neither ended nor answered within {wait} s; so far:"
        f" {exchange.received[:2000]!r}"
    )


def answers(data: bytes, heads, closed: bool) -> list[Answer]:
    """The answers in `data`. `heads[i]`: the i-th request was a HEAD."""
    found: list[Answer] = []
    while b"\r\n\r\n" in data:
        head, rest = data.split(b"\r\n\r\n", 1)
        first, *lines = head.decode("latin-1").split("\r\n")
        assert re.fullmatch(r"HTTP/1\.[01] \d{3}( .*)?", first), f"no status line: {first!r}"
        status = int(first.split(" ")[1])
        headers = {n.strip().lower(): v.strip() for n, v in (line.split(":", 1) for line in lines)}
        if status == 100:
            data = rest
            continue
        is_head = len(heads) > len(found) and heads[len(found)]
        if is_head or status in (204, 304):
            body, data, whole = b"", rest, True
        elif headers.get("transfer-encoding") == "chunked":
            body, data, whole = dechunk(rest)
        elif "content-length" in headers:
            n = int(headers["content-length"])
            body, data, whole = rest[:n], rest[n:], len(rest) >= n
        else:
            body, data, whole = rest, b"", closed
        found.append(Answer(status, headers, body, whole, head))
    assert not (closed and data and not found), f"no answer in {data[:200]!r}"
    return found


def dechunk(data: bytes) -> tuple[bytes, bytes, bool]:
    body = b""
    while b"\r\n" in data:
        size, rest = data.split(b"\r\n", 1)
        n = int(size.split(b";")[0], 16)
        if n == 0:
            return body, rest[2:], rest[:2] == b"\r\n"
        if len(rest) < n + 2:
            return body + rest[:n], b"", False
        body, data = body + rest[:n], rest[n + 2 :]
    return body, b"", False
