"""Ranks without a runtime: what every rank of a layout holds, sliced from global arrays, and its saving and loading.

It knows nothing of `checkpoint/geometry.py`: units are built as the runtime builds them, from padded local tensors.
"""

from pathlib import Path

import numpy as np

from shardwise.checkpoint import (
    Checkpoint,
    Manifest,
    PartEntry,
    PartRecord,
    TensorSpec,
    commit,
    needs,
    write_part,
    writes,
)
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh, Workload, check, unit_plan
from shardwise.layout.placement import Placed
from shardwise.model import ModelConfig
from shardwise.model.parameters import parameters

Arrays = dict[str, np.ndarray]
KINDS = ("model", "first", "second")

LLAMA = ModelConfig("llama", vocab=53, hidden=32, layers=2, heads=4, kv_heads=2, ffn=43, max_positions=64)
MODELS = {
    "llama": LLAMA,
    "mqa": LLAMA.replace(name="mqa", hidden=24, heads=6, head_dim=6, kv_heads=1, ffn=41, bias="qkv", qk_norm=True),
    "prime": LLAMA.replace(name="prime", hidden=29, heads=3, head_dim=8, kv_heads=3, ffn=41, vocab=59),
    "tied": ModelConfig(
        "tied", vocab=53, hidden=24, layers=3, heads=4, ffn=47, max_positions=16, norm="layernorm",
        positions="learned", activation="gelu_tanh", gated=False, bias="all", tied=True,
    ),
}  # fmt: skip
LAYOUTS = (
    "dp=1", "dp=3", "dp=2,zero=1", "dp=3,zero=2", "dp=5,zero=3", "dp=4,zero=3,shard=2", "dp=6,zero=1,shard=3", "tp=2",
    "tp=3,dp=2,zero=3", "tp=4", "tp=6", "dp=3,tp=2,sp,zero=3", "dp=2,tp=4,zero=1,sp", "dp=2,tp=2,order=pp-tp-cp-dp",
    "pp=2,dp=2,tp=2,zero=1", "cp=2,dp=2,zero=2", "dp=2,ep=2", "dp=4,ep=2,zero=3", "dp=2,tp=2,sp,ep=2,etp=2,zero=1",
    "dp=2,tp=2,sp,ep=4",
)  # fmt: skip


def layouts_of(model: ModelConfig) -> list[str]:
    def suits(text: str) -> bool:
        try:
            check(Layout.parse(text), model)
        except UserError:
            return False
        return True

    return [text for text in LAYOUTS if suits(text)]


def state_of(model: ModelConfig, seed: int = 0, kinds: tuple[str, ...] = KINDS) -> Arrays:
    rng = np.random.default_rng(seed)
    state = {f"{k}/{p.name}": rng.standard_normal(p.shape, np.float32) for k in kinds for p in parameters(model)}
    for values in state.values():
        values.flat[0], values.flat[-1] = -0.0, np.nan
    return state


def local_of(placed: Placed, values: np.ndarray) -> np.ndarray:
    local = np.zeros(placed.shape, values.dtype)
    held = values[tuple(slice(*interval) for interval in placed.box)]
    local[tuple(slice(n) for n in held.shape)] = held
    return local


def units_of(model: ModelConfig, layout: Layout, rank: int, state: Arrays, kind: str) -> dict[str, np.ndarray]:
    """Unit -> the interval of its flat buffer that the rank holds."""
    held, mesh = {}, Mesh.of(layout, model)
    for unit in unit_plan(model, layout, Workload(), rank=rank).units:
        shard = mesh.index(unit.sharded_over, rank)
        flat = np.concatenate([local_of(p, state[f"{kind}/{p.name}"]).reshape(-1) for p in unit.placed])
        flat = np.concatenate([flat, np.zeros(unit.padded - len(flat), flat.dtype)])
        held[unit.name] = flat[shard * unit.shard_numel : (shard + 1) * unit.shard_numel]
    return held


def starts_of(model: ModelConfig, layout: Layout, rank: int) -> dict[str, int]:
    """Unit -> where the rank's interval begins in its flat buffer."""
    mesh, units = Mesh.of(layout, model), unit_plan(model, layout, Workload(), rank=rank).units
    return {u.name: mesh.index(u.sharded_over, rank) * u.shard_numel for u in units}


def write_rank(folder: Path, model: ModelConfig, layout: Layout, rank: int, state: Arrays) -> PartRecord:
    kinds = sorted({name.partition("/")[0] for name in state})
    start, entries, arrays = starts_of(model, layout, rank), [], []
    for kind in kinds:
        units = units_of(model, layout, rank, state, kind)
        for held in writes(model, layout, rank):
            at = start[held.unit]
            entries.append(PartEntry(f"{kind}/{held.name}", TensorSpec(held.shape, "float32"), held.stored))
            arrays.append(held.without_padding(units[held.unit][held.start - at : held.stop - at]))
    return write_part(folder, rank, entries, arrays)


def save(folder: Path, model: ModelConfig, text: str, state: Arrays, step: int = 7, **more: str) -> Checkpoint:
    layout = Layout.parse(text)
    records = [write_rank(folder, model, layout, rank, state) for rank in range(layout.ranks)]
    about = {"model": model.to_json(), "layout": text, "workload": {"seq": 8, "batch": 4}, **more}
    manifest = Manifest.of(records, step=step, samples=4 * step, seed=3, optimizer_steps=step, about=about)
    commit(folder, manifest)
    return Checkpoint.open(folder)


def load_rank(
    checkpoint: Checkpoint, model: ModelConfig, layout: Layout, rank: int, kind: str
) -> dict[str, np.ndarray]:
    """Unit -> its interval, as `needs` and `Checkpoint.read` fill it."""
    start = starts_of(model, layout, rank)
    units = unit_plan(model, layout, Workload(), rank=rank).units
    flat = {unit.name: np.zeros(unit.shard_numel, np.float32) for unit in units}
    for held in needs(model, layout, rank):
        at = start[held.unit]
        checkpoint.read(f"{kind}/{held.name}", held.local, out=flat[held.unit][held.start - at : held.stop - at])
    return flat


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
