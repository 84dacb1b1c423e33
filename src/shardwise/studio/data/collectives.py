"""Collectives: every round of an algorithm with what each chunk then has; costs over size and ranks."""

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.predict.time.pricing import collective_seconds
from shardwise.report.units import format_bytes, format_time
from shardwise.schedule import algorithms, build, find
from shardwise.schedule.choose import Choice, Pricer, pricer
from shardwise.schedule.closed_forms import CLOSED_FORMS
from shardwise.schedule.comm import COLLECTIVES, CommSchedule, wanted
from shardwise.schedule.show import Holding, history
from shardwise.studio.columns import Columns, How, Table, View, command_line
from shardwise.studio.query import Query

MOST_RANKS = 16
CLUSTERS = ("8xH100", "2x8xH100", "8xA100", "2x8xA100", "8xB200")
SIZES = tuple(1 << power for power in range(8, 35))
"""Bytes at which the curves are drawn: 256 B to 16 GiB."""


def data(params: Mapping[str, str]) -> View:
    """One algorithm, round by round."""
    state, options, cluster = _asked(params)
    schedule = build(state["collective"], state["algorithm"], state["ranks"], **options)
    names = [algorithm.name for algorithm in algorithms(schedule.collective)]
    return View(
        state,
        {"collective": list(COLLECTIVES), "algorithm": names, "cluster": CLUSTERS},
        {"rounds": _rounds(schedule, cluster, state["bytes"])},
        {"rounds": _how_rounds(schedule, options)},
        _more(schedule, cluster, options),
    )


def costs(params: Mapping[str, str]) -> View:
    """Cost of every algorithm of the collective: at this size, over sizes, over ranks."""
    state, _, cluster = _asked(params)
    nbytes = state["bytes"]
    prices = pricer(state["collective"], state["ranks"], cluster)
    ranked = prices.ranked(nbytes)
    how = _how_costs(prices, ranked, nbytes, state)
    crossovers = [{"bytes": c.nbytes, "algorithm": c.algorithm} for c in prices.crossovers(SIZES[0], SIZES[-1])]
    tables = {
        "costs": _costs(ranked),
        "sizes": _sizes(prices, nbytes),
        "scaling": _scaling(prices.collective, nbytes, state["ranks"], cluster),
    }
    priced = collective_seconds(prices.collective, nbytes, state["ranks"], cluster)
    return View(state, {}, tables, dict.fromkeys(tables, how), {"crossovers": crossovers, "priced": priced})


def _asked(params: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, int], Cluster]:
    query = Query(params)
    collective = query.word("collective", "all-reduce", COLLECTIVES)
    names = [entry.name for entry in algorithms(collective)]
    algorithm = query.text("algorithm", "ring" if "ring" in names else names[0])
    algorithm = query.word("algorithm", algorithm, names) if algorithm in names else _known(query, names)
    ranks = query.whole("ranks", 4, 1, MOST_RANKS)
    options = _options(query, collective, algorithm, ranks)
    cluster = Cluster.parse(query.text("cluster", "8xH100" if ranks <= 8 else "2x8xH100"))
    query.whole("bytes", 1 << 26, 1, 1 << 40)
    query.done()
    if ranks > cluster.devices:
        raise UserError(f"{ranks} ranks do not fit {cluster}: choose a cluster of as many devices, such as 2x8xH100")
    return query.state, options, cluster


def _known(query: Query, names: list[str]) -> str:
    """The default algorithm, where the one named belongs to another collective; a misspelt one is refused."""
    request = str(query.state["algorithm"])
    if any(algorithm.name == request for algorithm in algorithms()):
        query.state["algorithm"] = "ring" if "ring" in names else names[0]
        return str(query.state["algorithm"])
    return query.word("algorithm", request, names)


def _options(query: Query, collective: str, algorithm: str, ranks: int) -> dict[str, int]:
    """The algorithm's own options, as far as the state gives them; others are left aside."""
    known = find(collective, algorithm).options
    limits = {"root": (0, ranks - 1), "segments": (1, 16), "node": (1, ranks)}
    # Nodes of equal size, two at least where that is possible.
    node = 8 if ranks == 16 else max((n for n in range(1, ranks // 2 + 1) if ranks % n == 0), default=1)
    options = {}
    for name, (least, most) in limits.items():
        default = node if name == "node" else known.get(name, least)
        value = query.whole(name, min(default, most), least, MOST_RANKS)
        if name in known:
            options[name] = min(value, most)
    return options


def _more(schedule: CommSchedule, cluster: Cluster, options: Mapping[str, int]) -> dict[str, Any]:
    """Data of the drawing: after every round the ranks whose data each chunk holds, as bits."""
    states = list(history(schedule))
    goal = wanted(schedule)
    algorithm = find(schedule.collective, schedule.algorithm)
    about = {name: getattr(algorithm, name) for name in ("summary", "natural", "source")}
    return {
        "algorithm": about | {"options": list(options)},
        "meaning": COLLECTIVES[schedule.collective],
        "chunks": schedule.chunks,
        "regions": list(schedule.regions),
        "per_node": cluster.devices_per_node,
        "masks": [[_mask(held) for row in state for held in row] for state in states],
        "pieces": [[_piece(held) for row in state for held in row] for state in states],
        "wanted": sorted(set((goal.rank * schedule.width + goal.chunk).tolist())),
        "sentences": list(_sentences(schedule)),
    }


def _mask(held: Holding) -> int:
    return 0 if held is None else sum(1 << rank for rank, _ in held)


def _piece(held: Holding) -> int:
    return -1 if held is None else min(chunk for _, chunk in held)


def _sentences(schedule: CommSchedule) -> Iterator[str]:
    yield f"Before the first round, every rank has only its own data. Wanted: {COLLECTIVES[schedule.collective]}."
    rounds = list(schedule.rounds())
    for number, (round, label) in enumerate(zip(rounds, schedule.labels(), strict=True), 1):
        away = round.src != round.dst
        pairs = len({*zip(round.src[away].tolist(), round.dst[away].tolist(), strict=True)})
        chunks = int(round.count[away].sum()) if pairs else int(round.count.sum())
        what = f"{chunks} chunk{'s go' if chunks != 1 else ' goes'}"
        way = f"from rank to rank in {pairs} message{'s' if pairs != 1 else ''}" if pairs else "to its place by itself"
        then = "what arrives is added" if round.reduce.any() else "what arrives is kept"
        stage = f" ({label})" if label else ""
        last = " Done." if number == len(rounds) else ""
        yield f"Round {number} of {len(rounds)}{stage}: {what} {way}; {then}.{last}"


def _rounds(schedule: CommSchedule, cluster: Cluster, nbytes: int) -> Table:
    headings = ("round", "stage", "from", "to", "chunk", "into", "chunks", "op", "bytes", "link")
    rows: list[tuple[Any, ...]] = []
    for number, (round, label) in enumerate(zip(schedule.rounds(), schedule.labels(), strict=True), 1):
        item = round.contiguous()
        for src, dst, chunk, to, count, _, adds in zip(*(c.tolist() for c in item.columns), strict=True):
            across = src // cluster.devices_per_node != dst // cluster.devices_per_node
            link = "itself" if src == dst else "between nodes" if across else "inside the node"
            what = "add" if adds else "copy"
            rows.append((number, label, src, dst, chunk, to, count, what, nbytes * count / schedule.chunks, link))
    return Table.of_rows("Every transfer, round by round", dict.fromkeys(headings, "") | {"bytes": "bytes"}, rows)


def _costs(ranked: list[Choice]) -> Table:
    columns: Columns = {
        "algorithm": ("", lambda choice: choice.name),
        "time": ("seconds", lambda choice: choice.price.seconds),
        "latency": ("seconds", lambda choice: choice.price.alpha),
        "bandwidth": ("seconds", lambda choice: choice.price.beta),
        "adding": ("seconds", lambda choice: choice.price.gamma),
        "lower bound": ("seconds", _bound),
        "steps": ("", lambda choice: choice.price.steps),
        "sent": ("bytes", lambda choice: choice.price.bytes_sent),
        "latency needed": ("share", lambda choice: choice.fractions["latency"]),
        "bandwidth needed": ("share", lambda choice: choice.fractions["bandwidth"]),
    }
    return Table.of("Every algorithm at this size, cheapest first", ranked, columns)


def _bound(choice: Choice) -> float:
    return float(max(choice.bounds.alpha, choice.bounds.beta, choice.bounds.gamma))


def _sizes(prices: Pricer, here: int) -> Table:
    sizes = sorted({*SIZES, here})
    results = [{choice.name: choice for choice in prices.ranked(nbytes)} for nbytes in sizes]
    columns: dict[str, list[Any]] = {"bytes": sizes}
    for candidate in prices.candidates:
        columns[candidate.name] = [at[candidate.name].price.seconds for at in results]
    columns["lower bound"] = [min(map(_bound, at.values())) for at in results]
    units = dict.fromkeys(columns, "seconds") | {"bytes": "bytes"}
    return Table("Time against the size of the tensor", columns, units)


def _scaling(collective: str, nbytes: int, here: int, cluster: Cluster) -> Table:
    ranks = sorted({p for p in (2, 3, 4, 6, 8, 12, 16) if p <= cluster.devices} | {here})
    results = {p: {c.name: c.price.seconds for c in pricer(collective, p, cluster).ranked(nbytes)} for p in ranks}
    names = [a.name for a in algorithms(collective) if any(a.name in at for at in results.values())]
    columns: dict[str, list[Any]] = {"ranks": ranks}
    columns |= {name: [results[p].get(name) for p in ranks] for name in names}
    return Table("Time against the number of ranks, at this size", columns, dict.fromkeys(names, "seconds"))


def _how_rounds(schedule: CommSchedule, options: Mapping[str, int]) -> How:
    params = [word for name, value in options.items() for word in (f"--{name}", value)]
    return How(
        [
            f"{schedule.algorithm} is a list of rounds; each row says which rank sends which chunks to whom.",
            "Contribution sets: the rounds are executed over sets of ranks instead of numbers; an addition joins two.",
            f"{schedule.steps} rounds with messages for {schedule.ranks} ranks, {schedule.chunks} chunks.",
        ],
        command_line("collective", "show", schedule.collective, schedule.algorithm, "--ranks", schedule.ranks, *params),
    )


def _how_costs(prices: Pricer, ranked: list[Choice], nbytes: int, state: Mapping[str, Any]) -> How:
    network, best = prices.network, ranked[0]
    steps = [
        "A message of n bytes takes α + n β, adding n bytes takes n γ; a round takes as long as its busiest port.",  # noqa: RUF001
        f"inside a node: α = {format_time(network.intra.alpha)}, 1/β = {_rate(network.intra.beta)}",  # noqa: RUF001
    ]
    if network.nodes > 1:
        steps.append(f"between nodes: α = {format_time(network.inter.alpha)}, 1/β = {_rate(network.inter.beta)}")  # noqa: RUF001
    form = CLOSED_FORMS.get((prices.collective, best.name))
    price, factors = best.price, ""
    if form and form.holds(network.ranks) and network.nodes == 1 and not network.sizes:
        a, b, c = form.factors(network.ranks)
        factors = f"{a:g} α + {b:.4g} n β + {c:.4g} n γ = "  # noqa: RUF001
    steps.append(
        f"{best.name}, n = {format_bytes(nbytes)}: {factors}{format_time(price.alpha)} latency + "
        f"{format_time(price.beta)} bandwidth + {format_time(price.gamma)} adding = {format_time(price.seconds)}"
    )
    bound = best.bounds
    steps.append(
        f"lower bound, each term for itself: {format_time(bound.alpha)} latency, {format_time(bound.beta)} bandwidth, "
        f"{format_time(bound.gamma)} adding; the dashed line is the largest of them"
    )
    words = ("--bytes", nbytes, "--ranks", state["ranks"], "--cluster", state["cluster"])
    command = command_line("collective", "cost", prices.collective, *words)
    return How([*steps, *network.notes], command, form.source if form else "Chan et al. 2007 for the lower bounds")


def _rate(beta: float) -> str:
    return f"{format_bytes(1 / beta)}/s" if beta else "no limit"
