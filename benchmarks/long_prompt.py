"""A long prompt and some tokens after it, under context parallelism, beside one rank.

    python benchmarks/long_prompt.py [--prompt 65536] [--tokens 16] [--chunk 2048] [--layouts cp=2 cp=4 tp=2,cp=2]

Each layout generates in its own processes with one thread each, in fp32, with the weights of one random Llama. Printed
per layout: seconds of the prompt and of a token after it (median), the largest difference of a logit from one rank's
over all tokens after the prompt, and the cache's bytes per rank, measured and as predicted before the start. Exit code
1 where a logit differs by more than 1e-4, a token differs, or a byte.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import train_step
from torch import Tensor

from shardwise.layout import Layout
from shardwise.ops.paged import Rows
from shardwise.predict.memory.serving import ServingSetup, serving_fit
from shardwise.runtime.allocator import retain_freed_memory
from shardwise.runtime.job.setup import make_comms
from shardwise.serving.engine import TokenGenerator
from shardwise.serving.job import ServingJob, weights_in
from shardwise.serving.lockstep import Lockstep
from shardwise.serving.messages import Command, Drain, Request, Sampling, Token
from shardwise.serving.scheduler import EngineStep

SHAPE = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 1 << 17, "tie_word_embeddings": False,
}  # fmt: skip
CLOSE = 1e-4


class Scoring(TokenGenerator):
    """Keeps the logits of the tokens that are chosen."""

    logits: list[Tensor]

    def forward(self, turn: EngineStep, rows: Rows, x: Tensor | None = None) -> Tensor:
        y = super().forward(turn, rows, x)
        self.logits.extend(y.clone())
        return y


def write_model(folder: Path) -> None:
    """A Llama with random weights in fp32, large enough that logits differ from token to token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, initializer_range=0.1)).save_pretrained(folder)


def asking(request: Request) -> Callable[[bool], list[Command]]:
    """The request at the first step, and the end at the second."""
    messages = iter(([request], [Drain()]))
    return lambda idle: next(messages, [])


def rank_main(rank: int, job: dict[str, Any]) -> None:
    serving = ServingJob.from_json(job["serving"])
    train_step.join(rank, serving.layout.ranks, job)
    retain_freed_memory()
    comms = make_comms(serving.layout, serving.model, rank, timeout=600.0)
    generator = Scoring(serving, comms, rank, torch.device("cpu"))
    generator.logits = []
    generator.load(weights_in(serving.weights)[1])
    prompt = tuple(np.random.default_rng(1).integers(serving.model.vocab, size=job["prompt"]).tolist())
    request = Request(1, prompt, Sampling(max_tokens=job["tokens"]))
    lockstep = Lockstep(generator, asking(request) if rank == 0 else None)
    tokens, clock, more = [], [time.perf_counter()], True
    while more:
        done = lockstep.step()
        more = done.more
        for answer in done.answers:
            if isinstance(answer, Token):
                tokens.append(answer.token)
                clock.append(time.perf_counter())
    lockstep.finish()
    everyone: list[Any] = [None] * serving.layout.ranks
    dist.all_gather_object(everyone, generator.cache_bytes)
    if rank == 0:
        result = {"tokens": tokens, "clock": clock, "cache": everyone}
        Path(job["folder"], "out").write_text(json.dumps(result))
        torch.save(torch.stack(generator.logits), Path(job["folder"], "logits"))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # taking gloo down while another rank does so now and then aborts the process


def run(text: str, weights: Path, args: argparse.Namespace) -> tuple[dict[str, Any], Tensor, int]:
    """(what a layout's ranks report, logits [tokens, vocabulary], predicted bytes of the cache per rank)."""
    model, _ = weights_in(weights)
    layout = Layout.parse(f"{text},precision=fp32")
    context = args.prompt + args.tokens
    serving = ServingJob(model, layout, str(weights), context=context, batch=1, chunk=args.chunk)
    predicted = serving_fit(model, layout, ServingSetup(context, 1, chunk=args.chunk)).held.cache
    with tempfile.TemporaryDirectory() as folder:
        job = {"folder": folder, "matmul": "highest", "serving": serving.to_json()}
        mp.spawn(rank_main, (job | {"prompt": args.prompt, "tokens": args.tokens},), nprocs=layout.ranks)
        logits: Tensor = torch.load(Path(folder, "logits"))
        return json.loads(Path(folder, "out").read_text()), logits, predicted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=1 << 16)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--layouts", nargs="+", default=["cp=2", "cp=4", "tp=2,cp=2"])
    args = parser.parse_args()
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder)
        write_model(weights)
        print(f"a prompt of {args.prompt:,} tokens in chunks of {args.chunk:,}, then {args.tokens} tokens, fp32")
        one_rank = run("dp=1", weights, args)
        alone, right, _ = one_rank
        for text in ("dp=1", *args.layouts):
            result, logits, predicted = run(text, weights, args) if text != "dp=1" else one_rank
            first, *rest = np.diff(result["clock"])
            apart = float((logits - right).abs().max())
            print(
                f"{text:10} prompt {first:6.1f} s, token {1e3 * statistics.median(rest):6.1f} ms, logits within "
                f"{apart:.1e}, cache per rank {', '.join(f'{n:,}' for n in result['cache'])} bytes, predicted "
                f"{predicted:,}",
                flush=True,
            )
            same = result["tokens"] == alone["tokens"] and set(result["cache"]) == {predicted}
            if apart > CLOSE or not same:
                wrong.append(text)
    if wrong:
        sys.exit(f"differs from one rank, or from what was predicted: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
