"""Decoding beside `transformers`, in one interleaved run: tokens/s of a model of about 100 million parameters.

    python benchmarks/generation.py [--rounds 5] [--tokens 64] [--prompt 64] [--batches 1 8 32] [--json FILE]

Every contender computes with one thread a rank and decodes greedily from the same random prompts; a round asks each in
turn, every second round in the other order. What counts is decoding alone: the tokens between the moment when every
sequence of a batch has its first and the end. Prints medians, ratios round by round, and what share of the memory's
bandwidth (read beside it, by as many processes as ranks) the weights and the cache that a step must read come to.

"products alone" bounds the rows above it: processes that do the matrix products of a rank's tokens and nothing else, so
that two of them over one are all that a second core can give. fp32, of which a token reads twice the bytes, takes part
with 8 sequences. Nobody computes probabilities of tokens, as `generate` does not. llama.cpp takes part where it is
installed (`peer_llama_cpp.py`); its threads stand where ranks stand, and q8_0 are its numbers of 8 bits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import peer_llama_cpp as llama_cpp
import torch
from rich.console import Console
from rich.table import Table

from shardwise.layout import Layout
from shardwise.model import ModelConfig
from shardwise.model.parameters import count_parts
from shardwise.ops.cpu.products import Packed, int8
from shardwise.ops.products import MakeProduct, Plain
from shardwise.serving.job import ServingJob, weights_in
from shardwise.serving.messages import Finished, Sampling, Token
from shardwise.serving.service import MEMORY, TUNABLES, Service

PLAIN, BF16, INT8, FP32, LLAMA = "transformers", "bf16", "int8", "fp32", "llama.cpp"
WIDTHS = {BF16: 2.0, INT8: 1.0, FP32: 4.0}
"""Bytes of a number in matrices."""
Q8_0 = 34 / 32
"""Bytes of a number in llama.cpp's format of 8 bits: 32 share a scale of 16 bits."""
SHAPE = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Contender:
    """name: in the table. alone: who computes the same on one rank. ranks: cores that it uses. weight_bytes: what every
    token must read of the weights, over all ranks. seconds: (prompts [B, P], tokens) -> seconds from everybody's first
    token to the last one."""

    name: str
    alone: str
    ranks: int
    weight_bytes: float
    seconds: Callable[[torch.Tensor, int], float]


def write_model(folder: Path) -> None:
    """A Llama with random weights in bf16, as `transformers` saves it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16().save_pretrained(folder)


def peer(folder: Path) -> Callable[[torch.Tensor, int], float]:
    """transformers' own `generate`, its clock started by the first token."""
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None

    class Clock(BaseStreamer):
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            self.times.append(time.perf_counter())

    def seconds(prompts: torch.Tensor, tokens: int) -> float:
        # A streamer takes one sequence only: batches are timed as the difference of two runs.
        if len(prompts) == 1:
            clock = Clock()
            with torch.inference_mode():
                model.generate(
                    prompts, attention_mask=torch.ones_like(prompts), do_sample=False,
                    min_new_tokens=tokens, max_new_tokens=tokens, streamer=clock,
                )  # fmt: skip
            return clock.times[-1] - clock.times[1]  # the first call hands over the prompt
        spans = []
        for count in (1, tokens):
            started = time.perf_counter()
            with torch.inference_mode():
                model.generate(
                    prompts, attention_mask=torch.ones_like(prompts), do_sample=False,
                    min_new_tokens=count, max_new_tokens=count,
                )  # fmt: skip
            spans.append(time.perf_counter() - started)
        return spans[1] - spans[0]

    return seconds


def ours(service: Service) -> Callable[[torch.Tensor, int], float]:
    """A running service, timed where its tokens arrive."""

    def seconds(prompts: torch.Tensor, tokens: int) -> float:
        firsts: dict[int, float] = {}
        over = threading.Semaphore(0)

        def sink(answer: Token | Finished) -> None:
            if isinstance(answer, Finished):
                over.release()
            else:
                firsts.setdefault(answer.id, time.perf_counter())

        for prompt in prompts.tolist():
            service.submit(prompt, Sampling(max_tokens=tokens, logprobs=False), sink)
        for _ in range(len(prompts)):
            over.acquire()
        return time.perf_counter() - max(firsts.values())

    return seconds


def contenders(folder: Path, batch: int, context: int, stack: ExitStack) -> tuple[list[Contender], dict[str, str]]:
    """Everybody, loaded and waiting; and who does not take part, with the reason."""
    model, _ = weights_in(folder)
    total, blocks, _active = count_parts(model)
    read = total - model.vocab * model.hidden  # of the embedding a token reads one row
    found = [Contender(PLAIN, PLAIN, 1, 2.0 * read, peer(folder))]
    for kind, ranks in itertools.product((BF16, INT8, FP32), (1, 2)):
        nbytes = WIDTHS[kind] * read
        name = kind if ranks == 1 else f"{kind}, tp={ranks}"
        layout = Layout.parse(f"tp={ranks},precision=fp32" if kind == FP32 else f"tp={ranks}")
        job = ServingJob(
            model, layout, str(folder), context=context, batch=batch, reuse=False,
            quantize=INT8 if kind == INT8 else "none",
        )  # fmt: skip
        service = stack.enter_context(Service(job))
        service.start()
        found.append(Contender(name, kind, ranks, nbytes, ours(service)))
        alone = stack.enter_context(SideBySide(ranks, multiplying, model, kind, ranks))
        name, over = f"{name}: products alone", f"{kind}: products alone"
        found.append(Contender(name, over, ranks, nbytes, products(alone)))
    reason = llama_cpp.missing()
    if reason is not None:
        return found, {LLAMA: reason}
    for kind, width in (("BF16", 2.0), ("Q8_0", Q8_0)):
        path = folder / f"{kind}.gguf"
        llama_cpp.write_gguf(folder, path, kind)
        for threads in (1, 2):
            alone = f"{LLAMA} {kind.lower()}"
            name = alone if threads == 1 else f"{alone}, {threads} threads"
            run = llama_cpp.engine(path, batch, context, threads)
            found.append(Contender(name, alone, threads, blocks * width + 2.0 * (read - blocks), run))
    return found, {}


Work = Callable[[int, int], None]
"""(rows of x, passes)."""


class SideBySide:
    """Processes of one thread each that do the same, which `make`, called in each of them, returns."""

    def __init__(self, ranks: int, make: Callable[..., Work], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._together = context.Barrier(ranks)  # goes with this object, not before
        self._ways: list[Connection] = []
        with large_pages():
            for _ in range(ranks):
                way, theirs = context.Pipe()
                given = theirs, self._together, make, args
                context.Process(target=beside, args=given, daemon=True).start()
                self._ways.append(way)

    def __enter__(self) -> SideBySide:
        return self

    def __exit__(self, *_: object) -> None:
        for way in self._ways:
            way.send(None)

    def seconds(self, rows: int, passes: int) -> float:
        """Until the last of them is through."""
        for way in self._ways:
            way.send((rows, passes))
        return max(way.recv() for way in self._ways)


@contextmanager
def large_pages() -> Iterator[None]:
    """For processes that are started meanwhile, as `Service` has it for its ranks."""
    before = os.environ.get(TUNABLES)
    os.environ.setdefault(TUNABLES, MEMORY)
    try:
        yield
    finally:
        if before is None:
            del os.environ[TUNABLES]


def beside(way: Connection, together: Any, make: Callable[..., Work], args: tuple[Any, ...]) -> None:
    """One of these processes."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        work = make(*args)
        while (asked := way.recv()) is not None:
            together.wait()
            started = time.perf_counter()
            work(*asked)
            way.send(time.perf_counter() - started)


def multiplying(model: ModelConfig, kind: str, ranks: int) -> Work:
    """The products of one rank's tokens."""
    dtype = torch.float32 if kind == FP32 else torch.bfloat16
    plain: MakeProduct = Packed() if Packed.serves(dtype, torch.device("cpu")) else Plain()
    keep = int8(dtype, torch.device("cpu")) if kind == INT8 else plain
    hidden, ffn = model.hidden, model.ffn // ranks
    shapes = [((model.q_width + 2 * model.kv_width) // ranks, hidden), (hidden, model.q_width // ranks)]
    shapes += [(2 * ffn, hidden), (hidden, ffn)]
    shapes = [*shapes * model.layers, (model.vocab // ranks, hidden)]
    made = [(keep(torch.randn(shape).to(dtype), None), shape[1]) for shape in shapes]

    def work(rows: int, passes: int) -> None:
        inputs = {width: torch.ones(1, rows, width, dtype=dtype) for _, width in made}
        for _ in range(passes):
            for product, width in made:
                product(inputs[width])

    return work


def products(alone: SideBySide) -> Callable[[torch.Tensor, int], float]:
    return lambda prompts, tokens: alone.seconds(len(prompts), tokens - 1)


def reading(nbytes: int) -> Work:
    data = torch.ones(nbytes // 8, dtype=torch.int64)

    def work(_rows: int, passes: int) -> None:
        for _ in range(passes):
            data.sum()

    return work


def bandwidth(ranks: int) -> float:
    """Bytes a second that so many processes read from memory together at best: the quickest of several sums."""
    nbytes = 1 << 28
    with SideBySide(ranks, reading, nbytes) as readers:
        return ranks * nbytes / min(readers.seconds(1, 1) for _ in range(9))


def measure(model: ModelConfig, everyone: list[Contender], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each batch and contender."""
    speeds = {ranks: bandwidth(ranks) for ranks in {each.ranks for each in everyone}}
    rows = []
    for batch in args.batches:
        prompts = torch.randint(1, model.vocab, (batch, args.prompt), generator=torch.Generator().manual_seed(batch))
        rates: dict[str, list[float]] = {each.name: [] for each in everyone}
        for each in everyone:
            each.seconds(prompts, 4)
        for number in range(args.rounds):
            for each in everyone if number % 2 == 0 else everyone[::-1]:
                rates[each.name].append(batch * (args.tokens - 1) / each.seconds(prompts, args.tokens))
        numbers = batch * (args.prompt + args.tokens / 2) * 2 * model.layers * model.kv_width
        for each in everyone:
            median = statistics.median(rates[each.name])
            ratios = [a / b for a, b in zip(rates[each.name], rates[PLAIN], strict=True)]
            cache = numbers * (4 if each.alone.startswith(FP32) else 2)
            alone = [a / b for a, b in zip(rates[each.name], rates[each.alone], strict=True)]
            rows.append({
                "batch": batch, "contender": each.name, "tokens_per_s": median,
                "over_transformers": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios),
                "over_one_rank": statistics.median(alone),
                "share_of_bandwidth": median / batch * (each.weight_bytes + cache) / speeds[each.ranks],
                "bandwidth": speeds[each.ranks],
            })  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    found = Table(title="decoding, one thread a rank")
    for column in ("batch", "contender", "tokens/s", "over transformers", "over one rank", "of the bandwidth"):
        found.add_column(column, justify="left" if column == "contender" else "right", no_wrap=True)
    for row in rows:
        found.add_row(
            str(row["batch"]), row["contender"], f"{row['tokens_per_s']:.1f}",
            f"{row['over_transformers']:.2f} ({row['lowest']:.2f} to {row['highest']:.2f})",
            f"{row['over_one_rank']:.2f}", f"{row['share_of_bandwidth']:.0%} of {row['bandwidth'] / 1e9:.1f} GB/s",
        )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write_model(Path(folder))
        model, _ = weights_in(folder)
        everybody, skipped = contenders(Path(folder), max(args.batches), args.prompt + args.tokens + 1, stack)
        rows = measure(model, everybody, args)
    console = Console(width=120)
    console.print(table(rows))
    for name, reason in skipped.items():
        console.print(f"{name}: {reason}")
    if args.json:
        args.json.write_text(json.dumps({"shape": SHAPE, "rows": rows, "skipped": skipped}, indent=1) + "\n")


if __name__ == "__main__":
    main()
