"""Batches, each compared with what was written, while something happens to the nodes: they are
killed, stopped, slow, restarted one after the other, and join and leave.
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from contextlib import ExitStack

from cluster_site import BATCH, TINY, Batches, Cluster, Site, outcome, read_at
from nodes import Distance
from report import Report, goal

CHANGES = ("calm", "kill", "back", "pause", "join", "drain", "etcd")
#: What puts a node at a distance from the others while all is well, in milliseconds; and what makes
#: it so many times slower.
ROUND_TRIP_MS, FIRST_BYTE_MS, TIMES_SLOWER = 1.0, 1.0, 20
TRICKLE = "1000"


def changes(report: Report, site: Site) -> None:
    """Batches at two nodes, while something happens to others. Each change has objects of its own,
    which lie at their owners and at c, and are asked for at a and b.
    """
    groups = {what: site.objects(what, site.args.batches * BATCH, TINY) for what in CHANGES}
    for names in groups.values():
        read_at(site.far.url, names)
    with site.cluster("changes") as cluster:
        all_changes(report, cluster, site, groups)


def all_changes(report: Report, cluster: Cluster, site: Site, groups: dict[str, list[str]]) -> None:
    args, bucket = site.args, site.bucket
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
        outcome(report, what, batches)
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
        shutil.rmtree(cluster.etcd.data)
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


def mirrors(report: Report, site: Site) -> None:
    """Two nodes keep everything, and one of three dies while batches are read at the others."""
    report.heading("kill -9 of one of three nodes, of which two keep everything")
    names = site.objects("mirrors", site.args.batches * BATCH, TINY)
    read_at(site.far.url, names)
    with site.cluster("mirrors", settings=("--set", "cache.mirror=2")) as cluster:
        one_of_two_copies(report, cluster, site.bucket, names)


def one_of_two_copies(report: Report, cluster: Cluster, bucket: Distance, names: list[str]) -> None:
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


def churn(report: Report, site: Site) -> None:
    """A fourth node takes a share and gives it, again and again: it starts, drains, takes its share
    again, drains, stops and is forgotten.
    """
    args = site.args
    names = site.objects("churn", args.batches * BATCH, TINY)
    read_at(site.far.url, names)
    over = max(args.churn, 2 * args.every)
    report.heading(
        f"{args.batches} batches in {over:g} s, while a node joins or leaves every {args.every:g} s"
    )
    with site.cluster("churn") as cluster:
        read_at(cluster.nodes["c"].url, names)
        before, epoch = site.bucket.moved()["bytes_to_client"], cluster.status("a")["epoch"]
        batches = Batches([cluster.nodes[n].url for n in "ab"], names, TINY, over=over)

        def stop_and_forget() -> None:
            cluster.stop("d")
            # Refused for some seconds: it was there a moment ago.
            cluster.order("forget", "d")

        steps = [
            lambda: cluster.start("d"),
            lambda: cluster.order("drain", "d"),
            lambda: cluster.order("drain", "d", "--undo"),
            lambda: cluster.order("drain", "d"),
            stop_and_forget,
        ]
        with batches.going() as worker:
            begin, number = time.monotonic(), 0
            while worker.is_alive():
                steps[number % len(steps)]()
                number += 1
                worker.join(max(0.1, begin + number * args.every - time.monotonic()))
        sent = site.bucket.moved()["bytes_to_client"] - before
        changed = cluster.status("a")["epoch"] - epoch
    report.add({"name": "churn: changes of the map", "value": changed, "unit": "epochs"})
    all_of_them = batches.done + batches.failed + batches.retryable
    for what, value, most in (
        ("wrong batches (bytes, or their places)", batches.wrong, 0),
        ("lost batches", batches.count - all_of_them + batches.failed, 0),
        ("batches to be tried again", batches.retryable, batches.count // 1000),
    ):
        report.add(
            {
                "name": f"churn: {what}",
                "value": value,
                "unit": f"of {batches.count}",
                "goals": [goal("value", at_most=most)],
            }
        )
    for error in batches.errors[:3]:
        report.note(f"churn: {error}")
    milliseconds = {"the 99th percentile": 0.99, "the longest batch": 1.0}
    for what, share in milliseconds.items():
        report.add(
            {"name": f"churn: {what}", "value": batches.percentile(share) * 1e3, "unit": "ms"}
        )
    report.add(
        {
            "name": "churn: read again from the bucket",
            "value": sent / (len(names) * TINY) * 100,
            "unit": "% of the data",
            "goals": [goal("value", at_most=1.0)],
        }
    )


def slow(report: Report, site: Site) -> None:
    """The way to one of three nodes becomes long, or trickles. Others reach each node through
    `forebay distance`; for the change it is ended and started again at its port, so connections to
    that node break once.
    """
    args = site.args
    groups = {
        what: site.objects(f"slow-{what}", args.batches * BATCH, TINY)
        for what in ("calm", "slower", "trickle")
    }
    for names in groups.values():
        read_at(site.far.url, names)
    with ExitStack() as on:
        ways: dict[str, Distance] = {}

        def put(name: str, times: int = 1, rate: str | None = None) -> None:
            """That node is so many times as far from the others as the rest."""
            if name in ways:
                ways[name].stop()
            ways[name] = on.enter_context(
                Distance(
                    site.directory,
                    f"slow-way-{name}",
                    f"127.0.0.1:{cluster.port(name)[1]}",
                    rtt_ms=ROUND_TRIP_MS * times,
                    first_byte_ms=FIRST_BYTE_MS * times,
                    rate=rate,
                    listen=cluster.addresses.get(name, "127.0.0.1:0"),
                )
            )
            cluster.addresses[name] = ways[name].address

        where = site.directory / "slow"
        cluster = on.enter_context(Cluster(where, site.bucket.url, site.etcd, "4GiB", "slow"))
        for name in "abc":
            put(name)
            cluster.start(name)
        cluster.settle(3)
        for names in groups.values():
            read_at(cluster.nodes["c"].url, names)

        def batches_of(what: str) -> tuple[Batches, float]:
            """And how many questions nodes asked each other and the bucket for each batch."""
            urls = [cluster.nodes[n].url for n in "ab"]
            batches = Batches(urls, groups[what], TINY, limit=args.limit, direct=False)

            def questions() -> float:
                asked = cluster.metric("forebay_peer_questions_total", "a", "b")
                return asked + site.bucket.moved()["requests"]

            before = questions()
            batches.run()
            return batches, (questions() - before) / max(1, batches.done)

        report.heading(
            f"One of three nodes is {TIMES_SLOWER} times as far away (forebay distance before its"
            f" peer port: {ROUND_TRIP_MS:g} ms and {FIRST_BYTE_MS:g} ms, times {TIMES_SLOWER})"
        )
        calm, calm_asked = batches_of("calm")
        calm_ms = calm.percentile(0.99) * 1e3
        outcome(report, "calm", calm)
        report.add({"name": "calm: the 99th percentile", "value": calm_ms, "unit": "ms"})

        put("c", TIMES_SLOWER)
        cluster.settle(3)
        counted = ("forebay_peer_hedged_questions_total", "forebay_peer_left_alone_total")
        before = [cluster.metric(metric, "a", "b") for metric in counted]
        slower, asked = batches_of("slower")
        hedged, alone = (
            cluster.metric(metric, "a", "b") - had
            for metric, had in zip(counted, before, strict=True)
        )
        outcome(report, "slower", slower)
        report.add(
            {
                "name": f"slower: the 99th percentile (2 x calm + {args.hedge_ms:g} ms)",
                "value": slower.percentile(0.99) * 1e3,
                "unit": "ms",
                "goals": [goal("value", at_most=2 * calm_ms + args.hedge_ms)],
            }
        )
        report.add(
            {
                "name": "slower: more requests to nodes and bucket",
                "value": (asked / calm_asked - 1) * 100 if calm_asked else None,
                "unit": "%",
                "goals": [goal("value", at_most=5.0)] if calm_asked else [],
            }
        )
        report.add({"name": "slower: questions to a second node", "value": int(hedged), "unit": ""})
        report.add({"name": "slower: times it was left alone", "value": int(alone), "unit": ""})

        report.heading("The way to one of three nodes carries 1 KB/s")
        put("c", rate=TRICKLE)
        trickle, _ = batches_of("trickle")
        outcome(report, "trickle", trickle)
        report.add({"name": "trickle: batches in time", "value": trickle.done, "unit": ""})
        report.add(
            {
                "name": "trickle: added to the 99th percentile",
                "value": max(0.0, trickle.percentile(0.99) * 1e3 - calm_ms),
                "unit": "ms",
                "goals": [goal("value", at_most=500)],
            }
        )
        report.add(
            {
                "name": "trickle: longest batch",
                "value": trickle.percentile(1.0) * 1e3,
                "unit": "ms",
                "goals": [goal("value", at_most=1000 + calm.percentile(1.0) * 1e3)],
            }
        )


def rolling(report: Report, site: Site) -> None:
    """All nodes are restarted, one after the other, while clients that know all of them read."""
    args = site.args
    names = site.objects("rolling", args.batches * BATCH, TINY)
    read_at(site.far.url, names)
    report.heading("All three nodes are restarted, one after the other")
    with site.cluster("rolling") as cluster:
        read_at(cluster.nodes["c"].url, names)
        shares, taken = cluster.shares(), 0.0
        before = site.bucket.moved()["bytes_to_client"]
        url, stopping = list(cluster.urls), threading.Event()
        rounds: list[Batches] = []

        def read() -> None:
            """Again and again, at all nodes in turn."""
            while not stopping.is_set() or not rounds:
                urls = [url[i:] + url[:i] for i in range(len(url))]
                rounds.append(Batches(urls, names, TINY, limit=args.limit))
                rounds[-1].run(3)

        moved = ("forebay_hand_over_taken_bytes_total", "forebay_mirror_copied_bytes_total")
        reader = threading.Thread(target=read)
        reader.start()
        try:
            for name in "abc":
                time.sleep(0.5)
                taken += sum(cluster.metric(metric, name) for metric in moved)
                cluster.stop(name)
                cluster.start(name)
                cluster.settle(3)
        finally:
            stopping.set()
            reader.join()
        taken += sum(cluster.metric(metric) for metric in moved)
        sent = site.bucket.moved()["bytes_to_client"] - before
        after = cluster.shares()
    done = sum(batches.done for batches in rounds)
    failed = sum(batches.failed + batches.retryable for batches in rounds)
    report.add(
        {
            "name": "rolling: failed reads (batches)",
            "value": failed,
            "unit": f"of {done + failed}",
            "goals": [goal("value", at_most=0)],
        }
    )
    for error in [error for batches in rounds for error in batches.errors][:3]:
        report.note(f"rolling: {error}")
    report.add(
        {
            "name": "rolling: wrong batches",
            "value": sum(batches.wrong for batches in rounds),
            "unit": f"of {done + failed}",
            "goals": [goal("value", at_most=0)],
        }
    )
    report.add(
        {
            "name": "rolling: moved between nodes",
            "value": int(taken),
            "unit": "bytes",
            "goals": [goal("value", at_most=0)],
        }
    )
    report.add(
        {
            "name": "rolling: placement changed",
            "value": sum(abs(after.get(name, 0.0) - share) for name, share in shares.items()),
            "unit": "share",
            "goals": [goal("value", at_most=0.0)],
        }
    )
    report.add(
        {
            "name": "rolling: longest batch",
            "value": max(batches.percentile(1.0) for batches in rounds) * 1e3,
            "unit": "ms",
        }
    )
    report.add(
        {
            "name": "rolling: read again from the bucket",
            "value": sent / (len(names) * TINY) * 100,
            "unit": "% of the data",
        }
    )
