from itertools import pairwise

import numpy as np
from hypothesis import given, settings

from harness.strategies import split_models
from shardwise.layout import Layout, UnitPlan, Workload, unit_plan
from shardwise.layout.axes import KV, TP
from shardwise.layout.gathers import gathering_uses, slot_elements, step_uses
from shardwise.layout.gradients import finished_after
from shardwise.layout.placement import Placed, place
from shardwise.layout.transport_buffers import transport_buffers
from shardwise.layout.unit import Unit
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.model.parameters import parameters

Split = tuple[ModelConfig, Layout, Workload]


def plan_of(split: Split, tp_rank: int = 0) -> UnitPlan:
    return UnitPlan(*split, tp_rank, "gloo")


def global_indices(placed: Placed) -> np.ndarray:
    """Row-major global position of each local element; -1 where it is padding."""
    whole = np.arange(placed.parameter.numel).reshape(placed.parameter.shape)
    held = whole[tuple(slice(*interval) for interval in placed.box)]
    padding = [(0, width - have) for width, have in zip(placed.shape, held.shape, strict=True)]
    return np.pad(held, padding, constant_values=-1).reshape(-1)


@settings(deadline=None, max_examples=60)
@given(split_models())
def test_every_element_is_held_once_for_each_replica(split: Split) -> None:
    model, layout, _ = split
    counts = {p.name: np.zeros(p.numel, int) for p in parameters(model)}
    replicas: dict[str, int] = {}
    for tp_rank in range(layout.tp):
        for unit in plan_of(split, tp_rank).units:
            flat = np.concatenate([global_indices(p) for p in unit.placed])
            owner = np.repeat(np.arange(len(unit.placed)), [p.numel for p in unit.placed])
            held = np.zeros(unit.padded, int)
            for shard in range(layout.shard_ranks):
                a, b = shard * unit.shard_numel, (shard + 1) * unit.shard_numel
                held[a:b] += 1
                for index, which in zip(flat[a:b], owner[a:b], strict=True):
                    placed = unit.placed[which]
                    replicas[placed.name] = placed.replicas
                    if index >= 0:
                        counts[placed.name][index] += 1
            assert (held == 1).all() and unit.padded >= len(flat)
    for name, count in counts.items():
        assert (count == replicas[name]).all(), name


@given(split_models())
def test_padding_is_less_than_one_piece(split: Split) -> None:
    model, layout, _ = split
    for unit in plan_of(split).units:
        assert 0 <= unit.padded - unit.numel < layout.shard_ranks
        assert unit.padded == unit.shard_numel * layout.shard_ranks
    for parameter in parameters(model):
        pieces = [place(parameter, layout, tp_rank) for tp_rank in range(layout.tp)]
        assert len({p.shape for p in pieces}) == 1, "shapes are equal on all ranks"
        for dim in pieces[0].dims:
            size = parameter.shape[dim]
            assert pieces[0].shape[dim] == -(-size // (layout.tp // pieces[0].replicas))
            assert all(0 <= p.box[dim][0] <= p.box[dim][1] <= size for p in pieces)


@given(split_models())
def test_offsets_and_spans_tile_a_unit(split: Split) -> None:
    for unit in plan_of(split).units:
        ends = [offset + p.numel for offset, p in zip(unit.offsets, unit.placed, strict=True)]
        assert list(unit.offsets) == [0, *ends[:-1]] and ends[-1] == unit.numel
        assert [s.start for s in unit.spans] == [0, *(s.stop for s in unit.spans[:-1])]
        assert unit.spans[-1].stop == unit.numel
        for offset, p in zip(unit.offsets, unit.placed, strict=True):
            (span,) = [s for s in unit.spans if s.start <= offset < s.stop]
            assert (span.replicas, span.decay, span.sum_over) == (p.replicas, p.parameter.decay, p.sum_over)


@given(split_models())
def test_gradients_to_be_summed_lie_together(split: Split) -> None:
    model, layout, _ = split
    for unit in plan_of(split).units:
        assert [axes for *_, axes in unit.partial_sums] in ([], [KV], [TP], [KV, TP])
        for offset, p in zip(unit.offsets, unit.placed, strict=True):
            assert [axes for start, stop, axes in unit.partial_sums if start <= offset < stop] == (
                [p.sum_over] if p.sum_over else []
            ), p.name
    cuts = {p.name: p.cut for p in parameters(model)}
    summed = {p.name: p.sum_over for unit in plan_of(split).units for p in unit.placed}
    for name, axes in summed.items():
        if axes == TP:
            assert layout.tp > 1 and (layout.sp or "attention.q_norm" in name or "attention.k_norm" in name)
        assert (axes == KV) == (cuts[name] == "kv heads" and layout.tp > model.kv_heads)


@given(split_models())
def test_every_parameter_is_in_one_unit_and_tied_ones_alone(split: Split) -> None:
    model, _, _ = split
    plan = plan_of(split)
    names = [p.name for unit in plan.units for p in unit.placed]
    assert sorted(names) == sorted(p.name for p in parameters(model))
    assert (
        [p.name for p in plan.by_name["tied"].placed] == ["embedding.tokens.weight"]
        if model.tied
        else "tied" not in names
    )
    finished = [unit.name for part in reversed(plan.parts) for unit in finished_after(plan, part)]
    assert sorted(finished) == sorted(unit.name for unit in plan.units), "each unit is reduced once"
    if model.tied:
        assert plan.by_name["tied"] in plan.units_of("head") and plan.by_name["tied"] in plan.units_of("embedding")


@given(split_models())
def test_whatever_a_part_reads_is_in_its_slot(split: Split) -> None:
    plan = plan_of(split)
    resident: dict[str, Unit] = {}
    steps = list(gathering_uses(plan))
    assert len(steps) == plan.micro_batches
    for step in steps:
        assert [(u.kind, u.part) for u in step] == [(u.kind, u.part) for u in step_uses(plan)]
        for use in step:
            for gather in use.gathers:
                unit = plan.by_name[gather.unit]
                assert resident.get(unit.slot) != unit, "gathered although resident"
                assert unit.padded <= slot_elements(plan)[unit.slot]
                resident[unit.slot] = unit
            if (use.kind, use.part) != ("backward", "embedding"):
                assert all(resident[unit.slot] == unit for unit in plan.units_of(use.part))
    assert len(slot_elements(plan)) <= 2 + split[0].tied


@given(split_models())
def test_units_are_staged_by_turns_where_ranks_read_each_other(split: Split) -> None:
    alone = transport_buffers(plan_of(split))
    assert not alone.lasting and all(unit == buffer for unit, buffer in alone.staged.items())
    plan = UnitPlan(*split, 0, "shared")
    staged, sizes = transport_buffers(plan).staged, transport_buffers(plan).sizes
    assert set(staged) == ({unit.name for unit in plan.units} if plan.dtypes.stages_gradients else set())
    assert all(plan.by_name[name].padded <= sizes[slot] for name, slot in staged.items())
    assert transport_buffers(plan).lasting == (plan.layout.stage == 3 and plan.layout.pp == 1)
    if transport_buffers(plan).lasting:
        done = [unit.name for part in reversed(plan.parts) for unit in finished_after(plan, part)]
        assert all(staged[before] != staged[after] for before, after in pairwise(done))
        assert [name for name, slot in staged.items() if slot == "tied"] == ["tied"] * split[0].tied


@given(split_models())
def test_every_block_has_one_backward_after_its_inputs_are_there(split: Split) -> None:
    plan = plan_of(split)
    uses = step_uses(plan)
    backwards = [use.part for use in uses if use.kind == "backward"]
    assert backwards == list(reversed(plan.parts))
    blocks = [part for part in plan.parts if part.startswith("blocks.")]
    again = [use.part for use in uses if use.kind == "recompute"]
    expected = [part for i in reversed(range(len(blocks))) for part in blocks[:i]]
    assert again == (expected if plan.layout.recompute == "input" else [])


def test_parameters_say_how_they_are_cut() -> None:
    kinds = {
        "blocks.0.attention.qkv.q.weight": "column",
        "blocks.0.attention.qkv.q.bias": "column",
        "blocks.11.attention.qkv.k.weight": "kv heads",
        "blocks.11.attention.qkv.v.bias": "kv heads",
        "blocks.0.attention.out.weight": "row",
        "blocks.0.attention.out.bias": "replicated",
        "blocks.0.mlp.down.weight": "row",
        "blocks.0.mlp.down.bias": "replicated",
        "blocks.0.mlp.gate_up.gate.weight": "column",
        "blocks.0.mlp.up.up.bias": "column",
        "blocks.0.mlp_norm.weight": "replicated",
        "embedding.tokens.weight": "vocab",
        "embedding.positions": "replicated",
        "head.out.weight": "vocab",
        "head.norm.weight": "replicated",
    }
    gpt = get("gpt2").replace(tied=False)
    found = {p.name: p.cut for model in (get("llama-2-7b"), gpt) for p in parameters(model)}
    assert {name: found[name] for name in kinds} == kinds


def test_ranks_of_a_tensor_group_hold_their_own_heads() -> None:
    model = ModelConfig("m", vocab=10, hidden=8, layers=1, heads=4, kv_heads=2, ffn=6, max_positions=8)
    plans = [unit_plan(model, Layout.parse("dp=2,tp=4"), Workload(4, 2), rank=rank) for rank in range(8)]
    keys = [next(p for p in plan.by_name["blocks.0"].placed if p.name.endswith("qkv.k.weight")) for plan in plans]
    assert [k.box[0] for k in keys] == [(0, 2), (0, 2), (2, 4), (2, 4)] * 2
    assert {k.replicas for k in keys} == {2}
