"""What is computed for clusters that no single machine can hold, by the code that places and
routes; and what AIStore documents, beside it.
"""

from __future__ import annotations

import json
import subprocess
import sys

from cluster_site import Site
from nodes import program
from report import Report, goal

AISTORE = """
A change of the map: every change of membership aborts the batches in flight (its limits, as of
commit 583e772), and begins a rebalance by itself, which may take minutes or hours
(docs/batch.md). Here: the rows of `changes` and `churn`.

Cold entries: a batch fetches none: an object of a remote bucket that is not cached becomes a
placeholder (its limits, as of commit 583e772); after six soft errors the batch is aborted
(docs/get_batch.md, get_batch.max_soft_errs). Here: a cold entry is fetched, once for all nodes;
the rows of `parts` and `object`.

Mirrors: the copies of an object lie on the disks of one node (docs/storage_svcs.md, "Local
mirroring and load balancing"), so they do not outlive that node. Over nodes it has erasure
coding, with replicas of small objects. Here: the rows of `mirrors`, on other nodes.

A sender that is lost or slow: the node that puts the batch together waits for it up to a limit,
and then asks neighbours a limited number of times (the GetBatch paper, sections 2.4.2 and 2.4.3).
Here: the rows of `changes` and `slow`.
"""


def computed(report: Report, site: Site) -> None:
    """Spread and moves, by the code that places; no node runs."""
    largest = site.args.largest
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


def simulated(report: Report, site: Site) -> None:
    """Lives of clusters with random weights, zones and changes: what must hold after each."""
    lives, nodes = site.args.lives, site.args.largest
    report.heading(
        f"Simulated (forebay cluster plan --simulate {lives} --nodes {nodes} --seed"
        f" {site.args.seed})"
    )
    command = [program(), "cluster", "plan", "--json", "--simulate", str(lives)]
    command += ["--nodes", str(nodes), "--seed", str(site.args.seed)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if not done.stdout:
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    found = json.loads(done.stdout)
    between = f"{found['nodes_least']:,} to {found['nodes_most']:,} nodes"
    report.add(
        {
            "name": f"clusters of {between} that break a promise",
            "value": len(found["broken"]),
            "unit": f"of {lives}",
            "goals": [goal("value", at_most=0)],
        }
    )
    for broken in found["broken"]:
        report.note(
            f"seed {broken['seed']}, change {broken['change']} ({broken['happened']}):"
            f" {broken['what']}"
        )
    if len(found["broken"]) == lives:
        return
    report.add(
        {
            "name": f"{found['maps']} changes of their maps: moves, of what must",
            "value": found["moved"] / (found["least"] or 1.0),
            "unit": "times",
            "goals": [goal("value", at_most=1.05)],
        }
    )
    report.add(
        {
            "name": "members of one weight together, off their share at most",
            "value": found["weights_off"] * 100,
            "unit": "%",
            "goals": [goal("value", at_most=3.0)],
        }
    )
    report.add({"name": "things that were checked", "value": found["checks"], "unit": ""})
    report.add({"name": "it took", "value": found["seconds"], "unit": "s"})


def aistore(report: Report, site: Site) -> None:
    """What AIStore says of itself. It is not run here."""
    report.heading("Beside it: what AIStore documents (it is not run here)")
    for words in AISTORE.strip().split("\n\n"):
        report.note(" ".join(words.split()))
