"""What leaves the bucket when many clients want one object, and how bytes lie on the disks of nodes
of different sizes.
"""

from __future__ import annotations

import hashlib
import http.client
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from cluster_site import EXTENT, TINY, Cluster, Site, ask_owners, read_by
from nodes import BUCKET, content
from report import Report, goal

#: What a client reads at once, and how often.
PART, PARTS = 1 << 20, 4
#: Disks of nodes, in units of what all data takes.
DISKS = {"a": (1, 1), "b": (1, 2), "c": (2, 2)}


def one_object(report: Report, site: Site) -> None:
    args, size = site.args, min(site.args.object, site.args.whole)
    site.large("large", size)
    clients = min(args.clients, 200)
    report.heading(f"{clients} clients, one cold object of {size >> 20} MiB, three nodes")
    with site.cluster("object") as cluster:
        urls, before = cluster.urls, site.bucket.moved()
        began = time.monotonic()
        with ThreadPoolExecutor(clients) as pool:
            jobs = [pool.submit(drain, urls[i % len(urls)], "large") for i in range(clients)]
            sizes = [job.result() for job in jobs]
        took = time.monotonic() - began
        after, detours = site.bucket.moved(), detours_of(cluster)
    report.add(
        {
            "name": "clients that got all of it",
            "value": sum(got == size for got in sizes),
            "unit": f"of {clients}",
            "goals": [goal("value", clients)],
        }
    )
    report.add(
        {
            "name": "the bucket sent, of the object",
            "value": (after["bytes_to_client"] - before["bytes_to_client"]) / size,
            "unit": "times",
            "goals": [goal("value", at_most=1.01)],
        }
    )
    add_detours(report, "", detours)
    report.add(
        {"name": "delivered by all nodes", "value": sum(sizes) / took / 2**20, "unit": "MiB/s"}
    )
    if any(got != size for got in sizes):
        sys.exit("a client did not get the whole object")


#: Why a node reads past the owner of what it wants.
DETOURS = {
    "forebay_peer_silences_total": "times that a node was given up",
    "forebay_peer_left_alone_total": "times that a node was left alone",
    "forebay_peer_hedged_questions_total": "questions to a second node",
}


def detours_of(cluster: Cluster) -> dict[str, float]:
    return {what: cluster.metric(metric) for metric, what in DETOURS.items()}


def add_detours(report: Report, of: str, detours: dict[str, float]) -> None:
    for what, count in detours.items():
        report.add({"name": f"{of}{what}", "value": int(count), "unit": ""})


def drain(url: str, name: str) -> int:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    connection.request("GET", f"/{BUCKET}/{name}")
    answer, size = connection.getresponse(), 0
    while piece := answer.read(1 << 20):
        size += len(piece)
    connection.close()
    return size


def sha1(data: bytes) -> bytes:
    return hashlib.sha1(data, usedforsecurity=False).digest()


def parts(report: Report, site: Site) -> None:
    """Each client reads some parts of one object, at one node; all parts are read by somebody."""
    args = site.args
    size = max(EXTENT, args.object // EXTENT * EXTENT)
    site.large("parts", size)
    report.heading(
        f"{args.clients} clients, each {PARTS} parts of 1 MiB of one cold object of"
        f" {size >> 20} MiB, three nodes"
    )
    made, count = random.Random(args.seed), size // PART
    wanted: list[int] = []
    while len(wanted) < max(count, args.clients * PARTS):
        wanted += made.sample(range(count), count)
    per_run = EXTENT // PART
    runs = (content(f"parts/{run}", EXTENT) for run in range(size // EXTENT))
    digests = [sha1(run[i * PART : (i + 1) * PART]) for run in runs for i in range(per_run)]
    with site.cluster("parts") as cluster:
        urls, before = cluster.urls, site.bucket.moved()
        wrong: list[str] = []
        begin = threading.Barrier(args.clients)
        per_client = -(-len(wanted) // args.clients)

        def read(number: int) -> None:
            mine = wanted[number * per_client : (number + 1) * per_client]
            where = urlsplit(urls[number % len(urls)]).netloc
            connection = http.client.HTTPConnection(where, timeout=300)
            begin.wait(120)
            for part in mine:
                first = part * PART
                asked = {"Range": f"bytes={first}-{first + PART - 1}"}
                connection.request("GET", f"/{BUCKET}/parts", headers=asked)
                answer = connection.getresponse()
                body = answer.read()
                if answer.status != 206 or sha1(body) != digests[part]:
                    wrong.append(f"part {part}: {answer.status}, {len(body)} bytes")
            connection.close()

        began = time.monotonic()
        with ThreadPoolExecutor(args.clients) as pool:
            list(pool.map(read, range(args.clients)))
        took = time.monotonic() - began
        after, detours = site.bucket.moved(), detours_of(cluster)
    report.add(
        {
            "name": "parts: wrong answers",
            "value": len(wrong),
            "unit": f"of {len(wanted)}",
            "goals": [goal("value", at_most=0)],
        }
    )
    for what in wrong[:3]:
        report.note(f"parts: {what}")
    report.add(
        {
            "name": "parts: the bucket sent, of the object",
            "value": (after["bytes_to_client"] - before["bytes_to_client"]) / size,
            "unit": "times",
            "goals": [goal("value", at_most=1.01)],
        }
    )
    report.add(
        {
            "name": "parts: requests to the bucket, for each run of 8 MiB",
            "value": (after["requests"] - before["requests"]) / (size // EXTENT),
            "unit": "requests",
        }
    )
    add_detours(report, "parts: ", detours)
    report.add(
        {
            "name": "parts: delivered by all nodes",
            "value": len(wanted) * PART / took / 2**20,
            "unit": "MiB/s",
        }
    )


def disks(report: Report, site: Site) -> None:
    """Nodes of 2, 3 and 4 parts, on two disks each: how bytes and units lie on them, of what is
    due by size. The client asks the owners, so no node keeps what is another's.
    """
    import forebay

    args = site.args
    names, first = site.objects("disks", args.units, TINY), site.objects("first", 64, TINY)
    # Half full, all in all.
    part = max(64 << 20, 2 * len(names) * TINY // sum(sum(d) for d in DISKS.values()))
    report.heading(f"{len(names):,} objects of 4 KiB over three nodes with two disks each")
    with site.cluster("disks", names="", near=True) as cluster:
        for name, sizes in DISKS.items():
            cluster.disks[name] = tuple(f"{size * part}" for size in sizes)
            cluster.start(name)
        cluster.settle(3)
        client = forebay.Client(cluster.urls, direct=True)
        ask_owners(client, cluster, first)
        before = {m["name"]: m["figures"] for m in cluster.status("a")["members"]}
        read_by(client, names, 256)
        # What came is written in the background.
        time.sleep(3)
        members = cluster.status("a")["members"]
    loads = {m["name"]: m["figures"] for m in members}
    added = {name: f["entries"] - before[name]["entries"] for name, f in loads.items()}
    on_disks = {
        f"{name}{i}": (disk["used_bytes"], disk["capacity_bytes"])
        for name, figures in loads.items()
        for i, disk in enumerate(figures["dirs"])
    }
    on_nodes = {
        name: (sum(d["used_bytes"] for d in figures["dirs"]), figures["capacity_bytes"])
        for name, figures in loads.items()
    }
    units = {name: (added[name], f["capacity_bytes"]) for name, f in loads.items()}
    shares = {m["name"]: (m["share"], m["weight"]) for m in members}
    for what, found, most in (
        ("units over nodes", units, 1.10),
        ("bytes over nodes", on_nodes, 1.10),
        ("bytes over disks", on_disks, 1.10),
    ):
        report.add(
            {
                "name": f"disks: {what}, by their sizes",
                "value": max(relative(found)),
                "unit": "max / mean",
                "goals": [goal("value", at_most=most)],
            }
        )
    report.add(
        {
            "name": "disks: shares of nodes, off their sizes at most",
            "value": max(abs(r - 1) for r in relative(shares)) * 100,
            "unit": "%",
            "goals": [goal("value", at_most=3.0)],
        }
    )
    report.add(
        {
            "name": "disks: entries on all nodes, of the objects",
            "value": sum(added.values()) / len(names),
            "unit": "times",
        }
    )


def relative(found: dict[str, tuple[float, float]]) -> list[float]:
    """What each has for its size, of the mean."""
    all_loads, all_sizes = (sum(v) for v in zip(*found.values(), strict=True))
    return [(load / all_loads) / (size / all_sizes) for load, size in found.values()]
