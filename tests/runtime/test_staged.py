"""Ranks that share a GPU: their tensors go through the host's memory, which is forced on CPU tensors here."""

from pathlib import Path

import pytest
import torch

from harness.cases import table
from harness.checks import assert_ledger, assert_replicas_equal, train
from harness.reference import Case
from harness.space import EXPERT_MODELS, MODELS
from harness.today import some_of
from shardwise.api import _carried_by
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.layout.transport_buffers import STAGED
from shardwise.predict import estimate
from shardwise.predict.memory.homes import host_bytes
from shardwise.predict.memory.step import predict_bytes
from shardwise.report import StepReport, compare
from shardwise.report.run_directory import RunDirectory
from shardwise.report.step_report import merge_roles
from shardwise.runtime.job.devices import cuda_device, sharing

LAYOUTS = table(__file__, "LAYOUTS")


@pytest.mark.parametrize(("model", "text", "transport"), some_of(LAYOUTS, 5, "staged layouts"))
def test_training(model: str, text: str, transport: str) -> None:
    """Losses of the same transport without staging, bit by bit, and the predicted ledger and buffers."""
    layout = Layout.parse(text)
    workload = Workload(seq=16, batch=2 * layout.dp * layout.pp)
    case = Case((MODELS | EXPERT_MODELS)[model], workload, layout.precision, layout.attention)
    plain = train(case, layout, transport=transport, memory=False)
    ranks = train(case, layout, transport=transport, staged=True)
    assert [rank.losses for rank in ranks] == [rank.losses for rank in plain]
    assert [rank.norms for rank in ranks] == [rank.norms for rank in plain]
    assert_replicas_equal(ranks)
    assert_ledger(case, layout, ranks)
    for index, rank in enumerate(ranks):
        plan = unit_plan(case.model, layout, workload, rank=index, backend="staged")
        assert rank.backend == plan.backend
        predicted, held = predict_bytes(plan), rank.role.bytes
        for name in ("parameters", "gradients", "optimizer", "comm"):
            assert getattr(held, name) == getattr(predicted, name), (index, name)
        assert rank.role.host == host_bytes(plan) and rank.role.host.comm > 0, index


@pytest.mark.parametrize("way", ["shared", "gloo"])
def test_the_prediction_of_a_run_is_that_of_its_transport(way: str, tmp_path: Path) -> None:
    case, layout = Case(MODELS["llama"], Workload(seq=16, batch=4), "fp64", "sdpa"), Layout.parse("dp=2,precision=fp64")
    ranks = train(case, layout, transport=way, staged=True)
    roles = merge_roles({index: rank.role for index, rank in enumerate(ranks)})
    assert {row.algorithm for role in roles for row in role.transport} == {way + STAGED}
    report = StepReport("measured", case.model.to_json(), str(layout), case.workload.to_json(), "2xGPU", roles)
    directory = RunDirectory(tmp_path)
    directory.report("measured").parent.mkdir()
    report.write(directory.report("measured"))
    assert _carried_by(directory) == "staged"
    predicted = estimate(case.model, layout, case.workload, backend="staged")
    assert compare(predicted, report).equal_ledger
    assert [role.host for role in predicted.roles] == [role.host for role in roles]


def test_ranks_take_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    current = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    devices = [cuda_device(local) for local in range(3)]
    assert [device.index for device in devices] == [0, 1, 0] and current == devices
    assert sharing(devices[1]).startswith("3 ranks share 2 GPUs") and not sharing(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert not sharing(devices[0])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="needs a GPU"):
        cuda_device(0)
