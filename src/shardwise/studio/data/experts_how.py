"""Experts, how computed: the formula of each figure with its numbers."""

from shardwise.layout import Mesh
from shardwise.layout.axes import ETP
from shardwise.report.step_report import DTYPE_BYTES
from shardwise.report.units import format_bytes, format_count, format_share
from shardwise.studio.columns import How, command_line
from shardwise.studio.data.experts_layer import ExpertLayer, example, routed_bytes, summed_bytes
from shardwise.studio.data.experts_router import SKEW

_ROUTER = (
    "Scores are drawn: about normal random numbers, the same on every machine. They are routed as the decoder routes: "
    "scores, groups, the largest k, weights.",
    f"balanced: each expert's logits are shifted until loads are even. skewed: they fall by {SKEW:g} from the first "
    "expert to the last.",
)


def explanations(layer: ExpertLayer, limited: ExpertLayer) -> dict[str, How]:
    """How each figure was computed. limited: the layer under a capacity."""
    first = layer.ranks[0]
    payload = (
        f"payload of rank 0: {len(first.tokens)} tokens x {layer.chosen.shape[-1]} experts x {layer.model.hidden:,} "
        f"numbers x {DTYPE_BYTES[layer.layout.dtype]} bytes = {format_bytes(layer.payloads(first)[0])}: the ledger's; "
        "rows for its own experts do not leave it"
    )
    command = _command(layer)
    return {
        "held": _held(layer, command),
        "routed": How([*_ROUTER, payload], command, "Lepikhin et al. 2020 (GShard)"),
        "loads": How(
            [
                *_ROUTER,
                payload,
                f"one row takes {format_count(layer.row_flops)}FLOP on its rank",
                f"mean {layer.mean:,.1f} rows per rank, busiest {max(one.rows for one in layer.ranks):,}: imbalance "
                f"{layer.imbalance:.3f}",
                "a rank waits 1 - its rows / rows of the busiest rank that it exchanges rows with; all together "
                f"{format_share(layer.waiting)} of the time",
            ],
            command,
        ),
        "capacity": _capacity(limited),
        "dropped": How([*_ROUTER, "Each capacity by itself, over the same tokens and scores."]),
        "exchanged": _exchanged(layer),
    }


def _command(layer: ExpertLayer) -> str:
    """The command that prints the ledger; none for a model that cannot be estimated."""
    model, layout = layer.model, layer.layout
    if model.why_not_runnable():
        return ""
    words = ("--cluster", f"{layout.ranks}xH100", "--seq", layer.tokens, "--batch", layout.dp)
    return command_line("estimate", model.name, "--layout", layout, *words)


def _held(layer: ExpertLayer, command: str) -> How:
    e, layout = layer.experts, layer.layout
    etp = Mesh.of(layout, layer.model).size(ETP)
    return How(
        [
            f"dp x tp = {layout.dp} x {layout.tp} = edp x ep x etp = "
            f"{layout.ranks // (layout.ep * etp)} x {layout.ep} x {etp} ranks",
            f"experts of a rank: {e.count} / ep = {e.count // layout.ep}; columns of each: {e.ffn:,} / etp = "
            f"{len(layer.ranks[0].columns):,}",
        ],
        command,
    )


def _capacity(layer: ExpertLayer) -> How:
    e = layer.experts
    return How(
        [
            *_ROUTER,
            f"most of a sequence: {layer.capacity:g} x {layer.tokens} tokens x {e.active} / {e.count} experts, rounded "
            "up; an expert takes the first ones",
            f"{layer.chosen_loads.sum() - layer.taken_loads.sum():,} of {layer.chosen_loads.sum():,} rows are dropped",
        ],
        source="Lepikhin et al. 2020 (GShard), Fedus et al. 2022 (Switch Transformer)",
    )


def _exchanged(layer: ExpertLayer) -> How:
    model, dtype = layer.model, layer.layout.dtype
    k, hidden, nbytes = layer.experts.active, model.hidden, DTYPE_BYTES[dtype]
    ranks = example(model)
    spread, cut = (format_bytes(each(model, ranks, dtype)) for each in (routed_bytes, summed_bytes))
    return How(
        [
            f"spread over n ranks: a token's {k} rows go there and back, and (n - 1) / n of them leave their rank: "
            f"2 x {k} x {hidden:,} x {nbytes} bytes x (n - 1) / n; n = {ranks}: {spread}",
            "cut over n ranks: an all-reduce of each token's results, in which each rank sends 2 (n - 1) / n of them: "
            f"n x 2 (n - 1) / n x {hidden:,} x {nbytes} bytes; n = {ranks}: {cut}",
            f"cut over spread: n / {k}",
        ],
        source="docs/collectives.md; Shoeybi et al. 2019 (tensor parallel)",
    )
