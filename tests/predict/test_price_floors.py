"""No priced time is below what the same estimate's ledger, gradients, weights and operations take at the full rates.

Each resource has a floor of its own: collectives of each kind at the full bandwidth of their links, products at the
peak, and the bytes of weights, gradients and optimizer state at the full bandwidth of the memory. What a price leaves out
decides searches (docs/prediction.md), and the mean error over published rows does not show it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from harness.today import EVERYTHING, seed
from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.axes import named
from shardwise.layout.mesh import Mesh
from shardwise.layout.units import unit_plan
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.predict.estimate import estimate
from shardwise.predict.time.step import LINKS
from shardwise.report.step_report import DTYPE_BYTES, LedgerRow, Role

MODELS = ("llama-3.2-1b", "llama-3-8b", "llama-3-70b", "qwen3-8b", "gpt2-xl", "mixtral-8x7b", "qwen3-30b-a3b")
CLUSTERS = ("8xH100", "4x8xH100", "2x8xA100", "4x8xB200", "8xRTX-4090", "16x8xH100")
DRAWS = 2000 if EVERYTHING else 60
PART = {"loss": "", "optimizer": ""}
VOLUME = {"all_reduce": 2.0, "all_gather_into": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Bytes that each rank sends over the tensor's, times (n - 1) / n."""


def draws(count: int, key: str) -> Iterator[tuple[str, str, Layout, Workload]]:
    """Legal layouts of the whole space, drawn by the day."""
    generator = random.Random(f"{key} {seed()}")
    pick = generator.choice
    while count:
        model, cluster = pick(MODELS), Cluster.parse(pick(CLUSTERS))
        degrees = Counter(tp=1, pp=1, cp=1, dp=1)
        ranks = cluster.devices
        while ranks > 1:
            degrees[pick(("tp", "pp", "cp", "dp", "dp"))] *= 2
            ranks //= 2
        text = ",".join(f"{axis}={n}" for axis, n in degrees.items())
        data = degrees["dp"] * degrees["cp"]
        zero = pick((0, 1, 2, 3))
        text += f",zero={zero},micro={pick((1, 2))},recompute={pick(('none', 'selective', 'full'))}"
        text += pick(("", ",sp")) * (degrees["tp"] > 1) + f",grads={pick(('bf16', 'fp32'))}"
        if zero and data > 2 and pick((True, False)):
            text += f",shard={data // 2}"
        if degrees["pp"] > 1:
            text += pick(("", ",schedule=interleaved,virtual=2", ",schedule=interleaved,virtual=4", ",schedule=zb-h1"))
        if get(model).experts and pick((True, False)):
            text += f",ep={pick((2, 4, 8))}"
        accumulate = degrees["pp"] * pick((1, 2, 8))
        layout_batch = degrees["dp"] * accumulate
        try:
            layout = Layout.parse(text)
            workload = Workload(seq=pick((512, 4096)), batch=layout_batch * layout.micro)
            report = estimate(model, layout, workload, cluster)
        except UserError:
            continue
        if report.timing is None:
            continue
        count -= 1
        yield model, str(cluster), layout, workload


def floor_of(row: LedgerRow, rank: int, mesh: Mesh, cluster: Cluster) -> float:
    """Seconds of a row's calls at the full bandwidth of the links that its group has."""
    group = sorted(mesh.group(named(row.axes), rank))
    nodes = len({device // cluster.devices_per_node for device in group})
    if row.op in ("send", "recv"):
        link = cluster.inter if nodes > 1 else cluster.intra
        return row.payload_bytes / link.bandwidth
    volume = VOLUME[row.op] * row.payload_bytes
    if nodes == 1:
        return volume * (len(group) - 1) / len(group) / cluster.intra.bandwidth
    # Each node takes in what its own ranks lack, over the network cards of its ranks of this group.
    lacking = (nodes - 1) / nodes / (len(group) / nodes)
    return volume * lacking / cluster.inter.bandwidth


def part_of(row: LedgerRow) -> str:
    """The part of a step that a row is priced in; empty for scalars and checks."""
    axes = set(row.axes.split("_"))
    if row.phase == "loss" or row.unit in ("gradient norm", "valid tokens", "loss"):
        return ""
    if row.unit == "tied":
        return "data"
    if axes == {"pp"}:
        return "pipeline"
    if axes == {"ep"}:
        return "experts"
    # Over cp alone go messages of attention, and, without data parallelism, units.
    return "tensor" if axes <= {"tp", "kv"} or (axes == {"cp"} and row.op in ("send", "recv", "all_to_all")) else "data"


def busiest(roles: tuple[Role, ...], mesh: Mesh, cluster: Cluster) -> dict[str, float]:
    """Floor of each part, of the role that has the highest."""
    floors: dict[str, float] = dict.fromkeys(LINKS, 0.0)
    for role in roles:
        mine: Counter[str] = Counter()
        for row in role.ledger:
            if name := part_of(row):
                once = 1 if row.op != "recv" else 0
                mine[name] += once * floor_of(row, role.ranks[0], mesh, cluster)
        floors = {name: max(floors[name], mine[name]) for name in floors}
    return floors


def gradient_floor(model: ModelConfig, layout: Layout, workload: Workload, cluster: Cluster) -> float:
    """Seconds of the passes that add up a rank's gradients, at the full bandwidth of the memory: least over ranks."""
    plan = unit_plan(model, layout, workload, backend="nccl")
    narrow, wide = DTYPE_BYTES[layout.dtype], DTYPE_BYTES[plan.grad_dtype]
    count = plan.micro_batches
    late = layout.stage >= 2
    if not plan.stages_gradients or (wide == narrow and count == 1):
        return 0.0
    elements = sum(unit.shard_numel if late else unit.numel for unit in plan.units if not unit.frozen)
    first = narrow + wide if wide > narrow else 0
    return elements * (first + (count - 1) * (narrow + 2 * wide)) / cluster.device.memory_bandwidth


@pytest.mark.parametrize(
    "model, cluster, layout, workload",
    [pytest.param(*d, id=f"{d[0]}:{d[2]}:{d[1]}:{d[3].batch}") for d in draws(DRAWS, "floors")],
)
def test_no_price_is_below_its_floor(model, cluster, layout, workload):
    cluster, config = Cluster.parse(cluster), get(model)
    report = estimate(model, layout, workload, cluster)
    timing, mesh = report.timing, Mesh.of(layout, config)
    parts = timing["parts"]
    for name, floor in busiest(report.roles, mesh, cluster).items():
        assert timing["links"][name] >= floor * 0.98, (
            f"{name}: {timing['links'][name]} s priced, {floor} s at full rate"
        )
    assert parts["gradients"] >= gradient_floor(config, layout, workload, cluster) * 0.98
