"""Algorithms of collectives: list and draw them round by round, prove them right, price them, measure them.

COLLECTIVE is a name such as all-reduce, ALGORITHM one such as ring; `list` shows all of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli import collective_bench
from shardwise.cli.actions import actions
from shardwise.cli.clusters import add_cluster, cluster_of
from shardwise.cli.output import print_json, print_result, progress
from shardwise.cli.quantities import bytes_of, numbers
from shardwise.cluster import Cluster
from shardwise.errors import UserError, os_errors
from shardwise.report.table import Column, FittedTable, plain_table
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes, format_share, format_time

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = actions(parser)
    rounds = action("show", "every round of an algorithm: who sends what to whom, and what each rank then holds", _show)
    _add_algorithm(rounds)
    rounds.add_argument("--ranks", type=int, required=True, metavar="P", help="how many take part")
    rounds.add_argument("--elements", type=int, metavar="N", help="elements of the buffer; left out, one a chunk")
    for option, text in (
        ("root", "the rank with the data, or the result (broadcast, scatter, gather, reduce)"),
        ("segments", "pieces of a pipeline (chain, double-tree)"),
        ("node", "ranks of a node (hierarchical)"),
    ):
        rounds.add_argument(f"--{option}", type=int, metavar="N", help=text)
    rounds.add_argument("--out", type=Path, metavar="FILE", help="write the rounds as JSON for a page")
    verify = action(
        "verify", "prove algorithms right for numbers of ranks; the exit code is 1 where one is wrong", _verify
    )
    _add_algorithm(verify, optional=True)
    verify.add_argument("--all", action="store_true", help="every algorithm")
    verify.add_argument("--ranks", default="1-16", metavar="P,...", help="numbers of ranks: 8, 1-64 or 2,4,8")
    cost = action("cost", "every algorithm of a collective on a cluster, cheapest first, and where that changes", _cost)
    cost.add_argument("collective", metavar="COLLECTIVE")
    cost.add_argument("--bytes", required=True, metavar="SIZE", help="of the full tensor: 4096, 64MB, 1GiB")
    cost.add_argument("--ranks", type=int, required=True, metavar="P", help="how many take part")
    add_cluster(cost, required=True, host=False)
    cost.add_argument("--nics", type=int, metavar="N", help="NICs of a node; left out, one for each device")
    bench = action("bench", "measure algorithms on processes of this host, beside the backend's own", _bench)
    _add_algorithm(bench, optional=True)
    collective_bench.add_arguments(bench)


def _add_algorithm(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    parser.add_argument("collective", metavar="COLLECTIVE", nargs="?" if optional else None)
    parser.add_argument("algorithm", metavar="ALGORITHM", nargs="?" if optional else None)


def list_all(args: argparse.Namespace) -> int:
    """Print all collectives and their algorithms."""
    from shardwise.schedule import algorithms

    fields = ("collective", "name", "summary", "natural", "source", "reads", "options")
    data = [{name: getattr(algorithm, name) for name in fields} for algorithm in algorithms()]
    return print_result(args, data, _listed())


def _listed() -> Iterator[Renderable]:
    from shardwise.schedule import algorithms
    from shardwise.schedule.comm import COLLECTIVES

    table = FittedTable(
        [
            Column("algorithm", left=True), Column("made for", left=True, drop=2),
            Column("options", left=True, drop=3), Column("what it does", left=True, wraps=True),
            Column("source", left=True, drop=1, wraps=True),
        ]
    )  # fmt: skip
    for collective, meaning in COLLECTIVES.items():
        table.add_row(collective, "", "", meaning, "")
        for a in algorithms(collective):
            table.add_row(f"  {a.name}", a.natural, ", ".join(a.options), a.summary, a.source)
    yield table


def _show(args: argparse.Namespace) -> int:
    from shardwise.schedule import build
    from shardwise.schedule.show import describe, frames

    for name in ("ranks", "segments"):
        if (getattr(args, name) or 0) > MOST_SHOWN:
            raise UserError(f"--{name} {getattr(args, name)}: up to {MOST_SHOWN:,} can be shown round by round")
    options = {name: value for name in ("root", "segments", "node") if (value := getattr(args, name)) is not None}
    schedule = build(args.collective, args.algorithm, args.ranks, **options)
    elements = schedule.chunks if args.elements is None else args.elements
    if not 0 <= elements <= MOST_ELEMENTS:
        raise UserError(f"--elements must lie between 0 and {MOST_ELEMENTS:,}, not {elements}")
    if args.out:
        with os_errors(f"write frames to {args.out}"):
            args.out.write_text(json.dumps(frames(schedule, elements)) + "\n")
    if args.json:
        print_json(frames(schedule, elements))
    else:
        for line in describe(schedule, elements):
            print(line)
    return 0


def _verify(args: argparse.Namespace) -> int:
    ranks = numbers("--ranks", args.ranks)
    if ranks[-1] > MOST_VERIFIED:
        raise UserError(f"--ranks {args.ranks}: algorithms are verified on up to {MOST_VERIFIED} ranks")
    chosen = _chosen(args)
    results: list[dict[str, Any]] = []
    for algorithm in chosen:
        results.append(_verified(algorithm, [p for p in ranks if not algorithm.most or p <= algorithm.most]))
        if not args.json:
            _print_verified(results[-1])
    wrong = [result for result in results if result["findings"]]
    if args.json:
        print_json(results)
    else:
        print(f"{len(results) - len(wrong)} of {len(results)} algorithms are right on {args.ranks} ranks")
    return 1 if wrong else 0


def _chosen(args: argparse.Namespace) -> list[Algorithm]:
    from shardwise.schedule import algorithms, find

    if args.all and args.collective:
        raise UserError(f"{args.action} takes either --all or names")
    if not args.all and not args.collective:
        raise UserError(f"{args.action} needs COLLECTIVE [ALGORITHM], or --all")
    return [find(args.collective, args.algorithm)] if args.algorithm else algorithms(args.collective)


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
        print(f"✓ {name}: right on {checked} number{'s' if checked != 1 else ''} of ranks", flush=True)
    for finding in result["findings"]:
        print(f"✗ {name} on {_ranks(finding['ranks'])}: {finding['text']}", flush=True)


def _cost(args: argparse.Namespace) -> int:
    from shardwise.schedule.algorithms import collective_name
    from shardwise.schedule.choose import pricer

    nbytes, cluster = bytes_of("--bytes", args.bytes), cluster_of(args)
    if args.ranks < 1:
        raise UserError(f"--ranks must be a positive integer, not {args.ranks}")
    name = collective_name(args.collective)
    if args.ranks > (most := MOST_EXCHANGED.get(name, MOST_PRICED)):
        raise UserError(f"--ranks {args.ranks}: {name} is priced on up to {most:,} ranks")
    prices = pricer(name, args.ranks, cluster, args.nics)
    progress(f"{name} on {_ranks(args.ranks)}")
    ranked = prices.ranked(nbytes)
    changes = prices.crossovers(1 << 8, 1 << 34)
    predicted = None if args.nics else _predicted(name, nbytes, args.ranks, cluster)
    progress()
    data = {
        "collective": prices.collective,
        "bytes": nbytes,
        "ranks": args.ranks,
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
    return print_result(args, data, chain(_told(predicted, name, nbytes, cluster), table, closing))


def _predicted(name: str, nbytes: int, ranks: int, cluster: Cluster) -> dict[str, float] | None:
    """Seconds that every other command prices with: of the library and, if any, of a kernel that reads the peers'
    memory. None for a collective or a device without measurements."""
    from shardwise.predict.time import Pricing
    from shardwise.predict.time.network import MEASURED

    op = name.replace("-", "_")
    try:
        price = Pricing(cluster).collectives.seconds
    except UserError:
        return None
    if op not in MEASURED or ranks == 1:
        return None
    library, read = (float(price(op, nbytes, ranks, reads_peers=reads)) for reads in (False, True))
    return {"library_seconds": library} | ({"reading_peers_seconds": read} if read < library else {})


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
    price = choice.price
    terms = {"alpha_s": price.alpha, "beta_s": price.beta, "gamma_s": price.gamma}
    bounds = dict(zip(("alpha_s", "beta_s", "gamma_s"), choice.bounds, strict=True))
    return {
        "algorithm": choice.name,
        "options": dict(choice.options),
        "seconds": price.seconds,
        **terms,
        "steps": price.steps,
        "bytes_sent": price.bytes_sent,
        "lower_bounds": bounds,
        "fractions": choice.fractions,
    }


def _cost_table(ranked: list[Choice], prices: Pricer, nbytes: int, cluster: Cluster) -> Iterator[Renderable]:
    title = f"{prices.collective} of {format_bytes(nbytes)} on {_ranks(prices.network.ranks)} of {cluster}"
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


def _bench(args: argparse.Namespace) -> int:
    chosen = [result for result in _chosen(args) if not result.most or args.ranks <= result.most]
    return collective_bench.run(args, chosen, [bytes_of("--sizes", word) for word in args.sizes.split(",")])


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
