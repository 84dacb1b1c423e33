"""Algorithms of collectives: list and draw them round by round, prove them right, price them, measure them.

COLLECTIVE is a name such as all-reduce, ALGORITHM one such as ring; `list` shows all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli import collective_bench
from shardwise.cli.clusters import NetworkOptions, cluster_of
from shardwise.cli.declare import CommandOptions, arg, word
from shardwise.cli.output import print_json, print_result, progress
from shardwise.cli.quantities import bytes_of, numbers
from shardwise.cluster import Cluster
from shardwise.codec import keyed
from shardwise.errors import UserError, os_errors
from shardwise.records import dataclass
from shardwise.report.table import plain_table
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes, format_share, format_things, format_time

if TYPE_CHECKING:
    from shardwise.schedule import Algorithm
    from shardwise.schedule.choose import Choice, Pricer

MOST_SHOWN = 1024
"""Ranks, and segments, that are shown round by round."""
MOST_ELEMENTS = 10**15
MOST_VERIFIED = 512
"""Ranks: a ring of them takes 20 s and 700 MB, one of twice as many two minutes and 3 GB."""
MOST_PRICED = 65_536
MOST_EXCHANGED = {"all-to-all": 24_576, "reduce-scatter": 24_576}
"""Ranks that are priced in about a minute; a pairwise exchange of p ranks has p - 1 different rounds."""


@dataclass
class NamedOptions(CommandOptions):
    """An algorithm."""

    collective: str = word("", "COLLECTIVE")
    algorithm: str = word("", "ALGORITHM")


@dataclass
class ChosenOptions(CommandOptions):
    """Algorithms."""

    collective: str | None = word("", "COLLECTIVE")
    algorithm: str | None = word("", "ALGORITHM")
    all: bool = arg("every algorithm", excludes="collective")

    def chosen(self) -> list[Algorithm]:
        """The algorithms. Raises `UserError`."""
        from shardwise.schedule import algorithms, find

        if not self.all and not self.collective:
            raise UserError("give COLLECTIVE [ALGORITHM], or --all")
        return [find(self.collective or "", self.algorithm)] if self.algorithm else algorithms(self.collective)


@dataclass
class ShowCollective(NamedOptions):
    """Every round of an algorithm: who sends what to whom, and what each rank then holds."""

    ranks: int = arg("how many take part", "P")
    elements: int | None = arg("elements of the buffer; left out, one a chunk", "N", least=0, most=MOST_ELEMENTS)
    root: int | None = arg("the rank with the data, or the result (broadcast, scatter, gather, reduce)", "N")
    segments: int | None = arg("pieces of a pipeline (chain, double-tree)", "N")
    node: int | None = arg("ranks of a node (hierarchical)", "N")
    out: Path | None = arg("write the rounds as JSON for a page", "FILE")

    def run(self) -> int:
        from shardwise.schedule import build
        from shardwise.schedule.show import describe, frames

        for name in ("ranks", "segments"):
            if (getattr(self, name) or 0) > MOST_SHOWN:
                raise UserError(f"--{name} {getattr(self, name)}: up to {MOST_SHOWN:,} can be shown round by round")
        options = {name: value for name in ("root", "segments", "node") if (value := getattr(self, name)) is not None}
        schedule = build(self.collective, self.algorithm, self.ranks, **options)
        elements = schedule.chunks if self.elements is None else self.elements
        if self.out:
            with os_errors(f"write frames to {self.out}"):
                self.out.write_text(json.dumps(frames(schedule, elements)) + "\n")
        if self.json:
            print_json(frames(schedule, elements))
        else:
            for line in describe(schedule, elements):
                print(line)
        return 0


@dataclass
class VerifyCollective(ChosenOptions):
    """Prove algorithms right for numbers of ranks; the exit code is 1 where one is wrong."""

    ranks: str = arg("numbers of ranks: 8, 1-64 or 2,4,8", "P,...", "1-16")

    def run(self) -> int:
        ranks = numbers("--ranks", self.ranks)
        if ranks[-1] > MOST_VERIFIED:
            raise UserError(f"--ranks {self.ranks}: algorithms are verified on up to {MOST_VERIFIED} ranks")
        chosen = self.chosen()
        results: list[dict[str, Any]] = []
        for algorithm in chosen:
            results.append(_verified(algorithm, [p for p in ranks if not algorithm.most or p <= algorithm.most]))
            if not self.json:
                _print_verified(results[-1])
        right = sum(not result["findings"] for result in results)
        print_result(self, results, [f"{right} of {len(results)} algorithms are right on {self.ranks} ranks"])
        return 0 if right == len(results) else 1


@dataclass
class PriceCollective(NetworkOptions):
    """Every algorithm of a collective on a cluster, cheapest first, and where that changes."""

    collective: str = word("", "COLLECTIVE")
    bytes: int = arg("of the full tensor: 4096, 64MB, 1GiB", "SIZE", read=bytes_of)
    ranks: int = arg("how many take part", "P", positive=True)
    nics: int | None = arg("NICs of a node; left out, one for each device", "N")

    def run(self) -> int:
        from shardwise.predict.time.pricing import collective_seconds
        from shardwise.schedule.algorithms import collective_name
        from shardwise.schedule.choose import pricer

        nbytes, cluster = self.bytes, cluster_of(self)
        name = collective_name(self.collective)
        if self.ranks > (most := MOST_EXCHANGED.get(name, MOST_PRICED)):
            raise UserError(f"--ranks {self.ranks}: {name} is priced on up to {most:,} ranks")
        prices = pricer(name, self.ranks, cluster, self.nics)
        progress(f"{name} on {format_things(self.ranks, 'rank')}")
        ranked = prices.ranked(nbytes)
        changes = prices.crossovers(1 << 8, 1 << 34)
        predicted = None if self.nics else collective_seconds(name, nbytes, self.ranks, cluster) or None
        progress()
        data = {
            "collective": prices.collective,
            "bytes": nbytes,
            "ranks": self.ranks,
            "cluster": str(cluster),
            "nics": prices.network.nics,
            "predicted": predicted,
            "algorithms": [_priced(choice) for choice in ranked],
            "crossovers": [{"bytes": c.nbytes, "algorithm": c.algorithm} for c in changes],
            "notes": list(prices.network.notes),
        }
        names = ", ".join(f"{c.algorithm} from {format_bytes(c.nbytes)}" for c in changes)
        closing = ["needed: the part of a term that no algorithm can do without", f"\ncheapest: {names}"]
        closing += [f"note: {note}" for note in prices.network.notes]
        table = _cost_table(ranked, prices, nbytes, cluster)
        return print_result(self, data, chain(_told(predicted, name, nbytes, cluster), table, closing))


@dataclass
class BenchCollective(ChosenOptions, collective_bench.BenchOptions):
    """Measure algorithms on processes of this host, beside the backend's own."""

    def run(self) -> int:
        chosen = [result for result in self.chosen() if not result.most or self.ranks <= result.most]
        return collective_bench.run(self, chosen)


def _verified(algorithm: Algorithm, ranks: list[int]) -> dict[str, Any]:
    """The findings of one algorithm over numbers of ranks; on a terminal, with a line that says how far it is."""
    from shardwise.schedule import build
    from shardwise.schedule.verify import verify

    name = f"{algorithm.collective} {algorithm.name}"
    findings = []
    for p in ranks:
        progress(f"{name}: {p} ranks")
        findings += [
            {"ranks": p, "rank": finding.rank, "chunk": finding.chunk, "round": finding.round, "text": str(finding)}
            for finding in verify(build(algorithm.collective, algorithm.name, p))
        ]
    progress()
    return {"collective": algorithm.collective, "algorithm": algorithm.name, "ranks": ranks, "findings": findings}


def _print_verified(result: dict[str, Any]) -> None:
    name, checked = f"{result['collective']} {result['algorithm']}", len(result["ranks"])
    if not result["findings"]:
        print(f"✓ {name}: right on {format_things(checked, 'number')} of ranks", flush=True)
    for finding in result["findings"]:
        print(f"✗ {name} on {format_things(finding['ranks'], 'rank')}: {finding['text']}", flush=True)


def _told(predicted: dict[str, float] | None, name: str, nbytes: int, cluster: Cluster) -> Iterator[str]:
    if not predicted:
        return
    library = "NCCL" if cluster.device.kind == "cuda" else "the backend"
    yield (
        f"{name} of {format_bytes(nbytes)}, as plan, generate and claims price it: "
        f"{format_time(predicted['library_seconds'])} by {library}, its latency and protocols included"
    )
    if read := predicted.get("reading_peers_seconds"):
        yield f"  {format_time(read)} by a kernel that reads peers' memory (gpt-fast, vLLM, TensorRT-LLM)"
    yield "below: algorithms on the wire alone\n"


def _priced(choice: Choice) -> dict[str, Any]:
    terms = "alpha_s=alpha beta_s=beta gamma_s=gamma"
    return {
        "algorithm": choice.name,
        "options": dict(choice.options),
        **keyed(choice.price, f"seconds {terms} steps bytes_sent"),
        "lower_bounds": keyed(choice.bounds, terms),
        "fractions": choice.fractions,
    }


def _cost_table(ranked: list[Choice], prices: Pricer, nbytes: int, cluster: Cluster) -> Iterator[Renderable]:
    ranks = format_things(prices.network.ranks, "rank")
    title = f"{prices.collective} of {format_bytes(nbytes)} on {ranks} of {cluster}"
    terms = ("α", "β", "γ")  # noqa: RUF001
    needed = [f"{term} needed" for term in terms]
    table = plain_table(("", "algorithm"), ("time", *terms, *needed, "steps", "sent"), title, drop=needed[::-1])
    for place, choice in enumerate(ranked):
        price = choice.price
        options = "".join(f" {name}={value}" for name, value in choice.options.items())
        shares = ("-" if part is None else format_share(part) for part in choice.fractions.values())
        times = map(format_time, (price.seconds, price.alpha, price.beta, price.gamma))
        mark = "✓" if place == 0 else ""
        table.add_row(mark, choice.name + options, *times, *shares, str(price.steps), format_bytes(price.bytes_sent))
    yield table


ACTIONS = {"show": ShowCollective, "verify": VerifyCollective, "cost": PriceCollective, "bench": BenchCollective}
