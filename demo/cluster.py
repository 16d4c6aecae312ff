#!/usr/bin/env python3
"""Three nodes as one cache, between a training loop and a bucket that is far away. While it trains,
a node is killed, comes back, and a fourth joins. `make demo-cluster` runs it.

Everything is on this machine. Where network namespaces can be made (by root), each node, etcd, the
bucket and the training loop are machines of their own to each other; elsewhere nodes have addresses
of loopback. Their map is in etcd, they speak TLS with certificates of a CA made for the occasion.
The bucket is an S3 server at a distance. Three ranks train one model, each with a loader of its own
over all nodes.
"""

import argparse
import contextlib
import fcntl
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

# The training step has one thread, before NumPy starts more: the servers need the other cores.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import data  # noqa: E402
import model  # noqa: E402
import network as networks  # noqa: E402
import numpy as np  # noqa: E402
import show_cluster  # noqa: E402
from forebay import Client, Full  # noqa: E402
from forebay import open as open_dataset  # noqa: E402
from run import prepare, to_its_end  # noqa: E402
from servers import Bucket, Distance, Etcd, Failed, Member  # noqa: E402

NAMES = ("a", "b", "c", "d")
# Machines beside the nodes.
OTHERS = ("etcd", "bucket", "trainer")
RANKS = 3
BATCH = 16
LOOK_SECONDS = 0.2
# What happens in which epoch, and after which share of its steps.
EVENTS = {3: ("killed", 0.4), 4: ("back", 0.2), 5: ("joined", 0.2)}
EPOCHS = (
    "cold: everything comes from the bucket, once",
    "three nodes have it",
    "a node is killed in the middle",
    "the node comes back",
    "a fourth node joins",
    "four nodes have it",
)


@dataclass
class Step:
    """A step of all ranks; times in seconds since the first began."""

    epoch: int
    began: float
    waited: float
    trained: float
    samples: int
    bytes: int
    loss: float


@dataclass
class Look:
    """What had been counted at one time, since the beginning."""

    at: float
    bucket_bytes: int
    peer_bytes: float
    delivered_bytes: int
    running: list
    # What each node sent to clients.
    sent_bytes: dict


@dataclass
class Story:
    """Everything that was seen."""

    dataset_bytes: int
    began: float = 0
    steps: list[Step] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    # What each epoch took, in seconds and bytes.
    epochs: list[dict] = field(default_factory=list)

    def now(self) -> float:
        return time.perf_counter() - self.began

    def second(self, at: float, long: float = 1.0) -> dict:
        """What happened from `at` on. Between two looks, counts lie on a line."""
        # Others add to both meanwhile.
        looks, steps = list(self.looks), list(self.steps)
        looked = [look.at for look in looks]
        arrived = [step.began + step.waited for step in steps]

        def grown(when: list, counts) -> float:
            if not when:
                return 0.0
            first, last = np.interp((at, at + long), when, counts)
            return float(last - first)

        delivered = grown([0, *arrived], np.cumsum([0, *(step.bytes for step in steps)]))
        bucket = grown(looked, [look.bucket_bytes for look in looks])
        waited = sum(
            max(0.0, min(step.began + step.waited, at + long) - max(step.began, at))
            for step in steps
        )
        running = [look.running for look in self.looks if look.at <= at + long]
        return {
            "at": at,
            "seconds": long,
            "running": running[-1] if running else [],
            "delivered_bytes": delivered,
            "bucket_bytes": bucket,
            "peer_bytes": grown(looked, [look.peer_bytes for look in looks]),
            "sent_bytes": {
                name: grown(looked, [look.sent_bytes[name] for look in looks]) for name in NAMES
            },
            # Of the bytes that came to the loop; what was asked for ahead of it counts here too.
            "hit_ratio": max(0.0, 1 - bucket / delivered) if delivered else None,
            "waited_s": waited,
            "steps": sum(at <= when < at + long for when in arrived),
        }

    def by_second(self) -> list[dict]:
        last = self.steps[-1]
        end = last.began + last.waited + last.trained
        return [self.second(at, min(1.0, end - at)) for at in range(int(np.ceil(end)))]


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="make demo-cluster ARGS=…",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shown = {"help": "%(default)s by default"}
    p.add_argument("--rtt", type=float, default=20, metavar="MS", help="round trip to the bucket")
    p.add_argument("--rate", type=float, default=40, metavar="MIB", help="to the bucket, a second")
    p.add_argument("--cache-size", default="80MiB", help="of each node; the data has 100 MB")
    p.add_argument("--step", type=float, default=100, metavar="MS", help="a step's shortest time")
    p.add_argument("--loopback", action="store_true", help="no network namespaces")
    p.add_argument(
        "--silent",
        action="store_true",
        help="what is killed is the node's machine: nothing answers for it",
    )
    p.add_argument("--out", type=Path, default=Path("demo-out"), **shown)
    p.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache/forebay", help=argparse.SUPPRESS
    )
    p.add_argument(
        "--forebay",
        type=Path,
        default=Path(sys.executable).parent / "forebay",
        help=argparse.SUPPRESS,
    )
    return p.parse_args()


class Nodes:
    """The nodes, and what they have counted, also those that were started anew."""

    def __init__(self, members: list[Member]):
        self.members = members
        # By counter and node.
        self.before = {count: {m.name: 0.0 for m in members} for count in self.COUNTED}
        self.latest = {count: {m.name: 0.0 for m in members} for count in self.COUNTED}
        # The loop looks at the ends of epochs, beside the thread that always does.
        self.one = threading.Lock()

    # From other nodes, and to clients.
    PEERS, SENT = "forebay_peer_received_bytes_total", "forebay_sent_bytes_total"
    COUNTED = (PEERS, SENT)

    def bytes(self) -> tuple[float, dict[str, float]]:
        """Bytes that nodes got from each other since the beginning, and that each sent to
        clients.
        """
        with self.one:
            for m in self.members:
                if m.runs:
                    with contextlib.suppress(OSError, http.client.HTTPException, Failed):
                        self._add(m.name, m.counted())
            sums = {
                count: {name: self.before[count][name] + latest for name, latest in of.items()}
                for count, of in self.latest.items()
            }
        return sum(sums[self.PEERS].values()), sums[self.SENT]

    def _add(self, name: str, counted: dict[str, float]) -> None:
        for count in self.COUNTED:
            now = counted.get(count, 0.0)
            if now < self.latest[count][name]:
                # It was started anew.
                self.before[count][name] += self.latest[count][name]
            self.latest[count][name] = now


def recordings(rows) -> list[bytes]:
    return [bytes(row["data"]) for row in rows]


class Rank:
    """One of the processes of a real job: a client of all nodes, and its share of each epoch."""

    def __init__(self, number: int, urls: list[str]):
        self.number, self.client = number, Client(urls)
        self.dataset = open_dataset(f"s3://{data.OBJECTS}/**.wav", client=self.client)
        self.loader = self.dataset.loader(
            BATCH,
            shuffle=Full(),
            seed=1,
            rank=number,
            world_size=RANKS,
            uneven="pad",
            collate=recordings,
        )

    def epoch(self, number: int):
        """Yields row numbers and recordings of each batch, without padding."""
        self.loader.set_epoch(number - 1)
        for sounds in self.loader:
            step = self.loader.last
            yield step.rows[: step.real], sounds[: step.real]


def watch(story: Story, nodes: Nodes, distance: Distance, stop: threading.Event) -> None:
    while True:
        # Only this thread adds to them, so they are in the order of time.
        story.looks.append(look(story, nodes, distance))
        if stop.wait(LOOK_SECONDS):
            return


def look(story: Story, nodes: Nodes, distance: Distance) -> Look:
    at, sent = story.now(), distance.counters()["bytes_to_client"]
    from_peers, to_clients = nodes.bytes()
    delivered = sum(step.bytes for step in story.steps)
    running = [m.name for m in nodes.members if m.runs]
    return Look(at, sent, from_peers, delivered, running, to_clients)


def train(
    story: Story, ranks: list[Rank], nodes: Nodes, distance: Distance, samples: list, args, screen
) -> None:
    """All epochs. `samples` has what each row is: what comes is compared with its file, and which
    rows come, with the plan as it was computed before anything happened.
    """
    planned = [[planned_rows(rank, epoch) for rank in ranks] for epoch in range(len(EPOCHS))]
    checks = [zlib.crc32(sample.path.read_bytes()) for sample in samples]
    network = model.Model(len(data.LANGUAGES), seed=1)
    for number, what in enumerate(EPOCHS, 1):
        before, began, seen = look(story, nodes, distance), story.now(), []
        event, share = EVENTS.get(number, (None, 1.0))
        at_step, happening = int(share * len(ranks[0].loader)), None
        shares = [rank.epoch(number) for rank in ranks]
        for step in range(len(ranks[0].loader)):
            if event and step == at_step:
                happening, event = happens(event, story, nodes.members, args.silent), None
            mark = time.perf_counter()
            parts = [next(share, None) for share in shares]
            arrived = time.perf_counter()
            sounds = [sound for part in parts if part for sound in part[1]]
            rows = [int(row) for part in parts if part for row in part[0]]
            if rows != [row for rank in planned[number - 1] for row in rank[step]]:
                raise Failed(f"epoch {number}, step {step}: other samples than planned")
            if [zlib.crc32(sound) for sound in sounds] != [checks[row] for row in rows]:
                raise Failed(f"epoch {number}, step {step}: other bytes than those of its rows")
            seen += rows
            labels = np.array([samples[row].label for row in rows])
            loss = network.step(np.stack([model.features(sound) for sound in sounds]), labels)
            time.sleep(max(0, arrived + args.step / 1000 - time.perf_counter()))
            trained = time.perf_counter() - arrived
            size = sum(len(sound) for sound in sounds)
            story.steps.append(
                Step(number, mark - story.began, arrived - mark, trained, len(rows), size, loss)
            )
            screen.show(story, number, nodes.members)
        if happening:
            # Raises what went wrong.
            happening.result()
        if sorted(seen) != list(range(len(checks))):
            raise Failed(f"epoch {number} did not have each sample once")
        after = look(story, nodes, distance)
        steps = [s for s in story.steps if s.epoch == number]
        story.epochs.append(
            {
                "epoch": number,
                "what": what,
                "seconds": story.now() - began,
                "samples": sum(s.samples for s in steps),
                "waited_s": sum(s.waited for s in steps),
                "longest_wait_s": max(s.waited for s in steps),
                "delivered_bytes": sum(s.bytes for s in steps),
                "bucket_bytes": after.bucket_bytes - before.bucket_bytes,
                "peer_bytes": after.peer_bytes - before.peer_bytes,
                "loss": float(np.mean([s.loss for s in steps])),
            }
        )
        screen.epoch(story.epochs[-1])


def planned_rows(rank: Rank, epoch: int) -> list[list[int]]:
    """The rows of each step of a rank, without padding: the order is a function of the seed."""
    order, steps = rank.loader.order, len(rank.loader)
    partition = {"world": RANKS, "rank": rank.number, "batch": {"rows": BATCH}, "uneven": "pad"}
    found = order.steps(order.at(epoch, 0), epoch + 1, partition)
    planned = [found.step(number) for number in range(steps)]
    return [step.rows[: step.real].tolist() for step in planned]


# A thread that stays: what it starts ends with it.
STARTER = ThreadPoolExecutor(1)


def happens(event: str, story: Story, members: list[Member], silent: bool) -> Future:
    """A node is killed, comes back, or joins, while the loop goes on."""
    member = members[3] if event == "joined" else members[1]

    def end() -> None:
        member.kill(silent)
        word = "falls silent" if silent else "is killed"
        story.events.append((story.now(), f"{member.name} {word}"))

    def start() -> None:
        member.start()
        word = "joins" if event == "joined" else "is back"
        story.events.append((story.now(), f"{member.name} {word}"))

    return STARTER.submit(end if event == "killed" else start)


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    home = args.cache / "demo"
    lock = (home / ".cluster").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(f"Another `make demo-cluster` runs, with the same folders in {home}: wait for it.")
    training, _ = data.load(home / "clips")
    print(f"  data:    {data.NAME}\n           {data.LICENCE}")
    with contextlib.ExitStack() as running:

        def stopped_at_the_end(server):
            running.callback(server.stop)
            return server

        network, where = networks.made(NAMES, OTHERS, args.loopback)
        running.enter_context(network)
        print(f"  network: {where}")
        if args.silent and isinstance(network, networks.Loopback):
            raise Failed("--silent takes network namespaces")
        logs, programs = home / "logs", args.cache / "bin"
        at = network.address
        with network.inside("bucket"):
            bucket = stopped_at_the_end(
                Bucket(programs / "versitygw", home / "bucket", logs, at("bucket"))
            )
            prepare(bucket, training)
            distance = stopped_at_the_end(
                Distance(args.forebay, bucket, args.rtt, args.rtt, args.rate, logs)
            )
        with network.inside("etcd"):
            etcd = stopped_at_the_end(Etcd(programs / "etcd", home / "etcd", logs, at("etcd")))
        members = cluster(args, home, network, distance, etcd)
        # The loop, and all that looks at nodes, is there from here on.
        running.enter_context(network.inside("trainer"))
        for member in members:
            stopped_at_the_end(member)
        for member in members[:RANKS]:
            member.start()
        status = [args.forebay, "cluster", "status", "--node", members[0].url]
        wait_for_all(members[0], RANKS)
        subprocess.run([str(part) for part in status], check=False)
        print()

        # Rows are numbered in the order of the objects' names.
        samples = sorted(training, key=lambda s: s.key.encode())
        urls = [member.url for member in members]
        ranks = [Rank(number, urls) for number in range(RANKS)]
        story = Story(sum(s.size for s in training), time.perf_counter())
        nodes, stop = Nodes(members), threading.Event()
        watcher = threading.Thread(target=watch, args=(story, nodes, distance, stop), daemon=True)
        watcher.start()
        with show_cluster.Screen() as screen:
            train(story, ranks, nodes, distance, samples, args, screen)
        stop.set()
        watcher.join()
        print()
        subprocess.run([str(part) for part in status], check=False)
    finish(args, story, where)


def wait_for_all(member: Member, count: int) -> None:
    """Until a node goes by a map with so many members: others enter it within moments."""
    deadline = time.monotonic() + 10
    while member.counted().get("forebay_cluster_members", 0) < count:
        if time.monotonic() > deadline:
            raise member.failed(f"did not see {count} members within 10 s")
        time.sleep(0.05)


def cluster(
    args: argparse.Namespace, home: Path, network, distance: Distance, etcd: Etcd
) -> list[Member]:
    """Four nodes with certificates, none of which runs yet."""
    certificates = home / "certificates"
    subprocess.run(["rm", "-rf", str(certificates)], check=True)
    made = [args.forebay, "cluster", "init", "demo", "--out", certificates]
    made += [part for name in NAMES for part in ("--node", name)]
    done = subprocess.run([str(part) for part in made], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"`forebay cluster init` failed: {done.stderr}")
    members = []
    for name in NAMES:
        folder = home / f"node-{name}"
        command = [args.forebay, "serve", "--json", "--freshness", "immutable"]
        command += ["--origin", f"s3://{data.OBJECTS}?endpoint=http://{distance.address}"]
        command += ["--cache", f"{folder}:{args.cache_size}"]
        command += ["--cluster", f"etcd://{etcd.address}/demo"]
        # The network is the demo's own, or loopback.
        command += ["--set", "auth.anonymous=true"]
        for key, value in (
            ("node", name),
            ("ca", certificates / name / "ca.pem"),
            ("cert", certificates / name / "node.pem"),
            ("key", certificates / name / "node.key"),
        ):
            command += ["--set", f"cluster.{key}={value}"]
        logs, address = home / "logs" / f"node-{name}", network.address(name)
        with network.inside(name):
            members.append(Member(name, command, network, address, folder, logs))
    return members


def finish(args: argparse.Namespace, story: Story, where: str) -> None:
    seconds = story.by_second()
    show_cluster.table(seconds, story.events)
    first, size = story.epochs[0], story.dataset_bytes
    later = sum(e["bucket_bytes"] for e in story.epochs[1:])
    print(
        f"\n  {size / 1e6:,.1f} MB of data, caches of {args.cache_size} each. The bucket sent"
        f" {first['bucket_bytes'] / 1e6:,.1f} MB in the first epoch (headers included) and"
        f" {later / 1e6:,.1f} MB in the {len(story.epochs) - 1} epochs after it."
    )
    print(
        "  Each epoch had each sample once, in the order that was computed before all began; each"
        " recording was compared with its file."
    )
    conditions = (
        f"One machine, {os.cpu_count()} cores, for all of it: bucket (versitygw) behind a proxy:"
        f" {args.rtt:g} ms round trip, {args.rate:g} MiB/s; nodes with caches of {args.cache_size},"
        f" TLS between them, their map in etcd. Network: {where}.\n{RANKS} ranks with batches of"
        f" {BATCH}, steps of at least {args.step:g} ms. {size / 1e6:,.0f} MB of WAV files."
    )
    out = args.out / "forebay-demo-cluster.png"
    credit = f"Recordings: {data.NAME.split(':')[0]}, {data.LICENCE}."
    show_cluster.picture(story, conditions, credit, out)
    numbers = {
        "conditions": conditions,
        "dataset_bytes": size,
        "epochs": story.epochs,
        "events": story.events,
        "seconds": seconds,
        "steps": [asdict(step) for step in story.steps],
        "looks": [asdict(one) for one in story.looks],
    }
    out.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(f"\n  picture: {out} (and .svg; the numbers: .json)")
    print("  With your own machines: docs/CLUSTER.md")


if __name__ == "__main__":
    to_its_end(main, "make demo-cluster")
