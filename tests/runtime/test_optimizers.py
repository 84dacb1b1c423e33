"""SGD with momentum and without, against torch.optim.SGD on one device; its exact bytes and ledger; resuming."""

from itertools import product
from pathlib import Path
from zlib import crc32

import pytest
import torch

from harness.checks import assert_parity, assert_rules, train
from harness.offloads import Offloaded, clear
from harness.optimizers import KINDS, optimizer_cases, small
from harness.pool import run_ranks
from harness.resume_jobs import STEPS
from harness.today import RESUMED, by_turns, of_some, some_of
from shardwise.checkpoint import Checkpoint
from shardwise.errors import UserError
from shardwise.layout import Layout, unit_plan
from shardwise.layout.homes import offloaded
from shardwise.layout.optimizers import OPTIMIZERS, states_of
from shardwise.predict.memory.step import predict_bytes
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.zero import update as updates
from shardwise.runtime.zero.update import update


@pytest.mark.layouts(lambda optimized: optimized.layout)
@pytest.mark.parametrize("optimized", by_turns(optimizer_cases(), 4, "optimizers"), ids=lambda o: o.id)
def test_every_layout_trains_as_one_device(optimized: Offloaded) -> None:
    case, layout = clear(optimized), optimized.layout
    over = {"transport": "gloo" if crc32(optimized.id.encode()) % 4 == 0 else "shared"}
    ranks = train(case, layout, **over)
    assert_rules(case, layout, ranks)


@pytest.mark.parametrize("kind", KINDS)
def test_trap_29_an_update_is_torchs(kind: str) -> None:
    case, layout = small("dp=2,zero=1,precision=fp64", kind)
    assert_parity(case, layout, train(case, layout, memory=False))


def test_every_way_to_offload_is_tried_with_both() -> None:
    every = list(optimizer_cases())
    assert {o.case.workload.optimizer for o in every} == set(KINDS)
    homes = {(o.case.workload.optimizer, o.layout.offload) for o in every}
    assert {(kind, home) for kind in KINDS for home in ("cpu", "nvme", "cpu:0.4", "nvme:0.6")} <= homes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["dp=2,zero=1", "dp=2,zero=3", "dp=2,zero=2,offload=cpu:0.5"])
def test_bf16_weights_keep_fp32_masters(kind: str, text: str) -> None:
    case, layout = small(f"{text},precision=bf16", kind)
    ranks = train(case, layout)
    assert_rules(case, layout, ranks)
    adam = unit_plan(case.model, layout, small(f"{text},precision=bf16", "adamw")[0].workload)
    mine = unit_plan(case.model, layout, case.workload)
    updated = sum(unit.shard_numel - offloaded(mine, unit) for unit in mine.units)
    saved = 4 * (len(OPTIMIZERS["adamw"]) - len(OPTIMIZERS[kind])) * updated
    assert predict_bytes(adam).optimizer - predict_bytes(mine).optimizer == saved > 0


# One update.


def flat(kind: str, elements: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(elements, generator=generator) for _ in range(1 + len(states_of(kind)))]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_bits_of_an_update_do_not_depend_on_cuts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, step = OptimizerConfig(), torch.ones(())
    whole, cut = flat(kind, 1003), flat(kind, 1003)
    if "second" in states_of(kind):
        whole[-1].abs_(), cut[-1].abs_()
    update(kind, whole, step, config, 0.1, decay=True)
    monkeypatch.setitem(updates.BLOCK, "cpu", 48)
    for start, stop in ((0, 13), (13, 300), (300, 1003)):
        update(kind, [tensor[start:stop] for tensor in cut], step, config, 0.1, decay=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_trap_29_weight_decay_leaves_moments_alone(kind: str) -> None:
    config, step = OptimizerConfig(weight_decay=0.5), torch.ones(())
    with_decay, without = flat(kind, 100), flat(kind, 100)
    before = without[0].clone()
    update(kind, with_decay, step, config, 0.1, decay=True)
    update(kind, without, step, config, 0.1, decay=False)
    torch.testing.assert_close(with_decay[0], without[0] - 0.1 * 0.5 * before)
    assert all(torch.equal(a, b) for a, b in zip(with_decay[2:], without[2:], strict=True))


# Resuming.


def saved(kind: str, text: str, folder: Path) -> tuple[Path, list[float]]:
    case, layout = small(f"{text},precision=fp64", kind, dp=2)
    ranks = run_ranks("harness.resume_jobs:straight", layout.ranks, (case, layout, str(folder), 3, STEPS))
    return folder / "step-3", ranks[0].losses


def resumed(kind: str, text: str, source: Path) -> list[float]:
    case, _ = small(f"{text},precision=fp64", kind, dp=2)
    layout = Layout.parse(f"{text},precision=fp64")
    return run_ranks("harness.resume_jobs:go_on", layout.ranks, (case, layout, [(str(source), None)], STEPS))[0][
        0
    ].losses


MOVES = {"dp=2,zero=1": "tp=2", "dp=2,zero=3": "pp=2", "tp=2": "dp=2,zero=2,offload=cpu", "dp=2": "dp=2,offload=nvme"}


@of_some("optimizers", RESUMED, 2)
@pytest.mark.parametrize(("kind", "text"), some_of(product(KINDS, MOVES), 3, "optimizers that move"))
def test_trap_29_a_run_resumes_under_another_layout(kind: str, text: str, tmp_path: Path) -> None:
    source, losses = saved(kind, text, tmp_path)
    kinds = {name.partition("/")[0] for name in Checkpoint.open(source).tensors}
    assert kinds == set(states_of(kind))
    assert resumed(kind, text, source) == losses[3:]
    assert resumed(kind, MOVES[text], source) == pytest.approx(losses[3:], rel=1e-9, abs=0)


def test_moments_that_an_optimizer_does_not_have_are_dropped(tmp_path: Path) -> None:
    source, losses = saved("momentum", "dp=2,zero=1", tmp_path)
    later = resumed("sgd", "dp=2,zero=1", source)
    assert later[0] == losses[3] and later[2] != losses[5]


@pytest.mark.parametrize(("stored", "kind"), [("sgd", "momentum"), ("momentum", "adamw")])
def test_missing_moments_are_an_error(stored: str, kind: str, tmp_path: Path) -> None:
    source, _ = saved(stored, "dp=2,zero=1", tmp_path)
    with pytest.raises(UserError, match=r"lacks the .* that .* needs: resume with the optimizer that wrote it"):
        Checkpoint.open(source).unused_states(kind)
