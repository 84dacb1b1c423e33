"""A blueprint says what layouts, checkpoints and prices need, in JSON whose size does not grow with depth."""

import json

import pytest

from shardwise.errors import UserError
from shardwise.model.blueprint import Blueprint
from shardwise.model.catalog import catalog, get
from shardwise.model.parameters import blueprint


@pytest.mark.parametrize("name", catalog())
def test_json_gives_the_same_blueprint_back(name):
    found = blueprint(get(name))
    assert Blueprint.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_depth_costs_nothing():
    """A part that repeats is described once."""
    short, deep = (json.dumps(blueprint(get("megatron-1t").replace(layers=n)).to_json()) for n in (2, 2048))
    assert len(deep) < len(short) + 100


@pytest.mark.parametrize("change", [{"parts": 3}, {"hidden": None, "width": 4}, {"parts": [{"name": "embedding"}]}])
def test_what_is_no_blueprint_is_refused_in_one_line(change):
    data = blueprint(get("tiny-gpt")).to_json()
    with pytest.raises(UserError, match=r"not a shardwise blueprint: [^\n]+$"):
        Blueprint.from_json(data | change)


def test_a_pipeline_keeps_what_is_around_the_blocks_at_its_ends():
    found = blueprint(get("tiny-gpt"))
    assert found.stages((1, 3)) == [["embedding", "blocks.0"], ["blocks.1", "blocks.2", "blocks.3", "head"]]
    assert found.stages((0, 4, 0)) == [["embedding"], [f"blocks.{i}" for i in range(4)], ["head"]]


def test_parts_that_share_a_table_say_so():
    assert blueprint(get("tiny-gpt")).sharing == {"embedding", "head"}
    assert blueprint(get("tiny-gpt").replace(tied=False)).sharing == frozenset()


@pytest.mark.parametrize("name", catalog())
def test_operations_multiply_with_every_matrix_that_a_token_meets(name):
    """The products of a part's operations and the matrices among its parameters are listed apart, and agree."""
    model = get(name)
    for part in blueprint(model).of_kind("block"):
        multiplied = sum(op.elements for op in part.operations if op.kind in ("linear", "router"))
        matrices = [p for p in part.parameters if len(p.shape) == 2]
        routed = sum(p.numel for p in matrices if p.cut == "expert")
        chosen = routed // model.experts.count * model.experts.active if model.experts else 0
        assert multiplied == sum(p.numel for p in matrices) - routed + chosen
