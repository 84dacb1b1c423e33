"""compile=block: generated layouts with their blocks compiled, held against one device that compiles nothing.

Most cases are traced, differentiated and cut into graphs as ever, by a backend that generates no code: that takes a
second where a C++ compiler takes twenty. A few go through inductor itself. SHARDWISE_ALL=1 runs all of both.
"""

import sysconfig
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from harness.checks import assert_ledger, assert_parity, assert_replicas_equal, judge
from harness.compile_jobs import Compiled, default_backend
from harness.pool import run_ranks
from harness.reference import Case
from harness.space import EXPERT_MODELS, MODELS, Point, cases, point, sample
from harness.today import COMPILED, EVERY_LAYOUT, by_turns, of_some, seed, some_of
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, check_runnable, unit_plan
from shardwise.predict import estimate
from shardwise.predict.memory.step import predict_bytes

TRACED = "aot_eager_decomp_partition"
RANKS, CONTEXT_RANKS = 2, 4
LIMIT = 400.0

INDUCTOR = (
    point(model="llama", dp=2, zero=3, precision="fp32"),
    point(model="gpt2", recompute="full", documents=True),
    point(model="qwen3", tp=2, sp=True, micro=2, recompute="selective", attention="math"),
    point(model="mqa", precision="bf16", accumulate=2),
)


def compiled(layout: Layout) -> Layout:
    return replace(layout, compile="block")


def train(case: Case, layout: Layout, backend: str) -> list[Compiled]:
    payload = (case, compiled(layout), judge(case), backend)
    return run_ranks("harness.compile_jobs:train", layout.ranks, payload, limit=LIMIT)


def assert_all(point: Point, backend: str) -> None:
    ranks, layout = train(point.case, point.layout, backend), compiled(point.layout)
    outcomes = [rank.outcome for rank in ranks]
    assert_parity(point.case, layout, outcomes, again=lambda case: [r.outcome for r in train(case, layout, backend)])
    assert_replicas_equal(outcomes)
    assert_ledger(point.case, layout, outcomes)
    for index, rank in enumerate(ranks):
        assert not rank.strays, "gradients that autograd put elsewhere"
        predicted = predict_bytes(unit_plan(point.case.model, layout, point.case.workload, rank=index))
        for name in ("parameters", "gradients", "optimizer", "comm"):
            assert getattr(predicted, name) == getattr(rank.outcome.role.bytes, name), (index, name)


def traced() -> tuple[Point, ...]:
    few = sample(seed(), count=1, most_ranks=RANKS)
    return tuple(p for p in cases("dense") if p.layout.ranks <= RANKS) if EVERY_LAYOUT else few


@pytest.mark.layouts(lambda point: compiled(point.layout))
@pytest.mark.parametrize("point", traced(), ids=lambda p: p.id)
def test_generated_layouts(point: Point) -> None:
    assert_all(point, TRACED)


def compilable(points: Iterable[Point]) -> list[Point]:
    def legal(point: Point) -> bool:
        try:
            check_runnable(compiled(point.layout), point.case.model, point.case.workload)
        except UserError:
            return False
        return point.layout.ranks <= CONTEXT_RANKS

    return [point for point in points if legal(point)]


def with_context() -> list[Point]:
    """Every second generated layout with context parallelism, or one of them."""
    return by_turns(compilable(cases("contexts"))[::2], 1, "contexts")


@of_some("attention over ranks", COMPILED, 2)
@pytest.mark.layouts(lambda point: compiled(point.layout))
@pytest.mark.parametrize("point", with_context(), ids=lambda p: p.id)
def test_attention_over_ranks_stays_outside_the_graphs(point: Point) -> None:
    assert_all(point, TRACED)


def with_experts() -> list[Point]:
    """Some generated layouts with experts, in float64, where no rounding decides which are chosen."""
    points = [p for p in compilable(cases("experts")) if p.layout.precision == "fp64"][::3]
    return by_turns(points, 1, "experts")


@of_some("routing", COMPILED, 2)
@pytest.mark.layouts(lambda point: compiled(point.layout))
@pytest.mark.parametrize("point", with_experts(), ids=lambda p: p.id)
def test_routing_stays_outside_the_graphs(point: Point) -> None:
    assert_all(point, TRACED)


def test_the_trial_of_a_compilation_counts_no_tokens() -> None:
    """Biases of routers follow the loads of the first step, also in the block that is compiled on zeros."""
    model, layout = EXPERT_MODELS["deepseek"], Layout.parse("dp=2,ep=2,precision=fp64")
    assert model.experts is not None
    model = model.replace(layers=1, experts=replace(model.experts, dense_layers=0))
    case = Case(model, Workload(12, 2), "fp64")
    assert_parity(case, compiled(layout), [rank.outcome for rank in train(case, layout, TRACED)])


def missing() -> str | None:
    import torch

    from shardwise.runtime.compiling import check_compiler

    try:
        check_compiler(torch.device("cpu"))
    except UserError as error:
        return str(error)
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return None if headers.exists() else f"no C++ headers of Python at {headers}"


@of_some("inductor", COMPILED, 2)
@pytest.mark.parametrize("point", some_of(INDUCTOR, 1, "inductor"), ids=lambda p: p.id)
def test_inductor(point: Point) -> None:
    if reason := missing():
        pytest.skip(reason)
    assert_all(point, "inductor")


OLDER = [int(number) for number in version("torch").split(".")[:2]] < [2, 13]
DEEP = MODELS["llama"].replace(layers=12)
WITHOUT_AND_WITH_GRADIENTS = 2


@pytest.mark.parametrize(
    ("layout", "pieces"),
    [
        # norm | maps | heads and core | map | residual and norm | maps | activation | map | residual
        *some_of(
            [("tp=2,sp", 5), ("dp=2,zero=3,recompute=selective,attention=math", 1), ("recompute=full", 1)], 1, "graphs"
        )
    ],
)
def test_blocks_are_compiled_once_for_all(layout: str, pieces: int) -> None:
    split = Layout.parse(f"{layout},precision=fp64")
    case = Case(DEEP, Workload(12, 2), "fp64", split.attention)
    for rank in train(case, split, TRACED):
        graphs = WITHOUT_AND_WITH_GRADIENTS * pieces
        # Older ones compile anew in the measured step, which runs under a dispatch mode.
        assert rank.graphs == graphs or (OLDER and rank.graphs is not None and rank.graphs > graphs)


def test_the_measured_step_is_the_compiled_one_and_saves_no_weights() -> None:
    # Few tokens on wide maps: one weight that was saved as a copy would outweigh all activations.
    model = MODELS["llama"].replace(hidden=64, head_dim=16, ffn=512)
    layout = Layout.parse("dp=2,zero=3,precision=fp64")
    case = Case(model, Workload(4, 2), "fp64")
    predicted = estimate(model, layout, case.workload).roles[0].bytes.saved
    assert predicted < 64 * 512 * 8
    for rank in train(case, layout, TRACED):
        assert 0 < rank.outcome.role.bytes.saved < predicted


RANDOM_STATE = 5056
"""Bytes of a CPU's random state, which compiled code of a checkpoint saves, needed or not."""


@pytest.mark.parametrize(
    ("name", "recompute"),
    some_of(product(["llama", "qwen3", "gpt2"], ["none", "selective", "full"]), 4, "saved by compiled blocks"),
)
def test_saved_tensors_of_whole_compiled_blocks(name: str, recompute: str) -> None:
    model = MODELS[name].replace(
        hidden=64, head_dim=16, ffn=176, layers=2, max_positions=64, dropout=0.0, attention_dropout=0.0
    )
    layout = Layout.parse(f"micro=2,recompute={recompute},precision=bf16")
    case = Case(model, Workload(48, 2), "bf16")
    plan = unit_plan(model, compiled(layout), case.workload)
    (rank,) = train(case, layout, TRACED)
    # Rotary tables are saved once for all blocks; where they are made, they are counted beside saved tensors.
    tables = 2 * plan.tokens * model.rotated * 2 * (model.positions == "rope")
    state = 0 if recompute == "none" else model.layers * RANDOM_STATE
    # torch 2.14 no longer saves the state of random numbers for a recomputation inside a compiled block.
    assert rank.outcome.role.bytes.saved - predict_bytes(plan).saved - tables in (0, state)


def test_without_a_compiler_one_line_says_what_to_do() -> None:
    import torch
    import torch._inductor.config as inductor

    from shardwise.runtime.compiling import check_compiler

    with inductor.patch({"cpp.cxx": (None, "/no/such/compiler")}), pytest.raises(UserError) as caught:
        check_compiler(torch.device("cpu"))
    assert "install g++" in str(caught.value) and "\n" not in str(caught.value)


def test_a_failing_compiler_is_told_in_one_line() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("command failed\nx.cpp:1:10: fatal error: Python.h: No such file or directory\nnote")

    import torch

    from shardwise.decoder import Decoder
    from shardwise.runtime.compiling import compile_blocks

    plan = unit_plan(MODELS["llama"], Layout.parse("precision=fp32,compile=block"), Workload(4, 1))
    with pytest.raises(UserError) as caught, default_backend(broken):
        compile_blocks(Decoder(plan.model), plan, torch.device("cpu"))
    assert "x.cpp:1:10: fatal error: Python.h" in str(caught.value) and "\n" not in str(caught.value)


@of_some("said of compilation", COMPILED, 2)
def test_estimate_and_dry_run_say_what_they_assume() -> None:
    from shardwise.runtime.dryrun import dry_run

    model, layout, workload = MODELS["llama"], Layout.parse("dp=2,zero=3,compile=block"), Workload(12, 2)
    predicted, observed = estimate(model, layout, workload), dry_run(model, layout, workload)
    assert any(note.startswith("compile=block: saved activations") for note in predicted.notes)
    assert any("without being compiled" in note for note in observed.notes)
    assert predicted.roles[0].ledger == observed.roles[0].ledger
    assert observed.layout == "dp=2,zero=3,compile=block"
