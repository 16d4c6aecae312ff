"""How far a cluster's throughput grows with its nodes where their links are what limits it: each
node is a network namespace, whose interface the kernel caps in both directions (tbf).
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from cluster_site import MEDIUM, NAMES, SMALL, Cluster, Etcd, Site, ask_owners, read_by
from cluster_writes import tests
from nodes import Node, as_entry, content
from report import Report, goal

#: Entries of a batch.
BATCH = 16
#: The same while everything is brought to its owners, before links are capped.
WARM_BATCH = 128
#: Nodes that others reach want to be told that they need no keys.
ANONYMOUS = ("--set", "auth.anonymous=true")


def links(report: Report, site: Site) -> None:
    args = site.args
    tests()
    import namespaces

    counts = [n for n in (1, 2, 4, 8) if n <= args.nodes]
    report.heading(
        f"1 to {counts[-1]} nodes, each with a link of {args.link >> 20} MiB/s in each direction"
    )
    if why := namespaces.why_not_capped():
        report.note(f"left out: {why}")
        return
    # Each object is read once where nodes put batches together: half of it crosses a link twice.
    count = round(counts[-1] * args.link * (args.seconds + 1) * 0.6 / MEDIUM) // BATCH * BATCH
    first = site.objects("links-first", 64, SMALL)
    names = site.objects("links", max(count, 4 * BATCH), MEDIUM)
    with ExitStack() as on:
        network = on.enter_context(namespaces.Network("world", *NAMES[: counts[-1]]))
        # The bucket, etcd and clients are at a machine whose link is not capped.
        on.enter_context(network.inside("world"))
        at = network.address("world")
        far = on.enter_context(
            Node(
                site.directory,
                "links-bucket",
                files=site.files,
                cache="4GiB",
                unix=False,
                listen=f"{at}:0",
                settings=ANONYMOUS,
            )
        )
        where = site.directory / "links-etcd"
        where.mkdir()
        etcd = on.enter_context(Etcd(where, args.etcd, at))
        base: dict[str, float] = {}
        for nodes in counts:
            called = f"links{nodes}"
            on_these = Cluster(site.directory / called, far.url, etcd, "4GiB", called, ANONYMOUS)
            with on_these as cluster:
                of_these(report, network, cluster, names, first, nodes, base, args)


def of_these(
    report: Report,
    network,
    cluster: Cluster,
    names: list[str],
    first: list[str],
    nodes: int,
    base: dict[str, float],
    args,
) -> None:
    import forebay

    with ExitStack() as on:
        for name in NAMES[:nodes]:
            cluster.host[name] = network.address(name)
            with network.inside(name):
                cluster.start(name)
        cluster.settle(nodes)
        mine = names[: len(names) * nodes // args.nodes // BATCH * BATCH] or names[:BATCH]
        # Only the owners have it: the client asks them, when it knows the map.
        client = forebay.Client(cluster.urls, direct=True)
        ask_owners(client, cluster, first)
        (item,) = client.batch([as_entry(mine[0])])
        if bytes(item.data) != content(mine[0], MEDIUM):
            sys.exit(f"{mine[0]} has other bytes")
        read_by(client, mine, WARM_BATCH)
        for name in NAMES[:nodes]:
            on.enter_context(network.capped(name, args.link))
        ways = (
            ("single objects (GETs), from their owners", 1, True, 0.9),
            ("batches that the client puts together", BATCH, True, 0.9),
            ("batches that a node puts together", BATCH, False, 0.45),
        )
        urls = cluster.urls
        for what, entries, direct, share in ways:
            clients = [client] if direct else [forebay.Client(u, direct=False) for u in urls]
            per_second = throughput(clients, nodes, mine, entries, direct, args.seconds)
            base.setdefault("all", per_second)
            report.add(
                {
                    "name": f"{nodes} {'nodes' if nodes > 1 else 'node'}: {what}",
                    "value": per_second / base["all"],
                    "unit": "times one node",
                    "mib_per_s": per_second / 2**20,
                    "goals": [goal("value", share * nodes)] if nodes > 1 else [],
                }
            )


def throughput(
    clients: list, nodes: int, names: list[str], entries: int, direct: bool, seconds: float
) -> float:
    """Bytes per second that four threads for each node get. What a node puts together is read once,
    so that nobody has it already.
    """
    chunks = [names[i : i + entries] for i in range(0, len(names), entries)]
    jobs = iter(itertools.cycle(chunks) if direct else chunks)
    lock, got = threading.Lock(), [0]
    began = time.monotonic()

    def work(number: int) -> None:
        client = clients[number % len(clients)]
        while time.monotonic() < began + seconds:
            with lock:
                chunk = next(jobs, None)
            if chunk is None:
                return
            size = sum(item.size for item in client.batch([as_entry(n) for n in chunk]))
            with lock:
                got[0] += size

    with ThreadPoolExecutor(4 * nodes) as pool:
        list(pool.map(work, range(4 * nodes)))
    return got[0] / (time.monotonic() - began)
