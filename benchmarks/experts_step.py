"""Training steps of a Mixtral on four ranks with expert parallelism, beside transformers' own, in turns.

    python benchmarks/experts_step.py [--tokens 512 2048] [--rounds 9] [--tiny] [--json FILE]

Peers are `DistributedConfig(fsdp_size=4, ep_size=4)`, where each rank has sequences of its own, and
`DistributedConfig(tp_size=4, ep_size=4)`, where all have all of them. Ours are compared with the peer of their layout.
All start from the same weights, in fp32, with fused AdamW and no clipping; peers communicate over gloo, ours over gloo
and, called `shared`, through the memory that the ranks share.

The contenders take turns (`turns.take_turns`). Printed for each pair: the medians, their ratio, and the lowest and the
highest ratio of a round. Losses after the same steps say whether both train the same model.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import train_step
import turns
from torch import Tensor

from shardwise.checkpoint.huggingface import open_weights
from shardwise.layout import Layout, Mesh, Workload, unit_plan
from shardwise.layout.axes import DP
from shardwise.model.huggingface import from_huggingface
from shardwise.runtime.checkpointing import start_from
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.job.setup import local_view, make_comms
from shardwise.runtime.pipeline.step import TrainProgram

RANKS, SEQUENCES = 4, 4
SIZES = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 2048,
}  # fmt: skip
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
THEIRS = {"fsdp": {"fsdp_size": RANKS, "ep_size": RANKS}, "tp": {"tp_size": RANKS, "ep_size": RANKS}}
"""Name of a peer -> arguments of its `DistributedConfig`."""
PAIRS = [("dp=4,ep=4,zero=3", "fsdp"), ("tp=4,ep=4", "tp")]
"""(our layout, the peer that it is compared with)."""
OURS = [f"{text}{transport}" for text, _ in PAIRS for transport in (" gloo", " shared")]


def rows(index: int, vocab: int, seq: int) -> Tensor:
    """Token ids of a step: [sequences, seq + 1]."""
    return torch.randint(vocab, (SEQUENCES, seq + 1), generator=torch.Generator().manual_seed(index))


def ours(name: str, source: Path, seq: int) -> turns.Step:
    """A step of this project's runtime; its loss."""
    text, transport = name.split()
    rank, layout = dist.get_rank(), Layout.parse(f"{text},precision=fp32")
    model = from_huggingface(source)
    assert model.experts is not None
    model = model.replace(experts=replace(model.experts, balance_loss=0.0))  # theirs has none without labels
    layout = replace(layout, micro=SEQUENCES // layout.dp)
    comms = make_comms(layout, model, rank, timeout=300, transport=transport)
    plan = unit_plan(model, layout, Workload(seq, SEQUENCES), rank=rank, backend=comms.backend)
    config = OptimizerConfig(lr=peers.LR, clip=0.0)
    program = TrainProgram(plan, comms, config, lambda p, i: torch.zeros(i.shape), torch.device("cpu"))
    program.optimizer.looks_at_norm = False
    start_from(program, open_weights(source, model))
    share = Mesh.of(layout, model).index(DP, rank)

    def step(index: int) -> float:
        mine = rows(index, model.vocab, seq).chunk(layout.dp)[share]
        pair = local_view(peers.plain_batch(mine[:, :-1].contiguous()), mine[:, 1:].contiguous(), plan)
        return program.step([pair], peers.LR)[0]

    return step


def theirs(name: str, source: Path, seq: int) -> turns.Step:
    """A step of transformers with its expert parallelism; the mean loss of the ranks."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()
    config, _, mesh = type(plain).prepare_distribute_model(DistributedConfig(**THEIRS[name]))
    model = type(plain).maybe_distribute_model(plain, config, mesh)
    optimizer, shares = peers.adamw(model), THEIRS[name].get("fsdp_size", 1)

    def step(index: int) -> float:
        mine = rows(index, plain.config.vocab_size, seq).chunk(shares)[dist.get_rank() % shares]
        logits = model(input_ids=mine[:, :-1], use_cache=False).logits
        loss = peers.loss_of(logits, mine[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach()
        dist.all_reduce(mean)
        return float(mean) / RANKS

    return step


def measure(source: Path, seq: int, rounds: int) -> dict[str, dict[str, Any]]:
    steps = {name: ours(name, source, seq) for name in OURS} | {name: theirs(name, source, seq) for name in THEIRS}
    return turns.take_turns(steps, OURS, rounds)


def rank_main(rank: int, job: dict[str, Any]) -> None:
    train_step.join(rank, RANKS, job)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    results = {
        tokens: measure(Path(job["folder"], "model"), tokens // SEQUENCES, job["rounds"]) for tokens in job["tokens"]
    }
    if rank == 0:
        Path(job["folder"], "out").write_text(json.dumps(results))
    turns.leave()


def compared(measured: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each pair."""
    named = [(name, peer) for text, peer in PAIRS for name in OURS if name.split()[0] == text]
    return turns.compared(measured, named, "fp32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048], help="of a step, in four sequences")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="one narrow layer")
    parser.add_argument("--json", type=Path, help="write seconds, rows, machine and date here")
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM, MixtralConfig

    with tempfile.TemporaryDirectory() as folder:
        config = MixtralConfig(**SIZES | (TINY if args.tiny else {}), bos_token_id=None, eos_token_id=None)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(Path(folder, "model"))
        model = from_huggingface(Path(folder, "model"))
        job = {"folder": folder, "matmul": "highest", "tokens": args.tokens, "rounds": args.rounds}
        mp.spawn(rank_main, (job,), nprocs=RANKS)
        measured = json.loads(Path(folder, "out").read_text())
    results = [{"tokens": int(tokens), "contenders": each, "rows": compared(each)} for tokens, each in measured.items()]
    for result in results:
        print(f"{result['tokens']} tokens a step, fp32, {RANKS} ranks with one thread each")
        for row in result["rows"]:
            print(turns.line(row))
    if args.json:
        train_step.write_json(args.json, train_step.header("experts_step", model) | {"results": results})


if __name__ == "__main__":
    main()
