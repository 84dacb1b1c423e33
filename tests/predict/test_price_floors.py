"""No priced time is below what the same estimate's ledger, gradients, weights and operations take at the full rates.

Each resource has a floor of its own: collectives of each kind at the full bandwidth of their links, products at the
peak, and the bytes of weights, gradients and optimizer state at the full bandwidth of the memory. What a price leaves
out decides searches, and the mean error over published rows does not show it.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from harness.cases import table
from harness.space import cases
from harness.today import EVERYTHING, some_of
from harness.today import seed as today
from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.axes import KV, TP, named
from shardwise.layout.gathers import gather_counts
from shardwise.layout.legality import check_runnable
from shardwise.layout.mesh import Mesh
from shardwise.layout.optimizers import update_bytes
from shardwise.layout.units import unit_plan
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.model.flops import matmul_parameters, training_flops_per_sequence
from shardwise.model.lora import Lora
from shardwise.model.parameters import blueprint
from shardwise.planner.plan import plan
from shardwise.predict.estimate import estimate
from shardwise.predict.supported import in_closed_form
from shardwise.predict.time import ENGINES, Pricing, ServedModel, StepShape, engine
from shardwise.predict.time.kernels import Kernels
from shardwise.predict.time.pieces import pieces
from shardwise.predict.time.serving import ServingLayout
from shardwise.predict.time.step import LINKS, PricedStep, training_step
from shardwise.predict.time.traffic import held_elements, traffic
from shardwise.report.step_report import DTYPE_BYTES, LedgerRow, Role, StepReport
from shardwise.schedule.pipeline.completion import gathers_of_a_stage

MODELS = ("llama-3.2-1b", "llama-3-8b", "llama-3-70b", "qwen3-8b", "gpt2-xl", "mixtral-8x7b", "qwen3-30b-a3b")
CLUSTERS = ("8xH100", "4x8xH100", "2x8xA100", "4x8xB200", "8xRTX-4090", "16x8xH100")
DRAWS = 2000 if EVERYTHING else 60
VOLUME = {"all_reduce": 2.0, "all_gather_into": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Bytes that each rank sends over the tensor's, times (n - 1) / n."""


def draws(count: int, key: str) -> Iterator[tuple[str, str, Layout, Workload]]:
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
        text += f",zero={zero},micro={pick((1, 2))},recompute={pick(('none', 'selective', 'full', 'input'))}"
        if degrees["cp"] > 1 and degrees["dp"] > 1:
            text += f",cpkind={pick(('ring', 'ring', 'ulysses', 'allgather'))}"
        text += pick(("", ",sp")) * (degrees["tp"] > 1) + f",grads={pick(('bf16', 'fp32'))}"
        if zero and data > 2 and pick((True, False)):
            text += f",shard={data // 2}"
        elif zero == 3 and data > 2:
            # Over cp alone all-to-alls are taken for those of attention.
            text += pick(("", ",hpz=2", ",qwz", ",qgz" if degrees["dp"] > 1 else ""))
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


def part_of(row: LedgerRow, cut: bool) -> str:
    """The part of a step that a row is priced in; empty for scalars and checks. cut: as of `busiest`."""
    axes = set(row.axes.split("_"))
    if row.phase == "loss" or row.unit in ("gradient norm", "valid tokens", "loss", "expert loads"):
        return ""
    if row.dtype == "int64":
        return "experts"
    if row.unit == "tied":
        return "data"
    if axes == {"pp"}:
        return "pipeline"
    if axes == {"ep"}:
        return "experts"
    # Over cp alone go messages of attention, and, without data parallelism, units.
    alone = axes == {"cp"} and (cut or row.op in ("send", "recv", "all_to_all"))
    return "tensor" if axes <= {"tp", "kv"} or alone else "data"


def busiest(roles: tuple[Role, ...], cut: bool, seconds: Callable[[LedgerRow, int], float]) -> list[dict[str, float]]:
    """Seconds of each part, by role. cut: whether there is data parallelism beside cp."""
    found = []
    for role in roles:
        mine: Counter[str] = Counter()
        for row in role.ledger:
            if row.op != "recv" and (name := part_of(row, cut)):
                mine[name] += seconds(row, role.ranks[0])
        found.append({name: mine[name] for name in LINKS})
    return found


def gradient_floor(model: ModelConfig, layout: Layout, workload: Workload, cluster: Cluster) -> float:
    """Seconds of the passes that add up a rank's gradients, at the full bandwidth of the memory: of the rank that has
    the fewest."""
    first = unit_plan(model, layout, workload, backend="nccl")
    narrow, wide = DTYPE_BYTES[layout.dtype], DTYPE_BYTES[first.dtypes.gradients]
    late, count = layout.stage >= 2, first.micro_batches
    if not first.dtypes.stages_gradients or (wide == narrow and count == 1):
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


def check_training(model: str, cluster_text: str, layout: Layout, workload: Workload, within: float = 0.1) -> None:
    cluster, config = Cluster.parse(cluster_text), get(model)
    report = estimate(model, layout, workload, cluster)
    timing, mesh = report.timing, Mesh.of(layout, config)
    roles = busiest(report.roles, layout.dp > 1, lambda row, rank: floor_of(row, rank, mesh, cluster))
    # Where layers do not divide, the busiest rank may be the one with the head, which has a block fewer.
    of_busiest = min if config.layers % (layout.pp * layout.virtual) else max
    for name in LINKS:
        floor = of_busiest(role[name] for role in roles)
        if floor < SCALARS:
            continue
        assert timing["links"][name] >= floor * 0.98, (
            f"{name}: priced {timing['links'][name]} s, at full rate {floor}: {model} {layout} {cluster} {workload}"
        )
    check_ledger(report, config, mesh, cluster, layout, f"{model} {layout} {cluster} {workload}", within)
    check(timing, config, layout, workload, cluster, 2.0)
    assert timing["parts"]["gradients"] >= gradient_floor(config, layout, workload, cluster) * 0.98, (model, layout)


def check_ledger(
    report: StepReport, model: ModelConfig, mesh: Mesh, cluster: Cluster, layout: Layout, case: str,
    within: float = 0.1,
) -> None:  # fmt: skip
    """What a step sends is priced as if its ledger were, row by row: neither less nor twice. A pipeline's messages are
    left out: their price includes the fill."""
    collectives, uneven = Pricing(cluster, layout=layout).collectives, model.layers % (layout.pp * layout.virtual)

    def seconds(row: LedgerRow, rank: int) -> float:
        first, second, *_ = group = sorted(mesh.group(named(row.axes), rank))
        nbytes = row.payload_bytes / row.count
        if row.op == "send":
            return row.count * float(collectives.hop(nbytes, second - first, len(group)))
        return row.count * float(collectives.seconds(row.op, nbytes, len(group), second - first))

    roles, links = busiest(report.roles, layout.dp > 1, seconds), report.timing["links"]
    for name in (name for name in LINKS if name != "pipeline"):
        rows, price = sorted(role[name] for role in roles), links[name]
        # Where the busiest rank has a block more than one with a table, it may be in between.
        pairs = [(rows[0], rows[-1])] if uneven else zip(rows, rows, strict=True)
        assert any((1 - within) * least - FEW <= price <= (1 + within) * most + FEW for least, most in pairs), (
            name,
            price,
            rows,
            case,
        )


FEW = 2e-4
"""Seconds of calls of a step that are no part's."""
SCALARS = 1e-6
"""Seconds of what is no tensor: experts' loads."""
OMITTED = table(__file__, "OMITTED")
"""Work that prices left out once, with a layout whose floor it decides."""


@pytest.mark.parametrize("what", OMITTED)
def test_what_prices_left_out_once(what):
    model, layout, cluster, seq, batch = OMITTED[what]
    check_training(model, cluster, Layout.parse(layout), Workload(seq=seq, batch=batch), 0.06)


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
    timing: dict[str, Any], model: ModelConfig, layout: Layout, workload: Workload, cluster: Cluster, gradient: float,
    update: float = update_bytes("adamw"),
) -> None:  # fmt: skip
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
    step = float(ServedModel(model, serving, software, pricing).decode_step(batch, context).seconds)
    read = (1.0 if serving.weights == "int8" else 2.0) * matmul_parameters(model) / serving.tp
    assert step >= read / cluster.device.memory_bandwidth, seed
    prompt = float(ServedModel(model, serving, software, pricing).prefill(batch, context).seconds)
    # The head's product is of one token a prompt.
    flops = 2.0 * batch * context * (matmul_parameters(model) - model.vocab * model.hidden) / serving.tp
    assert prompt >= flops / max(cluster.device.peak_flops.values()), seed


# -- The price of a step follows the plan: widths of gradients, passes that add them up, gathers of a pipeline


LLAMA = get("llama-3-8b")


@pytest.mark.parametrize("point", some_of([p for p in cases("dense") if p.case.precision != "fp64"], 12, "widths"))
def test_widths_are_those_of_the_plan(point):
    plan_of = unit_plan(point.case.model, point.layout, point.case.workload, backend="nccl")
    split = StepShape.of(point.layout, point.case.workload)
    assert float(split.gradient_width) == DTYPE_BYTES[plan_of.dtypes.gradients]
    assert float(split.wire_width) == DTYPE_BYTES[plan_of.dtypes.wire]


FROZEN = [("llama-3-8b", base) for base in ("", "int8", "nf4")]
PLAIN = [(name, None) for name in ("qwen3-8b", "gpt2", "qwen3-30b-a3b")]
HELD = [(*case, tp) for case in PLAIN + FROZEN for tp in (1, 2, 4, 16) if get(case[0]).heads % tp == 0]


@pytest.mark.parametrize(("name", "base", "tp"), HELD)
def test_parameters_are_those_of_the_plan(name, base, tp):
    model = get(name) if base is None else get(name).replace(lora=Lora(8, base=base))
    for sp in {False, tp > 1}:
        plan_of = unit_plan(model, Layout(tp=tp, sp=sp), Workload(seq=64, batch=1), backend="nccl")
        units = [unit for unit in plan_of.units if unit.name.startswith("blocks.")]
        held, whole = (held_elements(model, tp, trained, sp) for trained in (True, False))
        dense = [unit for unit in units if ".experts" not in unit.name]
        assert held.dense == sum(unit.numel for unit in dense if not unit.frozen) and held.narrow == 0
        assert whole.dense == sum(unit.numel for unit in dense if not unit.dtype)
        assert whole.narrow == sum(unit.numel for unit in dense if unit.dtype)
        sums = Counter({TP: 0, KV: 0})
        for unit in units:
            for start, stop, axes in unit.partial_sums:
                sums[axes] += stop - start
        assert (held.partial, held.repeated) == (sums[TP], sums[KV])


@pytest.mark.parametrize(("name", "base"), FROZEN)
@pytest.mark.parametrize("text", ["dp=8,zero=3,micro=2", "dp=2,pp=4,zero=3", "dp=4,tp=2,zero=2,sp"])
def test_frozen_weights_are_sent_as_they_are_stored(name, base, text):
    model, layout, cluster = get(name).replace(lora=Lora(16, base=base)), Layout.parse(text), Cluster.parse("8xH100")
    report = estimate(model, layout, Workload(seq=512, batch=64), cluster)
    check_ledger(report, model, Mesh.of(layout, model), cluster, layout, text)


def test_gradients_of_several_micro_batches_go_over_the_wire_in_fp32():
    # llama-3.2-1b, dp=8,zero=1: 4.94 GB a step with 8 micro-batches, half with one; priced alike before.
    one, many = (
        traffic(get("llama-3.2-1b"), StepShape(2048, dp=8, zero=1, shard=8, micro_batches=m), engine("shardwise"),
                Pricing(Cluster.parse("8xH100")))
        for m in (1, 8)
    )  # fmt: skip
    assert float(many.reduce) == pytest.approx(2 * float(one.reduce), rel=0.05)
    # From stage 2 on each micro-batch's are reduced in 16 bits.
    late = traffic(LLAMA, StepShape(2048, dp=8, zero=2, shard=8, micro_batches=8), engine("shardwise"),
                   Pricing(Cluster.parse("8xH100")))  # fmt: skip
    early = traffic(LLAMA, StepShape(2048, dp=8, zero=1, shard=8, micro_batches=1), engine("shardwise"),
                    Pricing(Cluster.parse("8xH100")))  # fmt: skip
    assert float(late.reduce) == pytest.approx(float(early.reduce))


@pytest.mark.parametrize(("grads", "count", "moved"), [("bf16", 1, 0), ("fp32", 1, 6), ("bf16", 8, 6 + 7 * 10)])
def test_adding_up_gradients_has_a_price_below_stage_2(grads, count, moved):
    layout, cluster = Layout.parse(f"dp=8,zero=1,grads={grads}"), Cluster.parse("8xH100")
    report = estimate(LLAMA, layout, Workload(seq=512, batch=8 * count), cluster)
    seconds = report.timing["parts"]["gradients"]
    least = moved * 8.03e9 / cluster.device.memory_bandwidth
    assert least * 0.99 <= seconds <= least * 1.3 + 1e-9
    cheaper = training_step(LLAMA, StepShape(512, dp=8, zero=1, shard=8, micro_batches=count), engine("shardwise"),
                            Pricing(cluster))  # fmt: skip
    assert (float(cheaper.parts["gradients"]) > 0) == (count > 1)


def test_a_product_that_adds_takes_as_long_as_its_accumulator_is_moved():
    pricing = Pricing(Cluster.parse("1xH100"))
    kernels: Kernels = pricing.kernels
    plain, adding = (float(kernels.matmul(28672, 8192, 512, "bfloat16", 1.0, "weight", out)) for out in (0.0, 8.0))
    assert adding >= 8 * 28672 * 8192 / pricing.constants.bandwidth > plain
    deep = [float(kernels.matmul(28672, 8192, 65536, "bfloat16", 1.0, "weight", out)) for out in (0.0, 8.0)]
    assert deep[0] == pytest.approx(deep[1]), "where the product itself takes longer, nothing changes"


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("layers", [3, 8])
@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3.2-1b"])
def test_blocks_are_gathered_as_often_as_slots_lack_them(name, layers, count):
    model, pricing = get(name).replace(layers=layers), Pricing(Cluster.parse("2xH100"))
    layout, workload = Layout.parse("dp=2,zero=3"), Workload(seq=64, batch=2 * count)
    counts = gather_counts(unit_plan(model, layout, workload, backend="nccl"))
    known = model, StepShape.of(layout, workload), engine("shardwise"), pricing
    step = PricedStep(*known, pieces(*known), traffic(*known), 1.0)
    blocks = sum(times for (_, gather), times in counts.items() if gather.unit.startswith("blocks."))
    assert float(step._gathers()) * layers * count == pytest.approx(blocks)


@pytest.mark.parametrize("virtual", [1, 2, 3, 4, 5, 6, 10])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_stages_are_gathered_as_often_as_the_schedule_does(pp, virtual):
    model = get("llama-3-8b").replace(layers=pp * virtual)
    schedule = f"schedule=interleaved,virtual={virtual}" if virtual > 1 else "schedule=1f1b"
    for rounds in (1, 2, 3, 5):
        layout = Layout.parse(f"dp=2,pp={pp},zero=3,{schedule}")
        first = unit_plan(model, layout, Workload(seq=64, batch=2 * pp * rounds), backend="nccl")
        counts = []
        for rank in range(pp):
            mine = replace(first, pp_rank=rank)
            blocks = set(mine.of_kind("block"))
            gathers = sum(n for (_, gather), n in gather_counts(mine).items() if gather.unit in blocks)
            counts.append(gathers / len(blocks))
        assert max(counts) == pytest.approx(float(gathers_of_a_stage(virtual, rounds)))


def test_a_ring_over_nodes_takes_as_long_as_its_longest_message():
    def inside(cp: int) -> float:
        split = StepShape(32768, cp=cp, micro_batches=1)
        return float(
            training_step(LLAMA, split, engine("shardwise"), Pricing(Cluster.parse("2x8xH100"))).parts["tensor"]
        )

    assert inside(16) > 4 * inside(8), "one message in eight crosses the network, and all wait for it"


def test_among_layouts_as_fast_the_most_common_comes_first():
    found = plan("llama-3-70b", "8x8xH100", seq=8192, batch=1024, top=3, explain=False)
    raw = plan("llama-3-70b", "8x8xH100", seq=8192, batch=1024, top=3, explain=False, by="fastest")
    assert found.fastest is not None and found.fastest.layout == raw.winner.layout
    assert raw.winner.seconds <= found.winner.seconds <= raw.winner.seconds * 1.05
    assert found.winner.layout.tp <= 8 and found.winner.layout.cp <= 2 and found.winner.layout.virtual <= 5
    assert raw.fastest is None and "within the error of 5%" in str(found)
    data = found.to_json()
    assert data["fastest"]["layout"] == str(raw.winner.layout)
    assert {row["layout"] for row in data["as_fast"]} >= {str(one.layout) for one in found.ranked}


@pytest.mark.parametrize("devices", some_of([128, 2048], 1, "405B"))
def test_405b_does_not_cut_short_sequences(devices):
    found = plan("llama-3-405b", f"{devices}x8xH100", seq=8192, batch=max(512, devices), top=1, explain=False)
    assert found.winner.layout.cp <= 2 and found.winner.layout.tp <= 8


def test_the_best_layout_keeps_a_margin_of_memory():
    found = plan("llama-3-8b", "8xH100", seq=8192, batch=64, top=5, explain=False)
    assert all(one.held.total <= found.room.safe for one in found.ranked)
    assert found.to_json()["ranked"][0]["memory"] == "fits"
    least = min(plan("llama-3-8b", "8xH100", seq=8192, batch=64, top=1, explain=False, by="memory").ranked,
                key=lambda one: one.held.total).held.total  # fmt: skip
    tight = replace(
        Cluster.parse("8xH100"), device=replace(Cluster.parse("8xH100").device, memory_bytes=least * 1.01 + 2e9)
    )
    risky = plan("llama-3-8b", tight, seq=8192, batch=64, top=1, explain=False)
    assert risky.to_json()["ranked"][0]["memory"] == "at risk" and "at risk" in risky.conclusion()
    assert any("margin" in warning for warning in risky.warnings)
    sure = plan("llama-3-8b", tight, seq=8192, batch=64, top=1, explain=False, reserve=2e9)
    assert sure.room.margin == 0.0 and sure.to_json()["ranked"][0]["memory"] == "fits"


def test_an_estimate_says_that_a_peak_is_at_risk():
    report = estimate(LLAMA, "dp=8,zero=2", cluster="8xH100", seq=8192, batch=64)
    room = report.room
    assert room["state"] == "fits" and room["safe"] < room["usable"]
    assert estimate(LLAMA, "dp=8", cluster="8xH100", seq=8192, batch=64).room["state"] == "does not fit"
