"""accelerate's YAML: FSDP of both versions, DeepSpeed, Megatron-LM, plain data parallel."""

import json

import pytest

from harness.cases import from_table, table
from shardwise.errors import UserError
from shardwise.interop import read

COMMON = table(__file__, "COMMON")
FSDP2 = table(__file__, "FSDP2")


@pytest.fixture
def reading(tmp_path):
    yaml = pytest.importorskip("yaml")

    def of(changes, ranks=None):
        path = tmp_path / "accelerate.yaml"
        path.write_text(yaml.safe_dump({**COMMON, "fsdp_config": FSDP2, **changes}))
        return read([str(path)], ranks)

    return of


def sizes(**named):
    return {"parallelism_config": {f"parallelism_config_{name}_size": size for name, size in named.items()}}


def test_fsdp_2(reading):
    found = reading({})
    assert (found.engine, str(found.layout)) == ("accelerate", "dp=16,zero=3,grads=fp32")
    assert found.unknown == () and found.batch is None and found.seq is None
    assert any("fsdp_config.fsdp_state_dict_type" in fact for fact in found.facts)


@from_table
def test_layouts(reading, changes, layout):
    assert str(reading(changes).layout) == layout


def test_clipping_that_accelerate_adds_is_said(reading):
    deepspeed = {"distributed_type": "DEEPSPEED", "fsdp_config": None, "deepspeed_config": {"zero_stage": 2}}
    assert [note for note in reading(deepspeed).notes if "clip" in note] == [
        "gradient_clipping is not given: accelerate then clips the gradient norm at 1.0"
    ]
    deepspeed["deepspeed_config"]["gradient_clipping"] = 0.5
    assert not [note for note in reading(deepspeed).notes if "clip" in note]


def test_compilation_is_said(reading):
    assert any("compiled" in fact for fact in reading({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}).facts)
    assert not any("compiled" in fact for fact in reading({"dynamo_config": {"dynamo_backend": "NO"}}).facts)


def test_weights_that_stay_gathered_are_said(reading):
    found = reading({"fsdp_config": {**FSDP2, "fsdp_reshard_after_forward": False}})
    assert any("ZeRO-2's traffic" in note for note in found.notes)


def test_a_strategy_that_fsdp_2_does_not_read_is_said(reading):
    found = reading({"fsdp_config": {**FSDP2, "fsdp_sharding_strategy": "FULL_SHARD"}})
    assert any("fsdp_sharding_strategy does nothing" in note for note in found.notes)


def test_a_deepspeed_file_beside_it_is_read(reading, tmp_path):
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2, "sub_group_size": 1e9}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    named = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    found = reading({**named, "fsdp_config": None})
    assert str(found.layout) == "dp=16,zero=2,micro=4,precision=fp32" and found.batch == 64
    assert any("zero_optimization.sub_group_size" in fact for fact in found.facts)


@from_table
def test_contradictions_are_one_line(reading, changes, line):
    with pytest.raises(UserError, match=line):
        reading(changes)


def test_a_bare_no_of_yaml_is_no(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "a.yaml").write_text("distributed_type: NO\nmixed_precision: no\n")
    assert str(read([str(tmp_path / "a.yaml")]).layout) == "precision=fp32"


def test_a_table_of_another_kind_is_said_to_do_nothing(reading):
    found = reading({"distributed_type": "MULTI_GPU"})
    assert any("fsdp_config does nothing with distributed_type MULTI_GPU" in note for note in found.notes)
    assert found.unknown == ()


def test_processes_of_the_cluster_stand_in_for_missing_ones(reading):
    assert reading({"num_processes": None}, 32).layout.dp == 32


def test_without_pyyaml_the_extra_is_named(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "a.yaml").write_text("distributed_type: FSDP")
    with pytest.raises(UserError, match=r"^reading a.yaml needs yaml: pip install 'shardwise\[export\]'"):
        read([str(tmp_path / "a.yaml")])


def test_a_yaml_that_builds_objects_is_refused(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "a.yaml").write_text("distributed_type: !!python/object/apply:os.getcwd []")
    with pytest.raises(UserError, match="not valid YAML"):
        read([str(tmp_path / "a.yaml")])


def test_a_launch_without_a_file_takes_all_gpus():
    words = "accelerate launch train.py --per_device_train_batch_size 2 --learning_rate 1e-5 --output_dir out"
    found = read([words], 8)
    assert str(found.layout) == "dp=8,micro=2,precision=fp32" and "accelerate's own file" in found.unsettled[-1]
    assert read([words.replace("launch", "launch --use_fsdp --num_processes 4")]).layout.stage == 3
    assert read([f"{words} --bf16"], 8).layout.precision == "bf16"
    with pytest.raises(UserError, match="give it in the file, or --ranks N"):
        read([words])
