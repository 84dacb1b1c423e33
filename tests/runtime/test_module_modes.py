"""Modes of a step that a user's module shares with the catalog's: recomputation, compiled blocks, local SGD."""

from collections.abc import Iterable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from harness.cases import from_table
from harness.module_jobs import (
    EVERY,
    OwnTraining,
    assert_as_one_device,
    assert_weights,
    reference,
    replicas_alone,
    trained,
)
from harness.own_modules import ATTENDING, COMPILED
from harness.pool import run_ranks
from harness.today import some_of
from shardwise import Layout, UserError, split
from shardwise.errors import DivergedError
from shardwise.layout.modules import check_module_layout

CUTS = [
    "dp=2,zero=1", "dp=2,zero=3", "tp=2", "tp=2,sp", "dp=2,tp=2,zero=2", "pp=2", "pp=2,dp=2,zero=3", "pp=2,tp=2",
]  # fmt: skip
EXPERTS = ["dp=2,ep=2", "dp=2,ep=2,zero=3"]


def layouts(names: Iterable[str], *modes: str) -> list[tuple[str, str, int]]:
    """(module, layout, micro-batches). Qwen3's plan for mixtures has no edges for cut sequences."""
    return [
        (name, f"{cut},{mode}", 2 if "pp" in cut else 1)
        for name, mode in product(names, modes)
        for cut in ([*(cut for cut in CUTS if "sp" not in cut), *EXPERTS] if "moe" in name else CUTS)
    ]


@pytest.mark.parametrize(
    ("name", "layout", "accumulate"), some_of(layouts(ATTENDING, "recompute=selective"), 3, "selective recomputation")
)
def test_selective_recomputation_trains_like_one_device(name, layout, accumulate):
    trained(OwnTraining(name, layout, accumulate))


@pytest.mark.parametrize("layout", ["cp=2", "dp=2,zero=3,recompute=selective"])
def test_attention_is_found_in_a_module_of_torch(layout):
    """Whose function calls it where no mode sees that. Blocks are in lists of lists."""
    trained(OwnTraining("grouped", layout))


def test_selective_recomputation_saves_less_than_none_and_more_than_full():
    def saved(layout: str) -> int:
        (outcome,) = trained(OwnTraining("attends", layout))
        return outcome.report.roles[0].bytes.saved

    assert saved("recompute=full") < saved("recompute=selective") < saved("recompute=none")


@pytest.mark.parametrize(
    ("name", "layout", "accumulate"),
    some_of(layouts(COMPILED, "compile=block", "compile=block,recompute=full"), 3, "compiled modules"),
)
def test_compiled_blocks_train_like_one_device(name, layout, accumulate):
    job, (_, final) = OwnTraining(name, layout, accumulate), reference(name)
    ranks = run_ranks("harness.module_jobs:train_compiled", Layout.parse(layout).ranks, (job, final))
    assert_as_one_device(name, [outcome for outcome, _ in ranks], 1e-5 if "rounded" in name else 1e-9)
    assert all(graphs for _, graphs in ranks)


LOCAL = [f"{cut},sync=local,every={EVERY}" for cut in ("dp=2", "dp=2,zero=1", "dp=4,replicas=2,zero=3", "dp=2,tp=2")]
APART = [*product(["attends", "skips", "states"], LOCAL), ("plain", f"pp=2,dp=2,sync=local,every={EVERY}")]


@pytest.mark.parametrize(("name", "layout"), some_of(APART, 3, "modules apart"))
def test_replicas_train_as_they_would_alone(name, layout):
    at, steps = Layout.parse(layout), 2 * EVERY
    losses, final = replicas_alone(name, at.independent, steps)
    job = OwnTraining(name, layout, 2 if at.pp > 1 else 1)
    ranks = run_ranks("harness.module_jobs:train_local", at.ranks, (job, final, steps))
    for rank in ranks:
        assert rank.losses == pytest.approx(losses[rank.replica], rel=1e-9)
    for replica in range(at.independent):
        assert_weights([rank.errors for rank in ranks if rank.replica == replica], final)


def test_replicas_save_after_an_outer_step_and_any_layout_continues(tmp_path):
    layout = f"dp=2,zero=1,sync=local,every={EVERY},moments=average"
    _, final = replicas_alone("plain", 2, EVERY)
    job = OwnTraining("plain", layout, save=str(tmp_path))
    for rank in run_ranks("harness.module_jobs:train_local", 2, (job, final, EVERY)):
        assert [bool(words) for words in rank.saved] == [True, False]
        assert "save after 1 more step" in rank.saved[0]
    for after in (layout, "dp=2,zero=3"):
        again = OwnTraining("plain", after, load=str(tmp_path))
        ranks = run_ranks("harness.module_jobs:train_local", 2, (again, final, EVERY))
        assert all(not rank.losses for rank in ranks)
        assert_weights([rank.errors for rank in ranks if not rank.replica], final)


# -- bad input: one line says what is wrong, and what to do


@from_table
def test_what_a_module_cannot_have_is_one_line(layout, message):
    with pytest.raises(UserError, match=message) as caught:
        check_module_layout(Layout.parse(layout))
    assert "\n" not in str(caught.value)


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.usefixtures("alone")
def test_blocks_without_the_attention_that_is_recomputed_are_named():
    module = split(ByHand(), "recompute=selective,precision=fp32")
    with pytest.raises(UserError, match="no block of this rank calls it: choose recompute=full"):
        module.train_step(squares, torch.ones(2, 4))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mode", ["stop", "skip"])
def test_a_replica_that_is_not_finite_is_noticed_at_the_outer_step(mode):
    module = split(ByHand(), "sync=local,every=2,precision=fp32", on_nonfinite=mode)
    assert module.train_step(squares, torch.full((2, 4), torch.nan)).skipped
    if mode == "skip":
        assert not module.train_step(squares, torch.ones(2, 4)).skipped
        return
    with pytest.raises(DivergedError, match="in 1 of the last 2 steps"):
        module.train_step(squares, torch.ones(2, 4))
