"""The page of published deployments: their tokens per second beside the winner of `plan --serve`.

python docs/published_deployments.py   writes docs/published_deployments.md: about a minute
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.cluster import Cluster
from shardwise.layout import Layout, Workload
from shardwise.planner.disaggregated import Disaggregated, best_apart, instances
from shardwise.planner.serving import Deployment, ServingPlan, plan_serving
from shardwise.planner.strategies import serving_engine
from shardwise.report.units import format_bytes, format_count, format_time

FOLDER = Path(__file__).parent
NEAR = 1.10
"""Ratio of tokens per second up to which two deployments are as fast."""
ALL = 1_000_000

HEAD = """\
# Published deployments

Deployments that the makers of engines and models recommend, beside the one that `plan --serve` ranks first for the same
model, devices, clients and type of weights. `python docs/published_deployments.py` makes this page from
`docs/published_deployments.json`. {near} of {count} are the winner or within {limit:.0%} of its tokens per second.

*Ratio*: the winner's tokens per second over those of the published deployment. Where prefill and decoding have devices
of their own, the winner is the best such pair.

"""
HEADINGS = (
    "published by", "cluster", "prompt, answer, clients", "published", "tokens/s", "first token, each", "memory",
    "winner", "tokens/s", "ratio",
)  # fmt: skip


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
    rows = json.loads((FOLDER / "published_deployments.json").read_text(encoding="utf-8"))
    found = [_compared(row) for row in rows]
    text = HEAD.format(near=sum(one.ratio <= NEAR for one in found), count=len(found), limit=NEAR - 1)
    text += f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}\n"
    text += "".join(f"| {' | '.join(_cells(one))} |\n" for one in found)
    text += f"\n## Ratios above {NEAR:.2f}\n"
    text += "".join(
        f"- {_name(one.row)}: {one.row.get('why', 'No reason found yet.')}\n" for one in found if one.ratio > NEAR
    )
    text += "\n## Sources and assumptions\n"
    for one in found:
        assumed = f" Assumed: {one.row['assumed']}." if "assumed" in one.row else ""
        text += f"- {_name(one.row)}: {one.row['source']}. Speed of {one.row['engine']}.{assumed}\n"
    (FOLDER / "published_deployments.md").write_text(text, encoding="utf-8")


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
    search = plan.model, plan.cluster, plan.workload, serving_engine(plan.engine), row["weights"]
    best = best_apart(*search, among, among)
    assert best
    return Compared(row, best_apart(*search, *theirs) if all(theirs) else None, best, plan.usable)


def _name(row: dict[str, Any]) -> str:
    return f"{row['publisher']}, {row['id']}"


def _cells(one: Compared) -> list[str]:
    row, theirs = one.row, one.published
    memory = format_bytes(theirs.held) if isinstance(theirs, Deployment) else "-"
    return [
        _name(row), str(Cluster.parse(row["cluster"])), f"{row['prompt']:,}, {row['output']:,}, {row['concurrency']:,}",
        _layout(theirs) if theirs else "not among the candidates",
        format_count(theirs.tokens_per_second) if theirs else "-",
        f"{format_time(theirs.first_token)}, {format_time(theirs.token)}" if theirs else "-",
        memory, _layout(one.winner), format_count(one.winner.tokens_per_second), f"{one.ratio:.2f}",
    ]  # fmt: skip


def _layout(one: Deployment | Disaggregated) -> str:
    if isinstance(one, Disaggregated):
        return f"`{one.prefill}` reads, `{one.decode}` decodes"
    return f"`{one.layout}`"


if __name__ == "__main__":
    main()
