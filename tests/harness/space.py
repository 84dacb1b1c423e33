"""The layout space: cases are drawn from it by rule, none is written down by hand.

`all_cases` is a deterministic selection that covers every pair of choices that can occur together; `sample` draws a few
of them by a seed, so that a working day's tests see another part of the space than the day before. Pipelines have a
space of their own in `pipelines.py`, covered and sampled by the same means.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any

from harness.reference import BF16_STEPS, STEPS, Case
from harness.today import EVERY_LAYOUT, seed
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, check_runnable
from shardwise.model import ModelConfig
from shardwise.model.config import LatentAttention, RopeScaling

GENERATOR_SEED = 7
POOL = 4000
LEAST = 160
EIGHT_RANKS = 14
SAMPLE = 24
SEQ = 12

# Every vocabulary and most widths are odd or prime: whatever a layout divides by leaves a remainder somewhere.
_LLAMA = ModelConfig("llama", vocab=53, hidden=32, layers=2, heads=4, kv_heads=2, ffn=44, max_positions=64)
_GPT2 = ModelConfig(
    "gpt2", vocab=53, hidden=24, layers=2, heads=4, ffn=47, max_positions=16, norm="layernorm", positions="learned",
    activation="gelu_tanh", gated=False, bias="all", tied=True, dropout=0.1,
)  # fmt: skip
MODELS: dict[str, ModelConfig] = {
    model.name: model
    for model in (
        _LLAMA,
        _LLAMA.replace(
            name="mqa", hidden=24, heads=6, head_dim=6, kv_heads=1, ffn=43,
            rope_scaling=RopeScaling(4.0, 1.0, 4.0, 16),
        ),
        _LLAMA.replace(name="prime", hidden=29, heads=3, head_dim=8, kv_heads=3, ffn=41, vocab=59),
        _LLAMA.replace(name="qwen2", hidden=26, heads=6, head_dim=6, kv_heads=3, ffn=45, bias="qkv"),
        _LLAMA.replace(name="qwen3", hidden=24, heads=4, head_dim=8, kv_heads=2, ffn=47, qk_norm=True, tied=True),
        _LLAMA.replace(
            name="olmo2", hidden=26, heads=4, head_dim=6, kv_heads=2, ffn=45, norm_placement="post", qk_norm=True,
            qk_norm_scope="all heads",
        ),
        _LLAMA.replace(
            name="gemma2", hidden=24, heads=6, head_dim=8, kv_heads=3, ffn=43, activation="gelu_tanh", tied=True,
            norm_placement="both", norm_zero_centered=True, score_scale=7.0, score_softcap=2.0, logit_softcap=3.0,
            window=5, full_attention_every=2, scaled_embedding=True,
        ),
        _LLAMA.replace(
            name="latent", hidden=26, heads=6, kv_heads=6, head_dim=0, ffn=45,
            latent_attention=LatentAttention(q_rank=11, kv_rank=9, nope_head_dim=5, rope_head_dim=4, v_head_dim=7),
        ),
        _LLAMA.replace(
            name="latent-direct", hidden=29, heads=4, kv_heads=4, head_dim=0, ffn=47, tied=True, dropout=0.1,
            latent_attention=LatentAttention(q_rank=0, kv_rank=13, nope_head_dim=6, rope_head_dim=2, v_head_dim=3),
        ),
        _GPT2,
        _GPT2.replace(name="gpt2-drop", heads=6, kv_heads=6, head_dim=4, attention_dropout=0.2),
        _GPT2.replace(
            name="neox", heads=6, kv_heads=6, head_dim=8, hidden=48, ffn=61, positions="rope", rotary_fraction=0.25,
            activation="gelu", tied=False, parallel_residual=True, dropout=0.0,
        ),
    )
}  # fmt: skip

CHOICES: dict[str, list[Any]] = {
    "model": list(MODELS),
    "dp": [1, 2, 3, 4, 6, 8],
    "tp": [1, 2, 3, 4, 6],
    "zero": [0, 1, 2, 3, 3],
    "shard": [0, 0, 2, 3],
    "hpz": [0, 2, 2, 3],
    "sp": [False, True],
    "tpkind": ["megatron", "megatron", "gathered"],
    "recompute": ["none", "selective", "full", "input"],
    "attention": ["sdpa", "math"],
    "micro": [1, 2],
    "accumulate": [1, 2, 3],
    "documents": [False, True],
    "precision": ["fp64"] * 7 + ["fp32", "bf16", "bf16-fp32"],
    "order": ["pp-dp-cp-tp", "pp-tp-cp-dp"],
    "ignore": ["some", "some", "none", "most"],
}
WORLDS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Point:
    """One point of the space: what is trained, and how it is split. `choices` are the values it was drawn with."""

    id: str
    case: Case
    layout: Layout
    choices: tuple[tuple[str, Any], ...]

    def __getitem__(self, name: str) -> Any:
        return dict(self.choices)[name]


def point(**choices: Any) -> Point:
    """Build a point from values of `CHOICES`; missing ones are the first choice. Raises `UserError` if illegal."""
    chosen = {name: choices.get(name, values[0]) for name, values in CHOICES.items()}
    model = MODELS[chosen["model"]]
    precision, _, grads = chosen["precision"].partition("-")
    layout = Layout(
        **{
            key: chosen[key]
            for key in ("dp", "tp", "zero", "shard", "hpz", "sp", "tpkind", "recompute", "attention", "micro", "order")
        },
        precision=precision,
        grads=grads or "bf16",
    )
    batch = layout.dp * layout.micro * chosen["accumulate"]
    workload = Workload(seq=choices.get("seq", SEQ), batch=batch, isolate_documents=chosen["documents"])
    check_runnable(layout, model, workload)
    words = [chosen["model"], str(layout), f"x{chosen['accumulate']}"]
    words += ["documents"] * chosen["documents"] + [f"ignore-{chosen['ignore']}"] * (chosen["ignore"] != "some")
    steps = BF16_STEPS if precision == "bf16" else STEPS
    case = Case(model, workload, precision, layout.attention, ignore=chosen["ignore"], steps=steps)
    return Point(":".join(words), case, layout, tuple(chosen.items()))


def possible_copies(chosen: dict[str, Any], data: int) -> int:
    """The draw's hpz where it is legal, else 0: most layouts have no room for it. data: ranks of a model's part."""
    among = chosen["shard"] or data
    return chosen["hpz"] if chosen["zero"] == 3 and among > chosen["hpz"] and not among % (chosen["hpz"] or 1) else 0


def _draw(generator: random.Random) -> Point | None:
    """A random point; None when the draw is illegal, means the same as a simpler one, or needs another world."""
    chosen = {name: generator.choice(values) for name, values in CHOICES.items()}
    dp, tp = chosen["dp"], chosen["tp"]
    chosen["hpz"] = possible_copies(chosen, dp)
    pointless = (
        dp * tp not in WORLDS
        or (chosen["zero"] and dp == 1)
        or chosen["shard"] == dp
        or (chosen["order"] != CHOICES["order"][0] and 1 in (dp, tp))
        or (chosen["precision"] == "bf16-fp32" and chosen["accumulate"] > 1)
    )
    if pointless:
        return None
    try:
        return point(**chosen)
    except UserError:
        return None


def _pairs(point: Point) -> set[tuple[Any, Any]]:
    return set(combinations(point.choices, 2))


@cache
def all_cases() -> tuple[Point, ...]:
    """At least `LEAST` points that cover every pair of choices seen in a large draw; at most a tenth on 8 ranks."""
    return covering(_draw, POOL, LEAST, EIGHT_RANKS)


def covering(
    draw: Callable[[random.Random], Point | None], size: int, least: int, eight_ranks: int
) -> tuple[Point, ...]:
    """At least `least` points that cover every pair of choices seen in a draw of `size`; so many of them on 8 ranks."""
    generator = random.Random(GENERATOR_SEED)
    drawn: dict[str, Point] = {}
    while len(drawn) < size:
        if found := draw(generator):
            drawn[found.id] = found
    numbers: dict[tuple[Any, Any], int] = {}
    masks = {p.id: sum(1 << numbers.setdefault(pair, len(numbers)) for pair in _pairs(p)) for p in drawn.values()}
    chosen: list[Point] = []
    missing = (1 << len(numbers)) - 1
    eight = [p for p in drawn.values() if p.layout.ranks == 8]
    rest = [p for p in drawn.values() if p.layout.ranks < 8]
    for pool, enough in ((eight, eight_ranks), (rest, None)):
        while enough is None or len(chosen) < enough:
            best = max(pool, key=lambda p: (masks[p.id] & missing).bit_count())
            if enough is None and not masks[best.id] & missing:
                break
            missing &= ~masks[best.id]
            chosen.append(best)
            pool.remove(best)
    chosen += rest[: max(0, least - len(chosen))]
    return tuple(sorted(chosen, key=lambda p: (p.layout.ranks, p.id)))


def first_with(draw: Callable[[random.Random], Point | None], count: int, **layout: int) -> Iterator[Point]:
    """The first `count` points drawn that have these values of a layout: they cover few pairs, and so are rare."""
    generator = random.Random(GENERATOR_SEED)
    while count:
        if (point := draw(generator)) and all(getattr(point.layout, key) == value for key, value in layout.items()):
            count -= 1
            yield point


def _features(point: Point) -> set[tuple[str, Any]]:
    wanted = (
        "zero",
        "sp",
        "tpkind",
        "recompute",
        "attention",
        "precision",
        "model",
        "accumulate",
        "documents",
        "ignore",
    )
    found = {(name, point[name]) for name in wanted} | {("ranks", point.layout.ranks)}
    return found | {("hsdp", point.layout.replicate_ranks > 1 and point.layout.zero > 0)}


def sample(seed: int, count: int = SAMPLE, most_ranks: int = max(WORLDS)) -> tuple[Point, ...]:
    """`count` of `all_cases`: every stratum first (stage, sp, recompute, model, precision, world, ...), then at random.

    At most one point has 8 ranks.
    """
    return stratified([p for p in all_cases() if p.layout.ranks <= most_ranks], _features, seed, count)


def stratified(
    points: Sequence[Point], features: Callable[[Point], set[tuple[str, Any]]], seed: int, count: int
) -> tuple[Point, ...]:
    """`count` of `points`: every feature first, then at random; at most one with 8 ranks."""
    generator = random.Random(seed)
    left = list(points)
    generator.shuffle(left)
    missing = set().union(*map(features, left))
    chosen: list[Point] = []
    while len(chosen) < count:
        best = max(left, key=lambda p: len(features(p) & missing))
        missing -= features(best)
        chosen.append(best)
        left.remove(best)
        if best.layout.ranks == 8:
            left = [p for p in left if p.layout.ranks < 8]
    return tuple(sorted(chosen, key=lambda p: (p.layout.ranks, p.id)))


def selected() -> tuple[Point, ...]:
    """What the tests run: every case with SHARDWISE_ALL=1, else today's sample."""
    return all_cases() if EVERY_LAYOUT else sample(seed())
