"""Faults and layouts, drawn by a seed."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, check_runnable
from shardwise.model.catalog import resolve

MOST_RANKS = 4
SEQ, BATCH = 32, 12
SIZES = {"vocab": 300, "layers": 2, "hidden": 64, "ffn": 96}
"""Fields of the model that differ from the catalog's."""
AXES = {"dp": (1, 2, 2, 4), "tp": (1, 1, 2), "pp": (1, 1, 2), "cp": (1, 1, 1, 2), "zero": (0, 1, 2, 3)}
PRECISIONS = ("fp32", "fp64", "bf16")
EXTRAS = (
    "", "", "", "sp", "recompute=full", "offload=cpu", "offload=nvme", "offload=cpu:0.5",
    "offload=nvme,offload_params=nvme", "sync=local,every=3", "sync=local,every=3,outer=nesterov", "ep=2",
    "sync=ps,servers=1", "sync=ps,servers=1:own", "schedule=zb,micro=4", "hpz=2",
)  # fmt: skip
"""Keys that a layout may have besides its axes. Runs under all of them repeat bit by bit."""
TRIES = 200
SERVED = ("dp=1", "tp=2", "pp=2", "dp=2", "tp=2,pp=2", "dp=2,tp=2")
"""Layouts of servers."""


@dataclass(frozen=True)
class Fault:
    """One fault. seed: of all that is random in it."""

    number: int
    kind: str
    layout: str
    seed: str


def model_of(layout: Layout) -> str:
    """Name of the catalog's model that is trained under a layout."""
    return "tiny-mixtral" if layout.ep > 1 else "tiny-llama"


def runnable(text: str) -> bool:
    try:
        layout = Layout.parse(text)
        check_runnable(layout, resolve(model_of(layout)).replace(**SIZES), Workload(seq=SEQ, batch=BATCH))
    except UserError:
        return False
    return layout.ranks <= MOST_RANKS


def draw_layouts(seed: str, count: int) -> list[str]:
    """So many different layouts, the first of them with two ranks."""
    generator, layouts = random.Random(f"layouts {seed}"), list[str]()
    while len(layouts) < count:
        extra = generator.choice(EXTRAS)
        # As many layouts with each extra key, however few axes it goes with.
        for _ in range(TRIES):
            axes = {key: generator.choice(values) for key, values in AXES.items()}
            words = [f"{key}={value}" for key, value in axes.items() if value > (key != "zero")]
            text = ",".join(filter(None, [*words, f"precision={generator.choice(PRECISIONS)}", extra]))
            if text not in layouts and runnable(text) and (layouts or Layout.parse(text).ranks == 2):
                layouts.append(text)
                break
    return layouts


def draw(seed: str, count: int, layouts: Sequence[str], kinds: Sequence[str]) -> Iterator[Fault]:
    generator, pending = random.Random(f"faults {seed}"), list[str]()
    for number in range(count):
        pending = pending or generator.sample(list(kinds), len(kinds))
        kind = pending.pop()
        fitting = SERVED if kind.startswith("server") else [text for text in layouts if fits(kind, text)]
        yield Fault(number, kind, generator.choice(fitting), f"{seed} {number}")


def fits(kind: str, text: str) -> bool:
    ranks = Layout.parse(text).ranks
    return ranks == 2 if kind == "link cut" else ranks > 1 if kind == "all ranks killed" else True
