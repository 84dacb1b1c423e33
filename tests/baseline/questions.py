"""Commands of the baseline, drawn from a fixed seed over models, layouts, clusters and workloads.

Each question is the argument list of one `shardwise` command. Python names never appear: an older or a renamed tree
answers the same questions. Illegal draws are left in; the recorder keeps a few of them.
"""

import random
from collections.abc import Iterator

SEED = 23

MODELS = (
    "tiny-llama", "tiny-gpt", "gpt2", "gpt2-xl", "gpt3-175b", "megatron-22b", "megatron-530b", "gpt-neox-20b",
    "bloom-176b", "llama-2-7b", "llama-2-70b", "llama-3-8b", "llama-3-70b", "llama-3-405b", "llama-3.2-1b",
    "mistral-7b", "qwen2.5-0.5b", "qwen2.5-72b", "qwen3-0.6b", "qwen3-32b",
)  # fmt: skip
EXPERTS = ("mixtral-8x7b", "deepseek-v3")
CLUSTERS = (
    (1, 4, "cpu"), (1, 8, "A100"), (1, 8, "H100"), (2, 8, "H100"), (8, 8, "A100"), (8, 8, "H100"), (32, 8, "H100"),
    (4, 8, "H200"), (6, 4, "A100"),
)  # fmt: skip

SMALL = (
    ("tiny-llama",),
    ("tiny-gpt",),
    ("tiny-llama", "--set", "layers=5,kv_heads=2,bias=qkv"),
    ("qwen3-0.6b", "--set", "layers=4,hidden=96,ffn=160,vocab=1000"),
    ("gpt-neox-20b", "--set", "layers=4,hidden=192,heads=8,kv_heads=8,head_dim=24,ffn=256,vocab=1000"),
)
"""Models of the dry runs, which take seconds by layer and micro-batch."""

PLANS = (
    "llama-3-8b --cluster 8xH100 --seq 8192 --batch 64",
    "llama-3-70b --cluster 8x8xH100 --seq 8192 --batch 512",
    "llama-3-70b --cluster 8x8xH100 --seq 8192 --batch 512 --by memory",
    "llama-3-70b --cluster 8x8xH100 --seq 8192 --batch 512 --by pareto",
    "llama-3-70b --cluster 8x8xH100 --seq 8192 --batch 512 --engine megatron-bridge",
    "llama-3-405b --cluster 64x8xH100 --seq 8192 --batch 1024 --tokens 15T --price 2",
    "gpt2 --cluster 8xA100 --seq 1024 --batch 512",
    "gpt2-xl --cluster 2xA100 --seq 1024 --batch 64 --fix zero=3",
    "gpt3-175b --cluster 128x8xA100 --seq 2048 --batch 1536",
    "megatron-1t --cluster 384x8xA100 --seq 2048 --batch 3072 --mtbf 50000 --save 60",
    "gpt-neox-20b --cluster 12x8xA100 --seq 2048 --batch 1536",
    "bloom-176b --cluster 48x8xA100 --seq 2048 --batch 2048 --by cost --tokens 300B --price 1.5",
    "mistral-7b --cluster 4x8xH200 --seq 32768 --batch 128",
    "qwen2.5-72b --cluster 16x8xH100 --seq 4096 --batch 1024 --reserve 6GB",
    "qwen3-0.6b --cluster 8xH100 --seq 4096 --batch 256",
    "mixtral-8x7b --cluster 8x8xH100 --seq 4096 --batch 512",
    "deepseek-v3 --cluster 64x8xH100 --seq 4096 --batch 4096",
    "llama-2-7b --cluster 2xA100 --seq 4096 --batch 8 --fix micro=1",
    "gpt2-large --cluster 4xA10G --seq 1024 --batch 64",
    "llama-3-405b --cluster 8xH100 --seq 8192 --batch 64",
    "llama-2-13b --cluster 4x8xA100 --seq 4096 --batch 256 --find sequence",
    "llama-2-13b --cluster 4x8xA100 --seq 4096 --batch 256 --find batch",
    "llama-2-13b --cluster 4x8xA100 --seq 4096 --batch 256 --find scaling",
    "llama-2-13b --cluster 8xA100 --seq 4096 --batch 256 --find model",
    "llama-3-8b --cluster 8x8xH100 --seq 8192 --batch 512 --find cluster --tokens 1T --deadline 30",
    "llama-3-8b --cluster 8xH100 --serve --prompt 1024 --output 256 --concurrency 64",
    "llama-3-70b --cluster 8xH100 --serve --prompt 2048 --output 512 --concurrency 32",
    "llama-3-70b --cluster 2x8xA100 --serve --prompt 512 --output 128 --concurrency 128 --by pareto",
    "llama-3-8b --cluster 2xL40S --serve --prompt 1024 --output 256 --concurrency 64",
    "qwen2.5-7b --cluster 4xA100 --serve --prompt 256 --output 1024 --concurrency 256",
)

TRAINED = (
    (SMALL[0], "dp=2,zero=3,precision=fp32", ("tp=2,zero=1", "dp=3,zero=2", "pp=2,dp=2,zero=1", "dp=1")),
    (SMALL[1], "tp=2,precision=fp32", ("dp=4,zero=3", "tp=2,pp=2", "dp=2,shard=2,zero=3", "tp=4,dp=2,zero=1")),
    (
        SMALL[2],
        "pp=2,precision=fp32",
        ("pp=5", "tp=2,dp=3,zero=3", "dp=4,shard=2,zero=2", "pp=2,schedule=zb-v,virtual=2,stages=1/1/1/2"),
    ),
    (SMALL[3], "dp=2,zero=1,precision=bf16", ("dp=2", "tp=4,zero=0", "tp=2,sp,dp=2,zero=3", "pp=4,schedule=gpipe")),
)
"""Checkpoints: a model, the layout that trains one step of it, and the layouts that the checkpoint is rewritten for."""


def estimates() -> Iterator[list[str]]:
    draw = random.Random(f"estimates {SEED}")
    while True:
        nodes, gpus, device = draw.choice(CLUSTERS)
        model = draw.choice(EXPERTS if draw.random() < 0.02 else MODELS)
        seq = draw.choice((256, 512, 1024, 2048, 4096))
        batch = draw.choice((64, 96, 256, 512))
        cluster = f"{nodes}x{gpus}x{device}" if nodes > 1 else f"{gpus}x{device}"
        layout = layout_text(draw, nodes * gpus, most_tp=gpus)
        command = ["estimate", model, "--layout", layout, "--cluster", cluster]
        command += ["--seq", str(seq), "--batch", str(batch)]
        yield command + ["--isolate-documents"] * (draw.random() < 0.1)


def dry_runs() -> Iterator[list[str]]:
    """Endless random `estimate --dry-run` commands: the runtime's own ledger and bytes, on fake tensors."""
    draw = random.Random(f"dry runs {SEED}")
    while True:
        ranks = draw.choice((1, 2, 4, 4, 8, 8, 12))
        batch = draw.choice((8, 12))
        layout = layout_text(draw, ranks, most_tp=4)
        model = draw.choice(SMALL)
        rest = ["--layout", layout, "--cluster", f"{ranks}xcpu", "--seq", "32", "--batch", str(batch), "--dry-run"]
        yield ["estimate", *model, *rest]


def layout_text(draw: random.Random, ranks: int, most_tp: int) -> str:
    """A random layout of so many ranks, as text; often one that is illegal for the model."""
    tp = draw.choice([n for n in (1, 1, 2, 4, 8) if ranks % n == 0 and n <= most_tp])
    pp = draw.choice([n for n in (1, 1, 2, 4, 8) if ranks // tp % n == 0])
    cp = 2 if draw.random() < 0.05 and ranks // tp // pp % 2 == 0 else 1
    dp = ranks // tp // pp // cp
    words = [f"{key}={degree}" for key, degree in (("dp", dp), ("tp", tp), ("pp", pp), ("cp", cp)) if degree > 1]
    if dp > 1 and (zero := draw.choice((0, 1, 2, 3, 3))):
        words.append(f"zero={zero}")
        if dp % 2 == 0 and dp > 2 and draw.random() < 0.3:
            words.append("shard=2")
        if zero == 3 and draw.random() < 0.1:
            words.append("offload=cpu")
    words += ["sp"] * (tp > 1 and draw.random() < 0.6)
    if pp > 1:
        schedule = draw.choice(("gpipe", "1f1b", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "breadth-first"))
        words.append(f"schedule={schedule}")
        words += ["virtual=2"] * (schedule in ("interleaved", "breadth-first", "zb-v", "dualpipe-v"))
    words += [f"micro={micro}" for micro in [draw.choice((1, 2, 4))] if micro > 1]
    words += [f"recompute={kind}" for kind in [draw.choice(("none", "none", "selective", "full", "input"))]]
    words += ["attention=math"] * (draw.random() < 0.5)
    words += ["compile=block"] * (draw.random() < 0.05)
    words += [f"precision={draw.choice(('bf16', 'bf16', 'fp32'))}"]
    words += ["grads=fp32"] * (draw.random() < 0.2)
    words += ["order=dp-pp-cp-tp"] * (draw.random() < 0.15)
    return ",".join(words)
