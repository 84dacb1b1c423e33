"""Output of `plan --serve`: the ranked deployments, tokens/s against time per token, and what was weighed."""

from collections.abc import Iterator, Sequence

from shardwise.layout.experts import experts_across
from shardwise.layout.model_size import named_size, size_words
from shardwise.model.formats import weight_format
from shardwise.planner.price_words import money, price_line, priced
from shardwise.planner.serving import Deployment, ServingPlan, type_name
from shardwise.predict.cluster_links import link_lines
from shardwise.report.table import Column, FittedTable
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes, format_count, format_share, format_time


def serving_conclusion(plan: ServingPlan) -> str:
    """The best deployment in one sentence."""
    one = plan.winner
    weights = type_name(one.weights, plan.model)
    return (
        f"best of {plan.considered:,} deployments of {named_size(plan.model)} on {plan.cluster}: {one.layout} in "
        f"{weights}{' (lossy)' * one.lossy} on {one.devices} device{'s' * (one.devices > 1)}, "
        f"{format_count(one.tokens_per_second)} tokens/s, {format_time(one.first_token)} to the mean first token, "
        f"{format_time(one.token)} for each after it, "
        f"{format_bytes(one.held)} of {format_bytes(plan.usable)} per device"
    )


def serving_tables(plan: ServingPlan) -> Iterator[Renderable]:
    """The answer: the best deployment and its neighbors, and what was assumed."""
    work = plan.workload
    clients = f"{work.concurrency:,} client{'s' * (work.concurrency > 1)}"
    if plan.rate is not None:
        clients = f"{plan.rate:g} requests a second, of which at most {work.concurrency:,} are under way"
    kept = f", with {' and '.join(map(str, plan.bounds))}" if plan.bounds else ""
    yield serving_conclusion(plan)
    yield f"{clients}, prompts of {work.prompt:,} tokens, answers of {work.output:,}, software of {plan.engine}{kept}\n"
    yield _table(plan, plan.ranked[: plan.shown], _BRIEF)
    yield from _remarks(plan)
    yield from plan.warnings
    yield from _bounded(plan)
    yield from _spread_experts(plan)
    if pair := plan.apart:
        yield (
            f"prefill and decoding apart, {pair.prefill} and {pair.decode}: {format_count(pair.tokens_per_second)} "
            f"tokens/s, {format_time(pair.first_token)} to the first token, {format_time(pair.token)} after it "
            "(--emit vllm --disaggregated)"
        )
    yield from (f"assumed: {note}" for note in plan.assumed)
    yield from link_lines(plan.cluster)
    best = plan.winner
    yield price_line(priced(plan.price, best.devices, plan.paid(best)), plan.cluster.device.name)


def why_tables(plan: ServingPlan) -> Iterator[Renderable]:
    """All deployments, tokens/s against time per token, and what was weighed."""
    yield f"\n{plan.model.name}: {size_words(plan.model)}"
    yield (
        f"{plan.considered:,} deployments, {plan.fitting:,} fit in {format_bytes(plan.usable)} a device; "
        f"{_ORDERS[plan.by] if plan.rate is None else _rate(plan)}\n"
    )
    yield _table(plan, plan.ranked)
    if plan.by != "pareto":
        yield "\ntokens/s against time per token, with as many clients as the batch size"
        last = len(plan.curve) - 1
        few = sorted({round(i * last / 7) for i in range(8)}) if last > 7 else range(last + 1)
        yield _table(plan, [plan.curve[i] for i in few])
    yield ""
    yield from _weighed(plan)


def _bounded(plan: ServingPlan) -> Iterator[str]:
    """The best that keeps one of several bounds alone."""
    for bound in plan.bounds if len(plan.bounds) > 1 else ():
        if one := bound.best:
            yield (
                f"{bound} alone: {one.layout} in {type_name(one.weights, plan.model)}, "
                f"{format_count(one.tokens_per_second)} tokens/s with {one.layout.dp * one.batch:,} clients, "
                f"{format_time(one.first_token)} to the first token, {format_time(one.token)} after it"
            )


def _remarks(plan: ServingPlan) -> Iterator[str]:
    """The range of the best deployment, and the best one whose weights keep the model's own bits."""
    one = plan.winner
    rate, factor = one.tokens_per_second, plan.factor(one)
    yield (
        f"80% range of the first row: {format_count(rate / factor)} to {format_count(rate * factor)} tokens/s, "
        f"{format_time(one.token / factor)} to {format_time(one.token * factor)} per token; first token and per token "
        "are means over the clients"
    )
    if one.lossy and (exact := plan.lossless):
        clients = exact.layout.dp * exact.batch
        fewer = f" with {clients:,} clients" if plan.bounds and clients < plan.workload.concurrency else ""
        yield (
            f"lossy: weights of fewer bits than the model's own, whose answers differ; best without: {exact.layout} in "
            f"{type_name(exact.weights)}, {format_count(exact.tokens_per_second)} tokens/s on {exact.devices} "
            f"device{'s' * (exact.devices > 1)}{fewer}"
        )
    elif one.lossy:
        fits = "keeps the bounds" if plan.bounds else "fits"
        yield f"lossy: weights of fewer bits than the model's own, whose answers differ; without, nothing {fits}"


_ORDERS = {
    "throughput": "most tokens/s first",
    "cost": "most tokens/s of a device first",
    "pareto": "the Pareto front of time per token and tokens/s, with as many clients as the batch size",
}


def _rate(plan: ServingPlan) -> str:
    return (
        f"deployments that answer {plan.rate:g} requests a second, fewest devices first; requests of a burst wait "
        "longer"
    )


_COLUMNS = (
    Column("layout", left=True, wraps=True), Column("weights", left=True), Column("answers", left=True),
    Column("devices", drop=4), Column("batch size", drop=1), Column("first token", "seconds", drop=2),
    Column("per token", "seconds"), Column("tokens/s", "count"), Column("per device", "count", drop=5),
    Column("memory", "bytes", drop=3), Column("cache", drop=7), Column("USD/M tokens", drop=6),
)  # fmt: skip


_BRIEF = ("layout", "weights", "answers", "batch size", "first token", "per token", "tokens/s", "memory")
"""Columns of the answer."""


def _table(plan: ServingPlan, deployments: Sequence[Deployment], names: Sequence[str] = ()) -> FittedTable:
    shown = [i for i, column in enumerate(_COLUMNS) if not names or column.name in names]
    table = FittedTable([_COLUMNS[i] for i in shown])
    for one in deployments:
        row = (
            str(one.layout), type_name(one.weights, plan.model), "lossy" if one.lossy else "own", str(one.devices),
            f"{one.layout.dp} x {one.batch}",
            one.first_token, one.token, one.tokens_per_second, one.rate, one.held,
            f"{format_count(one.cache_tokens)} tokens", money(plan.usd(one)),
        )  # fmt: skip
        table.add_row(*(row[i] for i in shown))
    return table


def _spread_experts(plan: ServingPlan) -> Iterator[str]:
    best = plan.winner
    if spread := plan.spread(best):
        replicas = experts_across(best.layout)
        if replicas > 1:
            groups = best.layout.dp // replicas
            each = f"in each of {groups} groups, {replicas}" if groups > 1 else f"{replicas}"
            yield (
                f"attention-dp: {each} replicas of attention, tp={best.layout.tp} each, share experts that are spread "
                f"over {spread.ranks} ranks"
            )
        if not spread.even:
            yield (
                f"{spread.full} ranks have {spread.most} experts, {spread.ranks - spread.full} have {spread.most - 1}: "
                f"priced by {spread.most}; {spread.redundant} redundant experts fill all ranks in as many bytes"
            )
    rejected = {reason: str(one.layout) for one in reversed(plan.ranked) if (reason := plan.not_runnable(one))}
    for reason, layout in list(rejected.items())[::-1][:MOST_REASONS]:
        yield f"generate and serve do not run {layout} here: {reason}"


MOST_REASONS = 3
"""Reasons for which layouts do not run here that are listed."""


def _weighed(plan: ServingPlan) -> Iterator[str]:
    if plan.quantised:
        fewer, split = plan.quantised
        yield (
            f"quantised on fewer or split on more: {type_name(fewer.weights)} on {fewer.devices} ({fewer.layout}) "
            f"gives {format_share(fewer.tokens_per_second / split.tokens_per_second)} of the tokens/s of bf16 on "
            f"{split.devices} ({split.layout}), a token every {format_time(fewer.token)} against "
            f"{format_time(split.token)}"
        )
    if plan.gathering:
        one = plan.gathering
        share = format_share(one.tokens_per_second / plan.winner.tokens_per_second)
        yield (
            f"gathering weights, at best {one.layout}: {share} of the winner's tokens/s, a token every "
            f"{format_time(one.token)}"
        )
    if pair := plan.apart:
        share = format_share(pair.tokens_per_second / plan.winner.tokens_per_second)
        yield (
            f"prefill and decoding apart: {pair.prefill} reads prompts, {pair.decode} decodes {pair.batch} sequences "
            f"at a time on each instance, {pair.devices} devices: {format_count(pair.tokens_per_second)} tokens/s "
            f"({share} of the winner's), {format_time(pair.first_token)} to the first token, "
            f"{format_time(pair.token)} for each after it; a request's cache of {format_bytes(pair.cache_bytes)} goes "
            f"over in {format_time(pair.transfer)}"
        )
    if plan.crossover:
        ranks, tokens = plan.crossover
        result = f"from about {format_count(tokens)} tokens of one pass on" if tokens else "with no number of tokens"
        yield f"on {ranks} devices of a node gathering is faster than tensor parallelism {result}"
    if any(one.weights in ("int8", "int4") for one in plan.ranked):
        stored = plan.model.counted.stored if plan.model.counted else ""
        words = stored or plan.words("int4")
        bits = f"{words}, {8 * weight_format(words).width:.3g} bits per weight"
        yield (
            f"{stored or 'int8 and int4'}: weights alone, multiplied in 16 bits at the speed of 16-bit products on "
            f"fewer bytes, which only good kernels reach; "
            + (f"its files are in {bits} with scales" if stored else f"int4 is {bits} with scales and zeros")
        )
