"""transformers' DistributedConfig and TrainingArguments as JSON."""

import json

import pytest

from shardwise.errors import UserError
from shardwise.interop import read
from shardwise.interop.engines import transformers

SIZES = {"tp_size": 2, "fsdp_size": 4, "dp_replicate_size": 2, "fsdp_mixed_precision": True}
ARGUMENTS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "gradient_checkpointing": True}


@pytest.fixture
def reading(tmp_path):
    def of(data, ranks=None):
        path = tmp_path / "train.json"
        path.write_text(json.dumps(data))
        return read([str(path)], ranks)

    return of


def test_both_tables(reading):
    found = reading({"distributed_config": SIZES, "training_arguments": ARGUMENTS}, 16)
    assert str(found.layout) == "dp=8,tp=2,zero=3,shard=4,micro=2,recompute=full,grads=fp32"
    assert found.batch == 2 * 8 * 4 and found.unknown == ()


def test_arguments_alone_are_ddp(reading):
    found = reading(ARGUMENTS | {"optim": "sgd", "fsdp": "full_shard"}, 4)
    assert str(found.layout) == "dp=4,zero=3,micro=2,recompute=full,precision=fp32" and found.optimizer == "sgd"


def test_a_nearby_key_is_named(reading):
    assert "fsdp_size" in reading({"distributed_config": {"fsdp_sizes": 2}}, 2).unknown[0]


def test_sizes_that_are_not_the_ranks(reading):
    with pytest.raises(UserError, match="multiply to 16, but there are 8 ranks"):
        reading({"distributed_config": SIZES}, 8)


def test_a_configuration_that_trl_has_not_is_an_error_with_the_nearest():
    with pytest.raises(UserError, match="accelerate_config zero4 is no file; did you mean zero3"):
        read(["trl sft --accelerate_config zero4 --model_name_or_path x --dataset_name y"])


def test_a_dialects_keys_are_named_as_they_are_written():
    table = {"base_model": "m", "sequence_len": 64, "micro_batch_size": "x", "datasets": []}
    with pytest.raises(UserError, match=r"^micro_batch_size must be an integer"):
        transformers.read(table, 8, {}.__getitem__, "axolotl")
    found = transformers.read({**table, "micro_batch_size": 2, "gptq_groupsize": 2}, 8, {}.__getitem__, "axolotl")
    assert "gptq_groupsize" in found.unknown
