"""`shardwise collective bench`: starts the ranks, and lays what they measured beside what a cluster predicts."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardwise.cli.declare import CommandOptions, arg
from shardwise.cli.output import print_result
from shardwise.cli.quantities import bytes_of
from shardwise.cluster import Cluster
from shardwise.cluster.catalog import lookup
from shardwise.errors import UserError
from shardwise.records import dataclass
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


def sizes_of(option: str, text: str) -> list[int]:
    """Sizes in bytes: 1KB,64MB. Raises `UserError`."""
    sizes = [bytes_of(option, word) for word in text.split(",")]
    if min(sizes) < 1:
        raise UserError(f"{option} {text}: give sizes of at least one byte")
    return sizes


@dataclass
class BenchOptions(CommandOptions):
    """A measurement, and what it is compared with."""

    ranks: int = arg("processes to start on this host", "P")
    transport: str = arg(default="both", choices=("shared", "sends", "both"))
    sizes: list[int] = arg("of the full tensor", "SIZE,...", SIZES, read=sizes_of)
    rounds: int = arg("how often each has its turn", "N", 7, positive=True)
    limit: float = arg("start nothing new after it", "SECONDS", 600.0, positive=True)
    cluster: str | None = arg("predict for it, too: such as 2xA100, or a TOML file", "TEXT")


def run(args: BenchOptions, algorithms: list[Algorithm]) -> int:
    """Measure these algorithms, and print it. Raises `UserError`, `RunFailed` when a rank dies, and
    `KeyboardInterrupt`, with what was measured until then printed."""
    check(args.ranks, args.sizes)
    network = _network(args)
    measurement, failure = measure(args, algorithms, args.sizes, args.limit)
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


def check(ranks: int, sizes: list[int]) -> None:
    """Raise `UserError` without torch, for a number of ranks that cannot be measured, and for sizes in bytes of which
    this host cannot hold one on each rank."""
    require("measuring", "torch")
    if not 1 < ranks <= MOST_RANKS:
        raise UserError(f"--ranks {ranks}: between 2 and {MOST_RANKS} can be measured on one host")
    room, largest = lookup("CPU").device.memory_bytes, max(sizes)
    if room is not None and ranks * largest > room:
        raise UserError(
            f"--sizes: {format_bytes(largest)} on each of {ranks} ranks are more than this machine's "
            f"{format_bytes(room)}"
        )


def _network(args: BenchOptions) -> Network | None:
    if args.cluster is None:
        return None
    from shardwise.schedule.network import Network

    return Network.of(Cluster.parse(args.cluster), args.ranks, repeated=True)


def cores() -> set[int]:
    """The cores that this process may use."""
    return os.sched_getaffinity(0)


def measure(
    args: Any, algorithms: list[Algorithm], sizes: list[int], limit: float, settled: float = 0.0
) -> tuple[dict[str, Any], BaseException | None]:
    """(what the ranks wrote, how it ended if not well). limit: seconds after which nothing new is started; settled:
    share by which the two quickest rounds of a call may differ to end its rounds. Raises where there is nothing."""
    from shardwise.runtime.measure.job import measured

    def job(out: str) -> dict[str, Any]:
        return {
            "algorithms": [(algorithm.collective, algorithm.name) for algorithm in algorithms],
            "sizes": sizes,
            "transports": ["shared", "sends"] if args.transport == "both" else [args.transport],
            "rounds": args.rounds,
            "limit": limit,
            "settled": settled,
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
