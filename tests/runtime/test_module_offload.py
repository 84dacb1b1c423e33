"""Offloading of a user's module: the same bits as in memory, and exact bytes of every home."""

import re

import pytest
import torch

from harness.cases import from_table, table
from harness.module_jobs import OffloadOutcome, OwnTraining
from harness.own_modules import OWN
from harness.pool import run_ranks
from harness.today import some_of
from shardwise import Layout, UserError, split
from shardwise.predict.memory.homes import disk_bytes, host_bytes
from shardwise.predict.memory.step import gradient_bytes, optimizer_bytes, parameter_bytes
from shardwise.predict.traffic.homes import home_rows
from shardwise.report.step_report import Bytes

CASES = table(__file__, "CASES")


@pytest.mark.parametrize(("name", "text", "lora"), some_of(CASES, 4, "offloaded modules"))
def test_a_home_changes_no_bit(name, text, lora, tmp_path):
    layout = Layout.parse(text)
    plain = re.sub("offload[^,]*,?", "", text).strip(",") or "dp=1"
    here, away = (_trained(OwnTraining(name, each, 2), str(tmp_path), lora) for each in (plain, text))
    for mine, theirs in zip(away, here, strict=True):
        if layout.stage == Layout.parse(plain).stage:  # off the device, a stage is in effect for one rank, too
            assert (mine.losses, mine.norms, mine.state) == (theirs.losses, theirs.norms, theirs.state)
        else:
            assert mine.losses == pytest.approx(theirs.losses, rel=1e-12)  # gradients are summed in another order
        _check_homes(mine, layout)
    assert not list(tmp_path.rglob("*.state")), "files go with their programs"


def _trained(job: OwnTraining, folder: str, lora: str) -> list[OffloadOutcome]:
    return run_ranks("harness.module_jobs:train_offloaded", Layout.parse(job.layout).ranks, (job, folder, lora))


def _check_homes(mine: OffloadOutcome, layout: Layout) -> None:
    """Copies and bytes are those of the plan; of saved activations, which no description predicts, that they go."""
    plan = mine.plan
    saved = {row: count for row, count in mine.copies.items() if row[4] == "uint8"}
    copies = {row: count for row, count in mine.copies.items() if row not in saved}
    if layout.offload_activations == "none":
        expected = {(r.phase, r.op, r.axes, r.unit, r.dtype, r.elements): r.count for r in home_rows(plan)}
        assert copies == expected and not saved
        assert mine.host == host_bytes(plan)
    else:
        blocks = set(plan.of_kind("block"))
        ways = {(phase, op, unit) for phase, op, _, unit, *_ in saved}
        assert ways == {("forward", "to_host", b) for b in blocks} | {("backward", "to_device", b) for b in blocks}
        assert mine.host.saved > 0
    assert mine.disk == disk_bytes(plan)
    lasting = Bytes(parameter_bytes(plan), gradient_bytes(plan), optimizer_bytes(plan))
    assert (mine.bytes.parameters, mine.bytes.optimizer) == (lasting.parameters, lasting.optimizer)
    if layout.pp == 1:
        assert mine.bytes.gradients == lasting.gradients


def test_saved_activations_leave_the_device():
    layouts = "dp=1", "offload_activations=cpu"
    (here,), (away,) = (_trained(OwnTraining("states", text, 2), "", "") for text in layouts)
    assert away.bytes.saved < here.bytes.saved / 2


@from_table
def test_bad_input_is_one_line(text, message):
    with pytest.raises(UserError, match=message) as caught:
        split(OWN["plain"](), text)
    assert "\n" not in str(caught.value)


def test_a_base_in_8_bits_is_not_on_disk(tmp_path):
    with pytest.raises(UserError, match="choose offload_params=cpu"):
        split(OWN["plain"](), "zero=3,offload=cpu,offload_params=nvme", lora="rank=2,base=int8", offload_dir=tmp_path)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
