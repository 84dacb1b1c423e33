"""Output of `plan` beside its tables: days and money of a whole run, and results of `--find`."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from shardwise.planner.price_words import money
from shardwise.report.table import Column, FittedTable
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes, format_count, format_share, format_time


def campaign_lines(campaign: dict[str, Any]) -> Iterator[str]:
    """A whole run's days and money, and what failures leave of the time."""
    if run := campaign.get("run"):
        yield "\n" + _run(run)
    if share := campaign.get("goodput"):
        yield (
            f"\nfailures: a checkpoint every {format_time(share['interval_seconds'])} (Young 1974, Daly 2006) leaves "
            f"{format_share(share['share'])} of the time for progress"
        )
        if run and share["share"]:
            energy = f" and {_energy(run['energy_kwh_at_most'] / share['share'])}" if run["energy_kwh_at_most"] else ""
            yield f"with failures the run takes {format_time(run['seconds'] / share['share'])}{energy}"


def _run(run: dict[str, Any]) -> str:
    cost = "" if run["cost"] is None else f", {money(run['cost'])} USD"
    took, kwh = format_time(run["seconds"]), run["energy_kwh_at_most"]
    host = f", {run['host_watts']:g} W of a host each" if run["host_watts"] else ""
    energy = f"no energy, since the power of {run['device']} is not known"
    if kwh:
        energy = f"{_energy(kwh)} (boards at full power{host}, PUE {run['pue']:g})"
    return f"a whole run: {run['steps']:,} steps, {took}, {run['device_hours']:,.0f} device-hours{cost}, {energy}"


def _energy(kwh: float) -> str:
    return f"at most {kwh / 1000:,.0f} MWh" if kwh >= 10_000 else f"at most {kwh:,.1f} kWh"


def answer_lines(find: str, answer: dict[str, Any]) -> Iterator[Renderable]:
    if find == "cluster":
        yield f"cheapest: {answer['cluster']} with {answer['layout']}"
        yield _run(answer)
        yield from _refusal(answer)
    elif find == "model":
        yield f"largest: {answer['model']} fits {answer['cluster']}"
    elif find == "batch":
        yield from _batch(answer)
    elif find == "sequence":
        yield f"longest: {answer['seq']:,} tokens fit {answer['cluster']}, with {answer['layout']}"
        yield f"{format_bytes(answer['bytes'])} on the fullest device"
        yield from _refusal(answer)
    else:
        yield _curve(answer["sizes"])
        yield (
            f"\nefficiency: tokens/s per device, of the {format_count(answer['ideal_tokens_per_second_per_device'])} "
            f"of the fastest layout on any of these clusters if memory were no limit ({answer['ideal_on']}): so never "
            "above 100%; compute, communication that is not hidden, and the pipeline's bubble are shares of the step"
        )
        refused = Counter(size["not_runnable"] for size in answer["sizes"] if size["not_runnable"])
        yield from (f"{layouts} of these: {reason}" for reason, layouts in refused.items())


def _refusal(answer: dict[str, Any], key: str = "not_runnable") -> Iterator[str]:
    if answer[key]:
        yield answer[key]


def _batch(answer: dict[str, Any]) -> Iterator[str]:
    tokens = format_count(answer["batch"] * answer["seq"])
    yield (
        f"largest batch without accumulating gradients: {answer['batch']:,} sequences ({tokens} tokens) fit "
        f"{answer['cluster']}, with {answer['layout']}"
    )
    yield f"{format_bytes(answer['bytes'])} on the fullest device"
    yield from _refusal(answer)
    of = f"of a step of {answer['of_batch']:,} sequences"
    if answer["micro"] is None:
        yield f"largest micro-batch {of}: none fits"
    else:
        yield f"largest micro-batch {of}: {answer['micro']:,}, with {answer['micro_layout']}"
        yield f"{format_bytes(answer['micro_bytes'])} on the fullest device"
        yield from _refusal(answer, "micro_not_runnable")


def _curve(sizes: list[dict[str, Any]]) -> FittedTable:
    columns = (
        Column("cluster", left=True), Column("layout", left=True, wraps=True), Column("step", "seconds"),
        Column("tokens/s", "count", drop=5), *(Column(name, "share", drop=drop) for drop, name in enumerate(_SHOWN, 1)),
        Column("efficiency", "share"),
    )  # fmt: skip
    table = FittedTable(columns, title="the same batch on more nodes")
    for size in sizes:
        if size["layout"] is None:
            table.add_row(size["cluster"], "nothing fits")
            continue
        parts = (size[name] / size["seconds"] for name in _SHOWN)
        times = size["seconds"], size["tokens_per_second"], *parts, size["efficiency"]
        table.add_row(size["cluster"], size["layout"], *times)
    return table


_SHOWN = ("compute", "communication", "bubble")
"""Groups of a step's parts in the scaling table; what is left of the step is waiting for launches."""
