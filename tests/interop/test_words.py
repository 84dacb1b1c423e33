"""Layouts in words."""

import pytest

from shardwise.cluster import Cluster
from shardwise.interop.expressions import BUILTINS
from shardwise.interop.words import in_words
from shardwise.layout import Layout

CLUSTER = Cluster.parse("8x8xH100")


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("dp=64", "plain data parallel over 64 ranks: every rank keeps everything across 8 nodes"),
        ("dp=8,tp=8,zero=3", "8-way tensor parallel inside a node"),
        (
            "dp=8,tp=8,zero=3",
            "ZeRO-3 over 8 ranks: parameters, gradients and optimizer state are sharded across 8 nodes",
        ),
        ("dp=64,zero=3,shard=8", "; 8 such groups sum their gradients (HSDP)"),
        ("dp=64,zero=3,hpz=8", "; backward gathers from a second copy over 8 ranks"),
        ("tp=16,pp=4,sp", "16-way tensor parallel across 2 nodes, with sequence parallelism"),
        ("tp=16,pp=4", "4 pipeline stages, 1f1b across 4 nodes"),
        ("tp=16,pp=4", "no data parallelism: one copy of the model"),
        ("cp=4,dp=16,cpkind=ulysses", "4-way context parallel (Ulysses) inside a node"),
        ("dp=64,zero=1,recompute=full,offload=cpu,compile=block", "recomputes every block in backward"),
        (
            "dp=64,zero=1,recompute=full,offload=nvme,compile=block",
            "optimizer state on disk, updated by the host's cores",
        ),
        ("dp=64,micro=4,grads=fp32", "micro-batches of 4 sequences, bf16 with fp32 gradients"),
    ],
)
def test_lines(layout, words):
    assert any(line == words or line.endswith(words) for line in in_words(Layout.parse(layout), CLUSTER))


def test_without_a_cluster_nothing_is_said_of_nodes():
    assert not any("node" in line for line in in_words(Layout.parse("dp=8,tp=8,zero=3")))


def test_a_server_has_replicas():
    assert in_words(Layout.parse("dp=2,tp=4"), None, serves=True) == ["2 replicas", "4-way tensor parallel"]


def test_no_property_of_a_layout_hides_a_function_of_engines_expressions():
    assert not BUILTINS.keys() & set(dir(Layout))
