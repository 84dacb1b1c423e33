"""DeepSpeed's JSON: layouts, the batch equation, and what it refuses."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cases import from_table, table
from shardwise.errors import UserError
from shardwise.interop import read
from shardwise.interop.reading.engine_reader import read_as
from shardwise.interop.spec import spec

STAGE_3 = table(__file__, "STAGE_3")


@pytest.fixture
def reading(tmp_path):
    def of(config, ranks=64):
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps(config))
        return read([str(path)], ranks)

    return of


@from_table
def test_sgd_has_less_state(reading, optimizer, name):
    found = reading(STAGE_3 | {"optimizer": optimizer})
    assert found.optimizer == name and found.unknown == ()


def test_stage_3_with_offload(reading):
    found = reading(STAGE_3)
    assert (found.engine, str(found.layout)) == ("DeepSpeed", "dp=64,zero=3,micro=2,offload=cpu")
    assert found.batch == 512 and found.seq is None
    assert found.unknown == () and "optimizer" in found.ignored
    assert "zero_optimization.offload_optimizer.pin_memory" in found.ignored
    assert any("reduces the gradients of each of the 4 micro-batches" in note for note in found.notes)


@from_table
def test_layouts(reading, changes, ranks, layout):
    assert str(reading({**STAGE_3, **changes}, ranks).layout) == layout


def test_clipping_is_said_where_it_is_left_out(reading):
    assert not any("gradient_clipping" in note for note in reading(STAGE_3).notes)
    without = {key: value for key, value in STAGE_3.items() if key != "gradient_clipping"}
    assert any("clips the gradient norm at 1.0" in note for note in reading(without).notes)


def test_a_batch_that_is_left_to_the_trainer(reading):
    found = reading({**STAGE_3, "train_micro_batch_size_per_gpu": "auto"})
    assert found.batch is None and found.layout.micro == 1
    assert any("the batch is auto" in fact for fact in found.facts)


def test_a_misspelt_key_is_said_with_the_nearest(reading):
    found = reading({**STAGE_3, "zero_optimization": {"stage": 3, "offload_optimiser": {"device": "cpu"}}})
    assert found.unknown == ("zero_optimization.offload_optimiser (did you mean offload_optimizer?)",)


@from_table
def test_contradictions_are_one_line(reading, changes, ranks, line):
    with pytest.raises(UserError, match=line) as raised:
        reading({**STAGE_3, **changes}, ranks)
    assert "\n" not in str(raised.value)


SIZE = st.integers(1, 8)


@given(SIZE, SIZE, SIZE, st.sets(st.sampled_from(["whole", "micro", "steps"]), min_size=1))
def test_two_numbers_of_the_batch_give_the_third(micro, steps, world, given_ones):
    keys = {
        "whole": "train_batch_size",
        "micro": "train_micro_batch_size_per_gpu",
        "steps": "gradient_accumulation_steps",
    }
    values = {"whole": micro * steps * world, "micro": micro, "steps": steps}
    config = {keys[name]: values[name] for name in given_ones}
    if given_ones == {"steps"}:
        with pytest.raises(UserError):
            read_as(spec("deepspeed"), config, world)
        return
    found = read_as(spec("deepspeed"), config, world)
    assert found.batch == found.layout.micro * world * (found.batch // found.layout.micro // world)
    assert "micro" not in given_ones or found.layout.micro == micro
    assert "whole" not in given_ones or found.batch == micro * steps * world
    if len(given_ones) > 1:
        assert (found.layout.micro, found.batch) == (micro, micro * steps * world)


def test_a_key_that_is_there_twice_is_an_error(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}, "zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    with pytest.raises(UserError, match="zero_optimization is there twice"):
        read([str(path)], 8)
