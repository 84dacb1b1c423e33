"""DeepSpeed's JSON: layouts, the batch equation, and what it refuses."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import UserError
from shardwise.interop import read
from shardwise.interop.reading.engine_reader import read_as
from shardwise.interop.spec import spec

STAGE_3 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "steps_per_print": 10,
}


@pytest.fixture
def reading(tmp_path):
    def of(config, ranks=64):
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps(config))
        return read([str(path)], ranks)

    return of


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        ({"type": "SGD", "params": {"lr": 0.1}}, "sgd"),
        ({"type": "sgd", "params": {"lr": 0.1, "momentum": 0.9}}, "momentum"),
        ({"type": "SGD"}, "sgd"),
        ({"type": "Adam"}, None),
    ],
)
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


@pytest.mark.parametrize(
    ("changes", "ranks", "layout"),
    [
        ({"zero_optimization": {"stage": 0}}, 8, "dp=8,micro=2"),
        (
            {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
            8,
            "dp=8,zero=1,micro=2,grads=fp32",
        ),
        ({"zero_optimization": {"stage": 2}, "bf16": {"enabled": False}}, 8, "dp=8,zero=2,micro=2,precision=fp32"),
        ({"tensor_parallel": {"autotp_size": 4}, "zero_optimization": {"stage": 1}}, 32, "dp=8,tp=4,zero=1,micro=2"),
        (
            {"sequence_parallel_size": 4, "zero_optimization": {"stage": 3}},
            32,
            "dp=8,cp=4,zero=3,cpkind=ulysses,micro=2",
        ),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, 64, "dp=64,zero=3,hpz=8,micro=2"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 64}}, 64, "dp=64,zero=3,micro=2"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, 64, "dp=64,zero=3,qwz,micro=2"),
        ({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}, 64, "dp=64,zero=2,qgz,micro=2"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 8}}, 64, "dp=64,zero=3,shard=8,micro=2"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            8,
            "dp=8,zero=3,micro=2",
        ),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, 8, "dp=8,zero=2,micro=2,offload=cpu"),
    ],
)
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


@pytest.mark.parametrize(
    ("changes", "ranks", "line"),
    [
        ({}, None, "does not say on how many GPUs"),
        ({"train_batch_size": 500}, 64, r"= 2 x 4 x 64; nearest train_batch_size that is: 512"),
        (
            {"train_batch_size": 500, "gradient_accumulation_steps": "auto"},
            64,
            "nearest train_batch_size that is: 384 or 512",
        ),
        ({"train_batch_size": None, "train_micro_batch_size_per_gpu": None}, 64, "one of train_batch_size and"),
        ({"zero_optimization": {"stage": 4}}, 64, "must be 0, 1, 2 or 3, not 4"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, 64, "offload_param needs stage 3"),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, 64, "needs stage 1, 2 or 3"),
        ({"fp16": {"enabled": True}}, 64, "both enabled"),
        ({"tensor_parallel": {"autotp_size": 8}}, 12, "12 ranks cannot be divided by"),
        ({"zero_optimization": True}, 64, "zero_optimization must be a table"),
        ({"train_micro_batch_size_per_gpu": -1}, 64, "must be an integer of at least 1"),
        ({"pipeline": {"stages": 4}}, 64, "pipeline works with ZeRO stages 0 and 1"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 7}}, 64, "hpz=7 must cut the 64 ranks"),
    ],
)
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
