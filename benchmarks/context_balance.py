"""Attention's work per context-parallel rank, zigzag and in a plain cut: each rank alone on one thread, in turn.

    python benchmarks/context_balance.py [--seq 16384] [--cp 4 8] [--rounds 5] [--json FILE]

Every rank's forward and backward is the runtime's own (`runtime/context/cores.py`), with the keys and values of the
other ranks at hand, so that nothing is sent. A plain cut, which no layout has, gives rank r the r-th run of the
sequence; it skips what no query sees. Ranks take turns in one process; a rank's time is the fastest of its rounds.
Printed per cut: each rank's FLOPs and seconds over the mean of the ranks.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from shardwise.decoder.attention import CoreAttention
from shardwise.layout import Layout, Workload
from shardwise.layout.context import SequenceCut, VisibleBlock
from shardwise.model import ModelConfig
from shardwise.ops.blockwise import FlashOnCPU
from shardwise.predict.context_balance import context_balance
from shardwise.runtime.context import cores as ring
from shardwise.runtime.context.view import ContextBatch, local_places
from shardwise.runtime.transport.comms import Comms

MODEL = ModelConfig(
    "core", vocab=8, hidden=256, layers=1, heads=4, kv_heads=2, head_dim=64, ffn=8, max_positions=1 << 20
)


class PlainCut(SequenceCut):
    """Consecutive chunks, and the blocks that causal attention then has."""

    def visible(self, rank: int, other: int) -> VisibleBlock:
        return VisibleBlock(slice(None), slice(None), rank == other)


@dataclass
class AtHand:
    """Keys and values of all ranks in one process, in place of a ring."""

    rank: int
    every: list[Tensor]
    seen: list[int]
    """Ranks whose keys this rank's queries see, itself first."""

    def around(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        return ((other, self.every[other]) for other in self.seen)

    def gradients(self, parts: Iterator[Tensor]) -> Tensor:
        """The additions of a ring, to one tensor."""
        total = next(parts)
        for part in parts:
            total = part.add_(total)
        return total

    def index(self, axes: Sequence[str]) -> int:
        """This rank's place, as `Comms` says it."""
        return self.rank


class Contender:
    """All ranks of one cut of a sequence, with one round's seconds for each."""

    def __init__(self, cut: SequenceCut, tensors: list[Tensor]) -> None:
        self.cut, self.seconds = cut, [float("inf")] * cut.cp
        self._local = [[x[:, local_places(cut, r, torch.device("cpu"))] for x in tensors] for r in range(cut.cp)]
        self._kv = [torch.stack((k, v)) for _, k, v, _ in self._local]

    def run(self, rank: int) -> None:
        """Time one rank's attention, forward and backward."""
        order = [(rank - step) % self.cut.cp for step in range(self.cut.cp)]
        seen = [other for other in order if self.cut.zigzag or other <= rank]
        at_hand, module = AtHand(rank, self._kv, seen), CoreAttention(MODEL, "core")
        context = ring.ContextCore(cast(Comms, at_hand), self.cut, FlashOnCPU(module.scale), "core", module)
        q, k, v, grad = self._local[rank]
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        places = local_places(self.cut, rank, torch.device("cpu"))[None]
        batch = ContextBatch(places, places, places, None, places, places)
        started = time.perf_counter()
        out = ring.attend(context, cast(ring.RingSource, at_hand), *leaves, batch)
        torch.autograd.grad(out, leaves, grad)
        self.seconds[rank] = min(self.seconds[rank], time.perf_counter() - started)


def over_mean(values: Sequence[float]) -> list[float]:
    mean = sum(values) / len(values)
    return [value / mean for value in values]


def measured(cp: int, seq: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Cut -> FLOPs and seconds of each rank."""
    generator = torch.Generator().manual_seed(0)
    heads = (MODEL.heads, MODEL.kv_heads, MODEL.kv_heads, MODEL.heads)
    tensors = [torch.randn(1, seq, n, MODEL.head_dim, generator=generator) for n in heads]
    contenders = {
        "zigzag": Contender(SequenceCut(seq, cp), tensors),
        "plain cut": Contender(PlainCut(seq, cp, zigzag=False), tensors),
    }
    for round_ in range(rounds + 1):
        for contender in contenders.values():
            if not round_:
                contender.run(0)
                contender.seconds[0] = float("inf")
                continue
            for rank in range(cp):
                contender.run(rank)
    balance = context_balance(MODEL, Layout(cp=cp), Workload(seq, 1))
    flops = {"zigzag": balance.flops, "plain cut": balance.plain_flops}
    return {name: {"flops": list(flops[name]), "seconds": each.seconds} for name, each in contenders.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=16384)
    parser.add_argument("--cp", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{args.seq} tokens, {MODEL.heads} heads of {MODEL.head_dim}, fp32, fastest of {args.rounds} rounds, one thread"
    )
    found = {}
    for cp in args.cp:
        found[f"cp={cp}"] = measured(cp, args.seq, args.rounds)
        for name, values in found[f"cp={cp}"].items():
            for what, numbers in values.items():
                ratios = over_mean(numbers)
                words = " ".join(f"{ratio:.3f}" for ratio in ratios)
                print(f"cp={cp} {name:9} {what:7} over the mean: {words}; busiest {max(ratios):.3f}", flush=True)
            print(f"cp={cp} {name:9} seconds, all ranks: {sum(values['seconds']):.2f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(vars(args) | {"json": None} | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
