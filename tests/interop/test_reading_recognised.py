"""Which engine a configuration is for; what is none; and that nothing but one line comes of rubbish."""

import json
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import from_table
from shardwise.errors import UserError
from shardwise.interop import ENGINES, read
from shardwise.interop.engines import torchrun, torchtitan, transformers
from shardwise.interop.reading.arguments import parse
from shardwise.interop.reading.engine_reader import read_as
from shardwise.interop.spec import spec


@from_table
def test_arguments(text, engine):
    assert read([text], 8).engine == engine


@from_table
def test_what_cannot_be_read_is_one_line(config, engine, line):
    with pytest.raises(UserError, match=line):
        read(config, 8, engine)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("ms-swift", "swift infer --max_batch_size 4"),
        ("ms-swift", "megatron export --tensor_model_parallel_size 2"),
        ("torchtune", "tune run --nproc_per_node 8 full_finetune_distributed --config llama3_1/8B_full"),
        ("LitGPT", "litgpt finetune_lora meta-llama/Llama-3.2-1B --devices 4"),
        ("XTuner", "NPROC_PER_NODE=8 xtuner train config.py --deepspeed deepspeed_zero2"),
    ],
)
def test_commands_of_engines_that_are_not_read_are_known(engine, words):
    with pytest.raises(UserError, match=f"{engine}'s configuration"):
        read([words], 8)


def test_a_program_that_is_no_engines_is_in_doubt():
    words = "{} --max_batch_size 16 --model m"
    assert "foo is no program of TensorRT-LLM" in read([words.format("foo serve")], 8).unsettled[0]
    named = read([words.format("foo serve")], 8, "tensorrt-llm"), read([words.format("trtllm-serve m")], 8)
    assert not any("no program" in doubt for one in named for doubt in one.unsettled)


@from_table
def test_files_that_hold_no_table(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as raised:
        read([str(path)], 8)
    assert "\n" not in str(raised.value)


def test_an_engine_can_be_named(tmp_path):
    path = tmp_path / "unusual.json"
    path.write_text(json.dumps({"parallelism": {"tensor_parallel_degree": 2}}))
    assert read([str(path)], 8, "torchtitan").layout.tp == 2
    with pytest.raises(UserError, match="torchrun is read from its arguments"):
        read([str(path)], 8, "torchrun")
    assert len(ENGINES) == 14


VALUE = st.sampled_from(
    [0, 1, 2, 3, 8, -1, 1.5, "auto", "8", "x", "", None, True, False, [], [2], {}, {"enabled": True}, {"device": "cpu"},
     {"stage": 3}, "full", "selective", "fp32", "1F1B", "none", 10**30]
)  # fmt: skip


def tables(keys):
    return st.dictionaries(
        st.sampled_from(keys), VALUE | st.dictionaries(st.sampled_from(keys), VALUE, max_size=6), max_size=8
    )


def words_of(text):
    return text.split()


DEEPSPEED = words_of("""
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps zero_optimization bf16 fp16 stage
    offload_param offload_optimizer enabled device tensor_parallel autotp_size sequence_parallel_size pipeline stages
    gradient_clipping data_types grad_accum_dtype zero_hpz_partition_size mics_shard_size other
""")
TORCHTITAN = words_of("""
    training parallelism activation_checkpoint compile model seq_len local_batch_size global_batch_size mode
    data_parallel_shard_degree data_parallel_replicate_degree tensor_parallel_degree pipeline_parallel_degree enable
    pipeline_parallel_schedule context_parallel_degree expert_parallel_degree name flavor num_pp_microbatches
""")
TRANSFORMERS = words_of("""
    distributed_config training_arguments tp_size fsdp_size dp_replicate_size pp_size ep_size fsdp_cpu_offload bf16
    optim fsdp_mixed_precision per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing other
""")
FLAGS = words_of("""
    tp_size pp_size dp_size ep_size mem_fraction_static context_length nproc_per_node nnodes layout batch
    expert_parallel pipeline_model_parallel_layout num_distributed_optimizer_instances attention_backend
    tensor_model_parallel_size pipeline_model_parallel_size num_layers micro_batch_size global_batch_size hidden_size
    num_attention_heads vocab_size recompute_granularity recompute_method bf16 fp16 sequence_parallel num_query_groups
    group_query_attention decoder_first_pipeline_num_layers tensor_parallel_size max_model_len quantization dtype
    gpu_memory_utilization data_parallel_size enable_expert_parallel num_layers_per_virtual_pipeline_stage
""")


SHELL = st.sampled_from(
    [
        "vllm serve x", "torchrun", "pretrain_gpt.py", "--tensor-parallel-size", "--nproc_per_node", "8", "A=2", "A=(",
        ")", "(", "$A", "${A:-3}", "$((A/0))", "$(( a b ))", "$((", "'", '"', "`", "\\", "\n", ";", "if x; then", "fi",
        "done", "for A in 1 2; do", "&&", "|", ">", "<<E", "E", "#", "bash -c", "'vllm serve y -tp 2'", "eval", "$@",
        "${", "}", "=", "ssh h", "accelerate launch",
    ]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(SHELL, st.sampled_from([" ", ""])), max_size=25), st.booleans())
def test_rubbish_in_a_shell_is_one_line(parts, ranks):
    text = " " + "".join(word + space for word, space in parts)
    try:
        found = read([text], 8 if ranks else None)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert found.layout.ranks >= 1 and json.dumps(found.to_json())


@settings(max_examples=300, deadline=None)
@given(st.data(), st.none() | st.integers(1, 64))
def test_rubbish_is_one_line(data, ranks):
    words = [
        word
        for flag, value in data.draw(st.dictionaries(st.sampled_from(FLAGS), VALUE, max_size=8)).items()
        for word in (f"--{flag.replace('_', '-')}", str(value))
    ]
    flags = parse(words, {}, frozenset()).flags
    for reader, config in (
        (partial(read_as, spec("deepspeed")), data.draw(tables(DEEPSPEED))),
        (torchtitan.read, data.draw(tables(TORCHTITAN))),
        (partial(read_as, spec("megatron")), flags),
        (partial(read_as, spec("vllm")), flags),
        (partial(read_as, spec("sglang")), flags),
        (torchrun.read, words),
        (lambda table, ranks: transformers.read(table, ranks, {}.__getitem__), data.draw(tables(TRANSFORMERS))),
    ):
        try:
            found = reader(config, ranks)
        except UserError as error:
            assert "\n" not in str(error)
        else:
            assert found.layout.ranks >= 1 and json.dumps(found.to_json())
