"""ZeRO-3 steps of an unmodified transformers Llama by `shardwise.split`, beside FSDP2 on the same module, in turns.

    python benchmarks/module_step.py [--tokens 512] [--precision fp32 bf16] [--rounds 9] [--tiny] [--json FILE]

124 million parameters on two ranks with one thread each, `--tokens` a step in four sequences, fused AdamW, no clipping.
FSDP2 is `fully_shard` on every layer and on the whole, with bf16 by its own policy, over gloo; ours communicates over
gloo and, called `shared`, through the memory that the ranks share. Printed for each pair: the medians, their ratio, and
the lowest and the highest ratio of a round. Losses after the same steps say whether both train the same model.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import train_step
import turns
from torch import Tensor, nn

from shardwise import split
from shardwise.runtime.job.config import OptimizerConfig

RANKS, SEQUENCES = 2, 4
SIZES = {
    "vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14,
    "num_attention_heads": 12, "max_position_embeddings": 2048,
}  # fmt: skip
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
PEER = "FSDP2"
OURS = ["zero=3 gloo", "zero=3 shared"]


def llama(sizes: dict[str, int]) -> nn.Module:
    """The module, with the same weights on every rank."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=torch.float32).train()


def described(sizes: dict[str, int]) -> dict[str, Any]:
    """What a result says of the module."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in llama(sizes).parameters())
    return {"model": {"transformers": "LlamaForCausalLM", **sizes}, "parameters": parameters}


def rows(index: int, sizes: dict[str, int], tokens: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of this rank in a step, [sequences / ranks, length] each."""
    shape = (SEQUENCES, tokens // SEQUENCES + 1)
    ids = torch.randint(sizes["vocab_size"], shape, generator=torch.Generator().manual_seed(index))
    mine = ids.chunk(RANKS)[dist.get_rank()]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def everyones(loss: Tensor) -> float:
    """The mean of the ranks' losses."""
    mean = loss.detach().float()
    dist.all_reduce(mean)
    return float(mean) / RANKS


def ours(name: str, sizes: dict[str, int], precision: str, tokens: int) -> turns.Step:
    """A step of `split`'s module; its loss."""
    layout = f"dp={RANKS},{name.split()[0]},precision={precision}"
    optimizer = OptimizerConfig(lr=peers.LR, clip=0.0)
    model = split(llama(sizes), layout, optimizer=optimizer, transport=name.split()[1])

    def loss(run: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        inputs, targets = batch
        return targets.numel() * peers.loss_of(run(input_ids=inputs, use_cache=False).logits, targets), targets.numel()

    return lambda index: model.train_step(loss, rows(index, sizes, tokens)).loss


def theirs(sizes: dict[str, int], precision: str, tokens: int) -> turns.Step:
    """A step of FSDP2; the mean loss of the ranks."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model: Any = llama(sizes)
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = narrow if precision == "bf16" else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = peers.adamw(model)

    def step(index: int) -> float:
        inputs, targets = rows(index, sizes, tokens)
        loss = peers.loss_of(model(input_ids=inputs, use_cache=False).logits, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return everyones(loss)

    return step


def rank_main(rank: int, job: dict[str, Any]) -> None:
    train_step.join(rank, RANKS, job)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    results = []
    for precision in job["precision"]:
        for tokens in job["tokens"]:
            steps = {name: ours(name, job["sizes"], precision, tokens) for name in OURS}
            steps[PEER] = theirs(job["sizes"], precision, tokens)
            measured = turns.take_turns(steps, OURS, job["rounds"])
            compared = turns.compared(measured, [(name, PEER) for name in OURS], precision)
            results.append({"precision": precision, "tokens": tokens, "contenders": measured, "rows": compared})
    if rank == 0:
        Path(job["folder"], "out").write_text(json.dumps(results))
    turns.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512], help="of a step, in four sequences")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="two narrow layers")
    parser.add_argument("--json", type=Path, help="write seconds, rows, machine and date here")
    args = parser.parse_args()
    sizes = SIZES | (TINY if args.tiny else {})
    with tempfile.TemporaryDirectory() as folder:
        settings = {"tokens": args.tokens, "precision": args.precision, "rounds": args.rounds}
        mp.spawn(rank_main, ({"folder": folder, "matmul": "highest", "sizes": sizes, **settings},), nprocs=RANKS)
        results = json.loads(Path(folder, "out").read_text())
    for result in results:
        print(f"{result['tokens']} tokens a step, {result['precision']}, {RANKS} ranks with one thread each")
        for row in result["rows"]:
            print(turns.line(row))
    if args.json:
        train_step.write_json(args.json, train_step.header("module_step", described(sizes)) | {"results": results})


if __name__ == "__main__":
    main()
