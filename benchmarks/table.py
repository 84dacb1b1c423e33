"""The Markdown tables that the README and the documentation quote, from the files in benchmarks/results/.

    python benchmarks/table.py [NAME ...]         prints all tables, or those named
    python benchmarks/table.py --check FILE ...   exit 1 unless the tables in the Markdown files are these
    python benchmarks/table.py --write FILE ...   puts these tables into the Markdown files

A table stands between `<!-- bench:NAME -->` and `<!-- /bench -->`. Where several result files have the same table, the
latest by the date written in them counts. Names: single; speed-N, time-N, cpu-N, memory-N for N ranks;
scaling-PRECISION; collectives-N; pipelines; stragglers-CONDITION.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardwise.errors import UserError

RESULTS = Path(__file__).parent / "results"
BLOCK = re.compile(r"(<!-- bench:([\w.-]+) -->\n)(.*?)(<!-- /bench -->)", re.DOTALL)
Row = dict[str, Any]


# -- from result files to tables


def tables(folder: Path) -> dict[str, str]:
    """Name -> Markdown of every table that the result files allow. Raises `UserError` where there are none."""
    found: dict[str, str] = {}
    results = []
    for path in sorted(folder.glob("*.json")):
        try:
            results.append(json.loads(path.read_text()))
        except json.JSONDecodeError as error:
            raise UserError(f"{path.name} is not JSON ({error}); measure again or remove it") from error
    for result in sorted((r for r in results if isinstance(r, dict)), key=lambda r: str(r.get("date", ""))):
        makers = {
            "train_step": train_step_tables, "scaling": scaling_tables, "collectives": collectives_tables,
            "pipelines": pipelines_tables, "stragglers": stragglers_tables, "offload_step": offload_tables,
        }  # fmt: skip
        maker = makers.get(result.get("benchmark", ""))
        if maker is not None:
            found |= {name: f"{text}\n{source(result)}\n" for name, text in maker(result)}
    if not found:
        raise UserError(f"no results in {folder.name}/; `make bench` and `make bench-scaling` measure them")
    return found


def source(result: Row) -> str:
    """The line below a table: what was run, when, and on what."""
    machine = result["machine"]
    rounds = f"{result['rounds']} rounds" if "rounds" in result else f"{result['steps']} steps"
    model = ""
    if "model" in result:
        model = f"{result['parameters'] / 1e6:.1f} million parameters in {result['model']['layers']} layers, "
    return (
        f"`{result['command']}`, {result['date'][:10]}: {machine['cores']} cores ({machine['cpu']}), torch "
        f"{machine['torch']}, one thread a rank, {model}{rounds}."
    )


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table whose first column is text and whose others are figures."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def train_step_tables(result: Row) -> Iterator[tuple[str, str]]:
    settings = result["settings"]
    for ranks in dict.fromkeys(s["ranks"] for s in settings):
        mine = [s for s in settings if s["ranks"] == ranks]
        if ranks == 1:
            yield "single", single_table(mine)
            continue
        yield f"speed-{ranks}", pair_table(mine, speed)
        yield f"time-{ranks}", pair_table(mine, lambda row: two(row, "s", 1e3, " ms"))
        yield f"cpu-{ranks}", pair_table(mine, lambda row: two(row, "cpu_s", 1e3, " ms"))
        yield f"memory-{ranks}", pair_table(mine, lambda row: two(row, "peak_bytes", 1e-6, " MB"))


def offload_tables(result: Row) -> Iterator[tuple[str, str]]:
    yield "offload-speed", pair_table(result["settings"], speed)
    yield "offload-time", pair_table(result["settings"], lambda row: two(row, "s", 1e3, " ms"))
    yield "offload-memory", pair_table(result["settings"], lambda row: two(row, "peak_bytes", 1e-6, " MB"))


def speed(row: Row) -> str:
    text = f"{row['speed']:.2f} ({row['speed_min']:.2f}-{row['speed_max']:.2f})"
    return text if row["same_loss"] else f"{text}, losses differ"


def two(row: Row, key: str, scale: float, unit: str) -> str:
    """shardwise's figure and the peer's."""
    values = (row[f"ours_{key}"], row[f"peer_{key}"])
    return "/".join("?" if value is None else f"{value * scale:.0f}" for value in values) + unit


def pair_table(settings: list[Row], cell: Callable[[Row], str]) -> str:
    """A row for each pair, a column for each setting. Below: micro-batches, and why a pair could not be measured."""
    columns = [f"{s['tokens']:,} tokens, {s['precision']}" for s in settings]
    pairs = list(dict.fromkeys((row["ours"], row["peer"]) for s in settings for row in s["rows"]))
    lines, reasons = [], {}
    for ours, peer in pairs:
        line = [f"`{ours}` / {peer}"]
        for setting in settings:
            row = next((r for r in setting["rows"] if (r["ours"], r["peer"]) == (ours, peer)), None)
            if row is not None and "reason" in row:
                reasons[peer] = row["reason"]
            line.append("-" if row is None or "reason" in row else cell(row))
        lines.append(line)
    notes = "".join(f"\n{peer} was not measured: {reason}.\n" for peer, reason in reasons.items())
    return markdown(["shardwise / peer", *columns], lines) + micro_batches(settings) + notes


def micro_batches(settings: list[Row]) -> str:
    """The line about those pairs that train a global batch in parts; empty where none does."""
    shapes = {s["tokens"]: r["shape"] for s in settings for r in s["rows"] if "micro-batches" in r.get("shape", "")}
    if not shapes:
        return ""
    parts = "; ".join(f"{tokens:,} tokens are {shape}" for tokens, shape in shapes.items())
    return f"\n`pp`, for both: {parts}.\n"


def single_table(settings: list[Row]) -> str:
    lines = []
    for setting in settings:
        for row in setting["rows"]:
            name = f"{setting['tokens']:,} tokens, {setting['precision']}"
            if "reason" in row:
                lines.append([name, *["-"] * 4])
                continue
            lines.append(
                [name, two(row, "s", 1e3, " ms"), speed(row), two(row, "peak_share", 100, " %"),
                 two(row, "peak_bytes", 1e-6, " MB")]
            )  # fmt: skip
    head = ["shardwise / plain loop", "time", "speed", "share of the matrix-product peak", "peak memory"]
    return markdown(head, lines)


def stragglers_tables(result: Row) -> Iterator[tuple[str, str]]:
    for condition in dict.fromkeys(run["condition"] for run in result["runs"]):
        lines = [
            [
                run["sync"], f"{run['tokens_per_s']:.0f}", f"{run['of_dp']:.2f}", f"{run['predicted_of_dp']:.2f}",
                f"{run['predicted_tokens_per_s'] / run['tokens_per_s'] - 1:+.1%}", f"{max(run['waiting']):.0%}",
                f"{run['validation_loss']:.3f}",
            ]
            for run in result["runs"] if run["condition"] == condition
        ]  # fmt: skip
        head = ["", "tokens/s", "of dp", "predicted of dp", "predicted tokens/s", "most waiting", "validation loss"]
        yield f"stragglers-{condition}", markdown(head, lines)


def scaling_tables(result: Row) -> Iterator[tuple[str, str]]:
    results = result["results"]
    cores = result["machine"]["cores"]
    for precision in dict.fromkeys(r["precision"] for r in results):
        mine = [r for r in results if r["precision"] == precision]
        columns = list(dict.fromkeys((row["ranks"], row["kind"]) for r in mine for row in r["rows"]))
        lines = []
        for each in mine:
            single = each["cases"]["single"]
            rate = single["tokens"] / statistics.median(single["seconds"])
            rows = {(row["ranks"], row["kind"]): row for row in each["rows"]}
            lines.append([f"`{each['strategy']}`", f"{rate:,.0f}", *(share(rows[c]) for c in columns)])
        head = ["tokens/s (share of ideal)", "1 rank", *(f"{ranks} ranks, {kind}" for ranks, kind in columns)]
        note = (
            f"\nIdeal is one rank's tokens/s times the smaller of ranks and cores ({cores}). "
            f"Strong: {result['tokens']:,} tokens a step; weak: {result['tokens']:,} a rank.\n"
        )
        yield f"scaling-{precision}", markdown(head, lines) + note


def collectives_tables(result: Row) -> Iterator[tuple[str, str]]:
    for each in result["results"]:
        names = list(each["rows"][0]["seconds"])
        lines = [
            [size(row["bytes"]), microseconds(row["median_s"]["shared"]),
             *("{:.2f} ({:.2f}-{:.2f})".format(*row["speed"][n]) for n in names if n != "shared")]
            for row in each["rows"]
        ]  # fmt: skip
        head = ["all-reduce", "shared memory", *(f"speed over {n}" for n in names if n != "shared")]
        note = "".join(f"\n{name} was not measured: {why}.\n" for name, why in each["missing"].items())
        yield f"collectives-{each['ranks']}", markdown(head, lines) + note


def pipelines_tables(result: Row) -> Iterator[tuple[str, str]]:
    cells = {(r["ranks"], r["micro"]): {(row["schedule"], row["virtual"]): row for row in r["rows"]}
             for r in result["results"]}  # fmt: skip
    lines = []
    for name, virtual in dict.fromkeys(key for rows in cells.values() for key in rows):
        rows = (mine.get((name, virtual)) for mine in cells.values())
        lines.append([name + (f", v={virtual}" if virtual > 1 else ""), *map(makespans, rows)])
    lines.sort()
    columns = [f"p={ranks}, m={micro}" for ranks, micro in cells]
    hops = ", ".join(microseconds(r["hop_s"]) for r in result["results"])
    ratios = [row["ratio"] for rows in cells.values() for row in rows.values()]
    orders = [r["order"] for r in result["results"]]
    pairs, wrong = sum(order["pairs"] for order in orders), sum(len(order["wrong"]) for order in orders)
    note = (
        f"\nIn the simulations a message takes what one between ranks took: {hops}. Ratios are between "
        f"{min(ratios):.3f} and {max(ratios):.3f}; {pairs - wrong} of {pairs} pairs that differ by more than 5% in the "
        "simulation were measured in that order.\n"
    )
    yield "pipelines", markdown(["measured / simulated", *columns], lines) + note


def makespans(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{row['measured_s'] * 1e3:,.0f}/{row['simulated_s'] * 1e3:,.0f} ms ({row['ratio']:.3f})"


def size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes % (1 << 20) == 0 else f"{nbytes >> 10} KiB"


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs"


def share(row: Row) -> str:
    return f"{row['tokens_per_s']:,.0f} ({row['share']:.0%}; {row['share_min']:.0%} to {row['share_max']:.0%})"


# -- into Markdown files


def rewritten(text: str, found: dict[str, str], name: str) -> str:
    """The Markdown with every marked table as it is now; tables of one run that follow each other have its source below
    the last. Raises `UserError` for a table that no result has."""
    names = [match[2] for match in BLOCK.finditer(text)]
    if not names:
        raise UserError(f"{name} has no table between <!-- bench:NAME --> and <!-- /bench -->")
    if unknown := [table for table in names if table not in found]:
        raise UserError(f"{name}: no results for the table {unknown[0]}; there are {', '.join(found)}")
    following = iter([*(found[table] for table in names[1:]), ""])

    def block(match: re.Match[str]) -> str:
        table, _, source = found[match[2]].rpartition("\n\n")
        shown = f"{table}\n" if next(following).endswith(f"\n\n{source}") else found[match[2]]
        return match[1] + shown + match[4]

    return BLOCK.sub(block, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", nargs="+", type=Path, metavar="FILE")
    what.add_argument("--write", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of result files")
    args = parser.parse_args()
    found = tables(args.results)
    if unknown := [name for name in args.names if name not in found]:
        raise UserError(f"no results for the table {unknown[0]}; there are {', '.join(found)}")
    stale = 0
    for path in args.check or args.write or []:
        if not path.is_file():
            raise UserError(f"{path}: there is no such file")
        text = path.read_text()
        new = rewritten(text, found, path.name)
        if args.write:
            path.write_text(new)
        elif new != text:
            print(f"{path}: tables differ from {args.results.name}/; `python benchmarks/table.py --write {path}`")
            stale = 1
    if not (args.check or args.write):
        names = args.names or list(found)
        print("\n".join(f"<!-- bench:{name} -->\n{found[name]}<!-- /bench -->" for name in names))
    return stale


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
