"""The cluster's table of numbers: what it promises, measured with real nodes, and computed for
clusters that no single machine can hold.

Three nodes (and a fourth that joins) with TLS between them, their map in etcd, in front of a
directory behind `forebay distance`, whose counters tell what the bucket gave. Each row prints its
goal. All of it is on one machine: figures say what nodes do and what it costs their CPUs, not what
a network gives.

Sources of the goals: the cluster's design, and what is computed comes from the code that places.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import usage
from nodes import (
    BUCKET,
    Distance,
    Node,
    as_entry,
    content,
    program,
    use_own_environment,
    write_objects,
)
from report import Report, goal

COLUMNS = [("name", "", 58), ("value", "", 12), ("unit", "", 16)]
TINY, SMALL, MEDIUM = 4 << 10, 10 << 10, 100 << 10
EXTENT = 8 << 20
# Objects of a batch while something happens. Each is read once, so that nodes need each other.
BATCH = 8
CHANGES = ("calm", "kill", "back", "pause", "join", "drain", "etcd")


class Etcd:
    """etcd in a directory, which can be stopped and started again."""

    def __init__(self, directory: Path, etcd: str) -> None:
        self.port, peer = free_port(), free_port()
        clients, peers = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{peer}"
        self.command = [etcd, "--name", "bench", "--data-dir", str(directory / "etcd")]
        self.command += ["--listen-client-urls", clients, "--advertise-client-urls", clients]
        self.command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        self.command += ["--initial-cluster", f"bench={peers}"]
        self.log = directory / "etcd.log"
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"etcd does not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Cluster:
    """Nodes by their names; those that were killed can be started again with their caches."""

    def __init__(
        self,
        directory: Path,
        endpoint: str,
        etcd: Etcd,
        cache: str,
        called: str = "bench",
        settings: tuple[str, ...] = (),
    ) -> None:
        self.directory, self.endpoint, self.etcd, self.cache = directory, endpoint, etcd, cache
        self.called, self.settings = called, settings
        self.nodes: dict[str, Node] = {}
        self.ports: dict[str, int] = {}
        directory.mkdir(exist_ok=True)
        made = [program(), "cluster", "init", called, "--out", str(directory / "certificates")]
        made += [part for name in "abcd" for part in ("--node", name)]
        subprocess.run(made, check=True, capture_output=True)

    def start(self, name: str) -> Node:
        certificates = self.directory / "certificates" / name
        self.ports.setdefault(name, free_port())
        settings = [
            *("--peer", f"127.0.0.1:{self.ports[name]}"),
            *("--cluster", f"etcd://127.0.0.1:{self.etcd.port}/{self.called}"),
            *self.settings,
        ]
        for key, value in (
            ("node", name),
            ("ca", certificates / "ca.pem"),
            ("cert", certificates / "node.pem"),
            ("key", certificates / "node.key"),
        ):
            settings += ["--set", f"cluster.{key}={value}"]
        self.nodes[name] = Node(
            self.directory,
            name,
            endpoint=self.endpoint,
            cache=self.cache,
            unix=False,
            settings=tuple(settings),
        )
        return self.nodes[name]

    def status(self, at: str) -> dict:
        done = subprocess.run(
            [program(), "cluster", "status", "--json", "--node", self.nodes[at].url],
            capture_output=True,
            text=True,
            check=False,
        )
        return json.loads(done.stdout)

    def order(self, *words: str) -> None:
        done = subprocess.run(
            [program(), "cluster", *words, "--node", self.nodes["a"].url],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"forebay cluster {' '.join(words)}: {done.stderr}")

    def wait(self, what: str, ready) -> float:
        """Seconds until it is so."""
        began = time.monotonic()
        while not ready():
            if time.monotonic() - began > 30:
                sys.exit(f"after 30 s it is not so: {what}")
            time.sleep(0.05)
        return time.monotonic() - began

    def settle(self, members: int) -> None:
        """Waits until all nodes go by the same map with so many members, and reach each other."""

        def is_settled() -> bool:
            seen = [self.status(name) for name in self.nodes]
            return all(
                len(s["members"]) == members
                and s["epoch"] == seen[0]["epoch"]
                and all(m["answers"] for m in s["members"])
                for s in seen
            )

        self.wait(f"{members} members that answer", is_settled)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        for node in self.nodes.values():
            node.stop()


def get(url: str, name: str, size: int) -> bool:
    """Whether an object comes as it was written."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        connection.request("GET", f"/{BUCKET}/{name}")
        answer = connection.getresponse()
        body = answer.read()
        return answer.status == 200 and len(body) == size and body == content(name, size)
    finally:
        connection.close()


def read_at(url: str, names: list[str], batch: int = 64) -> None:
    import forebay

    read_by(forebay.Client(url, direct=False), names, batch)


def read_by(client, names: list[str], batch: int = 64) -> None:
    for first in range(0, len(names), batch):
        client.batch([as_entry(name) for name in names[first : first + batch]]).wait()


class Batches:
    """Batches that go on while something happens, each compared with what was written."""

    def __init__(self, urls: list[str], names: list[str], size: int) -> None:
        self.urls, self.names, self.size = urls, names, size
        self.count = len(names) // BATCH
        self.seconds: list[tuple[float, float]] = []
        self.wrong = self.failed = 0
        self.lock = threading.Lock()

    def run(self, threads: int = 4) -> None:
        jobs = iter(range(self.count))

        def work(number: int) -> None:
            import forebay

            client = forebay.Client(self.urls[number % len(self.urls)])
            while True:
                with self.lock:
                    job = next(jobs, None)
                if job is None:
                    return
                wanted = self.names[job * BATCH : (job + 1) * BATCH]
                began = time.monotonic()
                try:
                    got = [bytes(item.data) for item in client.batch([as_entry(n) for n in wanted])]
                except forebay.ForebayError:
                    with self.lock:
                        self.failed += 1
                    continue
                took = time.monotonic() - began
                right = got == [content(n, self.size) for n in wanted]
                with self.lock:
                    self.wrong += not right
                    self.seconds.append((began, took))

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))

    def percentile(self, share: float) -> float:
        ordered = sorted(took for _, took in self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def computed(report: Report, largest: int) -> None:
    """Spread and moves, by the code that places; no node runs."""
    report.heading("Computed (forebay cluster plan)")

    def plan(*arguments: str) -> dict:
        done = subprocess.run(
            [program(), "cluster", "plan", "--json", *arguments],
            check=True,
            capture_output=True,
            text=True,
        )
        return json.loads(done.stdout)

    for nodes in (n for n in (3, 8, 64, 500, 1000) if n <= largest):
        figures = plan("--nodes", str(nodes))
        report.add(
            {
                "name": f"spread of units over {nodes:,} nodes",
                "value": figures["max_over_mean"],
                "unit": "max / mean",
                "goals": [goal("value", at_most=1.10)],
            }
        )
    changes = ((3, "add", 1), (64, "add", 8), (64, "remove", 1), (500, "add", 1))
    for nodes, change, count in (c for c in changes if c[0] <= largest):
        figures = plan("--nodes", str(nodes), f"--{change}", str(count))
        report.add(
            {
                "name": f"{nodes} nodes, {change} {count}: moves, of what must",
                "value": figures["moved"] / figures["least"],
                "unit": "times",
                "goals": [goal("value", at_most=1.05)],
            }
        )
        report.add(
            {
                "name": "… between nodes that stay",
                "value": figures["between_others"],
                "unit": "share",
                "goals": [goal("value", at_most=0.0)],
            }
        )
    for nodes, most in (t for t in ((64, 100.0), (1000, 2000.0)) if t[0] <= largest):
        report.add(
            {
                "name": f"a new table for {nodes:,} nodes",
                "value": plan("--nodes", str(nodes))["table_seconds"] * 1e3,
                "unit": "ms of CPU",
                "goals": [goal("value", at_most=most)],
            }
        )


def one_object(report: Report, cluster: Cluster, bucket: Distance, name: str, args) -> None:
    report.heading(
        f"{args.clients} clients, one cold object of {args.object >> 20} MiB, three nodes"
    )
    urls = [node.url for node in cluster.nodes.values()]
    before = bucket.moved()
    began = time.monotonic()
    with ThreadPoolExecutor(args.clients) as pool:
        jobs = [pool.submit(drain, urls[i % len(urls)], name) for i in range(args.clients)]
        sizes = [job.result() for job in jobs]
    took = time.monotonic() - began
    after = bucket.moved()
    whole = all(size == args.object for size in sizes)
    report.add(
        {
            "name": "clients that got all of it",
            "value": sum(s == args.object for s in sizes),
            "unit": f"of {args.clients}",
            "goals": [goal("value", args.clients)],
        }
    )
    sent = after["bytes_to_client"] - before["bytes_to_client"]
    report.add(
        {
            "name": "the bucket sent, of the object",
            "value": sent / args.object,
            "unit": "times",
            "goals": [goal("value", at_most=1.01)],
        }
    )
    report.add(
        {"name": "delivered by all nodes", "value": sum(sizes) / took / 2**20, "unit": "MiB/s"}
    )
    if not whole:
        sys.exit("a client did not get the whole object")


def drain(url: str, name: str) -> int:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    connection.request("GET", f"/{BUCKET}/{name}")
    answer, size = connection.getresponse(), 0
    while piece := answer.read(1 << 20):
        size += len(piece)
    connection.close()
    return size


def changes(
    report: Report, cluster: Cluster, bucket: Distance, groups: dict[str, list[str]], args
) -> None:
    """Batches at two nodes, while something happens to others. Each change has objects of its own,
    which lie at their owners and at c, and are asked for at a and b.
    """
    everything = len(groups["calm"]) * TINY

    def load(what: str) -> Batches:
        return Batches([cluster.nodes[n].url for n in "ab"], groups[what], TINY)

    for names in groups.values():
        read_at(cluster.nodes["c"].url, names)
    calm = load("calm")
    calm.run()

    def during(title: str, what: str, happens, again_share: float) -> None:
        report.heading(title)
        before = bucket.moved()["bytes_to_client"]
        batches = load(what)
        worker = threading.Thread(target=batches.run)
        worker.start()
        time.sleep(0.2)
        happens()
        worker.join()
        sent = bucket.moved()["bytes_to_client"] - before
        report.add(
            {
                "name": f"{what}: wrong batches",
                "value": batches.wrong,
                "unit": f"of {batches.count}",
                "goals": [goal("value", at_most=0)],
            }
        )
        report.add(
            {
                "name": f"{what}: failed batches",
                "value": batches.failed,
                "unit": f"of {batches.count}",
                "goals": [goal("value", at_most=0)],
            }
        )
        added = max(0.0, batches.percentile(0.99) - calm.percentile(0.99)) * 1e3
        report.add(
            {
                "name": f"{what}: added to the 99th percentile",
                "value": added,
                "unit": "ms",
                "goals": [goal("value", at_most=500)],
            }
        )
        report.add(
            {
                "name": f"{what}: longest batch",
                "value": batches.percentile(1.0) * 1e3,
                "unit": "ms",
                "goals": [goal("value", at_most=1000 + calm.percentile(1.0) * 1e3)],
            }
        )
        report.add(
            {
                "name": f"{what}: read again from the bucket",
                "value": sent / everything * 100,
                "unit": "% of the data",
                "goals": [goal("value", at_most=again_share)],
            }
        )

    def kill() -> None:
        cluster.nodes["c"].process.kill()
        cluster.nodes["c"].process.wait()

    during("kill -9 of one of three nodes", "kill", kill, 100 / 3 + 1)

    cluster.start("c")
    cluster.settle(3)
    during("it is back, with what it had", "back", lambda: None, 1.0)

    def pause() -> None:
        cluster.nodes["c"].process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        cluster.nodes["c"].process.send_signal(signal.SIGCONT)

    during("SIGSTOP for 3 s", "pause", pause, 100 / 3 + 1)
    cluster.settle(3)

    def join() -> None:
        cluster.start("d")
        cluster.settle(4)
        read_at(cluster.nodes["d"].url, groups["join"])

    during("a fourth node joins, and reads all of it", "join", join, 1.0)

    def leave() -> None:
        cluster.order("drain", "d")
        cluster.settle(4)
        read_at(cluster.nodes["a"].url, groups["drain"])

    during("it is drained", "drain", leave, 1.0)

    def without_etcd() -> None:
        cluster.etcd.process.kill()
        cluster.etcd.process.wait()
        shutil.rmtree(cluster.directory / "etcd")
        time.sleep(args.etcd_away)
        cluster.etcd.start()

    epoch = cluster.status("a")["epoch"]
    shares = [round(m["share"], 6) for m in cluster.status("a")["members"]]
    title = f"etcd is away for {args.etcd_away:g} s, and comes back empty"
    during(title, "etcd", without_etcd, 1.0)
    cluster.wait("the map lies in etcd again", lambda: cluster.status("a")["epoch"] > epoch)
    cluster.settle(4)
    status = cluster.status("a")
    moved = sum(
        abs(a - round(m["share"], 6)) for a, m in zip(shares, status["members"], strict=True)
    )
    report.add(
        {
            "name": "placement changed",
            "value": moved,
            "unit": "share",
            "goals": [goal("value", at_most=0.0)],
        }
    )
    report.add({"name": "the map went on", "value": status["epoch"] - epoch, "unit": "epochs"})


def mirrors(report: Report, cluster: Cluster, bucket: Distance, names: list[str]) -> None:
    """Two nodes keep everything, and one of three dies while batches are read at the others."""
    report.heading("kill -9 of one of three nodes, of which two keep everything")
    read_at(cluster.nodes["c"].url, names)
    seen: list[list[int]] = []

    def is_settled() -> bool:
        figures = [m["figures"] for m in cluster.status("a")["members"] if "figures" in m]
        time.sleep(2)
        seen.append([f["copied_bytes"] for f in figures])
        is_whole = len(figures) == 3 and all(f["copies_behind"] == 0 for f in figures)
        return is_whole and len(seen) > 1 and seen[-1] == seen[-2]

    cluster.wait("nothing is copied any more", is_settled)
    everything = len(names) * TINY
    before = bucket.moved()["bytes_to_client"]
    batches = Batches([cluster.nodes[n].url for n in "ab"], names, TINY)
    worker = threading.Thread(target=batches.run)
    worker.start()
    time.sleep(0.2)
    cluster.nodes["c"].process.kill()
    cluster.nodes["c"].process.wait()
    worker.join()
    report.add(
        {
            "name": "mirror 2: wrong or failed batches",
            "value": batches.wrong + batches.failed,
            "unit": f"of {batches.count}",
            "goals": [goal("value", at_most=0)],
        }
    )
    report.add(
        {
            "name": "mirror 2: read again from the bucket",
            "value": (bucket.moved()["bytes_to_client"] - before) / everything * 100,
            "unit": "% of the data",
            "goals": [goal("value", at_most=0.1)],
        }
    )
    report.add(
        {
            "name": "mirror 2: copied, of the data",
            "value": sum(seen[-1]) / everything,
            "unit": "times",
            "goals": [goal("value", at_most=1.05)],
        }
    )


class Costs:
    """CPU of all nodes of a cluster for each object that is read."""

    def __init__(self, report: Report, cluster: Cluster, names: list[str]) -> None:
        self.report, self.cluster, self.names = report, cluster, names

    def of(self, what: str, at: str, rounds: int = 1, direct: bool = False) -> float:
        import forebay

        nodes = self.cluster.nodes
        client = forebay.Client(nodes[at].url, direct=direct)
        if direct:
            self.ask_owners(client)
        before = sum(usage.cpu_seconds(node.pid) for node in nodes.values())
        for _ in range(rounds):
            read_by(client, self.names)
        after = sum(usage.cpu_seconds(node.pid) for node in nodes.values())
        micros = (after - before) / (rounds * len(self.names)) * 1e6
        self.report.add({"name": what, "value": micros, "unit": "µs"})
        return micros

    def ask_owners(self, client) -> None:
        """Returns when the client asks each node for what it owns."""
        deadline = time.monotonic() + 60
        nodes = self.cluster.nodes.values()
        while time.monotonic() < deadline:
            before = [batches_answered(node) for node in nodes]
            read_by(client, self.names[:64])
            if all(batches_answered(n) > b for n, b in zip(nodes, before, strict=True)):
                return
            time.sleep(0.2)
        sys.exit("the client does not ask the owners")

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


def costs(report: Report, cluster: Cluster, groups: dict[int, list[str]]) -> None:
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
        if here == 0:
            # The clock of processes goes in steps of 10 ms: there were too few objects.
            continue
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
        if here == 0 or share == 0:
            continue
        value = (mixed - here * (1 - share)) / share / here
        cost.times(f"{kib} KiB, from the node that has it, to it", value, size)


def batches_answered(node: Node) -> int:
    with contextlib.closing(http.client.HTTPConnection(node.address, timeout=30)) as connection:
        connection.request("GET", "/v1/forebay/status")
        return json.loads(connection.getresponse().read())["batches"]["completed"]


def is_here(node: Node, name: str) -> bool:
    with contextlib.closing(http.client.HTTPConnection(node.address, timeout=30)) as connection:
        connection.request("HEAD", f"/{BUCKET}/{name}")
        return connection.getresponse().headers["x-cache"] == "HIT"


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--objects", type=int, default=3000, help="objects whose CPU is measured")
    p.add_argument("--batches", type=int, default=1000, help="batches during each change")
    p.add_argument("--object", type=int, default=256 << 20, help="bytes of the large object")
    p.add_argument("--clients", type=int, default=200, help="clients that read it at once")
    p.add_argument("--etcd-away", type=float, default=20, help="seconds without etcd")
    p.add_argument(
        "--etcd",
        default=shutil.which("etcd") or str(Path.home() / ".cache/forebay/bin/etcd"),
        help="the etcd program",
    )
    p.add_argument(
        "--largest", type=int, default=1000, help="nodes of the largest computed cluster"
    )
    p.add_argument("--only", choices=["computed", "object", "costs", "changes", "mirrors"])
    p.add_argument("--save", type=Path, help="write the rows to this file")
    args = p.parse_args()
    use_own_environment()
    settings = {"nodes": 3, "objects": args.objects, "batches": args.batches}
    report = Report("The cluster", COLUMNS, settings)
    wants = lambda part: args.only in (None, part)  # noqa: E731
    if wants("computed"):
        computed(report, args.largest)
    if args.only == "computed":
        report.save(args.save)
        return
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as text, contextlib.ExitStack() as on:
        directory = Path(text)
        files = directory / "files" / BUCKET
        files.mkdir(parents=True)
        changing = {
            what: write_objects(files, what, args.batches * BATCH, TINY) for what in CHANGES
        }
        kept_twice = write_objects(files, "mirrors", args.batches * BATCH, TINY)
        groups = {
            SMALL: write_objects(files, "cost10", args.objects, SMALL),
            MEDIUM: write_objects(files, "cost100", max(100, args.objects // 3), MEDIUM),
        }
        with (files / "large").open("wb") as large:
            for part in range(args.object // EXTENT):
                large.write(content(f"large/{part}", EXTENT))
        far = on.enter_context(Node(directory, "bucket", files=files, cache="1GiB", unix=False))
        for names in (*changing.values(), kept_twice):
            read_at(far.url, names)
        bucket = on.enter_context(
            Distance(directory, "way", far.address, rtt_ms=5, first_byte_ms=5)
        )
        etcd = on.enter_context(Etcd(directory, args.etcd))
        cluster = on.enter_context(Cluster(directory, bucket.url, etcd, "4GiB"))
        for name in "abc":
            cluster.start(name)
        cluster.settle(3)
        if wants("object"):
            one_object(report, cluster, bucket, "large", args)
        if wants("costs"):
            costs(report, cluster, groups)
            held = sum(size * len(names) for size, names in groups.items())
            cache = f"{max(64, (held >> 20) // 2)}MiB"
            small = on.enter_context(Cluster(directory / "small", far.url, etcd, cache, "small"))
            for name in "abc":
                small.start(name)
            small.settle(3)
            passing_costs(report, small, groups)
        if wants("mirrors"):
            copies = ("--set", "cache.mirror=2")
            twice = Cluster(directory / "twice", bucket.url, etcd, "4GiB", "twice", copies)
            on.enter_context(twice)
            for name in "abc":
                twice.start(name)
            twice.settle(3)
            mirrors(report, twice, bucket, kept_twice)
        if wants("changes"):
            changes(report, cluster, bucket, changing, args)
    report.save(args.save)


if __name__ == "__main__":
    main()
