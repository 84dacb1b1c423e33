"""Two examples of each command, for its help. Tests run them."""

import re

EXAMPLES = {
    "plan": (
        "shardwise plan llama-3-8b --cluster 8xH100 --seq 8k --batch 64",
        "shardwise plan llama-3-70b --cluster 8xH100 --serve --prompt 1024 --output 256 --concurrency 64",
    ),
    "estimate": (
        "shardwise estimate llama-3-8b --layout dp=8,zero=2 --cluster 8xH100 --seq 8k --batch 8",
        "shardwise estimate --params 7e9 --zero-table 1,2,4,8,16",
    ),
    "validate": ("shardwise validate", "shardwise validate --experts"),
    "calibrate": (
        "shardwise calibrate network --ranks 2 --out here.toml",
        "shardwise calibrate device --ranks 2 --seconds 20 --out here.toml",
    ),
    "mcp": ("shardwise mcp", "shardwise mcp --json"),
    "train": (
        "shardwise train tiny-llama --layout dp=2,tp=2,zero=3,sp --data stdlib --max-bytes 500000 --seq 64 --batch 8 "
        "--steps 10 --report --out runs/first",
        "shardwise train --resume runs/first --layout dp=4,zero=1 --steps 20 --out runs/elsewhere",
    ),
    "generate": (
        'shardwise generate runs/first --layout tp=2 --prompt "def main" --max-new-tokens 16',
        'shardwise generate llama-3-70b --compare "tp=8" "zero=3,dp=8" "pp=8" --cluster 8xH100',
    ),
    "serve": (
        "shardwise serve runs/first --layout tp=2",
        "shardwise serve runs/first --layout dp=2 --port 8080 --name mine",
    ),
    "launch": (
        "shardwise launch --slurm --cluster 2x8xH100 --out job.sbatch -- train llama-3-8b --layout dp=16,zero=3 --data "
        "text.txt --seq 4096 --batch 64 --out runs/big",
        "shardwise launch --ssh a,b --cluster 2x8xH100 --out job.sh -- torchrun train.py",
    ),
    "lab": (
        "shardwise lab --nodes 2 --link 100Mb/s,latency=2ms -- shardwise train --resume runs/first --steps 25",
        "shardwise lab --nodes 2 -- torchrun --nproc-per-node 2 train.py",
    ),
    "compare": ("shardwise compare runs/first", "shardwise compare a.json b.json"),
    "checkpoint": (
        "shardwise checkpoint verify runs/first",
        "shardwise checkpoint export runs/first --out exported --dtype float32",
    ),
    "sync": (
        "shardwise sync simulate dp=4,sync=ssp,staleness=2 --slow rank=1,factor=3,probability=0.25",
        "shardwise sync simulate dp=4,sync=local,every=8 --slow rank=all,spread=0.3",
    ),
    "studio": (
        "shardwise studio",
        "shardwise studio --out page.html --view collectives",
    ),
    "verify": (
        "shardwise verify model.py:build --layout dp=2",
        'shardwise verify model.py:build --layout tp=2 --plan "*.up=column,*.down=row"',
    ),
    "trace": (
        "shardwise trace model.py:build --out model.json",
        "shardwise trace model.py:build --out small.json --tp 1",
    ),
    "certify": (
        "shardwise certify ddp dp=2",
        "shardwise certify fsdp2 --layouts 12 --json",
    ),
    "audit": (
        "shardwise audit -- torchrun --nproc-per-node 4 train.py",
        "shardwise audit trace_rank_0.json.gz trace_rank_1.json.gz",
    ),
    "explain": (
        'shardwise explain "vllm serve meta-llama/Llama-3.1-70B --tensor-parallel-size 8" --cluster 8xH100',
        'shardwise explain "pretrain_gpt.py --tensor-model-parallel-size 2 --use-distributed-optimizer" --ranks 8',
    ),
    "emit": (
        "shardwise emit llama-3-8b --layout dp=8,tp=2,zero=1,sp --seq 8192 --batch 128 --for megatron "
        "--cluster 2x8xH100",
        "shardwise emit llama-3-70b --layout tp=8 --for vllm",
    ),
    "list": ("shardwise list models", "shardwise list models llama-3-8b qwen2.5-32b --weights"),
    "collective": (
        "shardwise collective show all-reduce ring --ranks 4",
        "shardwise collective cost all-reduce --bytes 64MB --ranks 64 --cluster 8x8xH100",
    ),
    "pipeline": (
        "shardwise pipeline show 1f1b --ranks 4 --micro 8",
        "shardwise pipeline bubble zb-h1 --ranks 4",
    ),
    "demo": ("shardwise demo", "shardwise demo --json"),
    "completion": ("shardwise completion bash", "shardwise completion zsh"),
}


def broken(example: str, width: int = 78) -> str:
    """An example in lines of about `width` characters, broken between words by backslashes."""
    lines = [""]
    for word in re.findall(r'(?:"[^"]*"|\S)+', example):
        if lines[-1] and len(lines[-1]) + len(word) + 3 > width:
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(f"  {line}" for line in lines)
