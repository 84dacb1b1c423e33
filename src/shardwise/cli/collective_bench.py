"""`shardwise collective bench`: starts the ranks, and lays what they measured beside what a cluster predicts."""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardwise.cli.output import print_result
from shardwise.errors import UserError
from shardwise.report.table import plain_table
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes, format_time
from shardwise.runtime.installed import require

if TYPE_CHECKING:
    from shardwise.schedule import Algorithm
    from shardwise.schedule.network import Network

SIZES = "1KB,4KB,64KB,1MB,16MB,64MB"
MOST_RANKS = 64
_TIMEOUT = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All but the names of collective and algorithm."""
    parser.add_argument("--all", action="store_true", help="every collective")
    parser.add_argument("--ranks", type=int, required=True, metavar="P", help="processes to start on this host")
    parser.add_argument("--transport", choices=("shared", "sends", "both"), default="both", help="(both)")
    parser.add_argument("--sizes", default=SIZES, metavar="SIZE,...", help=f"of the full tensor ({SIZES})")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="how often each has its turn (7)")
    parser.add_argument(
        "--limit", type=float, default=600.0, metavar="SECONDS", help="start nothing new after it (600)"
    )
    parser.add_argument("--cluster", metavar="TEXT", help="predict for it, too: such as 2xA100, or a TOML file")


def run(args: argparse.Namespace, algorithms: list[Algorithm], sizes: list[int]) -> int:
    """Measure these algorithms at these sizes in bytes, and print it. Raises `UserError`, `RunFailed` when a rank dies,
    and `KeyboardInterrupt`, with what was measured until then printed."""
    check(args, sizes)
    network = _network(args)
    measurement, failure = measure(args, algorithms, sizes)
    result = {
        "ranks": args.ranks,
        "dtype": "float32",
        "rounds": args.rounds,
        "machine": {"cores": len(cores()), "cpu": platform.processor() or platform.machine()},
        "cluster": args.cluster,
        "notes": list(network.notes) if network else [],
        "wanted": measurement["wanted"],
        "cells": [_summed_up(cell, args.ranks, network) for cell in measurement["cells"]],
    }
    print_result(args, result, _lines(result))
    if failure is not None:
        raise failure
    return 0


def check(args: argparse.Namespace, sizes: list[int]) -> None:
    """Raise `UserError` without torch, for ranks, rounds or a limit that make no sense, and for sizes in bytes of which
    this host cannot hold one on each rank."""
    from shardwise.cluster.catalog import lookup

    require("measuring", "torch")
    if not 1 < args.ranks <= MOST_RANKS:
        raise UserError(f"--ranks {args.ranks}: between 2 and {MOST_RANKS} can be measured on one host")
    if args.rounds < 1:
        raise UserError(f"--rounds must be a positive integer, not {args.rounds}")
    if not args.limit > 0:
        raise UserError(f"--limit must be a positive number of seconds, not {args.limit:g}")
    if min(sizes) < 1:
        raise UserError(f"--sizes {args.sizes}: give sizes of at least one byte")
    room, largest = lookup("CPU").device.memory_bytes, max(sizes)
    if room is not None and args.ranks * largest > room:
        raise UserError(
            f"--sizes {args.sizes}: {format_bytes(largest)} on each of {args.ranks} ranks are more than this machine's "
            f"{format_bytes(room)}"
        )


def _network(args: argparse.Namespace) -> Network | None:
    if args.cluster is None:
        return None
    from shardwise.cluster import Cluster
    from shardwise.schedule.network import Network

    return Network.of(Cluster.parse(args.cluster), args.ranks, repeated=True)


def cores() -> set[int]:
    """The cores that this process may use."""
    import os

    return os.sched_getaffinity(0)


def measure(
    args: argparse.Namespace, algorithms: list[Algorithm], sizes: list[int]
) -> tuple[dict[str, Any], BaseException | None]:
    """(what the ranks wrote, how it ended if not well). Raises where there is nothing."""
    from shardwise.runtime.measure.job import measured

    def job(out: str) -> dict[str, Any]:
        return {
            "algorithms": [(algorithm.collective, algorithm.name) for algorithm in algorithms],
            "sizes": sizes,
            "transports": ["shared", "sends"] if args.transport == "both" else [args.transport],
            "rounds": args.rounds,
            "limit": args.limit,
            "settled": getattr(args, "settled", 0.0),
            "timeout": _TIMEOUT,
            "out": out,
        }

    return measured("shardwise.runtime.transport.bench", job, args.ranks)


def _summed_up(cell: dict[str, Any], ranks: int, network: Network | None) -> dict[str, Any]:
    """A cell with medians, quartiles, bytes/s and predictions, quickest first."""
    from shardwise.schedule import build
    from shardwise.schedule.price import price

    rows = []
    for row in cell["rows"]:
        seconds = row["seconds"]
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
        predicted = None
        if network is not None and row["algorithm"]:
            schedule = build(cell["collective"], row["algorithm"], ranks, **row["options"])
            predicted = price(schedule, network, cell["bytes"]).seconds
        figures = {"median_s": median, "quartiles_s": [low, high], "bytes_per_s": cell["bytes"] / median}
        rows.append({**row, **figures, "predicted_s": predicted})
    return {**cell, "rows": sorted(rows, key=lambda row: row["median_s"])}


def _lines(result: dict[str, Any]) -> Iterator[Renderable]:
    for cell in result["cells"]:
        yield from (_table(cell, result), "")
    done, target = len(result["cells"]), result["wanted"]
    yield "time: the median of calls that follow each other, with its quartiles; bytes/s: the full tensor's over it"
    if done < target:
        yield f"the time was over after {done} of {target} sizes: raise --limit, or leave sizes out"
    yield from (f"note: {note}" for note in result["notes"])


def _table(cell: dict[str, Any], result: dict[str, Any]) -> Any:
    memcpy = next(row for row in cell["rows"] if row["algorithm"] is None)
    title = f"{cell['collective']} of {format_bytes(cell['bytes'])} on {result['ranks']} ranks"
    predicts = ["predicted", "measured / predicted"] if result["cluster"] else []
    figures = ("time", "quartiles", "bytes/s", f"speed / {memcpy['transport']}", *predicts)
    table = plain_table(("algorithm", "by"), figures, title)
    for row in cell["rows"]:
        options = "".join(f" {name}={value}" for name, value in row["options"].items())
        low, high = map(format_time, row["quartiles_s"])
        cells = [(row["algorithm"] or "the backend's own") + options, row["transport"], format_time(row["median_s"])]
        cells += [f"{low} to {high}", f"{format_bytes(row['bytes_per_s'])}/s"]
        cells.append(f"{memcpy['median_s'] / row['median_s']:.2f}")
        if predicts:
            known = row["predicted_s"]
            cells += [format_time(known), f"{row['median_s'] / known:.2f}"] if known else ["-", "-"]
        table.add_row(*cells)
    return table
