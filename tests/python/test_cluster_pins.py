"""Pins of a cluster stay in force as nodes come and go: real nodes, etcd and S3 server."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from clusters import Cluster, eventually, fetch, filled, metric, order
from servers import Node, forebay_program

BUCKET = "kept"
FORGET_SECONDS = 10


@pytest.fixture(scope="module")
def bucket(origin) -> dict[str, bytes]:
    """Small objects, an empty one, and one of several units."""
    return filled(origin, BUCKET, [700_000] * 40 + [0, 1_500_000, 20 << 20], seed=7)


@pytest.fixture
def cluster(origin, etcd, tmp_path):
    made = Cluster(
        origin,
        tmp_path,
        f"etcd://127.0.0.1:{etcd.port}/kept",
        *("--set", f"cluster.forget_after={FORGET_SECONDS}s"),
        bucket=BUCKET,
    )
    yield made
    made.close()


def ask(node: Node, *words: str) -> tuple[int, dict]:
    """`forebay WORDS`, asked of this node: its exit code, and its report."""
    command = [forebay_program(), *words, "--node", node.url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    # A warm-up tells lines, of which the last is the report.
    report = done.stdout.splitlines()[-1] if words[0] == "warm" else done.stdout
    return done.returncode, json.loads(report)


def listed(node: Node, *words: str) -> dict[str, list[str]]:
    """Which nodes have pinned each object, as `forebay pin --list` says."""
    command = [forebay_program(), "pin", "--list", *words, "--node", node.url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    pins = map(json.loads, done.stdout.splitlines())
    return {pin["key"]: pin.get("nodes", []) for pin in pins if pin["bucket"] == BUCKET}


def stat(node: Node, key: str) -> dict:
    return json.loads(fetch(f"{node.url}/v1/forebay/stat/{BUCKET}/{key}"))


def pins(cluster: Cluster) -> dict[str, int]:
    return {name: int(metric(node, "forebay_store_pins")) for name, node in cluster.nodes.items()}


def held(cluster: Cluster, bucket: dict[str, bytes]) -> dict[str, int]:
    """The bytes of each object on disks of nodes that have pinned it."""

    def of(key: str) -> int:
        told = [stat(node, key) for node in cluster.nodes.values()]
        return sum(t["cached_bytes"] for t in told if t["pinned"])

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(bucket, pool.map(of, bucket), strict=True))


def lost(cluster: Cluster, bucket: dict[str, bytes]) -> list[str]:
    """What is pinned on fewer disks than one."""
    return [key for key, n in held(cluster, bucket).items() if n < len(bucket[key])]


def settled(cluster: Cluster, bucket: dict[str, bytes]) -> bool:
    """Whether each object is pinned by those who own it, and by nobody else: a small one by one
    node, and asking again pins nothing.
    """
    asked = next(iter(cluster.nodes.values()))
    where = listed(asked)
    if set(where) != set(bucket):
        return False
    if any(len(where[key]) != 1 for key in bucket if len(bucket[key]) <= 8 << 20):
        return False
    _, dry = ask(asked, "pin", f"{BUCKET}/o", "--dry-run")
    return (dry["changed"], dry["failed"]) == (0, 0)


def warm_and_pin(cluster: Cluster, bucket: dict[str, bytes]) -> None:
    asked = next(iter(cluster.nodes.values()))
    assert ask(asked, "warm", f"{BUCKET}/o")[0] == 0
    code, report = ask(asked, "pin", f"{BUCKET}/o")
    assert (code, report["changed"], report["failed"]) == (0, len(bucket), 0), report
    assert lost(cluster, bucket) == []
    assert cluster.from_bucket() == sum(map(len, bucket.values()))


def test_pins_follow_the_map_as_nodes_join_drain_and_die(cluster, bucket):
    cluster.start_all("ab")
    warm_and_pin(cluster, bucket)
    everything = sum(map(len, bucket.values()))
    cluster.start("c")
    cluster.agree(3)
    # Meanwhile nothing that is pinned is on no disk.
    deadline = time.monotonic() + 180
    while not settled(cluster, bucket):
        assert lost(cluster, bucket) == []
        assert time.monotonic() < deadline, (pins(cluster), listed(cluster.nodes["a"]))
    assert min(pins(cluster).values()) > 0
    assert lost(cluster, bucket) == []
    assert cluster.from_bucket() <= 1.2 * everything
    # A node that drains gives its pins away with what they hold.
    drained = order(cluster.nodes["a"], "drain", "b", "--wait")
    assert drained.returncode == 0, drained.stderr
    eventually(lambda: pins(cluster)["b"] == 0, "b lets go")
    eventually(lambda: settled(cluster, bucket), "others have pinned what b had")
    assert lost(cluster, bucket) == []
    cluster.stop("b")
    cluster.forget("b")
    assert lost(cluster, bucket) == []
    assert cluster.from_bucket() <= 1.2 * everything
    # What only a dead node had is pinned by those who own it then, and held once it has come.
    cluster.stop("c", signal.SIGKILL)
    cluster.forget("c")
    eventually(lambda: settled(cluster, bucket), "a has pinned what c had")
    assert pins(cluster) == {"a": len(bucket)}
    cluster.read(bucket, "a")
    eventually(lambda: not lost(cluster, bucket), "a holds what it has pinned")
    # What has gone stays gone, and what was never pinned is not.
    code, report = ask(cluster.nodes["a"], "unpin", f"{BUCKET}/o")
    assert (code, report["changed"]) == (0, len(bucket))
    cluster.start("d")
    cluster.agree(2)
    time.sleep(8)
    assert pins(cluster) == {"a": 0, "d": 0}


def test_a_pin_of_what_nobody_holds_is_let_go_once_its_new_owner_has_it(cluster, bucket):
    cluster.start_all("a")
    code, report = ask(cluster.nodes["a"], "pin", f"{BUCKET}/o")
    assert (code, report["changed"]) == (0, len(bucket)), report
    cluster.start("b")
    cluster.agree(2)
    deadline = time.monotonic() + 120
    while not settled(cluster, bucket):
        # The nodes are asked one after the other, so a pin may pass between two answers, once.
        missing = set(bucket) - set(listed(cluster.nodes["a"]))
        missing -= set(listed(cluster.nodes["a"])) if missing else set()
        assert not missing
        assert time.monotonic() < deadline, pins(cluster)
    assert min(pins(cluster).values()) > 0


def test_who_was_away_when_it_was_said_catches_up(cluster, bucket):
    cluster.start_all("abc")
    few, others = f"{BUCKET}/o00", f"{BUCKET}/o01"
    assert ask(cluster.nodes["a"], "pin", few)[0] == 0
    assert ask(cluster.nodes["a"], "pin", others, "--mirror", "2")[0] == 0
    assert set(listed(cluster.nodes["b"])) == {f"o0{i:02}" for i in range(20)}
    cluster.stop("c", signal.SIGKILL)
    code, report = ask(cluster.nodes["b"], "unpin", f"{BUCKET}/o0")
    of = {n["name"]: n for n in report["nodes"]}
    assert code == 1 and of["c"]["failed"] > 0
    code, report = ask(cluster.nodes["b"], "pin", f"{BUCKET}/o02")
    assert code == 1
    # It has pins of what was unpinned on its disk, and would tell others of those on several nodes.
    cluster.start("c")
    cluster.agree(3)
    wanted = {f"o0{i}" for i in range(20, 30)}
    eventually(lambda: set(listed(cluster.nodes["c"])) == wanted, "all know what was said last")
    eventually(lambda: ask(cluster.nodes["a"], "pin", f"{BUCKET}/o02")[1]["changed"] == 0, "pinned")
    time.sleep(12)
    assert set(listed(cluster.nodes["a"])) == wanted
    # Nor does a whole restart bring it back, though the first node up knows nobody else.
    for name in "abc":
        cluster.stop(name)
    cluster.start_all("abc")
    time.sleep(12)
    assert set(listed(cluster.nodes["a"])) == wanted


def test_pins_of_one_node_stay_there(cluster, bucket):
    cluster.start_all("a")
    # While it is alone, what it is told counts for all who come, unless it is said otherwise.
    assert ask(cluster.nodes["a"], "pin", f"{BUCKET}/o00", "--this-node")[0] == 0
    assert ask(cluster.nodes["a"], "pin", f"{BUCKET}/o01")[0] == 0
    cluster.start_all("bc")
    here = {f"o00{i}": ["a"] for i in range(10)}

    def moved() -> bool:
        where = listed(cluster.nodes["b"])
        others = {key: nodes for key, nodes in where.items() if key.startswith("o01")}
        return (
            {key: nodes for key, nodes in where.items() if key in here} == here
            and len(others) == 10
            and all(len(nodes) == 1 for nodes in others.values())
            and len({nodes[0] for nodes in others.values()}) > 1
        )

    eventually(moved, "what was pinned for all follows the map, and the rest does not")
    assert set(listed(cluster.nodes["a"], "--this-node")) >= set(here)
    assert not set(listed(cluster.nodes["b"], "--this-node")) & set(here)
    # Unpinned for all is unpinned there too.
    code, report = ask(cluster.nodes["c"], "unpin", f"{BUCKET}/o0")
    assert (code, report["changed"]) == (0, 20)
    assert listed(cluster.nodes["a"]) == {}


def test_the_list_is_of_all_nodes_or_says_which_one_does_not_answer(cluster, bucket):
    cluster.start_all("ab")
    assert ask(cluster.nodes["a"], "pin", f"{BUCKET}/o")[0] == 0
    where = listed(cluster.nodes["a"])
    assert set(where) == set(bucket) and where["o042"] == ["a", "b"]
    assert where == listed(cluster.nodes["b"])
    for name in "ab":
        only = listed(cluster.nodes[name], "--this-node")
        assert set(only) == {key for key, nodes in where.items() if name in nodes}
    cluster.stop("b", signal.SIGKILL)
    command = [forebay_program(), "pin", "--list", "--node", cluster.nodes["a"].url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and done.stdout == ""
    assert "node b" in done.stderr and "--this-node" in done.stderr, done.stderr
    assert set(listed(cluster.nodes["a"], "--this-node")) == {
        key for key, nodes in where.items() if "a" in nodes
    }


KEYS = """
[[keys]]
access_key = "root"
secret_key = "everything-and-more"
token = "of-root"

[[keys]]
access_key = "keeper"
secret_key = "less-than-everything"
token = "of-keeper"
[[keys.allow]]
bucket = "kept"
actions = ["admin"]
prefix = "o00"
"""


def test_reasons_are_for_who_may_administer_everything(cluster, bucket, tmp_path):
    """They are words of other nodes, which may be about other objects than those named."""
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    cluster.options += ["--set", f"auth.keys_file={keys}", "--set", "auth.unix_trusted=false"]
    for name in "ab":
        cluster.start(name)
    node = cluster.nodes["a"]

    def v1(token: str, method: str, path: str) -> requests.Response:
        headers = {"Authorization": f"Bearer {token}"}
        return requests.request(
            method, f"{node.url}/v1/forebay/{path}", headers=headers, timeout=60
        )

    def both() -> bool:
        members = v1("of-root", "GET", "cluster").json()["members"]
        return len(members) == 2 and all(m["answers"] for m in members)

    eventually(both, "two members")
    assert v1("of-keeper", "POST", f"pin?bucket={BUCKET}&prefix=o0").status_code == 403
    done = v1("of-keeper", "POST", f"pin?bucket={BUCKET}&prefix=o00").json()
    assert (done["changed"], done["failed"]) == (10, 0)
    assert v1("of-root", "POST", f"pin?bucket={BUCKET}&prefix=o01").json()["failed"] == 0
    # Of the pins of all nodes, a key sees those that it may administer.
    pinned = {t: v1(t, "GET", "pinned").json()["pinned"] for t in ("of-root", "of-keeper")}
    assert {p["key"] for p in pinned["of-keeper"]} == {f"o00{i}" for i in range(10)}
    assert len(pinned["of-root"]) == 20
    cluster.nodes.pop("b").stop(signal.SIGKILL)
    for what in ("warm", "unpin"):
        told = {}
        for token in ("of-root", "of-keeper"):
            answer = v1(token, "POST", f"{what}?bucket={BUCKET}&prefix=o00")
            lines = answer.text.splitlines() if what == "warm" else [answer.text]
            *failed, report = map(json.loads, lines)
            assert report["failed"] > 0
            reasons = [line["message"] for line in failed if line.get("event") == "object"]
            reasons += [e["message"] for e in report.get("errors", [])]
            [of_node] = [n["error"] for n in report["nodes"] if n["name"] == "b"]
            told[token] = [of_node, *reasons]
            assert len(told[token]) > 1
        assert all("node b" in reason for reason in told["of-root"]), told
        untold = "the log of the node that was asked says why"
        assert all(untold in reason for reason in told["of-keeper"]), told
        assert not any("node b" in reason for reason in told["of-keeper"]), told
    said = node.log.read_text()
    assert "told only to keys" in said and "node b" in said
