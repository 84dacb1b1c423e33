"""A CPU as `shardwise calibrate device` would describe it, with times that follow simple rules."""

from itertools import product

from shardwise.cluster import Cluster, Link
from shardwise.model import ModelConfig
from shardwise.predict.time.measuring import COUNTED, device_of

MODEL = ModelConfig("small", vocab=512, hidden=256, layers=4, heads=4, kv_heads=4, ffn=704, max_positions=512)
AXIS = (16, 256, 2048)
RATES = {"float32": 1e11, "bfloat16": 4e11}
TURNS = {"forward": 1.0, "input": 1.1, "weight": 0.9}
COPY = 2e10
SIZES = (1024, 1 << 16, 1 << 22)
LENGTHS = (128, 512, 2048)


def took(dtype: str, m: int, n: int, k: int) -> float:
    """A core that loses time on short products, and two microseconds on each."""
    return 2e-6 + 2.0 * m * n * k * (1 + 20 / k + 8 / m) / RATES[dtype]


def attended(dtype: str, width: int, length: int) -> float:
    """A kernel that works on 512 keys at a time, whatever the mask leaves of them."""
    keys = 512 * -(-length // 512)
    return 4.0 * 8 * width * length * (length + keys) / 2 / (0.5 * RATES[dtype]) * (1 + 32 / length)


def samples(ranks: int = 2, speed: float = 1.0, taken: float | None = None):
    found = []

    def add(what, of, shape, seconds):
        found.append({"what": what, "of": list(of), "shape": list(shape), "seconds": seconds / speed})

    for dtype, shape, turn in product(RATES, product(AXIS, AXIS, AXIS), TURNS):
        add("product", (dtype, turn), shape, took(dtype, *shape) * TURNS[turn])
    for dtype, width, length in product(RATES, (64, 128), LENGTHS):
        forward = attended(dtype, width, length)
        for way, times in (("forward", 1), ("both", 2 + LENGTHS.index(length))):
            add("attention", (dtype, way), (1, length, 8, width), forward * times)
    add("copy", (), (1 << 24,), 2 * (1 << 24) / COPY)
    for dtype, of in product(RATES, (*COUNTED, "optimizer")):
        add("pass", (of, dtype), (1024, 1024), 1e-3 * (len(of) + 1))
    for dtype in RATES:
        add("row", (dtype,), (1024, 1024), 1e-4)
    add("block", (), (), 3e-4)
    if taken is not None:
        add("taken", (), (), taken * speed)
    for op, nbytes in product(("all_reduce", "all_gather", "reduce_scatter", "message"), SIZES if ranks > 1 else ()):
        add("collective", (op,), (nbytes, ranks), 1e-5 + nbytes * 1e-9)
    return {"about": {"torch": "0"}, "samples": found}


def device(told=None):
    return device_of(told or samples(), "Test CPU", "cpu", 10**10, MODEL, "a test")


def cluster(told=None, ranks: int = 2) -> Cluster:
    return Cluster(1, ranks, device(told), Link(1e-6, 1e9, "told"), Link(None, None))
