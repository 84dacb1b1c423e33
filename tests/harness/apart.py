"""Replicas that train apart from each other (`sync=local`): points of all spaces as what a replica is, and the same
training on one device, replica after replica."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle, islice

import torch
from torch import Tensor

from harness.reference import Case, OneDevice, global_batch
from harness.space import GENERATOR_SEED, MODELS, SPACES, Point, cases
from harness.today import EVERY_LAYOUT, seed
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.runtime.sync.outer_step import Rounds

WORLDS = (2, 4, 8)
SPLITS = ((2, 2), (1, 2), (2, 2), (4, 2), (2, 2), (1, 4), (2, 4))
"""(ranks of a replica, replicas)."""
OF_EACH = 10
TODAY = 4
EIGHT_RANKS = 1
"""Of a day's cases, at most."""
OFFLOADS = ("", "", "offload=cpu", "", "", "offload=cpu:0.4", "", "offload=cpu,offload_params=cpu", "")
OUTERS = ("average", "nesterov", "nesterov")
MOMENTS = ("own", "average", "own", "own", "average")
ROUNDS = 2
"""Outer steps of a case: one from weights that replicas share, and one with what the first has left."""
LR, MOMENTUM = 0.7, 0.9
"""Of the outer optimizer."""


@dataclass(frozen=True)
class Apart:
    id: str
    case: Case
    layout: Layout
    transport: str


def _cases() -> Iterator[Apart]:
    generator = random.Random(GENERATOR_SEED)
    ways = zip(cycle(SPLITS), cycle((1, 2, 2, 3)), cycle(OUTERS), cycle(MOMENTS), cycle(OFFLOADS), strict=False)
    for name in SPACES:
        exact = [p for p in cases(name) if p.layout.precision == "fp64" and p.layout.ranks in (1, 2, 4)]
        generator.shuffle(exact)
        for (ranks, replicas), *way in islice(ways, OF_EACH):
            point = min(exact, key=lambda point: abs(point.layout.ranks - ranks))
            exact.remove(point)
            yield _apart(name, point, min(replicas, max(WORLDS) // point.layout.ranks), *way)


def _apart(name: str, point: Point, replicas: int, every: int, outer: str, moments: str, offload: str) -> Apart:
    keys = dict(word.split("=") for word in offload.split(",") if word)
    if point.layout.stage < 3:
        keys.pop("offload_params", None)
    dp = point.layout.dp * replicas
    local = {"sync": "local", "every": every, "outer": outer, "moments": moments, "replicas": replicas}
    layout = replace(point.layout, dp=dp, **local, **keys)
    workload = replace(point.case.workload, batch=point.case.workload.batch * replicas)
    case = replace(point.case, workload=workload, steps=ROUNDS * every)
    transport = dict(point.choices).get("transport", "shared")
    return Apart(f"{name}:{point.id}:{layout}", case, layout, transport)


def apart_cases() -> list[Apart]:
    return list(_cases())


def selected_apart() -> list[Apart]:
    every = apart_cases()
    if EVERY_LAYOUT:
        return every
    generator = random.Random(seed())
    largest, rest = ([a for a in every if (a.layout.ranks == max(WORLDS)) == large] for large in (True, False))
    return [*generator.sample(rest, TODAY - EIGHT_RANKS), *generator.sample(largest, EIGHT_RANKS)]


def listed(model: ModelConfig, text: str, transport: str = "shared", batch: int = 8) -> Apart:
    layout = Layout.parse(text)
    case = Case(model, Workload(12, batch), layout.precision, steps=4)
    return Apart(f"{model.name}:{text}", case, layout, transport)


PACKED = [
    listed(MODELS[name], text, transport)
    for name, transport, text in (
        ("qwen3", "shared", "dp=2,tp=2,sp,sync=local,every=2,outer=nesterov,outer_bits=8,precision=fp32"),
        ("gpt2", "gloo", "dp=4,zero=3,sync=local,every=2,outer=nesterov,outer_bits=4,replicas=2"),
        ("llama", "shared", "dp=4,tp=2,zero=1,sync=local,every=2,outer_bits=4,replicas=2,offload=cpu:0.5"),
        ("qwen3", "shared", "dp=2,pp=2,zero=1,sync=local,every=2,outer=nesterov,outer_bits=4,precision=fp64"),
        ("mqa", "gloo", "dp=4,tp=2,sync=local,every=1,outer=nesterov,outer_bits=8,precision=fp32"),
        ("prime", "shared", "dp=2,cp=2,zero=2,sync=local,every=4,outer_bits=8,algorithm=ring"),
        ("llama", "shared", "dp=4,zero=3,sync=local,every=2,outer=nesterov,replicas=2,algorithm=tree"),
        ("llama", "shared", "dp=2,zero=2,sync=local,every=2,outer=nesterov,replicas=1,outer_bits=4"),
        ("llama", "gloo", "dp=2,tp=2,zero=1,sync=local,every=2,moments=average,outer_bits=8,precision=fp32"),
    )
]
"""Outer gradients in few bits, and other precisions: no model on one device does the same."""


@dataclass
class Alone:
    """Replicas on one device. losses, norms: replica -> one a step. agreed: the mean loss of each round."""

    losses: list[list[float]]
    norms: list[list[float]]
    agreed: list[float]
    first_grads: dict[str, Tensor]
    final: dict[str, Tensor]


@lru_cache(maxsize=64)
def alone(case: Case, layout: Layout) -> Alone:
    """Train the replicas one after the other, and let them agree after each round."""
    count, rounds = layout.independent, Rounds.of(layout, case.steps)
    devices = [OneDevice(case, 1 / count) for _ in range(count)]
    found = Alone([[] for _ in devices], [[] for _ in devices], [], {}, {})
    shared = {name: tensor.detach().clone() for name, tensor in devices[0].master.items()}
    momentum = {name: torch.zeros_like(tensor) for name, tensor in shared.items()}
    total, tokens = 0.0, 0
    for step in range(case.steps):
        share = case.workload.batch // count
        for replica, device in enumerate(devices):
            own = slice(replica * share, (replica + 1) * share)
            rows = {name: tensor[own].clone() for name, tensor in global_batch(case, step).items()}
            loss, norm = device.step(rows, step)
            found.losses[replica].append(loss)
            found.norms[replica].append(norm)
            valid = int((rows["targets"] != -100).sum())
            total, tokens = total + loss * valid, tokens + valid
        if rounds.ends(step):
            found.agreed.append(total / max(1, tokens))
            total, tokens = 0.0, 0
            _agree([device.master for device in devices], shared, momentum, layout.outer)
            if layout.moments == "average":
                _average_moments(devices)
            for device in devices:
                device.show()
    found.first_grads, found.final = devices[0].grads, shared
    return found


def _average_moments(devices: list[OneDevice]) -> None:
    for name in devices[0].master:
        states = [device.optimizer.state[device.master[name]] for device in devices]
        for kind in ("exp_avg", "exp_avg_sq"):
            mean = sum(state[kind] for state in states) / len(states)
            for state in states:
                state[kind].copy_(mean)


def _agree(
    replicas: list[dict[str, Tensor]], shared: dict[str, Tensor], momentum: dict[str, Tensor], outer: str
) -> None:
    for name, base in shared.items():
        gradient = base - sum(weights[name].detach() for weights in replicas) / len(replicas)
        if outer == "nesterov":
            momentum[name] = MOMENTUM * momentum[name] + gradient
            gradient = LR * (gradient + MOMENTUM * momentum[name])
        base -= gradient
        for weights in replicas:
            weights[name].data.copy_(base)
