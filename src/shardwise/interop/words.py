"""A layout in words: what is split over how many ranks, and which of its groups stay inside a node."""

from collections.abc import Iterable

from shardwise.cluster import Cluster
from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import CP, DATA, PP, SHARD, TP, Axes
from shardwise.layout.experts import experts_across
from shardwise.layout.keys import KEYS, goes_with

_SHARDED = {
    1: "optimizer state is sharded",
    2: "gradients and optimizer state are sharded",
    3: "parameters, gradients and optimizer state are sharded",
}


def in_words(layout: Layout, cluster: Cluster | None = None, serves: bool = False) -> list[str]:
    """One line for each way in which the layout splits or saves. cluster: says what crosses nodes. serves: replicas
    answer requests of their own, and nothing is accumulated."""
    lines = [_data(layout, cluster, serves)]
    if layout.tp > 1:
        sequence = ", with sequence parallelism" if layout.sp else ""
        lines.append(f"{layout.tp}-way tensor parallel{_place(layout, TP, cluster)}{sequence}")
    if layout.pp > 1:
        chunks = f", {layout.virtual} chunks a rank" if layout.virtual > 1 else ""
        schedule = "" if serves else f", {layout.schedule}"
        lines.append(f"{layout.pp} pipeline stages{schedule}{chunks}{_place(layout, PP, cluster)}")
    if layout.cp > 1:
        kind = "Ulysses" if layout.ulysses else "ring"
        lines.append(f"{layout.cp}-way context parallel ({kind}){_place(layout, CP, cluster)}")
    if layout.ep > 1:
        lines.append(f"{layout.ep}-way expert parallel")
    if not serves:
        lines += _numbers(layout)
    return [line for line in lines if line]


def _data(layout: Layout, cluster: Cluster | None, serves: bool) -> str:
    data = layout.data_ranks
    if serves:
        if experts_across(layout) > 1:
            return f"attention data-parallel: {layout.dp} replicas of attention share experts"
        return f"{layout.dp} replicas" if layout.dp > 1 else "one engine"
    if data == 1:
        return "no data parallelism: one copy of the model"
    if not layout.stage:
        return f"plain data parallel over {data} ranks: every rank keeps everything{_place(layout, DATA, cluster)}"
    place = _place(layout, SHARD, cluster)
    line = f"ZeRO-{layout.stage} over {layout.shard_ranks} ranks: {_SHARDED[layout.stage]}{place}"
    if layout.replicate_ranks > 1:
        line += f"; {layout.replicate_ranks} such groups sum their gradients (HSDP)"
    return "; ".join([line, *_described(layout, goes_with("zero"))])


def _numbers(layout: Layout) -> list[str]:
    """Micro-batch, precision, recomputation, offload."""
    gradients = {"bf16": "bf16 gradients", "fp32": "fp32 gradients"}[layout.grads]
    precision = f"{layout.precision} with {gradients}" if layout.precision == "bf16" else layout.precision
    lines = [f"micro-batches of {layout.micro} sequence{'s' * (layout.micro > 1)}, {precision}"]
    share = f"{layout.offload_fraction:.0%} of the " if 0 < layout.offload_fraction < 1 else ""
    others = _described(layout, [name for name in KEYS if name not in goes_with("zero")])
    return [*lines, *(share * line.startswith("optimizer state") + line for line in others)]


def _described(layout: Layout, names: Iterable[str]) -> list[str]:
    """What these keys do, where they do something."""
    return [words for name in names if (words := KEYS[name].in_words(getattr(layout, name)))]


def _place(layout: Layout, axes: Axes, cluster: Cluster | None) -> str:
    """Whether the groups along axes stay inside a node; nothing where no cluster tells, or there is one node."""
    if cluster is None or cluster.nodes == 1 or layout.ranks > cluster.devices:
        return ""
    group = Mesh(layout).group(axes, 0)
    nodes = len({rank // cluster.devices_per_node for rank in group})
    return " inside a node" if nodes == 1 else f" across {nodes} nodes"
