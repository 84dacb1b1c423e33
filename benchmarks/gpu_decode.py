"""Decoding on one CUDA device: tokens/s of a Llama of 8B parameters, and their share of the read bandwidth.

    python benchmarks/gpu_decode.py [--batches 1 8 32] [--context 512] [--turns 64] [--quick] [--tiny] [--profile]
                                    [--without transformers kernels eager int8] [--json FILE]

Weights are random and made on the device. Ours are turns of the engine, as a server has them: scheduler, forward pass,
choice of tokens, which the host waits for. bf16 and int8; "no kernels" are CUDA graphs of torch's own operations;
"eager" has neither. Beside them transformers, if it is installed: eager, and with a static cache and torch.compile. The
read bandwidth is the faster of a sum of a large tensor and a product of a large matrix with a vector, measured first.
"of bandwidth" is what a step must read, weights without the embedding and keys and values, over its time and that
bandwidth. --quick leaves out what takes long: about two minutes on an H100.

Without a CUDA device, or with --tiny, the script decodes with a tiny model on the CPU, in the static form that graphs
are made of: that shows that it works and nothing else.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.checkpoint import LocalInterval
from shardwise.layout import Layout
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.model.parameters import count_parts
from shardwise.ops.paged import Rows
from shardwise.runtime.job.setup import make_comms
from shardwise.serving.engine import TokenGenerator
from shardwise.serving.graphs import Result
from shardwise.serving.job import ServingJob, Weights
from shardwise.serving.lockstep import Lockstep
from shardwise.serving.messages import Cancel, Command, Request, Sampling
from shardwise.serving.scheduler import EngineStep, Sequence

TINY = ModelConfig("tiny", vocab=512, hidden=128, layers=3, heads=4, kv_heads=2, ffn=352, max_positions=256)
WARM = 4
"""Turns before the timed ones: the first captures the graph."""
CHUNK = 2048
"""Tokens of prompts per turn."""
PEER_SECONDS = 110
"""Seconds after which --quick waits for transformers no longer."""
GRAPHS, PLAIN, EAGER = "graphs", "no kernels", "eager"


@dataclass
class DecodeRow:
    """One line of the table. seconds: of a step. share: of the read bandwidth; None where it was not measured."""

    name: str
    form: str
    batch: int
    tokens_per_s: float = 0.0
    seconds: float = 0.0
    share: float | None = None
    failure: str = ""


class RandomWeights(TokenGenerator):
    """An engine whose weights are random numbers, made where they stay; equal ones for each engine on a device."""

    scale = 0.02

    def _read(self, weights: Weights, held: LocalInterval) -> int:
        flat = self.engine.units[held.unit]
        target = flat.interval[held.start - flat.start : held.stop - flat.start]
        random = torch.Generator(self.device).manual_seed(zlib.crc32(held.name.encode()) + held.start)
        target.normal_(0.0, self.scale, generator=random)
        return target.nbytes


def unfinished(sequence: Sequence) -> bool:
    """Whether the prompt is not computed yet."""
    return sequence.num_uncomputed > 1 or not sequence.num_generated


class Decoding:
    """An engine with a batch of sequences."""

    def __init__(self, model: ModelConfig, args: argparse.Namespace, quantize: str, device: torch.device) -> None:
        context = args.context + args.turns * 4 + 64
        job = ServingJob(
            model, Layout(), "random", context=context, chunk=CHUNK, batch=max(args.batches), reuse=False,
            quantize=quantize, device=device.type,
        )  # fmt: skip
        self.device, self.prompt = device, args.context
        self.generator = RandomWeights(job, make_comms(job.layout, model, 0, timeout=600.0), 0, device, static=True)
        self.generator.load(None)  # type: ignore[arg-type]
        self.steps = self.generator.steps
        self.lockstep = Lockstep(self.generator, lambda idle: self._asked())
        self._next: list[Command] = []
        self._number = 0

    def _asked(self) -> list[Command]:
        asked, self._next = self._next, []
        return asked

    def start(self, batch: int, tokens: int) -> list[int]:
        """Prompts of random tokens, computed up to the first token of each; returns the requests' numbers."""
        random = torch.Generator().manual_seed(batch)
        numbers = []
        for _ in range(batch):
            self._number += 1
            prompt = torch.randint(1, self.generator.job.model.vocab, (self.prompt,), generator=random).tolist()
            self._next.append(Request(self._number, tuple(prompt), Sampling(max_tokens=tokens, logprobs=False)))
            numbers.append(self._number)
        scheduler = self.lockstep.scheduler
        while self._next or scheduler.waiting or any(map(unfinished, scheduler.running)):
            self.lockstep.step()
        return numbers

    def seconds(
        self, batch: int, form: str, turns: int, profile: Callable[[Callable[[], object]], None] | None
    ) -> float:
        """Seconds of a turn with one token of each of `batch` sequences."""
        chooser, kernels = self.generator.chooser, self.generator.chooser.kernels
        if form == PLAIN:
            chooser.kernels = False
            self.generator.steps = self.generator._decode_steps()
        elif form == EAGER:
            self.generator.steps = None
        try:
            numbers = self.start(batch, 4 * turns)
            for _ in range(WARM):
                self._turn(batch)
            started = time.perf_counter()
            for _ in range(turns):
                self._turn(batch)
            elapsed = time.perf_counter() - started
            if profile is not None:
                profile(lambda: self._turn(batch))
            if form == GRAPHS and self.generator.steps is None:
                raise RuntimeError("; ".join(self.generator.notices))
            self._next = [Cancel(number) for number in numbers]
            self.lockstep.step()
        finally:
            chooser.kernels = (kernels and chooser.kernels) or (form == PLAIN and kernels)
            self.generator.steps = self.generator.steps if form == GRAPHS else self.steps
        return elapsed / turns

    def _turn(self, batch: int) -> None:
        done = self.lockstep.step().step
        assert done.tokens == batch and not done.prefill, f"{done.tokens} tokens in a decode step of {batch}"


def bytes_read(model: ModelConfig, batch: int, context: int, width: int) -> float:
    """Bytes that a step reads: weights of `width` bytes a number but for the embedding, keys and values in bf16."""
    total, _, _ = count_parts(model)
    cached = 2 * model.kv_width * model.layers * context * batch * 2
    return float((total - model.vocab * model.hidden * (not model.tied)) * width + cached)


def bandwidth(device: torch.device, nbytes: int) -> dict[str, float]:
    """Bytes per second of a sum of a tensor and of a product of a matrix with a vector, the best of several."""
    matrix = torch.ones(nbytes // (1 << 14), 1 << 13, dtype=torch.bfloat16, device=device)
    vector = torch.ones(1 << 13, dtype=torch.bfloat16, device=device)
    found = {}
    for name, run in (("sum", matrix.sum), ("matrix by vector", lambda: matrix @ vector)):
        spans = []
        for _ in range(6):
            _wait(device)
            started = time.perf_counter()
            run()
            _wait(device)
            spans.append(time.perf_counter() - started)
        found[name] = matrix.nbytes / min(spans[1:])
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def profiled(turn: Callable[[], object]) -> None:
    """Print the kernels of one turn, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        turn()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us())
    rows = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    print(
        f"one turn: {sum(map(len, kernels.values()))} kernels, {sum(map(sum, kernels.values())) / 1e3:.3f} ms of them"
    )
    for name, spans in rows[:25]:
        print(f"{sum(spans):10.1f} us  {len(spans):5} x {sum(spans) / len(spans):8.2f} us  {name[:90]}", flush=True)


def ours(model: ModelConfig, args: argparse.Namespace, device: torch.device, rate: float) -> list[DecodeRow]:
    """Rows of this project's engine."""
    rows = []
    for quantize in ("none",) if "int8" in args.without else ("none", "int8"):
        started = time.perf_counter()
        decoding = Decoding(model, args, quantize, device)
        name = "bf16" if quantize == "none" else "int8"
        print(f"shardwise {name}: loaded in {time.perf_counter() - started:.1f} s", flush=True)
        for batch, form in _settings(args, quantize, device):
            row = DecodeRow(f"shardwise {name}", form, batch)
            turns = min(args.turns, 12) if form == EAGER else args.turns
            wanted = args.profile and batch == args.batches[0] and form == GRAPHS and device.type == "cuda"
            profile = profiled if wanted else None
            begun = time.perf_counter()
            try:
                row.seconds = decoding.seconds(batch, form, turns, profile)
            except Exception as error:  # the other rows are still worth having
                traceback.print_exc()
                row.failure = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            else:
                read = bytes_read(model, batch, args.context, 2 if quantize == "none" else 1)
                row.tokens_per_s, row.share = batch / row.seconds, read / row.seconds / rate
            rows.append(row)
            show(row)
            print(f"    measured in {time.perf_counter() - begun:.1f} s", flush=True)
        for line in (*decoding.generator.chooser.report, *decoding.generator.notices):
            print(f"    {line}", flush=True)
        for line in dict.fromkeys(decoding.generator.chooser.failures):
            print(f"    a kernel failed: {line}", flush=True)
        del decoding
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def _settings(args: argparse.Namespace, quantize: str, device: torch.device) -> list[tuple[int, str]]:
    """(batch, form) of the rows."""
    settings = [(batch, GRAPHS) for batch in args.batches]
    first = args.batches[:1] if args.quick or device.type == "cpu" else args.batches
    if quantize == "none":
        settings += [(batch, PLAIN) for batch in first if "kernels" not in args.without and device.type == "cuda"]
        settings += [(batch, EAGER) for batch in first if "eager" not in args.without]
    return settings


# -- are they right?


def difference(model: ModelConfig, precision: str, quantize: str, device: torch.device) -> tuple[float, str]:
    """(largest difference of a logit between static and eager decode steps, in parts of the largest logit; how they
    were computed). Requests of different lengths come and go; the eager engine follows with a cache of its own."""
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job = ServingJob(
            model, Layout.parse(f"precision={precision}"), "random", context=96, page=8, chunk=32, batch=6, reuse=False,
            quantize=quantize, device=device.type,
        )  # fmt: skip
        static, eager = (
            Following(job, make_comms(job.layout, model, 0, timeout=600.0), 0, device, static=form)
            for form in (True, False)
        )
        for generator in (static, eager):
            generator.load(None)  # type: ignore[arg-type]
        static.eager = eager
        asked = [Request(n, tuple(range(1, 6 * n)), Sampling(max_tokens=4 + 7 * (n % 3))) for n in range(1, 10)]
        lockstep = Lockstep(static, lambda idle: [asked.pop()] if asked else [])
        while asked or lockstep.scheduler.active:
            lockstep.step()
    finally:
        if started:
            dist.destroy_process_group()
    assert static.steps is not None, static.notices
    failures = dict.fromkeys((*static.notices, *static.chooser.failures))
    forms = f"{static.followed} steps in {len(static.steps.buckets)} buckets, " + (
        "kernels" if static.chooser.kernels else "no kernels"
    )
    return static.worst, "; ".join((forms, *failures))


class Following(RandomWeights):
    """An engine whose steps another one computes, too, eagerly."""

    scale = 0.2
    eager: TokenGenerator | None = None
    worst, followed = 0.0, 0

    def forward(self, turn: EngineStep, rows: Rows, x: torch.Tensor | None = None) -> torch.Tensor:
        if self.eager is not None:
            self.eager.forward(turn, self.eager.rows(turn), x)
        return super().forward(turn, rows, x)

    def decode(self, turn: EngineStep) -> Result | None:
        decoded = super().decode(turn)
        if decoded is not None and self.eager is not None:
            expected = self.eager.forward(turn, self.eager.rows(turn)).double()
            difference = float((decoded[0].double() - expected).abs().max() / expected.abs().max())
            self.worst, self.followed = max(self.worst, difference), self.followed + 1
        return decoded


# -- transformers, in a process of its own


def peer(pipe: Any, model: ModelConfig, args: argparse.Namespace, device: str) -> None:
    """Send rows of transformers, then None."""
    try:
        for row in _peer_rows(model, args, torch.device(device)):
            pipe.send(row)
    except Exception as error:
        traceback.print_exc()
        pipe.send(DecodeRow("transformers", "", 0, failure=f"{type(error).__name__}: {error}".splitlines()[0][:200]))
    pipe.send(None)


def _peer_rows(model: ModelConfig, args: argparse.Namespace, device: torch.device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=model.hidden, intermediate_size=model.ffn, num_hidden_layers=model.layers,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, vocab_size=model.vocab,
        max_position_embeddings=model.max_positions, tie_word_embeddings=model.tied, rms_norm_eps=model.norm_eps,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with device:
        network = LlamaForCausalLM(config).eval()
    network.generation_config.eos_token_id = None
    static = device.type == "cuda"
    # The compiled form first: it is the one to be compared with, and --quick may stop before the others.
    settings = [(args.batches[0], True)] if static else []
    settings += [(batch, False) for batch in (args.batches[:1] if args.quick else args.batches)]
    for batch, compiled in settings:
        form = "static cache, compiled" if compiled else "eager"
        tokens = args.turns if compiled else min(args.turns, 16)
        prompts = torch.randint(1, model.vocab, (batch, args.context), device=device)

        def seconds(count: int, prompts: torch.Tensor = prompts, compiled: bool = compiled) -> float:
            options = {"cache_implementation": "static"} if compiled else {}
            _wait(device)
            started = time.perf_counter()
            with torch.inference_mode():
                network.generate(
                    prompts, attention_mask=torch.ones_like(prompts), do_sample=False, min_new_tokens=count,
                    max_new_tokens=count, **options,
                )  # fmt: skip
            _wait(device)
            return time.perf_counter() - started

        for _ in range(3 if compiled else 1):
            seconds(tokens + 1)
        step = (min(seconds(tokens + 1) for _ in range(2)) - min(seconds(1) for _ in range(2))) / tokens
        yield DecodeRow("transformers bf16", form, batch, batch / step, step)


def peers(model: ModelConfig, args: argparse.Namespace, device: torch.device, rate: float) -> list[DecodeRow]:
    """Rows of transformers; a row that says why there are none."""
    if "transformers" in args.without:
        return []
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=peer, args=(there, model, args, device.type))
    process.start()
    there.close()
    rows: list[DecodeRow] = []
    limit = time.monotonic() + (PEER_SECONDS if args.quick else 600)
    try:
        while here.poll(max(0.0, limit - time.monotonic())):
            if (row := here.recv()) is None:
                break
            if row.seconds:
                row.share = bytes_read(model, row.batch, args.context, 2) / row.seconds / rate
            rows.append(row)
            show(row)
        else:
            rows.append(DecodeRow("transformers", "", 0, failure="no further result within the time"))
            show(rows[-1])
    except EOFError:
        rows.append(DecodeRow("transformers", "", 0, failure="its process ended"))
        show(rows[-1])
    process.kill()
    process.join()
    return rows


# -- all of it


def show(row: DecodeRow) -> None:
    line = f"{row.name:18} {row.form:24} batch {row.batch:3} "
    if row.failure:
        print(f"{line}  {row.failure}", flush=True)
        return
    share = f"{row.share:7.1%} of bandwidth" if row.share is not None else ""
    print(f"{line} {row.tokens_per_s:9.1f} tokens/s  {1e3 * row.seconds:8.3f} ms {share}", flush=True)


def conclusions(rows: list[DecodeRow]) -> dict[str, float]:
    """Ratios between rows at the smallest batch."""
    rates = {(row.name, row.form, row.batch): row.tokens_per_s for row in rows if not row.failure}
    found = {}
    bf16 = "shardwise bf16", GRAPHS
    for name, one, other in (
        ("bf16 over compiled transformers", bf16, ("transformers bf16", "static cache, compiled")),
        ("bf16 over eager", bf16, ("shardwise bf16", EAGER)),
        ("int8 over bf16", ("shardwise int8", GRAPHS), bf16),
    ):
        for batch in sorted({key[2] for key in rates}):
            if (*one, batch) in rates and (*other, batch) in rates:
                found[f"{name}, batch {batch}"] = rates[*one, batch] / rates[*other, batch]
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--context", type=int, help="tokens of each prompt")
    parser.add_argument("--turns", type=int, help="timed steps of each row")
    parser.add_argument("--without", nargs="+", default=[], choices=("transformers", "kernels", "eager", "int8"))
    parser.add_argument("--quick", action="store_true", help="under 100 s: fewer rows beside graphs")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: does the script work?")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step with one sequence")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        print("no CUDA device here: a tiny model on the CPU shows that the script works; GPU rates stay unmeasured")
        args.tiny = True
    args.batches = args.batches or ([1, 3] if args.tiny else [1, 8, 32])
    args.context = args.context or (24 if args.tiny else 512)
    args.turns = args.turns or (4 if args.tiny else 48)
    return args


def main() -> None:
    args = arguments()
    device = torch.device("cpu") if args.tiny else torch.device("cuda", 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rates = bandwidth(device, 1 << (22 if args.tiny else 32))
    name = "CPU, tiny model" if args.tiny else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}; read bandwidth " + ", ".join(
        f"{kind} {value / 1e12:.3g} TB/s" for kind, value in rates.items()
    ), flush=True)  # fmt: skip
    rate, model = max(rates.values()), TINY if args.tiny else get("llama-3-8b")
    rows = ours(model, args, device, rate) + peers(model, args, device, rate)
    ratios = conclusions(rows)
    for kind, ratio in ratios.items():
        print(f"{kind}: {ratio:.2f}")
    if args.tiny:
        print("a tiny model on the CPU, static steps without graphs: these rates say nothing about a GPU")
    if args.json:
        about = {"device": name, "torch": torch.__version__, "measures_gpu": not args.tiny, "bandwidth": rates}
        table = {"model": model.name, "context": args.context, "rows": [asdict(row) for row in rows], "ratios": ratios}
        args.json.write_text(json.dumps(about | table, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
