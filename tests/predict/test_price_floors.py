"""No priced time is below what the same estimate's ledger, gradients, weights and operations take at the full rates.

Each resource has a floor of its own: collectives of each kind at the full bandwidth of their links, products at the
peak, and the bytes of weights, gradients and optimizer state at the full bandwidth of the memory. What a price leaves
out decides searches, and the mean error over published rows does not show it.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from harness.cases import table
from harness.today import EVERYTHING
from harness.today import seed as today
from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.axes import named
from shardwise.layout.legality import check_runnable
from shardwise.layout.mesh import Mesh
from shardwise.layout.optimizers import update_bytes
from shardwise.layout.units import unit_plan
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.model.flops import matmul_parameters, training_flops_per_sequence
from shardwise.model.parameters import blueprint
from shardwise.predict.estimate import estimate
from shardwise.predict.supported import in_closed_form
from shardwise.predict.time import ENGINES, Pricing
from shardwise.predict.time.serving import ServingLayout, decode_step, prefill
from shardwise.predict.time.step import LINKS
from shardwise.report.step_report import DTYPE_BYTES, LedgerRow, Role

MODELS = ("llama-3.2-1b", "llama-3-8b", "llama-3-70b", "qwen3-8b", "gpt2-xl", "mixtral-8x7b", "qwen3-30b-a3b")
CLUSTERS = ("8xH100", "4x8xH100", "2x8xA100", "4x8xB200", "8xRTX-4090", "16x8xH100")
DRAWS = 2000 if EVERYTHING else 60
VOLUME = {"all_reduce": 2.0, "all_gather_into": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Bytes that each rank sends over the tensor's, times (n - 1) / n."""


def draws(count: int, key: str) -> Iterator[tuple[str, str, Layout, Workload]]:
    """Legal layouts of the whole space, drawn by the day."""
    generator = random.Random(f"{key} {today()}")
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
            check_runnable(layout, get(model), workload)
        except UserError:
            continue
        if layout.pp > 1 and not in_closed_form(layout.schedule, layout.virtual, layout.pp, accumulate):
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
    """Seconds of the passes that add up a rank's gradients, at the full bandwidth of the memory: of the rank that has
    the fewest."""
    first = unit_plan(model, layout, workload, backend="nccl")
    narrow, wide = DTYPE_BYTES[layout.dtype], DTYPE_BYTES[first.grad_dtype]
    late, count = layout.stage >= 2, first.micro_batches
    if not first.stages_gradients or (wide == narrow and count == 1):
        return 0.0
    copied = narrow + wide if wide > narrow else 0
    moved = copied + (count - 1) * (narrow + 2 * wide)
    plans = (replace(first, pp_rank=rank) for rank in {0, layout.pp // 2, layout.pp - 1})
    numel = min(sum(u.shard_numel if late else u.numel for u in plan.units if not u.frozen) for plan in plans)
    return numel * moved / cluster.device.memory_bandwidth


def computed_floors(
    model: ModelConfig, layout: Layout, workload: Workload, cluster: Cluster, gradient: float, update: float
) -> dict[str, float]:
    """Seconds of a rank's products and of its update at the full rates. gradient: bytes that a product moves for each
    gradient of a weight; update: bytes that the optimizer moves per parameter."""
    peak, bandwidth = cluster.device.peak("bfloat16"), cluster.device.memory_bandwidth
    flops = workload.batch * training_flops_per_sequence(model, workload.seq) / layout.ranks
    floors = {"products": flops / peak}
    matrices = model.layers * block_matrices(model) / layout.pp / layout.tp
    if not model.experts:
        count = workload.micro_batches(layout)
        floors["matmul"] = matrices * count * (4.0 + gradient) / bandwidth
    shards = layout.shard_ranks if layout.stage else 1
    floors["optimizer"] = matrices / shards * update / bandwidth if not model.experts else 0.0
    return floors


def block_matrices(model: ModelConfig) -> int:
    """Weights of the products of a block of a dense model."""
    block = blueprint(model).of_kind("block")[0]
    return sum(prod(p.shape) for p in block.parameters if len(p.shape) == 2)


CASES = list(draws(DRAWS, "floors"))
GROUPS = 40
"""Cases of a test that `make test-all` runs: draws are divided over them, so that it makes all."""
TRAINING = sorted(name for name, one in ENGINES.items() if not one.facts["optimizer_bytes"].startswith("not used"))


@pytest.mark.parametrize("group", range(GROUPS))
def test_no_price_is_below_its_floor(group):
    for case in CASES[group::GROUPS]:
        check_training(*case)


def check_training(model: str, cluster_text: str, layout: Layout, workload: Workload) -> None:
    cluster, config = Cluster.parse(cluster_text), get(model)
    report = estimate(model, layout, workload, cluster)
    timing, mesh = report.timing, Mesh.of(layout, config)
    for name, floor in busiest(report.roles, mesh, cluster).items():
        if floor < SCALARS:
            continue
        assert timing["links"][name] >= floor * 0.98, (
            f"{name}: priced {timing['links'][name]} s, at full rate {floor}: {model} {layout} {cluster} {workload}"
        )
    check(timing, config, layout, workload, cluster, 2.0)
    assert timing["parts"]["gradients"] >= gradient_floor(config, layout, workload, cluster) * 0.98, (model, layout)


SCALARS = 1e-6
"""Seconds of what is no tensor: experts' loads."""
OMITTED = table(__file__, "OMITTED")
"""Work that prices left out once, with a layout whose floor it decides."""


@pytest.mark.parametrize("what", OMITTED)
def test_what_prices_left_out_once(what):
    model, layout, cluster, seq, batch = OMITTED[what]
    check_training(model, cluster, Layout.parse(layout), Workload(seq=seq, batch=batch))


@pytest.mark.parametrize("group", range(min(GROUPS, DRAWS // 3)))
def test_no_price_of_another_engine_is_below_its_floor(group):
    for case in CASES[::3][group::GROUPS]:
        check_engine(*case)


def check_engine(model: str, cluster_text: str, layout: Layout, workload: Workload) -> None:
    cluster, config = Cluster.parse(cluster_text), get(model)
    software = ENGINES[random.Random(str(layout)).choice(TRAINING)]
    timing = estimate(model, layout, workload, cluster, engine=software.name).timing
    fused = software.wgrad_accumulates and software.grad_bytes != "plan"
    product = 2 * float(software.grad_bytes) if fused else 2.0
    check(timing, config, layout, workload, cluster, product, min(software.optimizer_bytes, update_bytes("adamw")))
    # Weights' gradients and parameters over the data ranks, each once a step at least, at the engine's own width.
    data = layout.dp * layout.cp
    width = 2.0 if software.grad_bytes == "plan" else software.grad_bytes
    numel = config.layers * block_matrices(config) / layout.pp / layout.tp if not config.experts else 0.0
    nodes = -(-layout.ranks // cluster.devices_per_node)
    link = (
        cluster.intra.bandwidth * cluster.devices_per_node
        if nodes == 1
        else max(cluster.inter.bandwidth, cluster.intra.bandwidth) * cluster.devices_per_node
    )
    assert timing["links"]["data"] >= 2 * numel * min(width, 2.0) * (data - 1) / data / link, (model, layout)


def check(
    timing: dict[str, Any],
    model: ModelConfig,
    layout: Layout,
    workload: Workload,
    cluster: Cluster,
    gradient: float,
    update: float = update_bytes("adamw"),
) -> None:
    parts = timing["parts"] | {"products": timing["parts"]["matmul"] + timing["parts"]["attention"]}
    for name, floor in computed_floors(model, layout, workload, cluster, gradient, update).items():
        assert parts[name] >= floor * 0.98, (
            f"{name}: priced {parts[name]} s, at the full rate {floor} s: {model.name} {layout} {cluster} {workload}"
        )


@pytest.mark.parametrize("group", range(min(GROUPS, DRAWS // 2)))
def test_no_price_of_serving_is_below_its_floor(group):
    for seed in range(group, DRAWS // 2, GROUPS):
        check_serving(seed)


def check_serving(seed: int) -> None:
    generator = random.Random(f"serving {seed} {today()}")
    pick = generator.choice
    model, cluster = get(pick(MODELS)), Cluster.parse(pick(("8xH100", "8xA100", "8xB200", "8xRTX-4090")))
    software = ENGINES[pick(("vllm", "tensorrt-llm", "gpt-fast"))]
    serving = ServingLayout(weights=pick(("bfloat16", "int8")), tp=pick((1, 2, 4, 8)))
    batch, context = pick((1, 8, 64, 256)), pick((128, 2048, 16384))
    pricing = Pricing(cluster)
    step = float(decode_step(model, serving, batch, context, software, pricing).seconds)
    read = (1.0 if serving.weights == "int8" else 2.0) * matmul_parameters(model) / serving.tp
    assert step >= read / cluster.device.memory_bandwidth, seed
    prompt = float(prefill(model, serving, batch, context, software, pricing).seconds)
    # The head's product is of one token a prompt.
    flops = 2.0 * batch * context * (matmul_parameters(model) - model.vocab * model.hidden) / serving.tp
    assert prompt >= flops / max(cluster.device.peak_flops.values()), seed
