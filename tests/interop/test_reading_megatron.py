"""Megatron-LM's arguments: layouts, the model that they describe, and what is refused."""

import pytest

from harness.cases import from_table
from shardwise.errors import UserError
from shardwise.interop import read
from shardwise.model.catalog import get
from shardwise.model.config import LatentAttention
from shardwise.model.families import family_of
from shardwise.model.parameters import parameters

PARALLEL = (
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer"
)
TRAINING = "--micro-batch-size 1 --global-batch-size 512 --seq-length 8192 --bf16 --lr 3e-4 --clip-grad 1.0"
LLAMA_70B = (
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000 "
    "--normalization RMSNorm --swiglu --untie-embeddings-and-output-weights --disable-bias-linear --vocab-size 128256 "
    "--make-vocab-size-divisible-by 1"
)
SCRIPT = f"torchrun --nproc-per-node 8 --nnodes 8 pretrain_gpt.py {PARALLEL} {TRAINING} {LLAMA_70B}"


def layout_of(text, ranks=64):
    return str(read([f"pretrain_gpt.py --micro-batch-size 1 --seq-length 2048 {text}"], ranks).layout)


def test_a_whole_command():
    found = read([SCRIPT])
    assert str(found.layout) == "dp=2,tp=8,pp=4,zero=1,sp,grads=fp32"
    assert (found.seq, found.batch) == (8192, 512)
    assert any("ZeRO-1" in note for note in found.notes)
    assert found.unknown == () and "--lr" in found.ignored


def test_the_model_of_the_arguments_is_the_catalog_s():
    model = read([SCRIPT]).described
    assert model is not None and family_of(model).module == "llama"
    shapes = {p.name: p.shape for p in parameters(model)}
    assert shapes == {p.name: p.shape for p in parameters(get("llama-3-70b"))}


def test_the_model_of_gpt_s_arguments():
    sizes = (
        "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --max-position-embeddings 2048 --vocab-size 50257"
    )
    model = read([f"pretrain_gpt.py --tensor-model-parallel-size 8 --seq-length 2048 {sizes}"], 8).described
    assert model is not None and (family_of(model).module, model.ffn, model.tied, model.bias) == (
        "gpt",
        4 * 12288,
        True,
        "all",
    )
    assert model.vocab == 51200, "padded to a multiple of 128 for each of 8 tensor-parallel ranks"


def test_experts_are_described():
    moe = "--swiglu --num-experts 8 --moe-ffn-hidden-size 1024 --moe-layer-freq '([0]*3+[1]*77)'"
    model = read([SCRIPT.replace("--swiglu", f"{moe} --moe-shared-expert-intermediate-size 2048")]).described
    experts = model.experts
    assert (experts.count, experts.active, experts.ffn, experts.shared, experts.dense_layers) == (8, 2, 1024, 2, 3)
    turns = read([SCRIPT.replace("--swiglu", moe.replace("'([0]*3+[1]*77)'", "2"))])
    assert turns.described is None and any("layers in turns" in fact for fact in turns.facts)


def test_latent_attention_is_described():
    moe = SCRIPT.replace(
        "--swiglu", "--swiglu --multi-latent-attention --q-lora-rank 64 --v-head-dim 96 --qk-layernorm"
    )
    model = read([f"{moe} --rotary-scaling-factor 40 --mscale 0.7"]).described
    assert model.latent_attention == LatentAttention(64, 32, 128, 64, 96) and model.kv_heads == model.heads
    assert (model.rope_scaling.factor, model.rope_scaling.mscale) == (40, 0.7)
    bare = read([moe.replace(" --q-lora-rank 64", "").replace(" --qk-layernorm", "")])
    assert bare.described.latent_attention.q_rank == 0 and bare.described.rope_scaling is None
    assert any("without --qk-layernorm" in fact for fact in bare.facts)


def test_a_model_of_other_layers_or_without_sizes_is_not_described():
    hybrid = read([SCRIPT.replace("--swiglu", "--swiglu --is-hybrid-model true --mamba-head-dim 64")])
    assert hybrid.described is None and hybrid.unknown == ()
    assert any("--mamba-head-dim, --is-hybrid-model" in fact for fact in hybrid.facts)
    assert read([f"pretrain_gpt.py {PARALLEL} {TRAINING}"], 64).described is None


@from_table
def test_layouts(text, layout):
    assert layout_of(text) == layout


@from_table
def test_sgd_has_less_state(words, name):
    found = read([f"pretrain_gpt.py {PARALLEL} {TRAINING} {words}"], 64)
    assert found.optimizer == name and found.unknown == ()


def test_sequence_parallel_without_tensor_parallel_is_switched_off():
    found = read(["pretrain_gpt.py --seq-length 2048 --micro-batch-size 1 --sequence-parallel"], 8)
    assert not found.layout.sp and any("switches it off" in note for note in found.notes)


def test_without_a_global_batch_nothing_is_accumulated():
    assert read(["pretrain_gpt.py --micro-batch-size 4 --seq-length 2048"], 8).batch == 32


@from_table
def test_contradictions_are_one_line(text, ranks, line):
    with pytest.raises(UserError, match=line):
        read([f"pretrain_gpt.py --micro-batch-size 1 {text}"], ranks)


def test_unknown_flags_are_said():
    assert read(["pretrain_gpt.py --micro-batch-size 1 --use-distributed-optimiser"], 8).unknown == (
        "--use-distributed-optimiser (did you mean --use-distributed-optimizer?)",
    )
