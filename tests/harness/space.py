"""The spaces of layouts of `spaces.toml`: cases are drawn from them by rule, none is written down by hand.

`cases` is a deterministic selection that covers every pair of choices that can occur together; `sample` draws a few of
them by a seed, so that a working day's tests see another part of the space than the day before. Choices that a space
does not have are `DEFAULTS`.
"""

import random
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from harness.reference import BF16_STEPS, STEPS, Case
from harness.today import EVERY_LAYOUT, seed
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, check_runnable
from shardwise.layout.context import SequenceCut
from shardwise.model import ModelConfig
from shardwise.model.config import Experts, LatentAttention, RopeScaling

GENERATOR_SEED = 7
SEQ = 12
WORLDS = (1, 2, 3, 4, 6, 8)
TABLE = tomllib.loads(Path(__file__).with_name("spaces.toml").read_text(encoding="utf-8"))
SPACES: dict[str, dict[str, Any]] = TABLE["spaces"]
DEFAULTS: dict[str, Any] = {
    **{"dp": 1, "tp": 1, "pp": 1, "cp": 1, "zero": 0, "shard": 0, "hpz": 0, "virtual": 1, "stages": "even", "seq": SEQ},
    **{"documents": False, "ignore": "some", "window": "model's", "balance": "model's", "capacity": 0.0, "z_loss": 0.0},
    **{"etp": "default", "transport": "shared"},
}
FIELDS = (
    "schedule", "pp", "virtual", "dp", "tp", "cp", "cpkind", "ep", "zero", "shard", "hpz", "sp", "tpkind", "recompute",
    "attention", "micro", "order",
)  # fmt: skip
PLAIN: dict[str, dict[str, Any]] = {
    "pp": {"virtual": 1, "schedule": "1f1b", "stages": "even"},
    "tp": {"sp": False, "etp": "default"},
    "cp": {"cpkind": "ring"},
    "zero": {"shard": 0},
}
"""Key -> values of those that mean nothing without it."""


def _models(table: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ModelConfig]]:
    for name, given in table.items():
        for key, kind in (("rope_scaling", RopeScaling), ("latent_attention", LatentAttention)):
            if key in given:
                given[key] = kind(*given[key])
        if "experts" in given:
            given["experts"] = Experts(**given["experts"])
        yield name, MODELS[given.pop("of")].replace(name=name, **given) if "of" in given else ModelConfig(name, **given)


MODELS: dict[str, ModelConfig] = {}
for _name, _model in _models(TABLE["models"]):
    MODELS[_name] = _model
EXPERT_MODELS = dict(_models(TABLE["expert_models"]))


@dataclass(frozen=True)
class Point:
    """One point of a space: what is trained, and how it is split. `choices` are the values it was drawn with."""

    id: str
    case: Case
    layout: Layout
    choices: tuple[tuple[str, Any], ...]

    def __getitem__(self, name: str) -> Any:
        return dict(self.choices)[name]


def point(**choices: Any) -> Point:
    """Build a point of the dense space; missing choices are the first ones. Raises `UserError` if illegal."""
    seq = {"seq": choices.pop("seq")} if "seq" in choices else {}
    chosen = {name: choices.get(name, values[0]) for name, values in SPACES["dense"]["choices"].items()}
    return _built(chosen, DEFAULTS | chosen | seq, random.Random())


def possible_copies(chosen: dict[str, Any], data: int) -> int:
    """The draw's hpz where it is legal, else 0: most layouts have no room for it. data: ranks of a model's part."""
    among = chosen["shard"] or data
    return chosen["hpz"] if chosen["zero"] == 3 and among > chosen["hpz"] and not among % (chosen["hpz"] or 1) else 0


def stage_layers(kind: str, chunks: int, generator: random.Random) -> tuple[int, ...]:
    """Layers of each stage; empty where the layout says nothing about them."""
    if kind == "even":
        return ()
    layers = [generator.choice((1, 2)) for _ in range(chunks)]
    if kind == "ends":  # the embedding alone, or the head, or both
        layers[generator.choice((0, -1))] = 0
    return tuple(layers)


def _model_of(draw: dict[str, Any], layout: Layout) -> ModelConfig:
    """The model of a draw: layers for all stages; windows shorter than a chunk of tokens, longer than one, and longer
    than two, none of one token (scores then have no gradient, and Adam makes updates of what bf16 rounds); losses of
    experts, and a bound on an expert's tokens."""
    model, chunks = (MODELS | EXPERT_MODELS)[draw["model"]], layout.pp * layout.virtual
    changes: dict[str, Any] = {"layers": sum(layout.stages) or (chunks + chunks % 3 if layout.pp > 1 else model.layers)}
    if draw["window"] != "model's":
        chunk = SequenceCut.of(layout, draw["seq"]).local // 2
        lengths = {"in a chunk": max(2, chunk - 1), "in two": chunk + 1, "long": 2 * chunk + 1}
        changes["window"] = lengths[draw["window"]]
    if model.experts:
        more = {"capacity": draw["capacity"], "z_loss": draw["z_loss"]}
        if draw["balance"] != "model's":
            more |= {"balance": draw["balance"], "balance_loss": 0.05}
        changes["experts"] = Experts(**(vars(model.experts) | more))
    return model.replace(**changes)


def _built(chosen: dict[str, Any], draw: dict[str, Any], generator: random.Random) -> Point:
    """The point of a draw: of `chosen` with the defaults of what its space has not. Raises `UserError` if illegal."""
    stages = stage_layers(draw["stages"], draw["pp"] * draw["virtual"], generator)
    precision, _, grads = draw["precision"].partition("-")
    layout = Layout(
        **{key: chosen[key] for key in FIELDS if key in chosen}, stages=stages, precision=precision,
        etp={"default": 0, "whole": 1, "tp": draw["tp"]}[draw["etp"]], grads=grads or "bf16",
    )  # fmt: skip
    model = _model_of(draw, layout)
    batch = layout.dp * layout.micro * draw["accumulate"]
    workload = Workload(draw["seq"], batch, isolate_documents=draw["documents"])
    check_runnable(layout, model, workload)
    e, seq = model.experts, "seq" in chosen
    words = [model.name, str(layout), f"{draw['seq'] if seq else ''}x{draw['accumulate']}"]
    words += [draw["transport"]] * seq
    if e:
        words += [e.balance] + [f"capacity-{e.capacity}"] * bool(e.capacity) + ["z-loss"] * bool(e.z_loss)
    words += [f"window-{model.window}"] * bool("window" in chosen and model.window)
    words += ["documents"] * draw["documents"] + [f"ignore-{draw['ignore']}"] * (draw["ignore"] != "some")
    case = Case(
        model, workload, precision, layout.attention, ignore=draw["ignore"],
        steps=BF16_STEPS if precision == "bf16" else STEPS, pool=layout.micro if e else 1,
    )  # fmt: skip
    return Point(":".join(words), case, layout, tuple(chosen.items()))


def _pointless(name: str, draw: dict[str, Any]) -> bool:
    """Whether a draw means the same as a simpler one, needs another world, or cannot be compared with one device."""
    dp, tp, ranks = draw["dp"], draw["tp"], draw["dp"] * draw["tp"] * draw["pp"] * draw["cp"]
    return (
        ranks not in WORLDS
        or (name in ("dense", "pipelines") and bool(draw["zero"]) and dp == 1)
        or (name == "dense" and (draw["shard"] == dp or (draw["order"] != "pp-dp-cp-tp" and 1 in (dp, tp))))
        or (name == "experts" and ranks == 1)
        # The one device that it is compared with rounds once, and has one batch.
        or (draw["precision"] == "bf16" and draw["accumulate"] > SPACES[name].get("most_rounded", 99))
        or (draw["precision"] == "bf16-fp32" and draw["accumulate"] > 1)
        or (draw["balance"] == "global" and draw["accumulate"] > 1)
    )


def _draw(name: str, generator: random.Random) -> Point | None:
    """A random point; None when the draw is illegal or pointless."""
    choices = SPACES[name]["choices"]
    chosen = {key: generator.choice(values) for key, values in choices.items()}
    for key in SPACES[name].get("plain", ()):
        if chosen[key] == min(choices[key]):
            chosen |= PLAIN[key]
    draw = DEFAULTS | chosen
    chosen["hpz"] = possible_copies(draw, draw["dp"] * draw["cp"])
    if _pointless(name, draw):
        return None
    try:
        return _built(chosen, draw, generator)
    except UserError:
        return None


@cache
def cases(name: str) -> tuple[Point, ...]:
    """At least `least` points of a space that cover every pair of choices seen in a large draw; so many of them on 8
    ranks, and some with the keys of `rare`, which cover few pairs."""
    space = SPACES[name]
    draw: Callable[[random.Random], Point | None] = lambda generator: _draw(name, generator)  # noqa: E731
    covered = _covering(draw, space["pool"], space["least"], space["eight_ranks"])
    rare, generator = [], random.Random(GENERATOR_SEED)
    while len(rare) < space.get("rare_count", 0):
        found = draw(generator)
        if found and all(getattr(found.layout, key) == value for key, value in space["rare"].items()):
            rare.append(found)
    return tuple(dict.fromkeys((*covered, *rare)))


def _covering(
    draw: Callable[[random.Random], Point | None], size: int, least: int, eight_ranks: int
) -> tuple[Point, ...]:
    generator = random.Random(GENERATOR_SEED)
    drawn: dict[str, Point] = {}
    while len(drawn) < size:
        if found := draw(generator):
            drawn[found.id] = found
    numbers: dict[tuple[Any, Any], int] = {}
    masks = {
        p.id: sum(1 << numbers.setdefault(pair, len(numbers)) for pair in set(combinations(p.choices, 2)))
        for p in drawn.values()
    }
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


def _strata(name: str, point: Point) -> set[tuple[Any, ...]]:
    layout = point.layout
    found: set[tuple[Any, ...]] = {(key, point[key]) for key in SPACES[name]["strata"]}
    if name == "dense":
        found |= {("ranks", layout.ranks), ("hsdp", layout.replicate_ranks > 1 and layout.zero > 0)}
    elif name == "pipelines":
        found.add(("tied", point.case.model.tied, point["zero"]))
    elif name == "experts":
        found.add(("etp", layout.expert_tp > 1, layout.ep > 1, layout.tp > 1))
    return found


def sample(seed: int, name: str = "dense", count: int = 0, most_ranks: int = max(WORLDS)) -> tuple[Point, ...]:
    """`count` of a space's cases, by default its `sample`: every stratum first (stage, sp, model, precision, ...), then
    at random; at most one with 8 ranks."""
    generator = random.Random(seed)
    left = [p for p in cases(name) if p.layout.ranks <= most_ranks]
    generator.shuffle(left)
    missing = set().union(*(_strata(name, p) for p in left))
    chosen: list[Point] = []
    while len(chosen) < (count or SPACES[name]["sample"]):
        best = max(left, key=lambda p: len(_strata(name, p) & missing))
        missing -= _strata(name, best)
        chosen.append(best)
        left.remove(best)
        if best.layout.ranks == 8:
            left = [p for p in left if p.layout.ranks < 8]
    return tuple(sorted(chosen, key=lambda p: (p.layout.ranks, p.id)))


def selected(name: str) -> tuple[Point, ...]:
    """What the tests run: every case with SHARDWISE_ALL=1, else today's sample."""
    return cases(name) if EVERY_LAYOUT else sample(seed(), name)
