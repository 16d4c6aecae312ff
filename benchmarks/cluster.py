"""The cluster's table of numbers: what it promises, measured with real nodes, and computed for
clusters that no single machine can hold.

Nodes with TLS between them, their map in etcd, in front of a directory behind `forebay distance`,
whose counters tell what the bucket gave. Each row prints its goal. All of it is on one machine:
figures say what nodes do and what it costs their CPUs, not what a network gives; that holds for
network namespaces too.

Sources of the goals: the cluster's design, and what is computed comes from the code that places.
`--only PART` runs one of the parts:

  computed   spread, moves and tables of up to 1,000 nodes
  simulated  lives of 100 clusters of 500 to 1,000 nodes: what must hold after each change
  object     many clients read one cold object, whole
  parts      1,000 clients read parts of one cold object
  changes    batches while a node is killed, stopped, joins, drains, and etcd is lost
  mirrors    the same for a node that dies, where two keep everything
  churn      batches while a node joins or leaves every 5 seconds
  slow       batches while one of three nodes is 20 times as far away, and behind 1 KB/s
  rolling    batches while all nodes are restarted, one after the other
  memory     of a batch, by its entries and the nodes of the cluster
  map        how long a read waits for a new map of 64 and of 1,000 members
  costs      CPU of an object that another node has, and of one that lies here
  disks      bytes and units on the disks of nodes of different sizes
  writes     reads after acknowledged writes at any node, while something happens
  links      throughput of 1 to 8 nodes whose links are capped
  aistore    what AIStore documents of the same things
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import cluster_changes
import cluster_computed
import cluster_costs
import cluster_data
import cluster_links
import cluster_writes
from cluster_site import Site
from nodes import use_own_environment
from report import Report

CACHE = Path(os.environ.get("FOREBAY_CACHE", Path.home() / ".cache" / "forebay"))
COLUMNS = [("name", "", 66), ("value", "", 12), ("unit", "", 16)]
PARTS: dict[str, Callable[[Report, Site], None]] = {
    "computed": cluster_computed.computed,
    "simulated": cluster_computed.simulated,
    "object": cluster_data.one_object,
    "parts": cluster_data.parts,
    "changes": cluster_changes.changes,
    "mirrors": cluster_changes.mirrors,
    "churn": cluster_changes.churn,
    "slow": cluster_changes.slow,
    "rolling": cluster_changes.rolling,
    "memory": cluster_costs.memory,
    "map": cluster_costs.map_change,
    "costs": cluster_costs.costs,
    "disks": cluster_data.disks,
    "writes": cluster_writes.writes,
    "links": cluster_links.links,
    "aistore": cluster_computed.aistore,
}
#: Their clients must be at another machine of the network from their first thread on.
OWN_PROCESS = ("links", "writes")
FOOTER = (
    "All nodes, clients and the bucket share this machine, also where they are in network"
    " namespaces or behind forebay distance: these figures measure CPUs and what the nodes do, not"
    " networks."
)


def arguments() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--only", choices=list(PARTS), help="run this part alone")
    p.add_argument("--batches", type=int, default=1000, help="batches during each change")
    p.add_argument("--objects", type=int, default=3000, help="objects whose CPU is measured")
    p.add_argument("--units", type=int, default=30_000, help="objects that are put on disks")
    p.add_argument("--entries", type=int, default=4096, help="entries of the largest batch")
    p.add_argument(
        "--object", type=int, default=1 << 30, help="bytes of the object that is read in parts"
    )
    p.add_argument(
        "--whole", type=int, default=64 << 20, help="at most so many bytes if it is read whole"
    )
    p.add_argument(
        "--clients", type=int, default=1000, help="clients at once; at most 200 read all of it"
    )
    p.add_argument("--lives", type=int, default=100, help="clusters that are simulated")
    p.add_argument(
        "--largest", type=int, default=1000, help="nodes of the largest computed cluster"
    )
    p.add_argument("--nodes", type=int, default=8, help="the most real nodes (links, memory)")
    p.add_argument("--link", type=int, default=10 << 20, help="bytes per second of a node's link")
    p.add_argument("--churn", type=float, default=60, help="seconds in which nodes come and go")
    p.add_argument("--every", type=float, default=5, help="seconds between two such changes")
    p.add_argument(
        "--seconds",
        type=float,
        default=10,
        help="for each disturbance of writes, each measurement of links, and changing maps",
    )
    p.add_argument(
        "--limit", type=float, default=40, help="no batch begins after so many seconds (slow ways)"
    )
    p.add_argument(
        "--hedge-ms",
        type=float,
        default=75.0,
        help="the longest that a node waits for another one before it asks a second (ADR 32)",
    )
    p.add_argument("--etcd-away", type=float, default=20, help="seconds without etcd")
    p.add_argument(
        "--disturb",
        nargs="*",
        choices=list(cluster_writes.DISTURBANCES),
        help="what happens during writes [all]",
    )
    p.add_argument("--seed", type=int, default=1, help="of what is random")
    p.add_argument(
        "--etcd",
        default=shutil.which("etcd") or str(CACHE / "bin" / "etcd"),
        help="the etcd program",
    )
    p.add_argument("--save", type=Path, help="write the rows to this file")
    return p


def apart(report: Report, part: str) -> None:
    """Runs a part in a process of its own, and takes its rows over."""
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as directory:
        kept = Path(directory) / "rows.json"
        command = [sys.executable, __file__, *sys.argv[1:]]
        done = subprocess.run([*command, "--only", part, "--save", str(kept)], check=False)
        if done.returncode:
            sys.exit(f"the part {part} failed: exit code {done.returncode}")
        found = json.loads(kept.read_text())
        report.rows += found["rows"]
        report.notes += [words for words in found["notes"] if words != FOOTER]


def main() -> None:
    args = arguments().parse_args()
    use_own_environment()
    settings = {"batches": args.batches, "objects": args.objects, "seed": args.seed}
    report = Report("The cluster, on one machine", COLUMNS, settings)
    for part in [args.only] if args.only else PARTS:
        began = time.monotonic()
        if part in OWN_PROCESS and not args.only:
            apart(report, part)
        else:
            with (
                tempfile.TemporaryDirectory(prefix="forebay-bench-") as directory,
                contextlib.ExitStack() as on,
            ):
                PARTS[part](report, Site(Path(directory), args, on))
        took = round(time.monotonic() - began, 1)
        report.times[part] = took
        print(f"  ({part}: {took:g} s)", flush=True)
    report.note(FOOTER)
    report.save(args.save)


if __name__ == "__main__":
    main()
