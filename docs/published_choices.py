"""The page of published layouts: their price beside the winner of `plan` for the same model, devices and batch.

python docs/published_choices.py   writes docs/published_choices.md: about two minutes on one core
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.model.changes import change
from shardwise.planner.plan import plan
from shardwise.planner.pricing import Priced, price_one
from shardwise.planner.runnable import space_for
from shardwise.predict.arguments import as_cluster, as_config
from shardwise.predict.fixing import fixed_of, text_of
from shardwise.predict.memory.capacity import usable_bytes
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import engine
from shardwise.report.units import format_bytes
from shardwise.validation import scoreboard

PAGE = Path(__file__).with_name("published_choices.md")

NEAR = 1.10
"""Ratio up to which a winner is within the error of the published layout."""

HEAD = """\
# Published choices

Layouts that Meta, NVIDIA, DeepSeek and torchtitan chose, beside the winner of `plan --engine` for the same model,
devices and batch. `python docs/published_choices.py` makes this page from
`src/shardwise/planner/published_choices.json`.

Dense models: {near} of {dense} layouts are within {limit:.0%} of the winner. {fit} of {count} layouts fit by the
predicted memory; all of them ran.

*Ratio*: price of the published layout over the winner's. *Memory*: of the fullest device; **over**: more than training
can use ({usable}). *Measured*: the published step and its precision. Prices are {precisions}.

"""

HEADINGS = (
    "recipe", "cluster; batch x tokens", "published layout", "measured", "price", "memory", "winner, price, memory",
    "ratio",
)  # fmt: skip

LEFT_OUT = """
## Left out
- Nemotron-H and Nemotron 3 (state-space layers), GPT-OSS (attention sinks), Llama 4 (chunked attention with vision) and
  DeepSeek-V4: the catalog does not describe them.
- Megatron-Bridge's LLAMA3_8B in FP8 on 8 H100: it recomputes 5 of 32 layers, which no layout says.
- Layouts of GB200, GB300, B200 and B300 beyond those in the scoreboard: their recipes are in FP8 and NVFP4 alone.

## Sources and assumptions
In brackets is the profile (`--engine`). What [published runs](published_runs.md#sources-and-assumptions) assumes of
the same papers is not repeated.

"""


@dataclass(frozen=True)
class Choice:
    """A published layout and the winner of the search, with their prices."""

    row: dict[str, Any]
    cluster: Cluster
    published: Priced
    winner: Priced
    searched: bool
    """Whether the search has the published layout among its candidates."""

    @property
    def ratio(self) -> float:
        return self.published.seconds / self.winner.seconds

    @property
    def fits(self) -> bool:
        return self.published.held.total <= usable_bytes(self.cluster)

    @property
    def dense(self) -> bool:
        return not as_config(self.row["model"]).experts


def main() -> None:
    choices = [_choice(row) for row in json.loads(scoreboard.PUBLISHED_CHOICES.read_text(encoding="utf-8"))]
    dense = [choice for choice in choices if choice.dense]
    narrow = any(choice.published.layout.precision != "bf16" for choice in choices)
    text = HEAD.format(
        near=sum(choice.ratio <= NEAR for choice in dense), dense=len(dense), limit=NEAR - 1,
        fit=sum(choice.fits for choice in choices), count=len(choices),
        usable=usable(choice.cluster for choice in choices),
        precisions="in the precision of the layout" if narrow else "in bf16, also where the run used FP8",
    )  # fmt: skip
    text += f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}\n"
    text += "".join(f"| {' | '.join(_cells(choice))} |\n" for choice in choices)
    text += f"\n## Reasons for ratios above {NEAR:.2f} and layouts that do not fit\n"
    text += "".join(f"- {_name(choice.row)}: {_reason(choice)}\n" for choice in choices if _questioned(choice))
    text += LEFT_OUT
    text += sources([choice.row for choice in choices])
    PAGE.write_text(text, encoding="utf-8")


def usable(clusters: Iterable[Cluster]) -> str:
    """Bytes of each kind of device that training can use."""
    bytes_of = {cluster.device.name: format_bytes(usable_bytes(cluster)) for cluster in clusters}
    return ", ".join(f"{device}: {text}" for device, text in bytes_of.items())


def sources(rows: Sequence[dict[str, Any]]) -> str:
    """Each file with the recipes of its places, and each assumption with the recipes that have it."""
    files: dict[str, dict[str, list[str]]] = {}
    notes: dict[str, list[str]] = {}
    runs = scoreboard.RUNS.read_text(encoding="utf-8")
    for row in rows:
        file, _, place = row["source"].partition(", ")
        files.setdefault(file, {}).setdefault(f"{place} ({row['engine']})", []).append(row["id"])
        stated = [f"stated: {row['stated']}"] if row.get("stated") else []
        for note in [*stated, *filter(None, (row.get("assumed") or "").split("; "))]:
            if note.split(":")[0] not in runs:
                notes.setdefault(note, []).append(row["id"])
    lines = [
        f"{file}, {'; '.join(f'{place}: {_listed(ids, rows)}' for place, ids in places.items())}"
        for file, places in files.items()
    ]
    lines += [f"{note}: {_listed(ids, rows)}" for note, ids in notes.items()]
    return "".join(f"- {line}.\n" for line in lines)


def _listed(ids: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """Recipes by name, or as all of their publisher."""
    theirs = [row["id"] for row in rows if row["publisher"] == "NVIDIA"]
    return "all of NVIDIA" if list(ids) == theirs else ", ".join(ids)


def _choice(row: dict[str, Any]) -> Choice:
    model, cluster = change(as_config(row["model"]), row.get("changes", "")), as_cluster(row["cluster"])
    workload, layout = Workload(batch=row["batch"], seq=row["seq"]), Layout.parse(row["layout"])
    published = price_one(model, layout, workload, engine(row["engine"]), Pricing(cluster))
    fixed = fixed_of(row.get("search", ""))
    found = plan(model, cluster, workload, engine=row["engine"], fix=fixed, top=1, explain=False)
    try:
        searched = space_for(model, cluster, workload, row["engine"], fixed_of(text_of(layout)))[0].size > 0
    except UserError:
        searched = False
    choice = Choice(row, cluster, published, found.ranked[0], searched)
    print(*_cells(choice), flush=True)
    return choice


def _name(row: dict[str, Any]) -> str:
    return f"{row['publisher']}, {row['id']}"


def _cells(choice: Choice) -> list[str]:
    row = choice.row
    winner = f"`{choice.winner.layout}`, {choice.winner.seconds:.2f} s, {_memory(choice, choice.winner)}"
    return [
        _name(row), f"{choice.cluster}; {row['batch']:,} x {row['seq']:,}", f"`{choice.published.layout}`",
        _measured(choice), f"{choice.published.seconds:.2f} s", _memory(choice, choice.published), winner,
        f"{choice.ratio:.2f}",
    ]  # fmt: skip


def _measured(choice: Choice) -> str:
    row = choice.row
    if rate := row.get("tokens_per_s_per_gpu"):
        seconds = row["batch"] * row["seq"] / choice.cluster.devices / rate
    elif "iter_time_s" in row:
        seconds = row["iter_time_s"]
    else:
        return f"- ({row['precision']})"
    return f"{seconds:.2f} s ({row.get('measured_in', row['precision'])})"


def _memory(choice: Choice, one: Priced) -> str:
    usable = usable_bytes(choice.cluster)
    over = " **over**" if one.held.total > usable else ""
    return f"{format_bytes(one.held.total)}{over}"


def _questioned(choice: Choice) -> bool:
    return choice.ratio > NEAR or not choice.fits or not choice.searched


def _reason(choice: Choice) -> str:
    facts = [f"ratio {choice.ratio:.2f}"] if choice.ratio > NEAR else []
    facts += [] if choice.fits else ["over by the predicted memory"]
    facts += [] if choice.searched else ["not among the candidates of the search"]
    return f"{', '.join(facts)}. {choice.row['why'] or 'No reason found yet.'}"


if __name__ == "__main__":
    main()
