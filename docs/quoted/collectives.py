"""Collectives, links, and what ZeRO and tensor parallelism move in training."""

from __future__ import annotations

from quoted.activations import plan_of
from quoted.showing import Inputs, Samples, Values, topic
from quoted.tokens import summed_bytes
from quoted.zero import elements_moved, zeropp_across_nodes
from shardwise.cluster import Cluster
from shardwise.cluster.catalog import lookup
from shardwise.layout.axes import TP, named
from shardwise.model.catalog import get
from shardwise.predict.traffic.ledger import predict_ledger
from shardwise.schedule import algorithms, build
from shardwise.schedule.closed_forms import CLOSED_FORMS, lower_bound
from shardwise.schedule.network import Network
from shardwise.schedule.price import price

shows = topic(3, "Collectives, links, traffic of training")
GB = 1e9


def wire_seconds(collective: str, algorithm: str, nbytes: float, ranks: int, bandwidth: float) -> float:
    """Seconds for the bytes alone, by a schedule over equal links of `bandwidth` bytes/s one way."""
    return price(build(collective, algorithm, ranks), Network.flat(ranks, 0.0, 1 / bandwidth), nbytes).seconds


@shows(
    "ring-volume",
    "schedule.price.price",
    "schedule.build",
    "shardwise collective cost all-reduce --bytes 64MB --ranks 8 --cluster 8xH100",
    text="8 ranks send {sent:g} M each in {steps} steps; reduce-scatter and all-gather {half:g} M",
)
def _ring_volume(inputs: Inputs) -> Values:
    nbytes = 2.0**40
    samples: Samples = []
    shares, steps = {}, {}
    for ranks in (2, 3, 8, 64):
        for name in ("all-reduce", "reduce-scatter", "all-gather"):
            paid = price(build(name, "ring", ranks), Network.flat(ranks, 1.0, 1.0), nbytes)
            shares[name, ranks], steps[name, ranks] = paid.bytes_sent / nbytes, paid.steps
        samples.append(({"M": nbytes, "N": ranks}, shares["all-reduce", ranks] * nbytes))
    halves = [shares[name, n] * 2 / shares["all-reduce", n] for name, n in shares if name != "all-reduce"]
    return {
        "formula": samples,
        "sent": shares["all-reduce", 8],
        "half": shares["all-gather", 8],
        "halves": halves,
        "steps": steps["all-reduce", 8],
        "steps_of": {n: steps["all-reduce", n] for n in (2, 3, 8, 64)},
    }


@shows(
    "broadcast-volume",
    "schedule.closed_forms.lower_bound",
    "schedule.algorithms",
    "shardwise collective show broadcast binomial --ranks 8",
    text="at least {least:g} M leave the root; of the algorithms here, on 8 ranks: {of}",
)
def _broadcast_volume(inputs: Inputs) -> Values:
    nbytes = 2.0**40
    sent = {}
    for algorithm in algorithms("broadcast"):
        sent[algorithm.name] = (
            price(build("broadcast", algorithm.name, 8), Network.flat(8, 1.0, 1.0), nbytes).bytes_sent / nbytes
        )
    _, least, _ = lower_bound("broadcast", 8)
    samples: Samples = [({"M": nbytes}, least * nbytes)]
    listed = ", ".join(f"{name} {times:g} M" for name, times in sent.items())
    return {"root_sends_at_least": samples, "least": least, "sent": sent, "of": listed}


@shows(
    "alpha-beta",
    "schedule.closed_forms.CLOSED_FORMS",
    "shardwise list algorithms",
    text="64 MB on 8 ranks, 5 us, 50 GB/s: broadcast by a tree {tree_ms:.2f} ms, all-reduce by a ring {ring_ms:.2f} ms",
)
def _alpha_beta(inputs: Inputs) -> Values:
    tree: Samples = []
    ring: Samples = []
    for n, size in ((8, 64e6), (64, 1e6), (5, 1e3)):
        letters = {"N": n, "alpha": 5e-6, "S": size, "B": 50e9}
        for samples, key in ((tree, ("broadcast", "binomial")), (ring, ("all-reduce", "ring"))):
            samples.append((letters, CLOSED_FORMS[key].at(n, size, 5e-6, 1 / 50e9).seconds))
    return {"tree": tree, "ring": ring, "tree_ms": 1e3 * tree[0][1], "ring_ms": 1e3 * ring[0][1]}


@shows("ib-units", "cluster.catalog.lookup", text="HDR {hdr_gb_s_per_direction:g} GB/s, NDR {ndr_gb_s_per_direction:g} "
       "GB/s a direction: NVLink is {nvlink3_over_hdr:g} and {nvlink4_over_ndr:g} times faster")  # fmt: skip
def _infiniband(inputs: Inputs) -> Values:
    ampere, hopper = lookup("A100"), lookup("H100")
    speeds = [link.bandwidth for link in (ampere.inter, hopper.inter, ampere.intra, hopper.intra)]
    hdr, ndr, nvlink3, nvlink4 = (speed or 0.0 for speed in speeds)
    return {
        "hdr_gb_s_per_direction": hdr / GB,
        "ndr_gb_s_per_direction": ndr / GB,
        "nvlink3_over_hdr": nvlink3 / hdr,
        "nvlink4_over_ndr": nvlink4 / ndr,
    }


@shows("pcie-units", "cluster.catalog.lookup", text="{gb_s_per_direction:g} GB/s a direction as the catalog has it")
def _pcie(inputs: Inputs) -> Values:
    return {"gb_s_per_direction": (lookup("A100-80GB-PCIe").intra.bandwidth or 0.0) / GB}


@shows(
    "ddp-7b-nvlink",
    "schedule.price.price",
    "predict.time.Pricing",
    text="{ms:.1f} ms on the wire, {nccl_ms:.0f} ms as NCCL was measured on 8 A100",
)
def _gradients_of_7b(inputs: Inputs) -> Values:
    seconds = wire_seconds("all-reduce", "ring", inputs["bytes"], inputs["gpus"], inputs["bus_gb_s"] * GB)
    measured = measured_seconds("8xA100", "all_reduce", inputs["bytes"], inputs["gpus"])
    return {"ms": 1e3 * seconds, "nccl_ms": 1e3 * measured}


@shows(
    "tp-allreduce-50mb",
    "schedule.price.price",
    text="2M/B: {ms_said_600:.3f} ms and {ms_said_12:.2f} ms; a ring of 8 at 300 GB/s one way: {ms_ring_300_p8:.3f} ms",
)
def _sum_of_50mb(inputs: Inputs) -> Values:
    nbytes = inputs["bytes"]
    # A tree on two ranks sends everything up and down: just 2M.
    said = {f"ms_said_{gb}": 1e3 * wire_seconds("all-reduce", "tree", nbytes, 2, gb * GB) for gb in (600, 12)}
    return said | {"ms_ring_300_p8": 1e3 * wire_seconds("all-reduce", "ring", nbytes, 8, 300 * GB)}


@shows("zero3-volume", "quoted.zero.elements_moved", "predict.traffic.ledger.predict_ledger",
       text="{ratio:g} times; {ledger:.2f} in the ledger of llama-3-8b on 64 ranks, where the last units of forward "
       "are still there when backward begins, and the embedding's backward reads no weights")  # fmt: skip
def _volume_of_zero_3(inputs: Inputs) -> Values:
    ratio = elements_moved(8e9, 3) / elements_moved(8e9, 0)
    moved = [_moved(layout) for layout in ("dp=64", "dp=64,zero=3")]
    return {"ratio": ratio, "ledger": moved[1] / moved[0]}


def _moved(layout: str) -> int:
    """Elements of the data-parallel collectives in a step of llama-3-8b, an all-reduce twice."""
    rows = predict_ledger(plan_of(get("llama-3-8b"), layout, 8192, 64))
    units = [row for row in rows if row.phase in ("forward", "backward", "optimizer") and row.elements > 1]
    return sum(row.elements * row.count * (2 if row.op == "all_reduce" else 1) for row in units)


@shows(
    "zeropp-volume",
    "quoted.zero.zeropp_across_nodes",
    text="{before:g}M between nodes become {after:g}M: {ratio:g} times less; by one of them alone: qwZ {qwz:g}M, hpZ "
    "{hpz:g}M, qgZ {qgz:g}M",
)
def _volume_of_zeropp(inputs: Inputs) -> Values:
    def across(weights: bool = False, secondary: bool = False, gradients: bool = False) -> float:
        return zeropp_across_nodes(1.0, weights, secondary, gradients)

    return {
        "ratio": across() / across(True, True, True),
        "before": across(),
        "after": across(True, True, True),
        "qwz": across(weights=True),
        "hpz": across(secondary=True),
        "qgz": across(gradients=True),
    }


@shows(
    "tp-collectives-per-layer",
    "predict.traffic.ledger.predict_ledger",
    "shardwise estimate llama-2-7b --layout tp=8 --cluster 8xH100 --seq 2048 --batch 1",
    text="{forward_all_reduces_per_layer:g} all-reduces a layer in forward, {backward:g} in backward; with sp "
    "{gathers:g} all-gathers and {scatters:g} reduce-scatters in forward",
)
def _collectives_per_layer(inputs: Inputs) -> Values:
    layers = get("llama-2-7b").layers
    return {
        "forward_all_reduces_per_layer": block_collectives("tp=8", "forward", "all_reduce") / layers,
        "backward": block_collectives("tp=8", "backward", "all_reduce") / layers,
        "gathers": block_collectives("tp=8,sp", "forward", "all_gather_into") / layers,
        "scatters": block_collectives("tp=8,sp", "forward", "reduce_scatter") / layers,
    }


@shows(
    "tp-64-allreduces",
    "predict.traffic.ledger.predict_ledger",
    text="{forward} in forward, {forward_and_backward} in all",
)
def _sums_of_32_layers(inputs: Inputs) -> Values:
    forward, backward = (block_collectives("tp=8", phase, "all_reduce") for phase in ("forward", "backward"))
    return {"forward": forward, "forward_and_backward": forward + backward}


def block_collectives(layout: str, phase: str, op: str) -> int:
    """How many collectives of activations over tp the blocks of llama-2-7b need in a phase of one micro-batch."""
    plan = plan_of(get("llama-2-7b"), layout, 2048)
    full = plan.tokens * plan.model.hidden
    rows = (row for row in predict_ledger(plan) if named(row.axes) == TP and row.unit in plan.of_kind("block"))
    return sum(row.count for row in rows if (row.phase, row.op, row.elements) == (phase, op, full))


@shows(
    "act-96-layer-19gb",
    "quoted.tokens.summed_bytes",
    text="{gb:.1f} GB for 4,096 tokens, {each_mb:.0f} MB a collective, in forward alone",
)
def _sums_of_96_layers(inputs: Inputs) -> Values:
    model = get("gpt3-175b")
    nbytes = summed_bytes(model, 4096)
    return {"gb": nbytes / GB, "each_mb": nbytes / (2 * model.layers) / 1e6}


def measured_seconds(cluster: str, op: str, nbytes: float, ranks: int) -> float:
    """Seconds of a collective as NCCL was measured on that kind of cluster, latency included."""
    from shardwise.predict.time import Pricing

    return float(Pricing(Cluster.parse(cluster)).collectives.seconds(op, nbytes, ranks))
