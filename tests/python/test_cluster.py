"""Nodes that are one cache: real nodes, a real etcd, a real S3 server, and what happens when one of
them goes away.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forebay
import pytest
from clusters import (
    Cluster,
    eventually,
    fetch,
    metric,
    names,
    order,
    shares,
    status,
    throughout,
    trouble,
)
from conftest import s3_client
from servers import READY_SECONDS, REGION, Etcd, Node, forebay_program, free_port

NAME = "training"
MAP = f"/forebay/{NAME}/map"
# The shortest that cluster.forget_after takes, and how long a lease in etcd lasts.
FORGET_SECONDS = LEASE_SECONDS = 10


@pytest.fixture(scope="module")
def bucket(origin) -> dict[str, bytes]:
    """The objects of a bucket `cluster`: small ones, an empty one, and one of several units."""
    s3 = s3_client(origin.url)
    s3.create_bucket(Bucket="cluster", CreateBucketConfiguration={"LocationConstraint": REGION})
    made = random.Random(1)
    sizes = [150_000] * 30 + [0, 20 << 20]
    objects = {f"o{i:02}": made.randbytes(size) for i, size in enumerate(sizes)}
    for key, value in objects.items():
        s3.put_object(Bucket="cluster", Key=key, Body=value)
    return objects


# A node that takes most of the data.
MOST = ["--set", "cluster.weight=100GiB"]


def again(cluster: Cluster, bucket: dict[str, bytes]) -> float:
    """The share of the data that left the bucket more than once."""
    everything = sum(map(len, bucket.values()))
    return cluster.from_bucket() / everything - 1


def silences(cluster: Cluster) -> int:
    """How often nodes that are there gave each other up. A node that says nothing for 0.4 s is, and
    what it has is read from the bucket once more: on a busy machine that is nobody's mistake.
    """
    return sum(
        m["link"]["silences"]
        for node in cluster.nodes.values()
        for m in status(node)["members"]
        if m.get("link") and m["name"] in cluster.nodes
    )


def asks_former_owners(cluster: Cluster, bucket: dict[str, bytes]) -> None:
    """The node `d` has just joined those that have everything."""
    assert shares(cluster.nodes["a"])["d"] > 0.95
    before = silences(cluster)
    cluster.read(bucket)
    assert again(cluster, bucket) <= 0.01 or silences(cluster) > before


@pytest.fixture
def cluster(origin, bucket, etcd, tmp_path):
    made = Cluster(
        origin,
        tmp_path,
        f"etcd://127.0.0.1:{etcd.port}/{NAME}",
        "--set",
        f"cluster.forget_after={FORGET_SECONDS}s",
    )
    yield made
    made.close()


def three(cluster: Cluster) -> Cluster:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(cluster.start, "abc"))
    cluster.agree(3)
    return cluster


def test_three_nodes_join_by_etcd_and_each_byte_leaves_the_bucket_once(
    origin, bucket, etcd, tmp_path
):
    certificates = tmp_path / "certificates"
    command = [forebay_program(), "cluster", "init", NAME, "--out", str(certificates)]
    subprocess.run([*command, *(f"--node={n}" for n in "abcd")], check=True, capture_output=True)
    cluster = Cluster(origin, tmp_path, f"etcd://127.0.0.1:{etcd.port}/{NAME}")
    cluster.options.remove("cluster.plain=true")
    cluster.options.remove("--set")
    try:

        def start(name: str, *options: str) -> Node:
            files = [("ca", "ca.pem"), ("cert", "node.pem"), ("key", "node.key")]
            sets = (f"cluster.{k}={certificates / name / file}" for k, file in files)
            return cluster.start(name, *(word for s in sets for word in ("--set", s)), *options)

        for name in "abc":
            start(name)
        said = cluster.agree(3)
        assert said["epoch"] == 3, "each of the three entered itself"
        for node in cluster.nodes.values():
            done = order(node, "status", "--json")
            assert done.returncode == 0, done.stderr
            told = json.loads(done.stdout)
            assert told["epoch"] == 3 and told["cluster"] == NAME
            assert [m["answers"] for m in told["members"]] == [True] * 3
            assert sum(m["share"] for m in told["members"]) == pytest.approx(1)
            assert told.get("error") is None and 0 < told["lease_seconds"] <= 10
            assert metric(node, "forebay_cluster_source_failing") == 0
        cluster.read(bucket)
        assert cluster.from_bucket() == sum(map(len, bucket.values()))
        asked = sum(m["link"]["questions"] for m in status(node)["members"] if m.get("link"))
        assert asked > 0
        start("d", *MOST)
        cluster.agree(4)
        asks_former_owners(cluster, bucket)
    finally:
        cluster.close()


def test_a_killed_node_is_stood_in_for_and_comes_back_as_itself(cluster, bucket):
    three(cluster)
    cluster.read(bucket, "a")
    before, epoch = shares(cluster.nodes["a"]), status(cluster.nodes["a"])["epoch"]
    ids = {m["name"]: m["id"] for m in status(cluster.nodes["a"])["members"]}
    for name in "abc":
        cluster.stop(name, signal.SIGTERM)
    # Who they are is in their cache directories. Nobody forgets while the test asks.
    cluster.options[-1] = "cluster.forget_after=600s"
    for name in "abc":
        cluster.start(name)
    assert cluster.agree(3)["epoch"] == epoch

    cluster.stop("c", signal.SIGKILL)
    refused = order(cluster.nodes["a"], "forget", "c")
    assert refused.returncode != 0, refused.stdout
    assert "c is there, or was seconds ago" in refused.stderr
    assert "stop that node first" in refused.stderr
    cluster.read(bucket)
    # Nobody has to ask it for that.
    for node in (cluster.nodes["a"], cluster.nodes["b"]):
        done = eventually(lambda node=node: (d := order(node, "status")).returncode and d, "told")
        assert done.returncode == 1 and "do not answer that node: c" in done.stderr

    # Its lease ends, and then an order takes it out.
    done = eventually(
        lambda: (d := order(cluster.nodes["b"], "forget", "c", "--json")).returncode == 0 and d,
        "c is forgotten",
    )
    assert {m["name"] for m in json.loads(done.stdout)["members"]} == {"a", "b"}
    assert cluster.agree(2)["epoch"] == epoch + 1
    assert sum(shares(cluster.nodes["a"]).values()) == pytest.approx(1)
    cluster.read(bucket)

    # No name is configured any more: its directory says who it is.
    cluster.start("c", "own-name")
    told = cluster.agree(3)
    assert told["epoch"] == epoch + 2
    assert {m["id"] for m in told["members"]} == set(ids.values())
    shares_now = {m["id"]: m["share"] for m in told["members"]}
    assert shares_now == {ids[name]: share for name, share in before.items()}
    cluster.read(bucket)


def test_a_restart_moves_nothing_and_who_stays_away_is_forgotten(cluster, bucket):
    three(cluster)
    cluster.read(bucket)
    before, from_bucket = status(cluster.nodes["a"]), cluster.from_bucket()
    for how in (signal.SIGTERM, signal.SIGKILL):
        cluster.stop("c", how)
        cluster.start("c")
        assert cluster.agree(3)["epoch"] == before["epoch"]
    assert shares(cluster.nodes["c"]) == {m["name"]: m["share"] for m in before["members"]}
    cluster.read(bucket)
    assert cluster.from_bucket() == from_bucket, "its disk has what it had"

    began = time.monotonic()
    cluster.stop("c", signal.SIGKILL)
    told = eventually(
        lambda: (s := status(cluster.nodes["a"])) and len(s["members"]) == 2 and s,
        "c is forgotten",
    )
    assert time.monotonic() - began > FORGET_SECONDS
    assert told["epoch"] == before["epoch"] + 1
    cluster.agree(2)
    cluster.read(bucket)


def test_a_stopped_etcd_stops_no_read_and_nobody_is_forgotten(cluster, etcd, bucket, origin):
    three(cluster)
    half = dict(list(bucket.items())[:15])
    cluster.read(half)
    before = {name: shares(node) for name, node in cluster.nodes.items()}
    epoch = status(cluster.nodes["a"])["epoch"]
    etcd.process.send_signal(signal.SIGSTOP)
    try:
        # Also what nobody has yet, in batches too.
        cluster.read(bucket)
        client = forebay.Client(cluster.nodes["b"].url)
        assert [bytes(e) for e in client.batch(list(bucket), bucket="cluster")] == [
            *bucket.values()
        ]
        for node in cluster.nodes.values():
            said = eventually(lambda node=node: trouble(node), "the status tells of etcd")
            assert f"127.0.0.1:{etcd.port}" in said
            assert metric(node, "forebay_cluster_source_failing") == 1
            assert metric(node, "forebay_cluster_lease_seconds") == 0
            refused = order(node, "drain", "c")
            assert refused.returncode != 0 and "etcd" in refused.stderr
        # Longer than a lease lasts, and than who is away is remembered.
        throughout(
            LEASE_SECONDS + FORGET_SECONDS,
            lambda: status(cluster.nodes["a"])["epoch"] == epoch,
            "the map changed though nobody could see who is there",
        )
        cluster.read(bucket)
    finally:
        etcd.process.send_signal(signal.SIGCONT)
    for node in cluster.nodes.values():
        eventually(lambda node=node: not trouble(node), "etcd is seen again")
    throughout(
        FORGET_SECONDS + 5,
        lambda: status(cluster.nodes["a"])["epoch"] == epoch,
        "somebody was forgotten whose lease had ended while etcd stood still",
    )
    assert {name: shares(node) for name, node in cluster.nodes.items()} == before
    leases = lambda node: metric(node, "forebay_cluster_lease_seconds")  # noqa: E731
    assert all(leases(node) > 0 for node in cluster.nodes.values())


def test_a_node_stops_in_order_though_etcd_does_not_answer(cluster, etcd):
    node = cluster.start("a", "--set", "limits.drain_timeout=1s")
    eventually(lambda: metric(node, "forebay_cluster_lease_seconds") > 0, "it has a lease")
    etcd.process.send_signal(signal.SIGSTOP)
    try:
        assert cluster.nodes.pop("a").stop(patience=60) == 0
    finally:
        etcd.process.send_signal(signal.SIGCONT)


def test_an_etcd_that_lost_everything_is_told_again(cluster, etcd, bucket, tmp_path):
    three(cluster)
    cluster.read(bucket)
    before, from_bucket = status(cluster.nodes["a"]), cluster.from_bucket()
    etcd.stop(signal.SIGKILL)
    for node in cluster.nodes.values():
        eventually(lambda node=node: trouble(node), "the status tells of etcd")
    throughout(
        LEASE_SECONDS + FORGET_SECONDS,
        lambda: status(cluster.nodes["a"])["epoch"] == before["epoch"],
        "the map changed without etcd",
    )
    cluster.read(bucket)
    empty = Etcd(tmp_path / "etcd2", port=etcd.port)
    try:
        eventually(lambda: len(empty.keys()) == 4, "the map and three nodes are put back")
        for node in cluster.nodes.values():
            newer = lambda node=node: status(node)["epoch"] > before["epoch"]  # noqa: E731
            eventually(newer, "the map that was put back is taken over")
        told = cluster.agree(3)
        assert json.loads(empty.keys()[MAP])["epoch"] == told["epoch"]
        for node in cluster.nodes.values():
            assert shares(node) == {m["name"]: m["share"] for m in before["members"]}
            eventually(lambda node=node: not trouble(node), "etcd is seen again")
        cluster.read(bucket)
        assert cluster.from_bucket() == from_bucket
    finally:
        empty.stop(signal.SIGKILL)


def test_what_is_no_map_of_this_cluster_changes_nothing(cluster, etcd, bucket, tmp_path):
    for name in "ab":
        cluster.start(name)
    before = cluster.agree(2)
    cluster.read(bucket)
    command = [forebay_program(), "cluster", "map", "other", "--member", "x=10.0.0.1:8300,1TiB"]
    other = subprocess.run(command, check=True, capture_output=True).stdout
    for wrong, why in ((b"garbage", "the map of the cluster"), (other, "of cluster .*other")):
        etcd.put(MAP, wrong)
        for node in cluster.nodes.values():
            eventually(lambda node=node, why=why: re.search(why, trouble(node)), why)
            assert status(node)["epoch"] == before["epoch"]
        with pytest.raises(AssertionError, match=why) as refused:
            cluster.start("c")
        assert "joining the cluster" in str(refused.value)
        assert etcd.keys()[MAP] == wrong, "what an operator put there is not overwritten"
        cluster.read(bucket)
    # Without it, the right one is put back.
    etcd.delete(MAP)
    for node in cluster.nodes.values():
        eventually(lambda node=node: not trouble(node), "the map is right again")
    assert {m["name"] for m in cluster.agree(2)["members"]} == {"a", "b"}


def test_of_two_nodes_with_one_identity_the_second_does_not_start(cluster, bucket, tmp_path):
    a = cluster.start("a")
    cluster.read(bucket)
    why = r"another node with this identity \(a\) runs at 127\.0\.0\.1:\d+"
    with pytest.raises(AssertionError, match=why) as refused:
        cluster.start("second", "--set", "cluster.node=a", "own-name")
    assert "stop one of them" in str(refused.value)
    assert "ended with status 1" in str(refused.value)
    # The same by a copied cache directory.
    (tmp_path / "copied").mkdir()
    shutil.copytree(
        tmp_path / "a" / "cache",
        tmp_path / "copied" / "cache",
        ignore=shutil.ignore_patterns("*.sock", "lock"),
    )
    with pytest.raises(AssertionError, match="another node with this identity"):
        cluster.start("copied", "own-name")
    assert len(status(a)["members"]) == 1 and not trouble(a)
    cluster.read(bucket)


def test_without_etcd_a_node_starts_only_if_it_may_be_alone(cluster, etcd, bucket, tmp_path):
    port = etcd.port
    etcd.stop(signal.SIGKILL)
    with pytest.raises(AssertionError, match="joining the cluster at etcd://") as refused:
        cluster.start("a")
    assert f"127.0.0.1:{port} does not answer" in str(refused.value)
    assert "start etcd, or let the node start alone (cluster.alone)" in str(refused.value)
    assert "ended with status 1" in str(refused.value), "so that the service is started again"
    for name in "ab":
        cluster.start(name, "--set", "cluster.alone=true")
        assert names(cluster.nodes[name]) == {name} and trouble(cluster.nodes[name])
    cluster.read(bucket)
    late = Etcd(tmp_path / "late", port=port)
    try:
        assert {m["name"] for m in cluster.agree(2)["members"]} == {"a", "b"}
        cluster.read(bucket)
    finally:
        late.stop(signal.SIGKILL)


def test_a_draining_node_is_read_from_and_not_the_bucket(cluster, bucket):
    # Or they would have everything before it is read.
    cluster.options += ["--set", "cluster.hand_over_rate=0"]
    for name, options in (("a", []), ("b", []), ("c", MOST)):
        cluster.start(name, *options)
    cluster.agree(3)
    # Nobody has what others own, except a.
    cluster.read(bucket, "a")
    before = shares(cluster.nodes["a"])
    assert cluster.from_bucket() == sum(map(len, bucket.values()))
    done = order(cluster.nodes["a"], "drain", "c")
    assert done.returncode == 0, done.stderr
    for node in cluster.nodes.values():
        eventually(lambda node=node: shares(node)["c"] == 0, "c has no share")
        assert sum(shares(node).values()) == pytest.approx(1)
        assert metric(node, 'forebay_cluster_members{state="draining"}') == 1
    of_c = 'forebay_peer_received_bytes_total{peer="c"}'
    sent = lambda: sum(metric(cluster.nodes[n], of_c) for n in "ab")  # noqa: E731
    so_far, silent = sent(), silences(cluster)
    cluster.read(bucket)
    assert sent() > so_far, "what c has is asked of c"
    assert again(cluster, bucket) <= 0.01 or silences(cluster) > silent
    from_bucket = cluster.from_bucket()
    # A restart does not undo what was ordered.
    cluster.stop("c")
    cluster.start("c", *MOST)
    cluster.agree(3)
    assert shares(cluster.nodes["c"])["c"] == 0
    for last in "b", "a":
        refused = order(cluster.nodes["c"], "drain", last)
    assert refused.returncode != 0
    assert "the last member" in refused.stderr and "let another node join" in refused.stderr
    assert order(cluster.nodes["a"], "drain", "b", "--undo").returncode == 0
    assert order(cluster.nodes["b"], "drain", "c", "--undo").returncode == 0
    for node in cluster.nodes.values():
        eventually(lambda node=node: shares(node) == before, "each has its share again")
    cluster.read(bucket)
    assert cluster.from_bucket() == from_bucket


def test_users_of_etcd(origin, bucket, tmp_path):
    ttl = 2
    options = ["--auth-token-ttl", str(ttl), "--bcrypt-cost", "4"]
    etcd = Etcd(tmp_path / "etcd", options=options)
    cluster = Cluster(origin, tmp_path, f"etcd://127.0.0.1:{etcd.port}/{NAME}")
    try:
        for name in ("root", "forebay"):
            etcd.call("auth/user/add", {"name": name, "password": f"of {name}"})
            etcd.call("auth/role/add", {"name": name})
            etcd.call("auth/user/grant", {"user": name, "role": name})
        key, end = "L2ZvcmViYXkvdHJhaW5pbmcv", "L2ZvcmViYXkvdHJhaW5pbmcw"
        permission = {"permType": "READWRITE", "key": key, "range_end": end}
        etcd.call("auth/role/grant", {"name": "forebay", "perm": permission})
        etcd.call("auth/enable", {})

        with pytest.raises(AssertionError, match=r"cluster\.etcd_user") as refused:
            cluster.start("a")
        assert "joining the cluster" in str(refused.value)
        password = tmp_path / "password"
        user = ["cluster.etcd_user=forebay", f"cluster.etcd_password_file={password}"]
        cluster.options += [word for s in user for word in ("--set", s)]
        password.write_text("wrong\n")
        password.chmod(0o600)
        with pytest.raises(AssertionError, match="authentication failed") as refused:
            cluster.start("a")
        assert "etcd's user" in str(refused.value) and str(password) in str(refused.value)
        assert "cluster.etcd_password_file" in str(refused.value)
        password.write_text("of forebay\n")
        for name in "ab":
            cluster.start(name)
        epoch = cluster.agree(2)["epoch"]
        cluster.read(bucket)

        # Tokens end; leases go on, and what is new is seen.
        throughout(
            LEASE_SECONDS + 3 * ttl,
            lambda: all(status(node)["lease_seconds"] for node in cluster.nodes.values()),
            "a node lost its lease when its token ended",
        )
        assert not any(trouble(node) for node in cluster.nodes.values())
        assert order(cluster.nodes["b"], "drain", "a").returncode == 0
        eventually(lambda: shares(cluster.nodes["a"])["a"] == 0, "the order is seen")
        assert status(cluster.nodes["a"])["epoch"] == epoch + 1

        # The password is changed, in etcd and then in the file.
        token = etcd.call("auth/authenticate", {"name": "root", "password": "of root"})["token"]
        etcd.call("auth/user/changepw", {"name": "forebay", "password": "new"}, token)
        eventually(lambda: "etcd_password_file" in trouble(cluster.nodes["a"]), "it is told")
        password.write_text("new\n")
        eventually(lambda: not trouble(cluster.nodes["a"]), "the new password is taken")
        cluster.agree(2)
        cluster.read(bucket)
    finally:
        cluster.close()
        etcd.stop(signal.SIGKILL)


class Name:
    """A name with several addresses, in a hosts file that only the nodes see."""

    def __init__(self, directory: Path, *names: str) -> None:
        self.file = directory / "hosts"
        self.names = names
        self.has(*[()] * len(names))
        unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "-r", "--mount"]
        multi = directory / "host.conf"
        multi.write_text("multi on\n")
        # A name that the file does not have is not asked of anybody else.
        switch = directory / "nsswitch.conf"
        switch.write_text("passwd: files\ngroup: files\nhosts: files\n")
        mounts = [(self.file, "hosts"), (multi, "host.conf"), (switch, "nsswitch.conf")]
        script = "".join(f"mount --bind {file} /etc/{name} && " for file, name in mounts)
        self.within = [*unshare, "sh", "-c", f'{script}exec "$@"', "sh"]
        tried = subprocess.run([*self.within, "true"], capture_output=True, text=True)
        assert tried.returncode == 0, (
            f"nodes need a hosts file of their own here: {tried.stderr} (as root, or with user"
            " namespaces, `unshare --mount` may mount one)"
        )

    def has(self, *addresses: tuple[int, ...]) -> None:
        """127.0.0.N for each N; for each of the names."""
        lines = ["127.0.0.1 localhost\n"]
        for name, numbers in zip(self.names, addresses, strict=True):
            lines += [f"127.0.0.{n} {name}\n" for n in numbers]
        # The same file: it is mounted.
        self.file.write_text("".join(lines))


@pytest.fixture
def by_name(origin, bucket, tmp_path):
    """A function that starts the node NAME at 127.0.0.N, and the cluster, whose name has nobody."""
    name = Name(tmp_path, "nodes.test")
    port = free_port()
    cluster = Cluster(
        origin,
        tmp_path,
        f"dns:nodes.test:{port}",
        "--set",
        f"cluster.forget_after={FORGET_SECONDS}s",
    )

    def start(node: str, number: int, *options: str) -> Node:
        cluster.ports[node] = (free_port(), port)
        return cluster.start(node, *options, host=f"127.0.0.{number}", within=name.within)

    cluster.within_name, cluster.start_at = name, start
    yield cluster
    cluster.close()


def all_see(cluster: Cluster, members: str) -> None:
    for node in cluster.nodes.values():
        eventually(lambda node=node: names(node) == set(members), f"the members {members}")


def test_nodes_find_each_other_at_a_name(by_name, bucket):
    cluster, name = by_name, by_name.within_name
    name.has((2, 3, 4))
    for node, number in (("a", 2), ("b", 3), ("c", 4)):
        cluster.start_at(node, number)
    all_see(cluster, "abc")
    assert len({json.dumps(shares(node)) for node in cluster.nodes.values()}) == 1
    cluster.read(bucket)
    assert cluster.from_bucket() == sum(map(len, bucket.values()))
    refused = order(cluster.nodes["a"], "drain", "b")
    assert refused.returncode != 0 and "cannot be ordered" in refused.stderr

    # A fourth one comes: before it is at the name, and then there.
    d = cluster.start_at("d", 5, *MOST)
    assert names(d) >= {"d"}
    name.has((2, 3, 4, 5))
    all_see(cluster, "abcd")
    assert len({json.dumps(shares(node)) for node in cluster.nodes.values()}) == 1
    asks_former_owners(cluster, bucket)

    # One starts again with another size while nobody asks it: all learn of that.
    cluster.stop("b")
    cluster.start("b", "--set", "cluster.weight=50GiB", host="127.0.0.3", within=name.within)
    for node in cluster.nodes.values():
        weights = lambda node=node: {m["name"]: m["weight"] for m in status(node)["members"]}  # noqa: E731
        eventually(lambda w=weights: w().get("b") == 50 << 30, "the new size of b")
    all_see(cluster, "abcd")
    assert len({json.dumps(shares(node)) for node in cluster.nodes.values()}) == 1

    # One dies, and stays at the name: it is forgotten though nobody asks it.
    cluster.stop("c", signal.SIGKILL)
    all_see(cluster, "abd")

    # One leaves the name: it stays for a while, and is then forgotten.
    cluster.stop("d")
    name.has((2, 3))
    throughout(FORGET_SECONDS / 2, lambda: names(cluster.nodes["a"]) == set("abd"), "too early")
    all_see(cluster, "ab")
    cluster.read(bucket)


def test_a_name_that_is_empty_or_of_strangers_empties_no_map(by_name, bucket):
    cluster, name = by_name, by_name.within_name
    name.has((2, 3))
    for node, number in (("a", 2), ("b", 3)):
        cluster.start_at(node, number)
    all_see(cluster, "ab")
    cluster.read(bucket)
    before = {node: status(cluster.nodes[node])["epoch"] for node in cluster.nodes}
    for wrong, why in (((), "cannot be resolved"), ((9, 10), "leads to no node of this cluster")):
        name.has(wrong)
        for node in cluster.nodes.values():
            eventually(lambda node=node, why=why: why in trouble(node), f"{why} is told")
        throughout(
            FORGET_SECONDS + 5,
            lambda: names(cluster.nodes["a"]) == names(cluster.nodes["b"]) == {"a", "b"},
            "somebody was forgotten because of the name",
        )
        cluster.read(bucket)
    name.has((2, 3))
    for node in cluster.nodes.values():
        eventually(lambda node=node: not trouble(node), "the name is right again")
    assert {n: status(cluster.nodes[n])["epoch"] for n in cluster.nodes} == before
    # Without a node: the first one starts before it has a name.
    cluster.stop("b")
    name.has(())
    cluster.start_at("b", 3)
    assert "cannot be resolved" in trouble(cluster.nodes["b"])
    name.has((2, 3))
    all_see(cluster, "ab")


def test_nodes_of_two_clusters_at_one_name_leave_each_other_alone(origin, bucket, tmp_path):
    name = Name(tmp_path, "one.test", "two.test")
    name.has((2, 3), (2, 3))
    port = free_port()
    clusters = [
        Cluster(origin, tmp_path / n, f"dns:{n}.test:{port}", "--log", "debug")
        for n in ("one", "two")
    ]
    try:
        for number, (node, cluster) in enumerate(zip("ab", clusters, strict=True), 2):
            cluster.ports[node] = (free_port(), port)
            cluster.start(node, host=f"127.0.0.{number}", within=name.within)
        for node, cluster in zip("ab", clusters, strict=True):
            log = cluster.nodes[node].log
            eventually(lambda log=log: "belongs to cluster" in log.read_text(), "it is told")
            assert names(cluster.nodes[node]) == {node}
            cluster.read(bucket)
    finally:
        for cluster in clusters:
            cluster.close()


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
def test_strangers_at_the_peer_port_are_refused(origin, bucket, etcd, tmp_path, secured):
    cluster = Cluster(origin, tmp_path, f"etcd://127.0.0.1:{etcd.port}/{NAME}")
    if secured:
        command = [forebay_program(), "cluster", "init", NAME, "--node=a", "--node=b"]
        subprocess.run([*command, "--out", tmp_path / "tls"], check=True, capture_output=True)
    try:
        for name in "ab":
            at = tmp_path / "tls" / name
            sets = [("plain", "false"), ("ca", at / "ca.pem")]
            sets += [("cert", at / "node.pem"), ("key", at / "node.key")]
            words = [w for k, v in sets for w in ("--set", f"cluster.{k}={v}")] if secured else []
            cluster.start(name, *words)
        cluster.agree(2)
        port = cluster.ports["a"][1]
        made = random.Random(2)
        for sent in (
            b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
            b"\x16\x03\x01\x00\x05hello",
            b"\xff" * 64,
            b"\x00" * 64,
            *(made.randbytes(4096) for _ in range(8)),
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=READY_SECONDS) as stranger:
                with contextlib.suppress(OSError):
                    stranger.sendall(sent)
                    stranger.shutdown(socket.SHUT_WR)
                got = b""
                with contextlib.suppress(ConnectionError):
                    while piece := stranger.recv(65536):
                        got += piece
            assert len(got) < 4096, got[:200]
            assert not any(value[:64] in got for value in bucket.values() if value)
        with pytest.raises((OSError, http.client.HTTPException)):
            fetch(f"http://127.0.0.1:{port}/cluster/o00")
        # Many that say nothing take no place for long.
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
        cluster.read(bucket)
        cluster.agree(2)
        for stranger in silent:
            stranger.settimeout(READY_SECONDS)
            with contextlib.suppress(ConnectionError):
                while stranger.recv(65536):
                    pass
            stranger.close()
        assert cluster.from_bucket() == sum(map(len, bucket.values()))
    finally:
        cluster.close()


# --- Operating the whole cluster from one node ---


def lines_of(node: Node, target: str, request: str) -> list[dict]:
    """What the node's log says of a request under this target."""
    with contextlib.suppress(FileNotFoundError):
        said = [json.loads(line) for line in node.log.read_text().splitlines() if line[:1] == "{"]
        return [line for line in said if line["target"] == target and line.get("id") == request]
    return []


def test_the_id_of_a_request_is_in_the_logs_of_all_nodes_that_work_for_it(cluster, bucket):
    cluster.options += ["--log", "info,forebay::peer=debug"]
    nodes = three(cluster).nodes
    # Of several units: at least one is another node's.
    request = urllib.request.Request(
        f"{nodes['a'].url}/cluster/o31", headers={"x-request-id": "epoch-3/step-7"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["x-request-id"] == "epoch-3/step-7"
        assert answer.read() == bucket["o31"]

    def answers() -> list[dict]:
        others = [nodes[name] for name in "bc"]
        return [line for n in others for line in lines_of(n, "forebay::peer", "epoch-3/step-7")]

    eventually(lambda: lines_of(nodes["a"], "forebay::request", "epoch-3/step-7"), "a's own line")
    me = next(m["id"] for m in status(nodes["a"])["members"] if m["name"] == "a")

    def by_links() -> int:
        members = status(nodes["a"])["members"]
        return sum(m["link"]["received_bytes"] for m in members if m["link"])

    def from_others() -> int:
        # An owner may have asked a former one, by the same id.
        return sum(line["bytes"] for line in answers() if line["from"] == me)

    assert by_links() > 0
    eventually(lambda: from_others() == by_links(), "a line for each answer")
    told = answers()
    for line in told:
        assert line["ms"] >= 0
        assert (line["bucket"], line["key"]) == ("cluster", "o31")
        assert line["outcome"] in ("given", "miss")
    # Of a name that is nowhere, the node that would own it says so, by the id of who asks it.
    for name, node in nodes.items():
        request = urllib.request.Request(
            f"{node.url}/cluster/none", headers={"x-request-id": f"lost-{name}"}
        )
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=60)
    refused = eventually(
        lambda: [
            line
            for name, asked in ((a, b) for a in nodes for b in nodes if a != b)
            for line in lines_of(nodes[asked], "forebay::peer", f"lost-{name}")
        ],
        "the line of a refusal",
    )
    # Who is late is overtaken by another node, which has nothing of it.
    outcomes = {line["outcome"] for line in refused}
    assert "refused" in outcomes and outcomes <= {"refused", "miss"}
    assert all("none" in line["error"] for line in refused if line["outcome"] == "refused")


def ask_of_cache(node: Node, *words: str) -> tuple[int, dict]:
    """`forebay WORDS`, asked of this node: its exit code, and its report."""
    command = [forebay_program(), *words, "--node", node.url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout, done.stderr
    # A warm-up tells lines, of which the last is the report.
    report = done.stdout.splitlines()[-1] if words[0] == "warm" else done.stdout
    return done.returncode, json.loads(report)


def test_a_cluster_is_warmed_pinned_and_evicted_from_any_node(cluster, bucket):
    nodes = three(cluster).nodes
    everything = sum(map(len, bucket.values()))
    code, dry = ask_of_cache(nodes["b"], "warm", "cluster/", "--dry-run")
    assert (code, dry["warmed_bytes"], cluster.from_bucket()) == (0, everything, 0)
    code, report = ask_of_cache(nodes["a"], "warm", "cluster/")
    assert (code, report["failed"], report["objects"]) == (0, 0, len(bucket))
    assert report["warmed_bytes"] == everything and len(report["nodes"]) == 3
    assert all(n["bytes"] > 0 and n["failed"] == 0 for n in report["nodes"])
    assert sum(n["bytes"] for n in report["nodes"]) == everything
    # Each byte is on one disk, and left the bucket once.
    assert cluster.from_bucket() == everything
    code, report = ask_of_cache(nodes["c"], "warm", "cluster/")
    assert (code, report["already_there_bytes"], report["warmed"]) == (0, everything, 0)
    # Pinned where they are owned: the small ones on one node, the large one on several.
    code, report = ask_of_cache(nodes["a"], "pin", "cluster/")
    assert (code, report["changed"], report["failed"]) == (0, len(bucket), 0)
    pins = {name: int(metric(node, "forebay_store_pins")) for name, node in nodes.items()}
    assert len(bucket) <= sum(pins.values()) <= len(bucket) + 2
    assert pins == {n["name"]: n["objects"] for n in report["nodes"]}
    code, report = ask_of_cache(nodes["b"], "evict", "cluster/")
    assert (code, report["changed"], report["bytes"]) == (0, 0, 0)
    code, report = ask_of_cache(nodes["c"], "unpin", "cluster/")
    assert (code, report["changed"]) == (0, len(bucket))
    # Of this node alone, as ever.
    code, report = ask_of_cache(nodes["b"], "evict", "cluster/", "--this-node")
    assert code == 0 and 0 < report["changed"] < len(bucket) and "nodes" not in report
    code, report = ask_of_cache(nodes["a"], "evict", "cluster/")
    assert code == 0 and report["changed"] > 0 and report["failed"] == 0
    left = {name: [k for k in bucket if stat(node, k)] for name, node in nodes.items()}
    assert left == {"a": [], "b": [], "c": []}

    # A node that is gone leaves its part undone, and asking again does what is missing.
    cluster.stop("c", signal.SIGKILL)
    code, report = ask_of_cache(nodes["a"], "warm", "cluster/")
    of = {n["name"]: n for n in report["nodes"]}
    assert code == 1
    assert of["c"]["failed"] == report["failed"] > 0 and of["c"]["error"]
    assert of["a"]["failed"] == of["b"]["failed"] == 0
    # Of an empty object, no byte is missing.
    assert report["warmed"] + report["failed"] + report["already_there"] == len(bucket)
    cluster.start("c")
    cluster.agree(3)
    code, report = ask_of_cache(nodes["b"], "warm", "cluster/")
    assert (code, report["failed"]) == (0, 0)
    of = {n["name"]: n for n in report["nodes"]}
    assert of["a"]["bytes"] == of["b"]["bytes"] == 0 < of["c"]["bytes"]


def stat(node: Node, key: str) -> int:
    """The bytes of an object that are in this node's cache."""
    return json.loads(fetch(f"{node.url}/v1/forebay/stat/cluster/{key}"))["cached_bytes"]


KEYS = """
[[keys]]
access_key = "ops"
secret_key = "not-told-anybody"
token = "everything"
"""


def test_the_nodes_of_a_cluster_are_compared_and_counted(cluster, bucket, tmp_path):
    files = {name: tmp_path / f"{name}.toml" for name in "abc"}
    for name, file in files.items():
        file.write_text(KEYS)
        cluster.start(name, "--set", f"auth.keys_file={file}")
    nodes = cluster.nodes

    def told() -> tuple[subprocess.CompletedProcess, dict]:
        unix = nodes["a"].unix_url
        command = [forebay_program(), "cluster", "status", "--node", unix]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
        said = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60)
        return shown, json.loads(said.stdout)

    eventually(lambda: len(told()[1]["members"]) == 3, "three members")
    command = [forebay_program(), "warm", "cluster/", "--node", nodes["a"].unix_url]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    shown, said = told()
    everything = sum(map(len, bucket.values()))
    of = {m["name"]: m for m in said["members"]}
    for name, node in nodes.items():
        figures = of[name]["figures"]
        used = node.metrics()
        disk = sum(v for k, v in used.items() if k.startswith("forebay_store_used_bytes"))
        assert figures["used_bytes"] == figures["dirs"][0]["used_bytes"] == disk
        assert figures["capacity_bytes"] == 256 << 20
        assert "differs" not in of[name]
    assert sum(m["figures"]["from_buckets_bytes"] for m in said["members"]) == everything
    most = max(m["figures"]["used_bytes"] for m in said["members"])
    mean = sum(m["figures"]["used_bytes"] for m in said["members"]) / 3
    assert said["spread"] == pytest.approx(most / mean)
    assert "times the mean" in shown.stdout and "differs" not in shown.stdout

    # One node gets another secret: the others see that, and nobody sees what it is.
    files["b"].write_text(KEYS.replace("not-told-anybody", "quite-another"))
    eventually(lambda: differs(told()[1]) == {"b": ["keys"]}, "b's keys")
    shown, said = told()
    assert "b has other keys and policies than the node that answers" in shown.stdout
    assert "not-told" not in shown.stdout + json.dumps(said) and "prints" not in json.dumps(said)
    sample = 'forebay_cluster_differs{what="keys"}'
    eventually(lambda: metric(nodes["a"], sample) == 1, "the metric of a")
    eventually(lambda: metric(nodes["b"], sample) == 2, "the metric of b")
    files["b"].write_text(KEYS)
    eventually(lambda: metric(nodes["a"], sample) == 0, "the metric of a, after")
    log = [json.loads(line) for line in nodes["a"].log.read_text().splitlines() if line[:1] == "{"]
    assert [(line["node"], line["differs"]) for line in log if "differs" in line] == [("b", "keys")]

    # Who is gone is told of as such, and the others are told of as before.
    cluster.stop("c", signal.SIGKILL)
    _, said = told()
    of = {m["name"]: m for m in said["members"]}
    assert of["c"]["untold"] and "figures" not in of["c"]
    assert of["a"]["figures"] and of["b"]["figures"]


def differs(said: dict) -> dict[str, list[str]]:
    return {m["name"]: m["differs"] for m in said["members"] if "differs" in m}


def test_top_shows_all_nodes_of_a_cluster(cluster, bucket):
    nodes = three(cluster).nodes

    def top(*words: str) -> subprocess.Popen:
        command = [forebay_program(), "top", "-n", "2", "--interval", "3s", *words]
        node = ["--node", nodes["a"].url]
        return subprocess.Popen([*command, *node], stdout=subprocess.PIPE, text=True)

    running = top("--json")
    json.loads(running.stdout.readline())
    cluster.read(bucket)
    reading = json.loads(running.stdout.readline())
    assert running.wait(60) == 0
    of = {n["name"]: n for n in reading["nodes"]}
    assert set(of) == {"a", "b", "c"} and all(n["answers"] for n in of.values())
    assert reading["total"]["objects_per_s"] > 0 and reading["total"]["sent_bytes_per_s"] > 0
    assert reading["total"]["from_buckets_bytes_per_s"] > 0
    assert reading["total"]["objects_per_s"] == pytest.approx(
        sum(n["objects_per_s"] for n in of.values())
    )
    cluster.stop("c", signal.SIGKILL)
    table, _ = top().communicate(timeout=60)
    lines = table.splitlines()
    assert len(lines) == 10 and lines[0].startswith("node")
    assert "silent" in next(line for line in lines[5:] if line.startswith("c "))
    assert lines[9].startswith("all")
    alone, _ = top("--this-node").communicate(timeout=60)
    assert len(alone.splitlines()) == 2 and "hit ratio" in alone


# Nearly all of the data.
ALL = ["--set", "cluster.weight=100TiB"]


def member(node: Node, name: str) -> dict:
    return next(m for m in status(node)["members"] if m["name"] == name)


def has_taken_over(node: Node, name: str) -> bool:
    """The member `name`, whose share the map shows, has everything that others had of it."""
    told = member(node, name)
    moving = told["moving"]
    return told["share"] > 0.9 and moving is not None and moving["gaining_slots"] == 0


def test_a_node_that_joins_takes_over_its_share_though_nobody_reads(cluster, bucket):
    three(cluster)
    cluster.read(bucket)
    everything = sum(map(len, bucket.values()))
    assert cluster.from_bucket() == everything
    d = cluster.start("d", *ALL)
    cluster.agree(4)
    eventually(lambda: has_taken_over(d, "d"), "d has its share")
    assert metric(d, "forebay_hand_over_taken_bytes_total") >= 0.99 * everything
    assert metric(d, "forebay_cluster_gaining_slots") == 0
    given = sum(metric(cluster.nodes[n], "forebay_hand_over_given_bytes_total") for n in "abc")
    # From who owned it, and of what moved before within the day also from who owned it then: three
    # nodes may have joined one after the other.
    assert everything <= given < 3 * everything
    # Who had it knows that it has gone.
    for name in "abc":
        node = cluster.nodes[name]
        eventually(
            lambda node=node: metric(node, "forebay_cluster_losing_slots") == 0, "it is told"
        )
    for name in "abc":
        cluster.stop(name, signal.SIGKILL)
    cluster.read(bucket, "d")
    assert again(cluster, bucket) <= 0.01


def test_a_drained_node_says_so_and_is_not_needed_any_more(cluster, bucket):
    for name, options in (("a", []), ("b", []), ("c", ALL)):
        cluster.start(name, *options)
    cluster.agree(3)
    # Nobody else has what c owns.
    cluster.read(bucket, "c")
    a = cluster.nodes["a"]
    done = order(a, "drain", "c", "--wait", "--json")
    assert done.returncode == 0, done.stderr
    told = {m["name"]: m for m in json.loads(done.stdout)["members"]}
    assert told["c"]["drained"] and told["c"]["state"] == "draining"
    assert told["c"]["moving"]["losing_slots"] == 0 and not told["a"]["drained"]
    b = cluster.nodes["b"]
    shown = "c: drained: it may be stopped"
    eventually(lambda: shown in order(b, "status").stdout, "the other node says it too")
    # It does not know after a restart that it gave everything, until it is told again.
    cluster.stop("c")
    cluster.start("c", *ALL)
    cluster.agree(3)
    eventually(lambda: member(a, "c")["drained"], "it is told again")
    taken = sum(metric(node, "forebay_hand_over_taken_bytes_total") for node in (a, b))
    assert taken >= 0.99 * sum(map(len, bucket.values()))
    cluster.stop("c", signal.SIGKILL)
    before = silences(cluster)
    cluster.read(bucket)
    assert again(cluster, bucket) <= 0.01 or silences(cluster) > before


def test_a_node_that_was_forgotten_takes_over_its_share_when_it_is_back(cluster, bucket):
    """Its table of owners is the one from before it was forgotten, which the others remember: who
    has not seen yet that it is back must not say that it has nothing for it.
    """
    for name, options in (("a", []), ("b", []), ("c", ALL)):
        cluster.start(name, *options)
    cluster.agree(3)
    cluster.stop("c", signal.SIGKILL)
    a = cluster.nodes["a"]
    eventually(lambda: len(status(a)["members"]) == 2, "c is forgotten")
    cluster.agree(2)
    # What it owns is now at the others alone.
    cluster.read(bucket)
    c = cluster.start("c", *ALL)
    cluster.agree(3)
    eventually(lambda: has_taken_over(c, "c"), "c has its share")
    taken = metric(c, "forebay_hand_over_taken_bytes_total")
    assert taken >= 0.99 * sum(map(len, bucket.values()))
