"""Training steps of shardwise beside its peers, interleaved A B A B in one set of processes.

    python benchmarks/train_step.py [--ranks 1 2 4] [--precision fp32 bf16] [--tokens 512 4096] [--pairs WORD ...]
                                    [--rounds 9] [--quick] [--json FILE]

Every contender gets the same model, global batch, precision, threads (one a rank) and float32 matrix-product setting.
What shares a layout of ours is measured together: each round trains one global batch with every contender of the group,
every second round in the opposite order. Pipelines of two ranks, of ours and of torch, both take the global batch in
four micro-batches and are cut at the same layers.

Printed for each pair: medians over rounds of milliseconds and CPU milliseconds a step, the ratio of speeds (median,
lowest, highest of the ratios round by round), and the peak of live tensor bytes a rank. Rank count 1 compares one
process with a plain training loop, and prints which share of the matrix-product peak, measured in the same run, the
step's model FLOPs (causal attention) make up.

Before each timed step the same contender makes one that is not timed. shardwise keeps the memory that it frees, as it
does in training; for the others glibc returns it, as it does by itself, unless `--alike` lets all keep it.

A step's seconds run from the first rank's start to the last rank's end; CPU seconds are the process's, all threads,
averaged over ranks. The peak is taken in steps that are not timed, on a contender built afresh under `LiveBytes`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import math
import os
import platform
import re
import statistics
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from shardwise.errors import UserError
from shardwise.model import ModelConfig
from shardwise.model.flops import training_flops_per_sequence
from shardwise.model.parameters import count
from shardwise.runtime.allocator import retain_freed_memory
from shardwise.runtime.measure.memory import LiveStorages

MODEL = ModelConfig("bench", vocab=4096, hidden=384, layers=6, heads=4, kv_heads=4, ffn=1024, max_positions=2048)
RANKS, TOKENS, PRECISIONS, ROUNDS = (1, 2, 4), (512, 4096), ("fp32", "bf16"), 9
WARM = 3
"""Steps before the timed ones: caches are filled, DDP has ordered its buckets, DeepSpeed has traced the model."""
SAME_LOSS = {"fp32": 2e-3, "bf16": 2e-2}
"""Relative difference of losses after the same steps up to which two contenders trained the same model."""
MICRO_BATCHES = 4
"""Parts in which a pipeline trains a global batch."""

PAIRS: list[tuple[str, str]] = [
    ("single", "plain"),
    ("zero=0", "ddp"),
    ("zero=1", "deepspeed1"),
    ("zero=2", "deepspeed2"),
    ("zero=2,offload=cpu", "deepspeed_offload"),
    ("zero=3", "fsdp2"),
    ("zero=3", "fsdp1"),
    ("zero=3", "deepspeed3"),
    ("tp", "tensor_parallel"),
    ("tp,sp", "sequence_parallel"),
    ("zero=0 shared", "ddp"),
    ("zero=3 shared", "fsdp2"),
    ("tp shared", "tensor_parallel"),
    *(
        (f"pp,schedule={schedule}{f',virtual={virtual}' * (virtual > 1)}{transport}", peer)
        for transport in ("", " shared")
        for peer, (schedule, virtual, _) in peers.PIPELINES.items()
    ),
]
"""(ours, the peer it is compared with). `single` is for one rank, pipelines for two, all others for two and more. Peers
and ours communicate over gloo, ours called `shared` through the memory that the ranks share."""


# -- contenders


def is_pipeline(ours: str) -> bool:
    return ours.startswith("pp")


def suits(ours: str, ranks: int) -> bool:
    """Whether a contender is compared at that many ranks."""
    if is_pipeline(ours):
        return ranks == 2
    return (ours == "single") == (ranks == 1)


def layout_of(what: str, setting: peers.Setting) -> str:
    """The layout text of one of ours, with all sequences of a rank in one micro-batch, but for pipelines."""
    ranks, micro = setting.ranks, setting.batch // setting.micro_batches
    if what == "single":
        return f"dp=1,micro={micro}"
    axis, *more = what.split(",")
    if axis in ("tp", "pp"):
        return ",".join([f"{axis}={ranks}", *more, f"micro={micro}"])
    return f"dp={ranks},{what},micro={micro // ranks}"


def build(name: str, setting: peers.Setting) -> peers.Contender:
    if name in peers.PEERS:
        return peers.PEERS[name](setting)
    what, _, transport = name.partition(" ")
    return peers.shardwise(setting, layout_of(what, setting), transport or "gloo")


def setting_of(ours: str, tokens: int, precision: str, ranks: int) -> peers.Setting:
    """512 tokens or fewer: one sequence a rank. More: sequences of 512.

    A pipeline has sequences of at most 512 tokens, and at least one in each micro-batch.
    """
    if is_pipeline(ours):
        seq = min(512, tokens // MICRO_BATCHES)
        return peers.Setting(MODEL, seq, tokens // seq, precision, ranks, MICRO_BATCHES)
    seq = 512 if tokens > 512 else tokens // ranks
    return peers.Setting(MODEL, seq, tokens // seq, precision, ranks)


# -- memory


class LiveBytes(LiveStorages):
    """Bytes of all tensor storages alive that any operation has touched while the mode was on, and the most ever.

    As in `shardwise.runtime.measure.memory`: a dispatch mode sees every operation's tensors, and weak references
    tell when their storages end. Built and stepped under it, a contender shows its parameters, gradients, optimizer
    state, buffers and activations. Three things the peers need on top: tensors that wrap others (DTensor, results of
    asynchronous collectives) are left to unwrap themselves, so that each local storage counts once; the sizes of all
    storages are read again around every operation, because FSDP empties and refills storages where no mode sees it; and
    nothing is left out as known. What an operator or gloo takes and returns inside itself is not seen, for anybody.
    """

    def __init__(self) -> None:
        super().__init__(known=set())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(each) for each in types):
            return NotImplemented
        self._count()
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._count()
        return out

    def _add(self, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            return
        storage = value.untyped_storage()
        key = storage._cdata
        # A fake tensor calls itself one of the CPU, but its storage is meta: DTensor derives shapes with them.
        if key not in self._seen and storage.device.type != "meta":
            self._seen[key] = weakref.ref(storage, lambda _: self._seen.pop(key, None))

    def _count(self) -> None:
        storages = (reference() for reference in list(self._seen.values()))
        self.live = sum(storage.nbytes() for storage in storages if storage is not None)
        self.peak = max(self.peak, self.live)

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = 0
        self._count()


def peak_bytes(name: str, setting: peers.Setting) -> int:
    """Peak of live tensor bytes in a steady step on this rank: the smallest of three steps' peaks.

    gloo's threads hold on to a buffer a moment longer than its collective takes, now and then: hence the smallest.
    """
    peaks = []
    with LiveBytes() as live:
        contender = build(name, setting)
        for index in range(WARM + 3):
            live.restart()
            contender.step(index)
            peaks.append(live.peak)
    contender.close()
    return min(peaks[WARM:])


# -- in every rank


def everywhere(value: Any) -> list[Any]:
    """The value of every rank, in rank order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def attempt(action: Callable[[], Any]) -> tuple[Any, str]:
    """(result, "") if the action succeeds on every rank, else (None, the first reason in one line)."""
    result, reason = None, ""
    try:
        result = action()
    except Exception as error:
        words = str(error).strip() or type(error).__name__
        known = isinstance(error, peers.Unavailable | UserError)
        reason = words.splitlines()[0] if known else f"{type(error).__name__}: {words.splitlines()[0]}"
    reasons = [each for each in everywhere(reason) if each]
    return (None, reasons[0]) if reasons else (result, "")


def measure(setting: peers.Setting, names: list[str], rounds: int, alike: bool = False) -> dict[str, Any]:
    """Name -> {describe, seconds and cpu_seconds of each round, peak_bytes, loss} or {describe, reason}."""
    results: dict[str, Any] = {}
    contenders: dict[str, peers.Contender] = {}
    for name in names:
        contender, reason = attempt(functools.partial(_started, name, setting))
        if reason:
            results[name] = {"describe": name, "reason": reason}
        else:
            contenders[name] = contender
    clocks: dict[str, list[tuple[float, float, float]]] = {name: [] for name in contenders}
    losses = {}
    for index in range(WARM, WARM + rounds):
        for name in list(contenders) if index % 2 else reversed(list(contenders)):
            retain_freed_memory(alike or contenders[name].keeps_memory)
            contenders[name].step(index + rounds)  # not timed: it finds memory and caches as another left them
            dist.barrier()
            started, used = time.perf_counter(), time.process_time()
            losses[name] = contenders[name].step(index)
            clocks[name].append((started, time.perf_counter(), time.process_time() - used))
    for name, contender in contenders.items():
        results[name] = {"describe": contender.describe, **over_ranks(clocks[name])}
        results[name]["loss"] = statistics.mean(loss for loss in everywhere(losses[name]) if not math.isnan(loss))
        contender.close()
    del contender, contenders
    for name in clocks:
        gc.collect()
        peak, reason = attempt(functools.partial(peak_bytes, name, setting))
        results[name]["peak_bytes"] = None if reason else max(everywhere(peak))
    gc.collect()
    return results


def _started(name: str, setting: peers.Setting) -> peers.Contender:
    contender = build(name, setting)
    for index in range(WARM):
        contender.step(index)
    return contender


def over_ranks(clock: list[tuple[float, float, float]]) -> dict[str, list[float]]:
    """Seconds and CPU seconds of each round from every rank's (start, end, CPU seconds); ranks without any had no part.

    perf_counter is the machine's monotonic clock, the same in all its processes.
    """
    rounds = list(zip(*(each for each in everywhere(clock) if each), strict=True))
    return {
        "seconds": [round(max(r[1] for r in ranks) - min(r[0] for r in ranks), 6) for ranks in rounds],
        "cpu_seconds": [round(statistics.mean(r[2] for r in ranks), 6) for ranks in rounds],
    }


def matmul_peak(precision: str, n: int = 768, times: int = 200) -> float:
    """FLOP/s of the best of many square matrix products of the precision, one thread.

    Small enough for some to run undisturbed on a busy machine; larger ones are no faster.
    """
    a, b = (torch.randn(n, n, dtype=peers.DTYPES[precision]) for _ in range(2))
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - started)
    return 2 * n**3 / best


def join(rank: int, processes: int, job: dict[str, Any]) -> None:
    """This process becomes one of `processes` ranks, with one thread and the matrix-product setting of everyone."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(job["matmul"])
    # FSDP and DeepSpeed call collectives by names that torch 2.13 has renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed|deepspeed")
    patience = timedelta(seconds=300)
    store = f"file://{job['folder']}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes, timeout=patience)


def rank_main(rank: int, job: dict[str, Any]) -> None:
    join(rank, job["ranks"], job)
    results = []
    for tokens in job["tokens"]:
        for precision in job["precision"]:
            results.append(run_setting(tokens, precision, job, say=rank == 0))
    if rank == 0:
        Path(job["folder"], "out").write_text(json.dumps(results))
    dist.destroy_process_group()


def run_setting(tokens: int, precision: str, job: dict[str, Any], say: bool) -> dict[str, Any]:
    """Measure every pair of one setting, group by group of the same contender of ours, and print each as it is done."""
    ranks = job["ranks"]
    result: dict[str, Any] = {
        "ranks": ranks, "tokens": tokens, "precision": precision, "contenders": {}, "rows": [],
    }  # fmt: skip
    if say:
        print(f"\n{ranks} {'rank' if ranks == 1 else 'ranks'}, {tokens} tokens a step, {precision}", flush=True)
    said = ""
    for ours in dict.fromkeys(ours for ours, _ in job["pairs"]):
        setting = setting_of(ours, tokens, precision, ranks)
        shape = shape_of(setting)
        if say and shape != said:
            print(f" {shape}", flush=True)
            said = shape
        names = [ours, *(peer for mine, peer in job["pairs"] if mine == ours)]
        flops = training_flops_per_sequence(MODEL, setting.seq) * setting.batch
        peak = matmul_peak(setting.precision) if setting.ranks == 1 else 0.0
        found = measure(setting, names, job["rounds"], job["alike"])
        if peak:
            peak = max(peak, matmul_peak(setting.precision))  # before and after: the machine may have been busy
        for name, contender in found.items():
            key = f"shardwise:{name}" if name == ours else name
            if peak and "seconds" in contender:
                contender["peak_share"] = flops / statistics.median(contender["seconds"]) / peak
            result["contenders"][key] = contender
        if peak:
            result["matmul_flops_per_s"] = peak
        for peer in names[1:]:
            row = compare(ours, found[ours], found[peer], precision) | {"shape": shape}
            result["rows"].append(row)
            if say:
                print(describe(row), flush=True)
    return result


# -- rows


def shape_of(setting: peers.Setting) -> str:
    """The global batch in words: sequences x tokens, and its parts where there are several."""
    parts = f" in {setting.micro_batches} micro-batches" if setting.micro_batches > 1 else ""
    return f"{setting.batch} x {setting.seq}{parts}"


def compare(ours: str, mine: dict[str, Any], theirs: dict[str, Any], precision: str) -> dict[str, Any]:
    """One line of the comparison, from what `measure` found of both."""
    row: dict[str, Any] = {"ours": ours, "peer": theirs["describe"]}
    for who, each in (("shardwise", mine), (theirs["describe"], theirs)):
        if "reason" in each:
            return row | {"reason": each["reason"] if who == theirs["describe"] else f"shardwise: {each['reason']}"}
    ratios = [b / a for a, b in zip(mine["seconds"], theirs["seconds"], strict=True)]
    row |= {"speed": statistics.median(ratios), "speed_min": min(ratios), "speed_max": max(ratios)}
    for who, each in (("ours", mine), ("peer", theirs)):
        row |= {
            f"{who}_s": statistics.median(each["seconds"]),
            f"{who}_cpu_s": statistics.median(each["cpu_seconds"]),
            f"{who}_peak_bytes": each["peak_bytes"],
            f"{who}_loss": each["loss"],
        }
        if "peak_share" in each:
            row[f"{who}_peak_share"] = each["peak_share"]
    row["same_loss"] = abs(mine["loss"] - theirs["loss"]) <= SAME_LOSS[precision] * abs(theirs["loss"])
    return row


def describe(row: dict[str, Any]) -> str:
    if "reason" in row:
        return f"  {row['ours']:<7} {row['peer']:<17} not measured: {row['reason']}"

    def both(key: str, scale: float, digits: int) -> str:
        mine, theirs = row[f"ours_{key}"], row[f"peer_{key}"]
        return " | ".join("?" if x is None else f"{x * scale:.{digits}f}" for x in (mine, theirs))

    text = (
        f"  {row['ours']:<7} {row['peer']:<17} {both('s', 1e3, 1):>17} ms   "
        f"speed {row['speed']:.2f} ({row['speed_min']:.2f} to {row['speed_max']:.2f})   "
        f"CPU {both('cpu_s', 1e3, 0):>11} ms   peak {both('peak_bytes', 1e-6, 1):>13} MB"
    )
    if "ours_peak_share" in row:
        text += f"   {both('peak_share', 100, 0)} % of the matrix-product peak"
    if not row["same_loss"]:
        text += f"   LOSSES DIFFER: {both('loss', 1, 4)}"
    return text


# -- the run


def machine() -> dict[str, Any]:
    """What it ran on, without names or paths."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["deepspeed"] = metadata.version("deepspeed")
    return {"cpu": cpu, "cores": cores, "system": platform.system(), **versions}


def header(benchmark: str, model: ModelConfig | dict[str, Any] = MODEL) -> dict[str, Any]:
    """What every result file starts with. The command is without the file that the result goes to.

    model: as a dict, `model` and `parameters` themselves.
    """
    words = [f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    command = re.sub(r" --json[ =]\S+", "", " ".join(["python", *words]))
    date = datetime.now(UTC).isoformat(timespec="minutes")
    if isinstance(model, ModelConfig):
        model = {"model": model.to_json(), "parameters": count(model)}
    return {"benchmark": benchmark, "date": date, "command": command, "machine": machine(), **model}


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Indented, but with lists of numbers on one line."""
    text = json.dumps(result, indent=1)
    text = re.sub(r"\[\s+([-\d.,e\s]+?)\s+\]", lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def chosen_pairs(words: list[str] | None) -> list[tuple[str, str]]:
    """The pairs of which either name contains one of the words; all without words."""
    pairs = [p for p in PAIRS if not words or any(w in p[0] or w in p[1] for w in words)]
    if not pairs:
        known = ", ".join(dict.fromkeys(name for pair in PAIRS for name in pair))
        raise UserError(f"--pairs {' '.join(words or [])}: no contender is called so; there are {known}")
    return pairs


def check(ranks: list[int], tokens: list[int], pairs: list[tuple[str, str]]) -> None:
    for n in ranks:
        if n < 1 or MODEL.heads % n:
            raise UserError(f"--ranks {n}: must divide the model's {MODEL.heads} heads; use 1, 2 or 4")
        for total in tokens:
            whole = 512 * n if total > 512 else n * n
            if total < 1 or total % whole:
                raise UserError(f"--tokens {total}: {n} ranks need a multiple of {whole} tokens")
    if 2 in ranks and any(is_pipeline(ours) for ours, _ in pairs):
        for total in tokens:
            whole = MICRO_BATCHES * (512 if total > 512 * MICRO_BATCHES else 1)
            if total % whole:
                raise UserError(f"--tokens {total}: {MICRO_BATCHES} micro-batches need a multiple of {whole} tokens")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help="1 is for the plain loop alone")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="of a global batch")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--matmul", choices=("highest", "high", "medium"), default="medium",
                        help="float32 matrix-product precision for everyone")  # fmt: skip
    parser.add_argument("--alike", action="store_true", help="let the peers keep the memory they free, too")
    parser.add_argument("--name", default="train_step", help="of the benchmark in the JSON file (train_step)")
    parser.add_argument("--pairs", nargs="+", metavar="WORD", help="only pairs with a contender whose name contains it")
    parser.add_argument("--quick", action="store_true", help="1 and 2 ranks, 512 tokens, fp32, 3 rounds")
    parser.add_argument("--json", type=Path, help="write raw times, rows, machine and date here")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.tokens, args.precision, args.rounds = [1, 2], [512], ["fp32"], 3
    if args.rounds < 1:
        raise UserError(f"--rounds must be a positive integer, not {args.rounds}")
    return args


def main() -> None:
    args = arguments()
    pairs = chosen_pairs(args.pairs)
    check(args.ranks, args.tokens, pairs)
    print("ours | the peer's, medians; speed above 1 means that ours is faster")
    settings = []
    for ranks in args.ranks:
        suited = [pair for pair in pairs if suits(pair[0], ranks)]
        if not suited:
            continue
        with tempfile.TemporaryDirectory() as folder:
            job = vars(args) | {"folder": folder, "ranks": ranks, "pairs": suited}
            mp.spawn(rank_main, (job,), nprocs=ranks)
            settings += json.loads(Path(folder, "out").read_text())
    if args.json:
        about = {"rounds": args.rounds, "matmul": args.matmul, "settings": settings}
        write_json(args.json, header(args.name) | about)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
