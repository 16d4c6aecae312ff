"""Makes the report of a loader from what was counted here, and what the node says."""

from __future__ import annotations

import datetime
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _accounts, _forebay, energy
from ._ledger import OfEpoch
from ._plan import Order
from ._readings import SAMPLED, STAGES, Domain, Readings
from ._words import counted
from .errors import ConnectionFailed, Error, InvalidRequest, Timeout
from .report import Report
from .shuffle import to_wire

if TYPE_CHECKING:
    from .loader import Loader
    from .stats import Meter, Stats

#: Sums of a ledger that tell where bytes came from.
SOURCES = ("memory", "disk", "peer", "origin")
#: Joules of the node are not told if they are not known for more than this share of the time.
UNKNOWN_SHARE = 0.01
#: So many samples are waited for until the end of a loop is in one.
SAMPLES_AWAITED = 6
#: Measures of an order, as the report names them.
MEASURES = {
    "displacement": "displacement",
    "rank correlation": "rank_correlation",
    "co-location": "co_location",
    "label dispersion": "label_dispersion",
    "gap entropy": "gap_entropy",
    "epoch overlap": "epoch_overlap",
    "epoch correlation": "epoch_correlation",
}
#: Those of them that depend on what share each dataset of a mix has.
BY_SHARES = ("co-location", "label dispersion")


def is_place(prices: str | os.PathLike[str] | None) -> bool:
    """Whether ``prices`` names a provider and region (``aws/us-east-1``), rather than a file."""
    return (
        isinstance(prices, str)
        and re.fullmatch(r"[\w-]+/[\w-]+", prices) is not None
        and not Path(prices).is_file()
    )


def of_loader(
    loader: Loader[Any],
    meter: Meter,
    order: bool,
    place: str | None,
    egress: str,
    prices: str | os.PathLike[str] | None,
    is_by_prices: bool = False,
) -> Report:
    """The report of :meth:`forebay.Loader.report`. ``is_by_prices``: the place was given as
    ``prices=``, and a file may have been meant.
    """
    place = place or os.environ.get("FOREBAY_PLACE") or None
    file = prices or os.environ.get("FOREBAY_PRICES") or None
    table = None if file is None else _table(file)
    # Before anything is measured: a mistake in the table costs no time.
    named = None if file is None else str(file)
    _forebay.report_prices(table, named, None, egress)
    try:
        _forebay.report_prices(table, named, place, egress)
    except InvalidRequest as e:
        if is_by_prices:
            e.message = f"there is no file {place!r}, and {e.message}"
        raise
    ledger, stats = meter.ledger, meter.stats()
    absent: list[str] = []
    not_here: list[str] = []
    lacks: list[str] = []
    run = None
    unknown, failure = at_node(meter, absent)
    if stats.batches:
        run = {
            **figures(ledger.whole(), sum(unknown.values())),
            "skipped": stats.skipped,
            "reconnects": stats.reconnects,
            "samples": stats.samples,
        }
        not_here, lacks = energy.unread(_domains(run["energy"]))
    else:
        absent.append(
            "everything: this loader has handed out no batch"
            + (" since counting began anew" if meter.was_reset else " in this process")
            + " (DataLoader workers count for themselves)"
        )
    if run is not None and run["sources"] is None:
        absent.append("bytes by source and the hit ratio: the node does not say")
    document: dict[str, Any] = {
        "title": title(loader),
        "made_at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "unit": unit(loader),
        "is_streamed": bool(loader.options.stream),
        "is_local": not loader.datasets[0].client.route.startswith("http"),
        "run": run,
        "epochs": [
            {"epoch": n, **figures(of, unknown.get(n, 0.0))}
            for n, of in ledger.epochs().items()
            # Of an epoch that was only read ahead there is nothing to tell.
            if {"batches", "compute_s"} & of.sums.keys()
        ],
        "epochs_left_out": ledger.left_out,
        "timeline": ledger.timeline(),
        "ends": [] if run is None else [this_end(run, stats, loader, lacks)],
        "stored": stored(loader),
        "shuffle": None,
        "absent": absent,
    }
    if order:
        try:
            document["shuffle"] = quality(loader, absent)
        except InvalidRequest as e:
            # An epoch of a few rows has no order to speak of.
            absent.append(f"the quality of the order: {e.message}")
    absent += [f"joules here: {why}" for why in not_here]
    if run is not None:
        is_all = add_nodes(document, loader, meter, failure)
        if place is None:
            absent.append("money: whose prices apply is not known (place=, or FOREBAY_PLACE)")
        elif not is_all:
            some = "all that" if document.get("origin") else "what"
            absent.append(f"money: {some} was asked of the origin is not known")
        else:
            told = _forebay.report_money(json.dumps(document), table, named, place, egress)
            document["money"] = json.loads(told)
    return Report(document)


def _table(file: str | os.PathLike[str]) -> str:
    """The text of a table of prices."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise InvalidRequest(
            f"{os.fspath(file)}: the table of prices is not UTF-8 (byte {e.start})",
            hint="save it as UTF-8; `forebay report --print-prices` prints a table that is right",
        ) from None


def at_node(meter: Meter, absent: list[str]) -> tuple[dict[int, float], Error | None]:
    """Asks the node for its last samples; seconds by epoch of which it is not known what its
    machine used, and what kept it from answering.
    """
    watch, what = meter.watch, "joules of the node by what the loop did"
    if watch is None:
        return {}, None
    failure = None
    for _ in range(SAMPLES_AWAITED):
        began = time.perf_counter()
        try:
            watch.ask()
        except Error as e:
            absent.append(f"{what}: it does not say ({e.message})")
            failure = e
            break
        if not meter.ledger.at_node()[1] or time.perf_counter() - began > SAMPLES_AWAITED * SAMPLED:
            break
        # The last moments come with the next sample.
        time.sleep(SAMPLED)
    was_told, _, unknown = meter.ledger.at_node()
    missed = sum(unknown.values())
    if watch.why_not is not None:
        absent.append(f"{what}: {watch.why_not}")
    elif was_told and missed >= 0.01:
        absent.append(f"{what}: what the node measured in {missed:.2f} s of it is not known")
    return unknown, failure


def add_nodes(
    document: dict[str, Any], loader: Loader[Any], meter: Meter, failure: Error | None
) -> bool:
    """Adds what the nodes say about the job, unless the only one has just not answered. Returns
    whether that is all that the job took.
    """
    document["job"], absent = loader.job, document["absent"]
    clients = loader.clients()
    if isinstance(failure, (ConnectionFailed, Timeout)) and len(_accounts.distinct(clients)) == 1:
        absent.append(f"what the node took: it does not say ({failure.message})")
        return False
    accounts = _accounts.of_job(clients, loader.job)
    lacks = []
    for where, error in accounts.failed:
        which = where if accounts.several else "the node"
        lacks.append(f"what {which} took: it does not say ({error.message})")
    for n, account in enumerate(accounts.found, 1):
        name, where = "node", ""
        if accounts.several:
            name, where = f"node {n}", f"{account.where}: "
        document["ends"].append(node_end(account.said, name, where))
        of = name if accounts.several else "the node"
        absent += [f"joules of {of}: {why}" for why in account.said["absent"]]
    lacks = lacks or _lacking(accounts, loader, meter)
    absent += lacks
    if accounts.found:
        document["origin"] = origin_use(accounts, is_all=not lacks)
    return not lacks


def _lacking(accounts: _accounts.Accounts, loader: Loader[Any], meter: Meter) -> list[str]:
    """What is not in the accounts of the nodes that answered, as far as it is known."""
    if not accounts.found:
        return [f"what the nodes took: none of them knows the job {loader.job}"]
    clients = _accounts.distinct(loader.clients())
    # Of a client of one node, these are the times when it did not answer.
    failed = [client for client in clients if client.moves]
    moved = [client.route for client in failed if client.nodes > 1]
    if moved:
        before = f"before its client moved to {', '.join(moved)}"
        return [f"what the nodes took that served the job {before}: they are not asked"]
    # How many rows packs are made of is not known, nor how many came to others, or before.
    is_own = loader.place.world_size == 1 and not meter.was_reset
    if loader.options.pack is not None or not is_own:
        return [
            f"what {client.route} took before it failed to answer: it may have been started again"
            for client in failed
        ]
    stats = meter.stats()
    came = stats.samples + stats.skipped
    if came <= accounts.rows:
        return []
    unknown = f"what was taken for {came - accounts.rows:,} of {counted(came, 'row')}"
    why = "another one sent them, or one that was started again since"
    return [f"{unknown}: the nodes that answer know nothing of these ({why})"]


def node_end(said: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """What a node used."""
    others = said["node_rows"] > said["rows"]
    return {
        "name": name,
        "of": f"{where}all that the node did between the job's first request and its last, by any"
        " rank" + (", for other jobs too" if others else ""),
        "seconds": said["seconds"],
        "samples": max(said["rows"], said["node_rows"]),
        # Whatever a loader makes of them.
        "unit": "rows",
        "cpu_seconds": said["node_cpu_seconds"],
        "energy": said["energy"],
    }


def origin_use(accounts: _accounts.Accounts, is_all: bool) -> dict[str, Any]:
    """What the nodes asked of the origin, together."""
    each = [account.said for account in accounts.found]

    def saved(said: dict[str, Any]) -> int:
        # What was fetched for the job itself is on the disk, and in memory, when it is read.
        return max(0, said["memory_bytes"] + said["disk_bytes"] - said["origin_bytes"])

    return {
        "reads": sum(said["origin_requests"] for said in each),
        "read_bytes": sum(said["origin_bytes"] for said in each),
        "bytes_saved": sum(saved(said) for said in each),
        "of": "" if is_all else "not all: see absent",
    }


def title(loader: Loader[Any]) -> str:
    """What was read, and how."""
    o = loader.options
    size = f"batches of {o.batch_size}" if o.max_total is None else f"at most {o.max_total}"
    if o.pack is not None:
        size = f"batches of {counted(o.batch_size or 0, 'pack')} of {o.pack.length:,} tokens"
    of = " + ".join(d.name for d in loader.datasets)
    return f"{of}, {size}, shuffle {_shuffle(loader)}"


def unit(loader: Loader[Any]) -> str:
    """What the loop got so many of."""
    return "samples" if loader.options.pack is None else "packs"


def stored(loader: Loader[Any]) -> list[dict[str, Any]]:
    """What lies at the origin for a loader: each dataset that was opened, with all of its files."""
    return [{"by": "dataset", "name": name, "bytes": size} for name, size in loader.stored()]


def _shuffle(loader: Loader[Any]) -> str:
    told = to_wire(loader.options.shuffle)
    size = told.get("rows", told.get("blocks"))
    return told["kind"] if size is None else f"{told['kind']}:{size}"


def figures(of: OfEpoch, unknown: float) -> dict[str, Any]:
    """The sums of an epoch, or of all, as the report has them. For ``unknown`` seconds of it, it is
    not known what the node's machine used.
    """
    sums = of.sums

    def get(name: str) -> float:
        return sums.get(name, 0.0)

    compute, waited, first = get("compute_s"), get("waited_s"), get("first_wait_s")
    seconds = compute + waited
    running = seconds - first
    sources = {name: int(get(f"{name}_bytes")) for name in SOURCES}
    known = any(f"{name}_bytes" in sums for name in SOURCES)
    total = sum(sources.values())
    found: dict[str, Any] = {
        "samples": int(get("samples")),
        "batches": int(get("batches")),
        "bytes": int(get("bytes")),
        "seconds": seconds,
        "samples_per_s": get("samples") / seconds if seconds else 0.0,
        "compute_s": compute,
        "waited_s": waited,
        "first_wait_s": first,
        "au": compute / running if get("batches") > 1 and running > 0 else None,
        "waits": {
            "node_s": get("node_s"),
            "decode_s": get("wait_decode_s"),
            "collate_s": get("collate_s"),
            **{f"{n}_s": get(f"{n}_s") for n in ("origin", "disk", "prepare", "network")},
        },
        "sources": sources if known else None,
        "hit_ratio": 1 - sources["origin"] / total if known and total else None,
        "cpu_seconds": None,
        "energy": [],
        "stages": [],
        "node_stages": [],
    }
    took = dict(zip(STAGES, (waited, compute), strict=True))
    if unknown <= UNKNOWN_SHARE * seconds:
        found["node_stages"] = [
            {"stage": stage, "seconds": took[stage], **_used(used), "cpu_seconds": None}
            for stage, used in of.node.items()
            # Of sensors that were not there all the time, nothing is told.
            if used.joules
        ]
    if of.used is not None:
        found.update(_used(of.used))
        found["stages"] = [
            {"stage": stage, "seconds": took[stage], **_used(used)}
            for stage, used in of.stages.items()
        ]
    return found


def _used(used: Readings) -> dict[str, Any]:
    return {
        "cpu_seconds": used.cpu_seconds,
        "energy": [
            {"source": key[0], "domain": key[1], "estimate": key[2], "joules": joules}
            for key, joules in used.joules.items()
        ],
    }


def this_end(
    run: dict[str, Any], stats: Stats, loader: Loader[Any], lacks: list[str]
) -> dict[str, Any]:
    """CPU time and energy of this process and machine, whose joules lack something."""
    whose = f"; joules are {_whose(run['energy'], lacks)}" if run["energy"] else ""
    return {
        "name": "process",
        "of": f"this process, with the training in it{whose}",
        "seconds": run["seconds"],
        "samples": stats.samples,
        "unit": unit(loader),
        "cpu_seconds": run["cpu_seconds"],
        "energy": run["energy"],
    }


def _whose(figures: list[dict[str, Any]], lacks: list[str]) -> str:
    """What the joules of this machine are of."""
    kinds = {figure["estimate"] for figure in figures}
    if kinds == {True}:
        return "an estimate from its CPU time"
    whose = "of the whole machine"
    if lacks:
        whose = f"of all that ran on this machine, without {_listed(lacks)}"
    return f"{whose}, estimates of its CPU time" if True in kinds else whose


def _listed(names: list[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _domains(figures: list[dict[str, Any]]) -> list[Domain]:
    return [(figure["source"], figure["domain"], figure["estimate"]) for figure in figures]


def quality(loader: Loader[Any], absent: list[str]) -> dict[str, Any]:
    """How good the order is, beside a uniform one; adds to ``absent`` what is not known of it."""
    o = loader.options
    if not isinstance(loader.order, Order):
        raise InvalidRequest("the order of shards that nobody has indexed is not known beforehand")
    # In batches of one row nothing can be measured; of packs nobody knows how many rows they have.
    batch = o.batch_size if o.batch_size is not None and o.batch_size > 1 and not o.pack else 32
    said = json.loads(loader.order.measured(batch))
    own, uniform = said["order"], said["expected"]
    stages = loader.order.document.get("schedule", ())
    changes = any(0 < stage["from"] < loader.rows_per_epoch for stage in stages)
    if changes:
        names = _listed([f"the {name}" for name in BY_SHARES])
        absent.append(f"{names} of the order: the weights of the mix change within the epoch")
    return {
        "order": _shuffle(loader),
        "batch": batch,
        "measures": [
            (name, own[key], uniform[key])
            for name, key in MEASURES.items()
            if not (changes and name in BY_SHARES)
        ],
        "points": said.get("points", []),
    }
