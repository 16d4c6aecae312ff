"""What a batch costs nodes (CPU and memory), and what a change of the map costs those who read."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import usage
from cluster_site import (
    MEDIUM,
    SMALL,
    Cluster,
    Site,
    ask_owners,
    free_port,
    read_at,
    read_by,
)
from nodes import BUCKET, Node, program
from report import Report, goal

#: Entries of the batches whose memory is measured, and the nodes of the smaller of two clusters.
BATCHES, FEW = (64, 512, 4096), 3
ENTRY_BYTES = 64 << 10
#: Changes of the map whose CPU is measured; a node looks at its file every second.
QUIET_CHANGES, QUIET_SECONDS = 4, 2.0


class Costs:
    """CPU of all nodes of a cluster for each object that is read."""

    def __init__(self, report: Report, cluster: Cluster, names: list[str]) -> None:
        self.report, self.cluster, self.names = report, cluster, names

    def of(self, what: str, at: str, rounds: int = 1, direct: bool = False) -> float:
        import forebay

        nodes = self.cluster.nodes
        client = forebay.Client(nodes[at].url, direct=direct)
        if direct:
            ask_owners(client, self.cluster, self.names[:64])
        before = sum(usage.cpu_seconds(node.pid) for node in nodes.values())
        for _ in range(rounds):
            read_by(client, self.names)
        after = sum(usage.cpu_seconds(node.pid) for node in nodes.values())
        micros = (after - before) / (rounds * len(self.names)) * 1e6
        self.report.add({"name": what, "value": micros, "unit": "µs"})
        return micros

    def times(self, what: str, value: float, size: int) -> None:
        ratio = {SMALL: 2.0, MEDIUM: 1.6}[size]
        self.report.add(
            {
                "name": what,
                "value": value,
                "unit": "times",
                "goals": [goal("value", at_most=ratio)],
            }
        )


def costs(report: Report, site: Site) -> None:
    count = site.args.objects
    groups = {
        SMALL: site.objects("cost10", count, SMALL),
        MEDIUM: site.objects("cost100", max(100, count // 3), MEDIUM),
    }
    with site.cluster("costs") as cluster:
        kept_costs(report, cluster, groups)
    held = sum(size * len(names) for size, names in groups.items())
    cache = f"{max(64, (held >> 20) // 2)}MiB"
    with site.cluster("passing", cache=cache, near=True) as cluster:
        passing_costs(report, cluster, groups)


def kept_costs(report: Report, cluster: Cluster, groups: dict[int, list[str]]) -> None:
    """CPU of all nodes for an object that another node has, and for one that lies here, where there
    is room for everything: what comes is written to the disk.
    """
    report.heading("CPU of all nodes for each object (batches of 64), all kept where it is read")
    for size, names in groups.items():
        for name in ("b", "c"):
            read_at(cluster.nodes[name].url, names)
        kib, cost = size >> 10, Costs(report, cluster, names)
        mixed = cost.of(f"{kib} KiB, two of three from the node that has it", "a")
        read_at(cluster.nodes["b"].url, names)
        here = cost.of(f"{kib} KiB, from the own disk", "b", rounds=10)
        value = (mixed - here / 3) * 1.5 / here
        cost.times(f"{kib} KiB, from the node that has it, to it", value, size)
        owners = cost.of(f"{kib} KiB, from their owners by the client", "a", 10, direct=True)
        cost.times(f"{kib} KiB, from their owners by the client, to it", owners / here, size)


def passing_costs(report: Report, cluster: Cluster, groups: dict[int, list[str]]) -> None:
    """The same where no node has room for what others have: nothing is written."""
    report.heading(
        "CPU of all nodes for each object (batches of 64), nothing kept where it is read"
    )
    for _ in range(3):
        for node in cluster.nodes.values():
            for names in groups.values():
                read_at(node.url, names)
    for size, names in groups.items():
        kib, cost, rounds = size >> 10, Costs(report, cluster, names), 5
        own = [name for name in names if is_here(cluster.nodes["a"], name)]
        share = 1 - len(own) / len(names)
        mixed = cost.of(f"{kib} KiB, {share:.0%} from the node that has it", "a", rounds)
        here = Costs(report, cluster, own).of(f"{kib} KiB, from the own disk", "a", rounds=30)
        if share == 0:
            continue
        value = (mixed - here * (1 - share)) / share / here
        cost.times(f"{kib} KiB, from the node that has it, to it", value, size)


def is_here(node: Node, name: str) -> bool:
    with contextlib.closing(http.client.HTTPConnection(node.address, timeout=30)) as connection:
        connection.request("HEAD", f"/{BUCKET}/{name}")
        return connection.getresponse().headers["x-cache"] == "HIT"


class Watch:
    """The greatest resident size of a node, and the most of its budget that was reserved, while
    something goes on.
    """

    def __init__(self, node: Node) -> None:
        self.node, self.peak_bytes, self.reserved_bytes = node, 0, 0.0

    def __enter__(self):
        usage.forget_peak(self.node.pid)
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._look)
        self.thread.start()
        return self

    def _look(self) -> None:
        while not self.stopping.wait(0.005):
            self.look()

    def look(self) -> None:
        used = self.node.metrics().get("forebay_memory_used_bytes", 0.0)
        self.reserved_bytes = max(self.reserved_bytes, used)

    def __exit__(self, *_) -> None:
        self.stopping.set()
        self.thread.join()
        self.peak_bytes = usage.peak_bytes(self.node.pid)


def ask(
    node: Node, names: list[str], pause: float = 0.0, begun: Callable[[], None] | None = None
) -> int:
    """A batch that the node puts together, read slower than it comes: its bytes. `begun` is called
    once, before the rest is read.
    """
    body = json.dumps({"in": [{"objname": name} for name in names], "strm": True})
    connection = http.client.HTTPConnection(node.address, timeout=120)
    headers = {"Content-Type": "application/json"}
    connection.request("GET", f"/v1/ml/moss/{BUCKET}", body, headers)
    answer, size = connection.getresponse(), 0
    if answer.status != 200:
        sys.exit(f"a batch of {len(names)}: {answer.status} {answer.read()[:500]!r}")
    while piece := answer.read(1 << 20):
        if begun is not None and size == 0:
            begun()
        size += len(piece)
        time.sleep(pause)
    connection.close()
    return size


def memory(report: Report, site: Site) -> None:
    """Batches of different sizes at one node, whose client reads 1 MiB and pauses."""
    import forebay

    sizes = (FEW, max(FEW + 1, min(8, site.args.nodes)))
    counts = [count for count in BATCHES if count <= max(site.args.entries, BATCHES[0])]
    # Each is read once at that node: what comes from others it may keep.
    names = site.objects("memory", counts[0] + sum(counts), ENTRY_BYTES)
    first = site.objects("memory-first", 64, SMALL)
    report.heading("Memory of the node that puts a batch together (entries of 64 KiB)")
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for nodes in sizes:
        with site.cluster(f"memory{nodes}", "abcdefgh"[:nodes], near=True) as cluster:
            node = cluster.nodes["a"]
            owned = forebay.Client(cluster.urls, direct=True)
            ask_owners(owned, cluster, first)
            read_by(owned, names, 128)
            left = iter(names)
            # What a node needs once, it has.
            ask(node, list(itertools.islice(left, counts[0])))
            for count in counts:
                began = usage.resident_bytes(node.pid)
                with Watch(node) as watch:
                    size = ask(node, list(itertools.islice(left, count)), 0.01, watch.look)
                if size < count * ENTRY_BYTES:
                    sys.exit(f"a batch of {count} entries has {size} bytes")
                added = max(0.0, watch.peak_bytes - began)
                found[nodes, count] = (watch.reserved_bytes, added)
                report.add(
                    {
                        "name": f"{nodes} nodes, {count:,} entries: reserved of the budget",
                        "value": watch.reserved_bytes / 2**20,
                        "unit": "MiB",
                    }
                )
                report.add(
                    {
                        "name": f"{nodes} nodes, {count:,} entries: added to what is resident",
                        "value": added / 2**20,
                        "unit": "MiB",
                    }
                )
    # A batch of 64 is smaller than the window of a batch: the next one is not.
    base = counts[min(1, len(counts) - 1)]
    for nodes in sizes:
        least, most = found[nodes, base][0], found[nodes, counts[-1]][0]
        report.add(
            {
                "name": f"{nodes} nodes: {counts[-1]:,} entries, of {base:,} (budget)",
                "value": most / least if least else 1.0,
                "unit": "times",
                "goals": [goal("value", at_most=1.25)],
            }
        )
    few, many = found[sizes[0], counts[-1]][0], found[sizes[1], counts[-1]][0]
    report.add(
        {
            "name": f"{sizes[1]} nodes, of {sizes[0]} (budget)",
            "value": many / few if few else 1.0,
            "unit": "times",
            "goals": [goal("value", at_most=1.25)],
        }
    )


class Reading:
    """A client that reads one object from a node's own disk, one request after the other."""

    def __init__(self, node: Node, name: str) -> None:
        self.node, self.name = node, name

    def for_seconds(self, seconds: float) -> list[float]:
        """How long each read took."""
        took: list[float] = []
        connection = http.client.HTTPConnection(self.node.address, timeout=60)
        end = time.monotonic() + seconds
        while (began := time.monotonic()) < end:
            connection.request("GET", f"/{BUCKET}/{self.name}")
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                sys.exit(f"GET {self.name}: {answer.status}")
            took.append(time.monotonic() - began)
        connection.close()
        return took


def map_change(report: Report, site: Site) -> None:
    """A real node in a map with many members (which are nowhere), in a file that is replaced again
    and again while a client reads what the node has.
    """
    args = site.args
    names = site.objects("map", 1, SMALL)
    for members in (n for n in (64, 1000) if n <= args.largest or n == 64):
        report.heading(f"A map of {members:,} members changes, at a node that is read from")
        directory = site.directory / f"map{members}"
        directory.mkdir()
        file, port = directory / "map.json", free_port()

        def member(number: int, port: int = port) -> list[str]:
            # The others are nowhere: nothing listens at their port.
            at = port if number == 0 else 9
            return ["--member", f"n{number}=127.0.0.1:{at},1TiB,z{number % 3}"]

        def write(count: int, file=file) -> None:
            """The next map: the last member of the largest one is there, or not."""
            command = [program(), "cluster", "map", "map"]
            command += ["--after", str(file)] if file.exists() else []
            command += [part for number in range(count) for part in member(number)]
            done = subprocess.run(command, check=True, capture_output=True)
            part = file.with_suffix(".part")
            part.write_bytes(done.stdout)
            part.replace(file)

        write(members)
        settings = ("--peer", f"127.0.0.1:{port}", "--cluster", str(file))
        settings += ("--set", "cluster.node=n0", "--set", "cluster.plain=true")
        with Node(
            directory,
            "node",
            endpoint=site.far.url,
            cache="1GiB",
            unix=False,
            admin=True,
            settings=settings,
        ) as node:
            reading = Reading(node, names[0])
            # The others do not answer: it knows that by now.
            reading.for_seconds(2)
            calm = reading.for_seconds(args.seconds)
            epochs, changed = [node.metric("forebay_cluster_epoch")], threading.Event()

            counts = itertools.cycle([members - 1, members])

            def change(counts=counts, changed=changed, node=node, epochs=epochs) -> None:
                end = time.monotonic() + args.seconds
                while time.monotonic() < end:
                    write(next(counts))
                    deadline = time.monotonic() + 10
                    while time.monotonic() < deadline:
                        time.sleep(0.1)
                        epoch = node.metric("forebay_cluster_epoch")
                        if epoch > epochs[-1]:
                            epochs.append(epoch)
                            break
                changed.set()

            changer = threading.Thread(target=change)
            changer.start()
            during: list[float] = []
            while not changed.is_set():
                during += reading.for_seconds(0.25)
            changer.join()
            # Reads and scrapes would hide what a change costs by itself.
            before = usage.cpu_seconds(node.pid)
            for _ in range(QUIET_CHANGES):
                write(next(counts))
                time.sleep(QUIET_SECONDS)
            cpu = usage.cpu_seconds(node.pid) - before
            quiet = node.metric("forebay_cluster_epoch") - epochs[-1]
        changes = len(epochs) - 1
        report.add({"name": f"{members:,} members: changes", "value": changes, "unit": ""})
        report.add(
            {"name": f"{members:,} members: longest read before", "value": max(calm) * 1e3}
            | {"unit": "ms"}
        )
        report.add(
            {"name": f"{members:,} members: longest read meanwhile", "value": max(during) * 1e3}
            | {"unit": "ms"}
        )
        report.add(
            {
                "name": f"{members:,} members: a read waits longer, at most",
                "value": max(0.0, max(during) - max(calm)) * 1e3,
                "unit": "ms",
                "goals": [goal("value", at_most=10.0)],
            }
        )
        report.add(
            {
                "name": f"{members:,} members: CPU of the node for a change",
                "value": cpu / quiet * 1e3 if quiet else None,
                "unit": "ms of CPU",
                "goals": [goal("value", at_most={64: 100.0, 1000: 2000.0}[members])]
                if quiet
                else [],
            }
        )
