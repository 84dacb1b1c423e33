"""Layouts for other engines: drawn at random over all keys, then brought to the nearest that an engine expresses."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from harness.cases import table
from shardwise.errors import UserError
from shardwise.interop import WRITERS, WriteRequest, nearest_layout
from shardwise.interop.reading.settings import ServerSettings
from shardwise.layout import Layout, Workload, check, check_runnable
from shardwise.model.catalog import get

MODELS = ("llama-3-8b", "gpt2", "qwen3-8b", "mixtral-8x7b", "llama-3-70b", "qwen3-30b-a3b")
CHOICES: dict[str, list[Any]] = table(__file__, "CHOICES")
SPLITS = ("dp", "tp", "pp", "ep", "precision")
"""Keys that a serving layout draws."""
MOST_RANKS = 64
DRAWS = 100_000


def _request(engine: str, generator: random.Random) -> WriteRequest | None:
    """A random request that the model and the runtime allow; None for a draw that is illegal."""
    model = get(generator.choice(MODELS))
    drawn = {key: generator.choice(values) for key, values in CHOICES.items()}
    # Few draws of all keys are legal; a server's have few keys.
    often = 0.1 if WRITERS[engine].serves else 0.5
    drawn = {key: value for key, value in drawn.items() if key in SPLITS or generator.random() < often}
    count = drawn.get("pp", 1) * drawn.get("virtual", 1)
    if drawn.pop("stages", "even") == "uneven" and 1 < count < model.layers // 2:
        even = [model.layers // count] * count
        even[0] += model.layers - sum(even) + 1
        even[-1] -= 1
        drawn["stages"] = tuple(even)
    try:
        layout = Layout(**drawn)
        work = Workload(1024, layout.dp * layout.cp * layout.tp * layout.micro * 32)
        (check if WRITERS[engine].serves else check_runnable)(layout, model, work)
    except UserError:
        return None
    if layout.ranks > MOST_RANKS:
        return None
    if WRITERS[engine].serves:
        weights = generator.choice(["bfloat16", "fp8", "int4-g128z"])
        cache = generator.choice(["", "float8_e4m3fn"])
        served = ServerSettings(weights, cache, length=4096, sequences=64, tokens=8192, memory=0.85)
        return WriteRequest(model, layout, served=served)
    return WriteRequest(model, layout, replace(work, optimizer=generator.choice(WRITERS[engine].optimizers)))


def requests(engine: str, count: int, seed: str) -> Iterator[tuple[WriteRequest, WriteRequest]]:
    """`count` pairs: a random request, and the one with the nearest layout that the engine expresses."""
    generator = random.Random(f"{engine} {seed}")
    for _ in range(DRAWS):
        if not count:
            return
        request = _request(engine, generator)
        if request is None or WRITERS[engine].objection(request.model):
            continue
        layout = nearest_layout(engine, request)
        if layout is None or layout.ranks > MOST_RANKS:
            continue
        count -= 1
        yield request, replace(request, layout=layout)
    raise AssertionError(f"{engine} expresses hardly any of {DRAWS} draws: {count} are missing")
