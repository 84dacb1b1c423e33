from itertools import product

import pytest
import torch
from torch import Tensor, nn

from harness.cases import from_table, table
from harness.module_jobs import ROWS, STEPS, OwnTraining, reference, trained
from harness.own_modules import OWN, GroupedModel, SkipMLP, own_batch
from harness.pool import run_ranks
from harness.today import some_of
from shardwise import Layout, StepReport, UserError, split
from shardwise.layout import Workload, unit_plan
from shardwise.layout.gathers import gather_counts, gathered_elements
from shardwise.runtime.module.describe import describe, find_blocks

PLAIN = ("skips", "states", "shared")
"""Without experts and without stages."""
LAYOUTS = table(__file__, "LAYOUTS")


@pytest.mark.parametrize(("name", "layout"), some_of(product(PLAIN, LAYOUTS), 12, "own modules"))
def test_training_is_that_of_one_device(name, layout):
    trained(OwnTraining(name, layout))


@pytest.mark.parametrize("layout", ["dp=2,zero=1", "dp=2,zero=3"])
def test_trap_33_micro_batches_with_different_numbers_of_tokens_are_one_batch(layout):
    trained(OwnTraining("states", layout, accumulate=2))


def test_trap_33_the_root_has_a_slot_and_a_staging_buffer_of_its_own():
    """The second of three blocks takes the slot that an embedding has."""
    trained(OwnTraining("skips", "dp=2,zero=3"))


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=2"])
def test_trap_33_weights_are_also_read_past_their_maps(layout):
    trained(OwnTraining("shared", layout))


def test_trap_33_a_padding_token_of_a_cut_table_is_not_trained():
    assert any((own_batch("states", ROWS, step)[0] == 0).any() for step in range(STEPS))
    trained(OwnTraining("states", "tp=2"))


@pytest.mark.parametrize(
    ("name", "layout", "accumulate"),
    [("shared", "dp=2,zero=3", 1), ("shared", "dp=2,tp=2,zero=2", 1), ("routed", "dp=2,tp=2,ep=2,zero=3", 1),
     ("plain", "pp=2,dp=2,zero=3", 2)],
)  # fmt: skip
def test_gloo_gives_the_same_as_shared_memory(name, layout, accumulate):
    trained(OwnTraining(name, layout, accumulate, transport="gloo"))


def test_the_ledger_has_the_gathers_and_sums_of_the_plan():
    job = OwnTraining("skips", "dp=2,zero=3")
    layout = Layout.parse(f"{job.layout},precision=fp64")
    module = OWN[job.name]()
    blueprint = describe(module, layout, None, find_blocks(module, None)).blueprint
    plan = unit_plan(blueprint, layout, Workload(seq=1, batch=2))
    assert [unit.name for unit in plan.units] == ["root", "blocks.0", "blocks.1", "blocks.2"]
    for outcome in trained(job):
        rows = {(r.phase, r.op, r.unit, r.elements): r.count for r in outcome.ledger if r.unit in plan.by_name}
        gathers = {
            (phase, "all_gather_into", gather.unit, gathered_elements(plan, gather)): count
            for (phase, gather), count in gather_counts(plan).items()
        }
        # The root stays for the whole step, and the last two blocks until their backward passes.
        assert len(gathers) == 5
        sums = {("backward", "reduce_scatter", unit.name, unit.padded): 1 for unit in plan.units}
        assert rows == gathers | sums


def test_bytes_by_class_are_those_of_the_units():
    (outcome, _) = trained(OwnTraining("skips", "dp=2,zero=1"))
    parameters = sum(p.numel() for p in OWN["skips"]().parameters())
    assert StepReport.from_json(outcome.report.to_json()) == outcome.report
    (role,) = outcome.report.roles
    assert role.ranks == (0, 1)
    assert role.bytes.parameters == pytest.approx(8 * parameters, abs=8 * 8)
    assert role.bytes.optimizer == pytest.approx(2 * 8 * parameters / 2, abs=2 * 8 * 8)
    assert role.bytes.saved > 0 and role.bytes.total > role.bytes.parameters + role.bytes.optimizer


CONTINUED = [
    *product(("shared", "states"), ["dp=2,zero=3"], ("dp=2,tp=2,zero=3", "tp=2", "dp=2,zero=1")),
    *product(["routed"], ["dp=2,ep=2,zero=3"], ("dp=2,tp=2,etp=2,zero=3", "tp=2,ep=2", "dp=2,zero=1")),
    *product(["plain"], ["pp=2,dp=2,zero=1"], ("pp=2,virtual=2,schedule=interleaved", "dp=2,zero=3", "tp=2")),
]


@pytest.mark.parametrize(("name", "before", "after"), CONTINUED)
def test_a_checkpoint_is_continued_under_any_layout(name, before, after, tmp_path):
    """The second module has parameters of three dims."""
    accumulate = 2 if name == "plain" else 1
    saved = OwnTraining(name, before, accumulate, save=str(tmp_path))
    run_ranks("harness.module_jobs:train_own", Layout.parse(before).ranks, (saved, {}))
    trained(OwnTraining(name, after, accumulate, load=str(tmp_path)))


@pytest.mark.parametrize("layout", ["dp=2,zero=3", "tp=2", "dp=2,tp=2,zero=1", "pp=2"])
def test_a_module_on_the_meta_device_starts_with_the_same_weights_under_any_layout(layout):
    errors = run_ranks("harness.module_jobs:from_meta", Layout.parse(layout).ranks, layout)
    for weights, logits in errors:
        assert weights == 0 and logits < 1e-5


@from_table
def test_bf16_trains_near_float64_with_masters_in_float32(name, layouts):
    expected, _ = reference(name)
    for layout in layouts:
        ranks = Layout.parse(layout).ranks
        for losses, dtypes, states in run_ranks("harness.module_jobs:mixed", ranks, (name, layout)):
            assert losses == pytest.approx(expected.losses, rel=0.02)
            assert (dtypes, states) == ({"torch.bfloat16"}, {"torch.float32"})


# -- bad input: one line says what is wrong, and what to do


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        both = torch.ones(2, 3)
        self.a, self.b = nn.Parameter(both[:2]), nn.Parameter(both[:1])


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.blocks[1](self.blocks[0](x)))


@from_table
def test_bad_input_is_one_line(module, layout, options, message):
    with pytest.raises(UserError, match=message) as caught:
        split(module, layout, **options)
    assert "\n" not in str(caught.value)


def test_lists_are_no_blocks():
    module, blocks = GroupedModel(), [f"blocks.{group}.{block}" for group in range(2) for block in range(2)]
    assert find_blocks(module, None) == find_blocks(module, ["HeadsBlock"]) == blocks
    with pytest.raises(UserError, match=r"blocks\.0 is a ModuleList, which is never called: name blocks\.0\.\*"):
        find_blocks(module, ["blocks.*"])


@from_table
def test_a_bad_plan_is_one_line(plan, message):
    module = SkipMLP()
    module.blocks[0].up = Doubled(16, 48)
    with pytest.raises(UserError, match=message):
        describe(module, Layout(tp=2), plan, [])


def test_a_degree_that_does_not_divide_names_those_that_do():
    message = r"tp=5 does not divide the 48 outputs of blocks.0.up.weight; valid tp: 1, 2, 3"
    with pytest.raises(UserError, match=message):
        describe(OWN["skips"](), Layout(tp=5), {"blocks.*.up": "column"}, [])


@pytest.mark.usefixtures("alone")
def test_a_block_that_runs_twice_is_found_by_an_example():
    x = torch.randn(3, 4)
    module = split(Twice(), "precision=fp32")
    with pytest.raises(UserError, match=r"the forward pass of blocks\.0 came where the plan has the end"):
        module(x)
    torch.manual_seed(0)
    plain = Twice()
    expected = plain(x).detach()
    module = split(plain, "precision=fp32", example=x)
    assert module.program.plan.parts == ["root", "blocks.1"]
    assert torch.equal(module(x), expected)


@pytest.mark.usefixtures("alone")
def test_parameters_need_not_be_contiguous():
    plain = nn.Linear(4, 3)
    plain.weight = nn.Parameter(torch.randn(4, 3).t())
    x = torch.randn(2, 4)
    expected = plain(x).detach()
    torch.testing.assert_close(split(plain, "precision=fp32")(x), expected)


@pytest.mark.usefixtures("alone")
def test_what_a_step_needs_is_said():
    module = split(OWN["skips"](), "precision=fp32")
    x = torch.randn(2, 16)
    with pytest.raises(UserError, match=r"loss_fn must return \(summed loss, number of tokens\)"):
        module.train_step(lambda model, batch: 1.0, x)
    with pytest.raises(UserError, match="2 micro-batches for a split that accumulates 1"):
        module.train_step(lambda model, batch: model(batch).mean(), [x, x])
    with pytest.raises(UserError, match="no step was measured"):
        module.report()


@pytest.mark.usefixtures("alone")
def test_a_block_without_gradient_is_left_alone():
    module = split(OWN["skips"](), "zero=3,precision=fp32")

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model.scale.sum() + model(x).detach().sum()

    states = module.program.optimizer.states
    before = {state.flat.unit.name: state.master.clone() for state in states}
    module.train_step(loss, torch.randn(2, 16))
    assert {s.flat.unit.name for s in states if not torch.equal(s.master, before[s.flat.unit.name])} == {"root"}


@pytest.mark.usefixtures("alone")
def test_a_blocks_parameter_that_the_loss_uses_is_named():
    """The root's may be used anywhere."""
    plain = OWN["skips"]()
    plain.blocks[1].aside = nn.Parameter(torch.ones(3))
    module = split(plain, "precision=fp32")
    x = torch.randn(2, 16)
    module.train_step(lambda model, x: model(x).square().mean() + model.scale.norm() + model.head.weight.norm(), x)
    with pytest.raises(UserError, match=r"a parameter of blocks\.1 was used outside of its forward pass"):
        module.train_step(lambda model, x: model(x).square().mean() + model.blocks[1].aside.norm(), x)


@pytest.mark.usefixtures("alone")
def test_a_weight_in_8_bits_that_other_code_reads_is_said() -> None:
    module = split(OWN["shared"](), "precision=fp32", lora="rank=3,base=int8")
    with pytest.raises(UserError, match="own code reads a linear map's weight"):
        module(torch.zeros(2, 6, dtype=torch.int64))
    with pytest.raises(UserError, match=r"no block of Linear has an nn\.Linear"):
        split(torch.nn.Linear(3, 4), "precision=fp32", lora="rank=3,base=int8")
