"""Whatever is asked, figures or one line; and no figure moves the wrong way. 10,000 questions with SHARDWISE_ALL=1."""

from dataclasses import replace
from math import isfinite

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from harness.frames import frame_of
from harness.strategies import any_layouts
from harness.today import EVERYTHING, some_of
from shardwise.cluster import Cluster, Link
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, check, check_runnable
from shardwise.layout.legality import valid_tp
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.model.config import Experts, LatentAttention
from shardwise.planner import Space, plan, price_one, search
from shardwise.planner.bounds import MemoryBound
from shardwise.planner.exact import ExactMemory, rank_plan
from shardwise.planner.runnable import OWN
from shardwise.planner.shortfall import usable_bytes
from shardwise.planner.space import EVEN, weighed
from shardwise.predict.memory.step import predict_bytes
from shardwise.predict.step_seconds import step_seconds
from shardwise.predict.time import ENGINES, Pricing, engine

EXAMPLES = 10_000 if EVERYTHING else 80
FEATURES = {name: profile.features for name, profile in ENGINES.items() if profile.features.sources}
TRAINING = ("megatron-bridge", "megatron-lm-2022", "llm-foundry")
QUIET = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def mixtures(draw: st.DrawFn, layers: int) -> Experts:
    """Experts of a model with so many layers, of which the first ones may have none."""
    count = draw(st.sampled_from([1, 2, 3, 8, 64, 256]))
    return Experts(
        count, draw(st.integers(1, min(count, 8))), draw(st.sampled_from([100, 768, 14336])),
        shared=draw(st.integers(0, 2)), dense_layers=draw(st.integers(0, min(3, layers))),
        router_bias=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Decoders of both kinds, from toys to hundreds of billions of parameters."""
    kv_heads = draw(st.sampled_from([1, 2, 4, 8, 12]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4, 8]))
    shared = {
        "name": "random", "vocab": draw(st.sampled_from([100, 32000, 50257, 128256])),
        "hidden": draw(st.sampled_from([64, 768, 4096, 12288, 20000])), "layers": draw(st.integers(1, 130)),
        "heads": heads, "kv_heads": kv_heads, "head_dim": draw(st.sampled_from([16, 64, 128])),
        "ffn": draw(st.sampled_from([100, 3072, 14336, 53248])), "max_positions": 1 << 20, "tied": draw(st.booleans()),
    }  # fmt: skip
    if draw(st.booleans()):
        experts = draw(st.none() | mixtures(shared["layers"]))
        if draw(st.integers(0, 2)) == 0:
            latent = LatentAttention(96, 64, 32, 16, 32)
            return ModelConfig(**shared | {"kv_heads": heads, "head_dim": 48}, experts=experts, latent_attention=latent)
        return ModelConfig(
            **shared, qk_norm=draw(st.booleans()), bias=draw(st.sampled_from(["none", "qkv"])), experts=experts
        )
    dropout = draw(st.sampled_from([0.0, 0.1]))
    return ModelConfig(
        **shared, norm="layernorm", positions=draw(st.sampled_from(["learned", "alibi"])), activation="gelu",
        embedding_norm=draw(st.booleans()), gated=False, bias="all", dropout=dropout, attention_dropout=dropout,
    )  # fmt: skip


CLUSTERS = st.builds(
    "{}x{}x{}".format,
    st.sampled_from([1, 2, 3, 16, 1_000_000]),
    st.sampled_from([1, 4, 7, 8]),
    st.sampled_from(["H100", "A100-40GB", "L4", "B200", "MI300X", "TPU-v5p", "CPU", "GB200", "H1OO", "RTX4090"]),
)
NONSENSE = st.tuples(st.sampled_from([-1, 0, 1, 100, 1 << 20]), st.sampled_from([-3, 0, 1, 6, 1000]))


@st.composite
def questions(draw: st.DrawFn) -> tuple[ModelConfig, str, tuple[int, int], Layout]:
    """A model, a cluster, tokens and sequences, and a layout; one in six makes no sense."""
    model, layout = draw(models()), draw(any_layouts())
    if draw(st.integers(0, 5)) == 0:
        return model, draw(CLUSTERS), draw(NONSENSE), layout
    usual = dict.fromkeys(("virtual",) if model.experts else ("ep", "virtual"), 1) | {
        "etp": 0,
        "stages": (),
        "offload": "none",
        "precision": "bf16",
    }
    usual |= {"grads": "bf16", "compile": "off", "order": Layout().order}
    kept = draw(st.sets(st.sampled_from(sorted(usual)), max_size=1))
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "zb-h1", layout.schedule]))
    tp = draw(st.sampled_from([t for t in valid_tp(model) if t <= 64]))
    try:
        layout = replace(
            layout, **{key: value for key, value in usual.items() if key not in kept}, schedule=schedule, tp=tp,
            sp=tp > 1 and (layout.sp or bool(model.experts)), attention="math" if model.attention_dropout else "sdpa",
        )  # fmt: skip
    except UserError:
        layout = Layout(tp=tp)
    batch = layout.dp * layout.micro * draw(st.sampled_from([1, 2, 8, 24]))
    sequence = layout.cp * layout.tp * draw(st.sampled_from([1, 64, 1024]))
    cluster = draw(st.sampled_from(["8xH100", "2x8xA100", "3x4xH200", "1xB200", "7xMI300X"]))
    return model, cluster, (sequence, batch), layout


@QUIET
@given(questions(), st.sampled_from(TRAINING), st.booleans())
def test_random_questions_get_figures_or_one_line(question, software, whole):
    model, text, numbers, layout = question
    try:
        cluster, workload = Cluster.parse(text), Workload(*numbers)
        if whole and cluster.devices < 64:
            space = Space(model, cluster, workload, engine(software))
            found = search(space, Pricing(cluster), top=2, usable=usable_bytes(cluster)).best
        else:
            check(layout, model, workload)
            # Enough devices for it.
            cluster = Cluster.parse(f"512x8x{cluster.device.name}")
            found = (price_one(model, layout, workload, engine(software), Pricing(cluster)),)
    except UserError as error:
        assert str(error) and "\n" not in str(error)
        return
    for one in found:
        assert isfinite(one.seconds) and one.seconds > 0
        assert all(isfinite(part) and part >= 0 for part in one.parts.values()), one.parts
        assert isfinite(one.held.total) and one.held.total > 0


@st.composite
def priced(draw: st.DrawFn) -> tuple[ModelConfig, Layout, Workload]:
    tp, pp, dp, cp = (draw(st.sampled_from([1, 2, 4])) for _ in range(4))
    ends = draw(st.sampled_from([EVEN, EVEN, (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)])) if pp > 1 else EVEN
    layers, experts, ep = 4 * pp - sum(ends), None, 1
    if draw(st.booleans()):
        dense = draw(st.sampled_from([0, 0, 1, 3, 5]))
        experts = Experts(8, draw(st.integers(1, 8)), 1024, draw(st.integers(0, 1)), min(dense, layers - 1))
        ep = draw(st.sampled_from([n for n in (1, 2, 4, 8) if (dp * cp * tp) % n == 0]))
    window, every = draw(st.sampled_from([(0, 0), (0, 0), (256, 0), (256, 2), (256, 3)]))
    model = ModelConfig(
        "random", 32000, 1024, layers, 16, 4096, 4096, kv_heads=draw(st.sampled_from([4, 16])), experts=experts,
        window=window, full_attention_every=every,
    )  # fmt: skip
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved"])) if pp > 1 else "1f1b"
    zero = draw(st.integers(0, 3))
    layout = Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, zero=zero, shard=draw(st.sampled_from([0, 2])) if zero and dp * cp > 2 else 0,
        sp=tp > 1 and (experts is not None or draw(st.booleans())), schedule=schedule, ep=ep,
        virtual=2 if schedule == "interleaved" else 1,
        micro=draw(st.sampled_from([1, 2])), recompute=draw(st.sampled_from(["none", "selective", "full"])),
    )  # fmt: skip
    if ends != EVEN:
        layout = replace(layout, stages=weighed(layers, layout.stage_count, ends))
    return model, layout, Workload(1024, dp * layout.micro * pp * draw(st.sampled_from([1, 2, 4])))


HOST_BOUND = (
    ModelConfig("random", 32000, 1024, 7, 16, 4096, 4096, kv_heads=4, experts=Experts(8, 1, 1024)),
    Layout(tp=2, pp=2, sp=True, stages=(4, 3)), Workload(1024, 2),
)  # fmt: skip


def slower(cluster: Cluster, which: str, share: float) -> Cluster:
    """The cluster with a share of the bandwidth of one kind of link, or of a rate of its devices."""
    if which in ("intra", "inter"):
        link = getattr(cluster, which)
        return replace(cluster, **{which: Link(link.alpha, link.bandwidth * share)})
    peaks = {dtype: rate * share for dtype, rate in cluster.device.peak_flops.items()}
    rates = {"peak_flops": peaks} if which == "products" else {"memory_bandwidth": share * 3.35e12}
    return replace(cluster, device=replace(cluster.device, **rates))


SOFTWARE = st.sampled_from([*TRAINING, "shardwise"])


@example(HOST_BOUND, 0.5, "intra", "megatron-bridge")
@settings(QUIET, max_examples=max(60, EXAMPLES // 10))
@given(priced(), st.floats(0.02, 1), st.sampled_from(["intra", "inter", "memory", "products"]), SOFTWARE)
def test_slower_hardware_makes_nothing_faster(case, share, which, software):
    model, layout, workload = case
    clusters = [slower(Cluster.parse("8x8xH100"), which, less) for less in (1, share)]
    fast, slow = (price_one(model, layout, workload, engine(software), Pricing(on)).seconds for on in clusters)
    assert slow >= fast * (1 - (1e-9 if which in ("intra", "inter") else 1e-4))


@settings(QUIET, max_examples=max(60, EXAMPLES // 10))
@given(priced(), st.sampled_from(["seq", "batch", "micro", "ffn", "vocab"]), SOFTWARE)
def test_larger_steps_take_no_less_time_and_memory(case, key, software):
    """Rounding of tiles aside. And no exposed traffic of data ranks is longer than its collectives alone."""
    model, layout, workload = case
    cluster = Cluster.parse("8x8xH100")
    keys = (key, "batch") if key == "micro" else (key,)
    larger = [replace(one, **{key: 2 * getattr(one, key) for key in keys if hasattr(one, key)}) for one in case]
    before, after = (price_one(*each, engine(software), Pricing(cluster)) for each in (case, larger))
    assert after.seconds >= before.seconds * (1 - 5e-3) and after.held.total >= before.held.total
    step = step_seconds(model, layout, workload, cluster, software)
    assert step.parts["data"] <= step.links["data"] * (1 + 1e-9) and step.seconds == pytest.approx(before.seconds)


@settings(QUIET, max_examples=max(40, EXAMPLES // 10))
@given(priced())
def test_experts_on_more_ranks_need_no_more_memory(case):
    """Each rank has fewer of them; without ZeRO, with which their states have fewer ranks to be sharded over, too."""
    model, layout, workload = case
    if model.experts is None or layout.data_ranks * layout.tp % (2 * layout.ep) or layout.ep == 8:
        return
    one, more = (replace(layout, zero=0, shard=0, ep=ep, etp=1) for ep in (layout.ep, 2 * layout.ep))
    exact = ExactMemory(model, workload, Cluster.parse("8x8xH100"))
    few, many = (exact.total(each) for each in (one, more))
    assert many < few or (many == few and model.experts.dense_layers > 1)  # of a rank without experts


@settings(QUIET, max_examples=max(60, EXAMPLES // 5))
@given(priced(), st.sampled_from(["8x8xH100", "64xcpu", "8x8xcpu"]))
def test_the_bound_is_never_above_the_bytes(case, text):
    model, layout, workload = case
    exact = ExactMemory(model, workload, Cluster.parse(text))
    try:
        frame = frame_of(model, layout, workload)
    except UserError:
        return
    bound = MemoryBound(model, workload, "sdpa", exact.backend).total(frame)
    assert float(bound.max()) <= exact.total(layout)
    ranks = (rank_plan(model, layout, workload, place, exact.backend) for place in range(layout.pp))
    assert exact.of(layout).bytes.total == max(predict_bytes(rank).total for rank in ranks)


PLANS = (
    ("llama-3-8b", "8xH100", 8192, 32), ("llama-3-70b", "4x8xH200", 4096, 64), ("gpt2", "4xL4", 1024, 16),
    ("llama-3-405b", "64x8xH200", 8192, 256), ("mixtral-8x7b", "2x8xH100", 4096, 64), ("qwen3-4b", "3xH100", 2048, 6),
)  # fmt: skip


@pytest.mark.parametrize(("name", "cluster", "seq", "batch"), some_of(PLANS, 3, "plans"))
def test_every_layout_of_a_plan_runs_on_its_engine(name, cluster, seq, batch):
    """The default plan's under `train`, which says no to what it lacks; another engine's have that one's features."""
    model, workload = get(name), Workload(seq, batch)
    here = plan(name, cluster, workload, top=50, explain=False)
    assert here.engine == "shardwise" and not here.none_runs
    for one in here.ranked:
        check_runnable(one.layout, model, workload)
    for software in some_of(sorted(FEATURES.keys() - set(OWN)), 3, f"engines for {name}"):
        try:
            found = plan(name, cluster, workload, engine=software, top=50, explain=False)
        except UserError as error:
            reasons = ("does not fit", "no layout splits", "does not run models with experts")
            assert any(reason in str(error) for reason in reasons)
            continue
        for one in found.ranked:
            assert not FEATURES[software].missing(one.layout, model.layers), (software, one.layout)


def test_engines_lack_what_their_sources_say():
    """Zero-bubble schedules are in this runtime alone; sequence and context parallelism came to Megatron later."""
    zb, sp, cp, ep, three = "pp=2,schedule=zb-h1", "tp=2,sp", "cp=2", "ep=2,dp=2", "dp=2,zero=3"
    interleaved = "pp=2,schedule=interleaved,virtual=2"
    words = (zb, sp, cp, ep, interleaved, three)
    lacking = {
        name: [text for text in words if FEATURES[name].missing(Layout.parse(text), 8)] for name in sorted(FEATURES)
    }
    assert lacking["megatron-bridge"] == [zb]
    assert lacking["megatron-lm-2022"] == [zb, cp, ep, three]
    assert lacking["megatron-deepspeed-bf16"] == [zb, sp, cp, ep, interleaved, three]
    assert lacking["llm-foundry"] == [zb, sp, cp, ep, interleaved]
    assert lacking["shardwise"] == lacking["shardwise-cpu"] == []


@settings(QUIET, max_examples=60)
@given(any_layouts())
def test_the_runtimes_features_are_what_it_checks(layout):
    fixed = {"cpkind": "ring", "etp": 0, "stages": (), "offload": "none", "schedule": "1f1b", "virtual": 1}
    try:
        layout = replace(layout, **fixed, recompute="none")
    except UserError:
        return
    assert not FEATURES["shardwise"].missing(layout, layout.pp)
