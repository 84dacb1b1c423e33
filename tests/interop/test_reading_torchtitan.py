"""torchtitan's TOML and arguments, of both ways to count a batch."""

import pytest

from harness.cases import from_table, table
from shardwise.errors import UserError
from shardwise.interop import read
from shardwise.interop.engines import torchtitan
from shardwise.interop.reading.fields import ConfigFields
from shardwise.options import runs_in, runs_text

LLAMA_70B = table(__file__, "LLAMA_70B")


@pytest.fixture
def reading(tmp_path):
    def of(text, ranks=64):
        path = tmp_path / "train.toml"
        path.write_text(text)
        return read([str(path)], ranks)

    return of


def layout_of(arguments, ranks=64):
    training = "--training.seq_len 4096 --training.local_batch_size 2 --activation_checkpoint.mode none"
    return str(read([f"torchtitan {training} {arguments}"], ranks).layout)


def test_a_whole_file(reading):
    found = reading(LLAMA_70B)
    assert str(found.layout) == "dp=8,tp=8,zero=3,sp,micro=8,recompute=full,grads=fp32"
    assert (found.seq, found.batch, found.model) == (8192, 64, "llama-3-70b")
    assert found.unknown == () and {"job", "optimizer", "training.steps", "model.hf_assets_path"} <= set(found.ignored)


@from_table
def test_layouts(arguments, layout):
    assert layout_of(arguments) == layout


def test_a_batch_counted_in_tokens():
    words = (
        "torchtitan --training.max_context_length 4096 --training.num_tokens_per_microbatch_per_dp_rank 8192 "
        "--training.num_tokens_per_train_step 1048576 --parallelism.data_parallel_shard_degree 8"
    )
    found = read([words])
    assert (found.seq, found.layout.micro, found.batch) == (4096, 2, 256)
    assert any("16 local batches are accumulated" in fact for fact in found.facts)


def test_a_number_of_pipeline_micro_batches():
    words = "--parallelism.pipeline_parallel_degree 2 --parallelism.num_pp_microbatches 2"
    assert read([f"torchtitan --training.local_batch_size 8 {words}"], 4).layout.micro == 4


@pytest.mark.parametrize("more, micro", [("", 2), ("pipeline_parallel_microbatches = 8", 1)])
def test_stages_of_0_1_cut_the_local_batch(reading, more, micro):
    old = "[training]\nbatch_size = 8\nseq_len = 8192\n[experimental]\npipeline_parallel_degree = 4\n"
    found = reading(old + more, 32)
    assert str(found.layout).startswith(f"dp=8,pp=4,zero=2,micro={micro}".replace(",micro=1", ""))
    assert ("4 of 2" in " ".join(found.facts)) == (not more) and "experimental" not in found.ignored


@pytest.mark.parametrize(
    ("more", "stages"),
    [
        ("", "20/21/20/19"),
        ("--parallelism.pipeline_parallel_schedule Interleaved1F1B", "10/11/10/10/10/10/10/9"),
        ("--parallelism.pipeline_parallel_layers_per_stage 21", "20/21/20/19"),
        ("--parallelism.pipeline_parallel_last_stage_less_layers 5", "21/22/21/16"),
        ("--parallelism.pipeline_parallel_first_stage_less_layers 0 "
         "--parallelism.pipeline_parallel_last_stage_less_layers 0", ""),
    ],
)  # fmt: skip
def test_the_ends_count_as_layers_of_their_stages(more, stages):
    words = f"torchtitan --model.name llama3 --model.flavor 70B --parallelism.pipeline_parallel_degree 4 {more}"
    assert runs_text(read([words], 4).layout.stages) == stages


@pytest.mark.parametrize(
    ("pp", "stages", "ends"),
    [
        (4, "8/9/9/6", (1, 2)), (4, "7/9/9/7", (2, 1)), (4, "8/8/8/8", (0, 0)), (2, "18/14", (0, 3)),
        (2, "14/18", (4, 0)), (8, "4/5/5/4/4/4/4/2", (1, 2)), (2, "32/0", (0, 31)),
        (4, "8/10/6/8", None), (4, "10/6/8/8", None),
    ],
)  # fmt: skip
def test_stages_are_cut_by_what_the_ends_count_as(pp, stages, ends):
    assert torchtitan.ends_of(runs_in(stages)) == ends
    if ends is not None:
        assert torchtitan.cut_stages("llama-3-8b", pp, 1, ends, 0, None, ConfigFields({})) == runs_in(stages)


def test_lists_of_modules_are_stages():
    names = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2"], ["norm", "output"]]
    table = {"parallelism": {"pipeline_parallel_degree": 3, "module_fqns_per_model_part": names}}
    assert torchtitan.read(table, 3).layout.stages == (1, 2, 0)
    with pytest.raises(UserError, match="3 stages do not suit 2 ranks"):
        torchtitan.read({"parallelism": {**table["parallelism"], "pipeline_parallel_degree": 2}}, 2)


def test_tokens_are_those_of_one_pipeline_micro_batch():
    words = "--parallelism.pipeline_parallel_degree 2 --parallelism.num_pp_microbatches 4"
    tokens = "--training.max_context_length 4096 --training.num_tokens_per_microbatch_per_dp_rank 8192"
    found = read([f"torchtitan {words} {tokens}"], 4)
    assert (found.layout.micro, found.batch) == (2, 2 * 4 * 2)


def test_a_policy_of_recomputation():
    words = "torchtitan --training.seq_len 4096 activation-checkpoint"
    assert read([f"{words}:full"], 8).layout.recompute == "full"
    assert not any("upper bound" in fact for fact in read([f"{words}:none"], 8).facts)


def test_converters_are_said(reading):
    found = reading(LLAMA_70B.replace('flavor = "70B"', 'flavor = "70B"\nconverters = ["quantize.linear.float8"]'))
    assert any("quantize.linear.float8" in fact for fact in found.facts)


def test_selective_recomputation_is_said_to_be_an_upper_bound():
    assert any("upper bound" in fact for fact in read(["torchtitan --training.seq_len 4096"], 8).facts)


@from_table
def test_contradictions_are_one_line(arguments, ranks, line):
    with pytest.raises(UserError, match=line):
        read([f"torchtitan {arguments}"], ranks)


def test_unknown_keys_are_said(reading):
    found = reading(LLAMA_70B.replace("tensor_parallel_degree", "tensor_parallel_degre"))
    assert found.unknown == ("parallelism.tensor_parallel_degre (did you mean tensor_parallel_degree?)",)


@from_table
def test_a_configuration_that_torchtitan_has_fills_in_what_is_not_given(words, layout, seq, batch, model):
    found = read([f"torchrun --nnodes 2 --nproc_per_node 8 -m torchtitan.train --module {words}"])
    assert (str(found.layout), found.seq, found.batch, found.model) == (layout, seq, batch, model)
    assert not found.unsettled and not found.unknown
    other = read(
        [f"torchrun --nproc_per_node 8 -m torchtitan.train --module {words.replace(' --config ', ' --config my')}"]
    )
    assert any("preset my" in doubt for doubt in other.unsettled)
