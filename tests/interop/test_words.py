"""Layouts in words."""

from harness.cases import from_table
from shardwise.cluster import Cluster
from shardwise.interop.expressions import BUILTINS
from shardwise.interop.words import in_words
from shardwise.layout import Layout

CLUSTER = Cluster.parse("8x8xH100")


@from_table
def test_lines(layout, words):
    assert any(line == words or line.endswith(words) for line in in_words(Layout.parse(layout), CLUSTER))


def test_without_a_cluster_nothing_is_said_of_nodes():
    assert not any("node" in line for line in in_words(Layout.parse("dp=8,tp=8,zero=3")))


def test_a_server_has_replicas():
    assert in_words(Layout.parse("dp=2,tp=4"), None, serves=True) == ["2 replicas", "4-way tensor parallel"]


def test_no_property_of_a_layout_hides_a_function_of_engines_expressions():
    assert not BUILTINS.keys() & set(dir(Layout))
