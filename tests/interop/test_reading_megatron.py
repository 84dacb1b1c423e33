"""Megatron-LM's arguments: layouts, the model that they describe, and what is refused."""

import pytest

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


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("--bf16", "dp=64,grads=fp32"),
        ("--fp16", "dp=64"),
        ("", "dp=64,precision=fp32"),
        ("--bf16 --grad-reduce-in-bf16", "dp=64"),
        ("--bf16 --recompute-activations", "dp=64,recompute=selective,grads=fp32"),
        (
            "--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "dp=64,recompute=full,grads=fp32",
        ),
        ("--bf16 --context-parallel-size 2 --cp-comm-type a2a", "dp=32,cp=2,cpkind=ulysses,grads=fp32"),
        ("--bf16 --use-torch-fsdp2", "dp=64,zero=3,grads=fp32"),
        ("--bf16 --use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", "dp=64,zero=2,grads=fp32"),
        ("--bf16 --use-megatron-fsdp --use-distributed-optimizer", "dp=64,zero=3,grads=fp32"),
        ("--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "dp=64,zero=2,grads=fp32"),
        ("--bf16 --optimizer-cpu-offload", "dp=64,offload=cpu,grads=fp32"),
        ("--bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.5", "dp=64,offload=cpu:0.5,grads=fp32"),
        ("--bf16 --use-tp-pp-dp-mapping --pipeline-model-parallel-size 2", "dp=32,pp=2,grads=fp32,order=dp-pp-cp-tp"),
        (
            "--bf16 --pipeline-model-parallel-size 4 --num-layers 32 --num-layers-per-virtual-pipeline-stage 4",
            "dp=16,pp=4,schedule=interleaved,virtual=2,grads=fp32",
        ),
        (
            "--bf16 --pipeline-model-parallel-size 4 --num-layers 30 --decoder-last-pipeline-num-layers 6",
            "dp=16,pp=4,stages=8/8/8/6,grads=fp32",
        ),
        ("--bf16 --expert-model-parallel-size 8", "dp=64,ep=8,grads=fp32"),
    ],
)
def test_layouts(text, layout):
    assert layout_of(text) == layout


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("", None),
        ("--optimizer adam", None),
        ("--optimizer sgd", "momentum"),
        ("--optimizer sgd --sgd-momentum 0", "sgd"),
    ],
)
def test_sgd_has_less_state(words, name):
    found = read([f"pretrain_gpt.py {PARALLEL} {TRAINING} {words}"], 64)
    assert found.optimizer == name and found.unknown == ()


def test_sequence_parallel_without_tensor_parallel_is_switched_off():
    found = read(["pretrain_gpt.py --seq-length 2048 --micro-batch-size 1 --sequence-parallel"], 8)
    assert not found.layout.sp and any("switches it off" in note for note in found.notes)


def test_without_a_global_batch_nothing_is_accumulated():
    assert read(["pretrain_gpt.py --micro-batch-size 4 --seq-length 2048"], 8).batch == 32


@pytest.mark.parametrize(
    ("text", "ranks", "line"),
    [
        ("--tensor-model-parallel-size 8", 12, "12 ranks cannot be divided by"),
        ("--bf16 --fp16", 8, "both given"),
        ("--recompute-granularity full", 8, "needs --recompute-method"),
        ("--recompute-granularity some", 8, "--recompute-granularity=some is unknown"),
        (
            "--tensor-model-parallel-size $TP",
            8,
            "--tensor-model-parallel-size is .TP, a variable that nothing here sets",
        ),
        ("--num-layers-per-virtual-pipeline-stage 4", 8, "needs --num-layers"),
        (
            "--num-layers 30 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4",
            8,
            "not a multiple",
        ),
        (
            "--position-embedding-type alibi --num-layers 2 --hidden-size 64 --num-attention-heads 2 --vocab-size 9",
            8,
            "alibi",
        ),
        (
            "--global-batch-size 100",
            64,
            "no multiple of micro-batch x data-parallel ranks = 1 x 64; nearest: 64 or 128",
        ),
        ("", None, "on how many GPUs"),
    ],
)
def test_contradictions_are_one_line(text, ranks, line):
    with pytest.raises(UserError, match=line):
        read([f"pretrain_gpt.py --micro-batch-size 1 {text}"], ranks)


def test_unknown_flags_are_said():
    assert read(["pretrain_gpt.py --micro-batch-size 1 --use-distributed-optimiser"], 8).unknown == (
        "--use-distributed-optimiser (did you mean --use-distributed-optimizer?)",
    )
