"""The kinds of tensor parallelism side by side: bytes by hand, and every form of them in what `estimate` prints."""

import pytest

from shardwise.cli.main import main
from shardwise.cluster import Cluster
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.predict.tensor_kinds import tensor_kinds

MODEL = ModelConfig("m", vocab=64, hidden=32, layers=3, heads=4, kv_heads=2, ffn=44, max_positions=64)
CLUSTER = Cluster.parse("2xH100")
WORKLOAD = Workload(16, 2)
WIDTH = 2
"""Bytes of an activation's element."""


def test_payload_of_each_kind_is_its_table_s() -> None:
    gathered, megatron, sequence = tensor_kinds(MODEL, Layout.parse("tp=2,tpkind=gathered"), WORKLOAD, CLUSTER)
    assert [kind.name for kind in (gathered, megatron, sequence)] == [
        "tpkind=gathered", "tpkind=megatron", "tpkind=megatron,sp",
    ]  # fmt: skip
    tokens = WORKLOAD.seq * WORKLOAD.batch
    stream, inner, heads = MODEL.hidden, MODEL.ffn, MODEL.q_width + 2 * MODEL.kv_width
    loss = 3 * tokens * 4 + 8  # a maximum, a sum and a target per token; the gradient's norm
    edges = 2 * tokens * stream * WIDTH + loss
    # Each map: its outputs are gathered, and its input's gradient is summed.
    outputs, inputs = heads + stream + 2 * inner + stream, stream + MODEL.q_width + stream + inner
    assert gathered.payload["all-gather"] == MODEL.layers * tokens * outputs * WIDTH
    assert gathered.payload["all-reduce"] == MODEL.layers * tokens * inputs * WIDTH + edges
    assert gathered.payload["reduce-scatter"] == 0
    # Megatron's: two sums forward and two backward (Shoeybi et al. 2019).
    assert megatron.payload["all-reduce"] == MODEL.layers * 4 * tokens * stream * WIDTH + edges
    assert megatron.payload["all-gather"] == megatron.payload["reduce-scatter"] == 0
    assert megatron.sent < sequence.sent < gathered.sent
    assert sequence.saved < megatron.saved < gathered.saved


def test_kinds_that_suit_nothing_are_left_out() -> None:
    assert tensor_kinds(MODEL, Layout.parse("dp=2"), WORKLOAD, CLUSTER) == []
    odd = tensor_kinds(MODEL, Layout.parse("tp=3,tpkind=gathered"), WORKLOAD, Cluster.parse("3xH100"))
    assert [kind.name for kind in odd] == ["tpkind=gathered"]  # 3 divides neither heads nor sequence


def test_estimate_prints_them_for_the_older_form(capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--cluster", "2xH100", "--seq", "64", "--batch", "2"]
    assert main(["estimate", "tiny-llama", "--layout", "tp=2,tpkind=gathered", *where]) == 0
    gathered = capsys.readouterr().out
    assert "kinds of tensor parallelism" in gathered and "tpkind=megatron" in gathered
    assert main(["estimate", "tiny-llama", "--layout", "tp=2", *where]) == 0
    assert "kinds of tensor" not in capsys.readouterr().out
