"""The page of published deployments: their tokens per second beside the winner of `plan --serve`; and what servers
logged of their memory and took for requests, beside the predictions.

python docs/published_deployments.py   writes docs/published_deployments.md: about a minute
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.model.caches import layer_caches
from shardwise.model.catalog import resolve
from shardwise.model.formats import weight_format
from shardwise.planner.disaggregated import Disaggregated, best_apart, instances
from shardwise.planner.serving import Deployment, ServingPlan, plan_serving
from shardwise.planner.strategies import serving_engine
from shardwise.predict.memory.serving import ServingSetup, stage_bytes
from shardwise.predict.time.constants import constants
from shardwise.predict.time.serving import ServedModel, ServingLayout
from shardwise.predict.time.step import Pricing
from shardwise.report.units import format_bytes, format_count, format_time

FOLDER = Path(__file__).parent
NEAR = 1.10
"""Ratio of tokens per second up to which two deployments are as fast."""
ALL = 1_000_000
GIB = 1 << 30
UNEXPLAINED = "No reason found yet."
LOADED_WITHIN, SERVED_WITHIN = 0.01, 0.2
"""Errors of weights, and of times, up to which a row needs no reason."""

HEAD = """\
# Published deployments

Deployments that makers of engines and models recommend, beside the winner of `plan --serve` for the same model,
devices, clients and type of weights. `python docs/published_deployments.py` makes this page from
`docs/published_deployments.json`. {near} of {count} are the winner or within {limit:.0%} of its tokens per second.

*Speed*: tokens per second, mean time to the first token and per token after it, and memory of a device. *Ratio*: the
winner's tokens per second over those of the published deployment. Where prefill and decoding have devices of their own,
the winner is the best such pair.

"""
HEADINGS = "published by", "cluster; prompt, answer, clients", "published", "speed", "winner", "ratio"
SOURCES = """
## Sources and assumptions
*Load*: prompts, answers and clients are assumed. In brackets is the profile whose speed is used.

"""

LOADS_HEAD = """\

## Weights and caches of servers
GiB of weights per device, and bytes of cache per token and device (what the server set aside over the tokens that it
says fit): logged, predicted and the error. {near} of {count} weights are within {limit:.0%}.

| model | software, devices | layout | weights | cache per token |
|---|---|---|---|---|
"""
SPEEDS_HEAD = """\

## Times of servers
Seconds until a server has answered requests that all arrive at once, without prefix caching: measured, predicted and
the error. {near} of {count} are within {limit:.0%}; the mean error is {mean:.0%}. Answers have {shortest} to {longest}
tokens.

| model | cluster, layout | {loads} |
|---|---|{rule}
"""


@dataclass(frozen=True)
class Compared:
    """A published deployment and the winner."""

    row: dict[str, Any]
    published: Deployment | Disaggregated | None
    winner: Deployment | Disaggregated
    usable: float

    @property
    def ratio(self) -> float:
        """Infinite where the published one is not among the candidates."""
        return self.winner.tokens_per_second / self.published.tokens_per_second if self.published else float("inf")


def main() -> None:
    data = json.loads((FOLDER / "published_deployments.json").read_text(encoding="utf-8"))
    found = [_compared(row) for row in data["deployments"]]
    text = HEAD.format(near=sum(one.ratio <= NEAR for one in found), count=len(found), limit=NEAR - 1)
    text += f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}\n" + _rows(_cells(one) for one in found)
    text += f"\n## Ratios above {NEAR:.2f}\n"
    text += "".join(f"- {_name(one.row)}: {one.row.get('why', UNEXPLAINED)}\n" for one in found if one.ratio > NEAR)
    text += SOURCES + sources(data["deployments"])
    text += _loads(data["loads"]) + _speeds(data["speeds"])
    (FOLDER / "published_deployments.md").write_text(text, encoding="utf-8")


def sources(rows: list[dict[str, Any]]) -> str:
    """Each source, with what was assumed for its row."""
    lines = []
    for row in rows:
        assumed = f" {row['assumed']}." if "assumed" in row else ""
        lines.append(f"- {row['id']} ({row['engine']}): {row['source']}.{assumed}\n")
    return "".join(lines)


def _rows(rows: Iterable[list[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _loads(rows: list[dict[str, Any]]) -> str:
    errors = [(row, loaded(row)[1]) for row in rows if row["gib"]]
    near = sum(abs(error) <= LOADED_WITHIN for _, error in errors)
    text = LOADS_HEAD.format(near=near, count=len(errors), limit=LOADED_WITHIN) + _rows(map(load_cells, rows))
    return text + _reasons((row, f"{row['model']}, {row['layout']}, {row['gib']:.2f} GiB") for row, error in errors
                           if abs(error) > LOADED_WITHIN) + _sources(rows)  # fmt: skip


def _speeds(rows: list[dict[str, Any]]) -> str:
    errors = [served(row)[1] for row in rows]
    known = [abs(error) for error in errors if error is not None]
    near = sum(error <= SERVED_WITHIN for error in known)
    lengths, loads = [row["output"] for row in rows], list(dict.fromkeys(map(_load, rows)))
    head = SPEEDS_HEAD.format(
        near=near, count=len(rows), limit=SERVED_WITHIN, mean=sum(known) / len(known), shortest=min(lengths),
        longest=max(lengths), loads=" | ".join(loads), rule="---|" * len(loads),
    )  # fmt: skip
    far = (
        (row, f"{row['model'].partition('/')[2]}, {row['cluster']}")
        for row, error in zip(rows, errors, strict=True)
        if error is None or abs(error) > SERVED_WITHIN
    )
    return head + _rows(speed_lines(rows)) + _reasons(far) + _sources(rows)


def _reasons(rows: Iterable[tuple[dict[str, Any], str]]) -> str:
    """A paragraph for each reason, with the rows that it explains."""
    named: dict[str, list[str]] = {}
    for row, name in rows:
        named.setdefault(row.get("why", UNEXPLAINED), []).append(name)
    reasons = (f"- {why.strip('.')}: {'; '.join(dict.fromkeys(names))}\n" for why, names in named.items())
    return f"\nLarger errors:\n{''.join(reasons)}"


def _sources(rows: list[dict[str, Any]]) -> str:
    return "\nSources:\n" + "".join(f"- {source}\n" for source in dict.fromkeys(row["source"] for row in rows))


def loaded(row: dict[str, Any]) -> tuple[float, float]:
    """(GiB of weights on the fullest device, error against the row's); error 0 where the row has none."""
    setup = ServingSetup(1, 1, weights=row.get("weights", "bfloat16"))
    stages = stage_bytes(resolve(row["model"], stored=True), Layout.parse(row["layout"]), setup)
    gib = max(stage.weights for stage in stages) / GIB
    return gib, gib / row["gib"] - 1 if row["gib"] else 0.0


def cached(row: dict[str, Any]) -> tuple[float, float]:
    """(bytes of cache per token and device as published, as predicted)."""
    width, tp = weight_format(row.get("cache", "bfloat16")).each, Layout.parse(row["layout"]).tp
    caches = layer_caches(resolve(row["model"], stored=True))
    kept = width * sum(one.numbers_of(row["length"], tp, width) for one in caches)
    return row["cache_gib"] * GIB / row["tokens"], kept / row["length"]


def load_cells(row: dict[str, Any]) -> list[str]:
    gib, error = loaded(row)
    published, predicted = cached(row) if "tokens" in row else (0.0, 0.0)
    return [
        row["model"], f"{row['engine']}, {row['devices']}", f"`{row['layout']}`",
        f"{row['gib']:.2f}, {gib:.2f} ({error:+.2%})" if row["gib"] else "-",
        f"{published:,.0f}, {predicted:,.0f} ({predicted / published - 1:+.2%})" if published else "-",
    ]  # fmt: skip


def served(row: dict[str, Any]) -> tuple[float, float | None]:
    """(seconds, error against the row's); None where the requests do not fit."""
    cluster = Cluster.parse(row["cluster"])
    split = ServingLayout(row["weights"], tp=Layout.parse(row["layout"]).tp)
    work = row["prompt"], row["output"], row["requests"]
    pricing = Pricing(cluster, constants(cluster.device))
    try:
        model, engine = resolve(row["model"], stored=True), serving_engine(row["engine"])
        seconds = float(ServedModel(model, split, engine, pricing).throughput(*work).seconds)
    except UserError:
        return float("inf"), None
    return seconds, seconds / row["seconds"] - 1


def speed_lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each server, with a cell for each load."""
    loads, lines = list(dict.fromkeys(map(_load, rows))), {}
    for row in rows:
        server = row["model"], f"{row['cluster']}, `{row['layout']}`"
        lines.setdefault(server, dict.fromkeys(loads, "-"))[_load(row)] = speed_cell(row)
    return [[*server, *cells.values()] for server, cells in lines.items()]


def speed_cell(row: dict[str, Any]) -> str:
    seconds, error = served(row)
    return f"{row['seconds']:.0f}, " + ("does not fit" if error is None else f"{seconds:.0f} ({error:+.0%})")


def _load(row: dict[str, Any]) -> str:
    return f"{row['requests']} prompts of {row['prompt']:,}"


def _compared(row: dict[str, Any]) -> Compared:
    work = Workload(prompt=row["prompt"], output=row["output"], concurrency=row["concurrency"])
    plan = plan_serving(row["model"], row["cluster"], work, engine=row["engine"], top=ALL)
    same = [one for one in plan.ranked if one.weights == row["weights"]]
    if "layout" in row:
        layout = Layout.parse(row["layout"])
        one = Compared(row, next((one for one in same if one.layout == layout), None), same[0], plan.usable)
    else:
        one = _apart(row, plan, same)
    print(*_cells(one), flush=True)
    return one


def _apart(row: dict[str, Any], plan: ServingPlan, same: list[Deployment]) -> Compared:
    plain = [(one.layout, one.cache_tokens) for one in same if not one.layout.zero and one.layout.cp == 1]
    among = instances(plain)
    asked = [instances([(Layout.parse(row[name]), 0)])[0].layout for name in ("prefill", "decode")]
    theirs = [[one for one in among if one.layout == layout] for layout in asked]
    cache = same[0].cache
    search = plan.model, plan.cluster, plan.workload, serving_engine(plan.engine), row["weights"]
    best = best_apart(*search, among, among, cache)
    assert best
    return Compared(row, best_apart(*search, *theirs, cache) if all(theirs) else None, best, plan.usable)


def _name(row: dict[str, Any]) -> str:
    return f"{row['publisher']}, {row['id']}"


def _cells(one: Compared) -> list[str]:
    row, theirs = one.row, one.published
    memory = f", {format_bytes(theirs.held)}" if isinstance(theirs, Deployment) else ""
    times = f"{format_time(theirs.first_token)}, {format_time(theirs.token)}" if theirs else ""
    work = f"{row['prompt']:,}, {row['output']:,}, {row['concurrency']:,}"
    return [
        _name(row), f"{Cluster.parse(row['cluster'])}; {work}",
        _layout(theirs) if theirs else "not among the candidates",
        f"{format_count(theirs.tokens_per_second)}, {times}{memory}" if theirs else "-",
        f"{_layout(one.winner)}, {format_count(one.winner.tokens_per_second)}", f"{one.ratio:.2f}",
    ]  # fmt: skip


def _layout(one: Deployment | Disaggregated) -> str:
    if isinstance(one, Disaggregated):
        return f"`{one.prefill}` reads, `{one.decode}` decodes"
    return f"`{one.layout}`"


if __name__ == "__main__":
    main()
