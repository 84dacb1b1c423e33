"""shardwise on one CUDA device, beside the script that a user would write: FSDP2 and torch.compile, world size one.

    python benchmarks/gpu.py [--models llama-3.2-1b llama-3.2-3b] [--seq 4096 8192] [--recompute none selective full]
                             [--compile off block] [--tokens 8192] [--rounds 2] [--steps 10] [--json FILE]
                             [--quick | --tiny]

Both train the same Llama in bf16 from the same weights on the same tokens, with fp32 master weights, fused AdamW,
gradient clipping and torch's fused attention, and read the loss after every step. Each measurement is a process of its
own, ours and theirs by turns, so that neither finds the other's memory. Printed are medians over all timed steps:
tokens/s, MFU (causal attention counted once, recomputation not), the predicted and the measured peak
of memory. What runs out of memory is said to.

Without a CUDA device, or with --tiny, the same script trains a tiny model on the CPU, which shows that it works and
nothing else. --quick takes seven settings, one round and few steps, and starts each process while the one before it
measures, so that it is over in a few minutes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.cluster import Cluster, Device, Link
from shardwise.cluster.catalog import lookup
from shardwise.decoder import Batch
from shardwise.decoder.attention import Rope
from shardwise.decoder.random import initial_values
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.model.flops import training_flops_per_token
from shardwise.model.parameters import Parameter, count, parameters
from shardwise.predict import estimate
from shardwise.report.units import format_bytes, format_count
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.job.setup import make_comms
from shardwise.runtime.measure.hardware import matmul_rate
from shardwise.runtime.measure.memory import StepMeasurement
from shardwise.runtime.pipeline.step import TrainProgram

TINY = ModelConfig("tiny", vocab=512, hidden=128, layers=3, heads=4, kv_heads=2, ffn=352, max_positions=256)
DEVICES = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200", "NVIDIA A100-SXM4-80GB": "A100"}
"""torch's names of the devices in the catalog."""
QUICK = (
    ("llama-3.2-1b", 4096, "none", "off"), ("llama-3.2-1b", 4096, "none", "block"),
    ("llama-3.2-3b", 8192, "none", "block"), ("llama-3.2-3b", 8192, "selective", "block"),
    ("llama-3.2-3b", 8192, "full", "block"), ("llama-3.2-1b", 4096, "full", "off"),
    ("llama-3.2-1b", 4096, "selective", "off"),
)  # fmt: skip
"""(model, tokens of a sequence, recompute, compile) of --quick, the most telling first."""
OPTIMIZER = OptimizerConfig(lr=1e-4)
WARM_UP = 3
SEED = 0
FAILURE = (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, ImportError)


@dataclass(frozen=True)
class Setting:
    """What is trained, and how: `micro` sequences of `seq` tokens a step."""

    model: ModelConfig
    seq: int
    micro: int
    recompute: str
    compile: str
    steps: int
    device: str

    @property
    def layout(self) -> Layout:
        return Layout(micro=self.micro, recompute=self.recompute, compile=self.compile)

    @property
    def workload(self) -> Workload:
        return Workload(seq=self.seq, batch=self.micro)

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """(ids, targets) of step `index`, each [micro, seq], on the device."""
        generator = torch.Generator().manual_seed(index)
        rows = torch.randint(self.model.vocab, (self.micro, self.seq + 1), generator=generator).to(self.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


Step = Callable[[Tensor, Tensor], float]
"""Train on (ids, targets); returns the loss."""


def shardwise(setting: Setting) -> tuple[Step, TrainProgram]:
    """This project's runtime."""
    layout, model, device = setting.layout, setting.model, torch.device(setting.device)
    plan = unit_plan(model, layout, setting.workload, backend="nccl" if device.type == "cuda" else "gloo")
    program = TrainProgram(plan, make_comms(layout, model, 0, timeout=600.0), OPTIMIZER, _initial, device)
    positions = torch.arange(setting.seq, device=device).expand(setting.micro, -1).contiguous()

    def step(ids: Tensor, targets: Tensor) -> float:
        batch = Batch(ids, positions, positions, None, positions, positions)
        return program.step([(batch, targets)], OPTIMIZER.lr)[0]

    return step, program


def _initial(parameter: Parameter, index: Tensor) -> Tensor:
    return initial_values(parameter, index, SEED)


class Block(nn.Module):
    """A Llama block as everyone writes it. recompute: none, selective (the attention core) or full."""

    def __init__(self, c: ModelConfig, recompute: str) -> None:
        super().__init__()
        self.head_dim, self.recompute = c.head_dim, recompute
        self.attention_norm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.q = nn.Linear(c.hidden, c.q_width, bias=False)
        self.k = nn.Linear(c.hidden, c.kv_width, bias=False)
        self.v = nn.Linear(c.hidden, c.kv_width, bias=False)
        self.o = nn.Linear(c.q_width, c.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.gate = nn.Linear(c.hidden, c.ffn, bias=False)
        self.up = nn.Linear(c.hidden, c.ffn, bias=False)
        self.down = nn.Linear(c.ffn, c.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.recompute == "full":
            out: Tensor = checkpoint(self._forward, x, cos, sin, use_reentrant=False)
            return out
        return self._forward(x, cos, sin)

    def _forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (p(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        if self.recompute == "selective":
            a = checkpoint(_attend, q, k, v, use_reentrant=False)
        else:
            a = _attend(q, k, v)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Llama(nn.Module):
    """ids [B, S] -> logits [B, S, vocab]."""

    def __init__(self, c: ModelConfig, seq: int, recompute: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocab, c.hidden)
        self.blocks = nn.ModuleList(Block(c, recompute) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.head = nn.Linear(c.hidden, c.vocab, bias=False)
        if c.tied:
            self.head.weight = self.embedding.weight
        cos, sin = Rope(c).tables(torch.arange(seq, device="cpu")[None], torch.bfloat16)
        self.register_buffer("cos", cos.transpose(1, 2))  # [1, 1, seq, head_dim / 2]
        self.register_buffer("sin", sin.transpose(1, 2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        out: Tensor = self.head(self.norm(x))
        return out


def _their_name(name: str) -> str:
    """Where `Llama` keeps what shardwise calls `name`."""
    *path, module, _ = name.split(".")
    if path[0] == "blocks":
        return f"blocks.{path[1]}.{'o' if module == 'out' else module}.weight"
    return {"tokens": "embedding", "norm": "norm", "out": "head"}[module] + ".weight"


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def fsdp2(setting: Setting) -> tuple[Step, None]:
    """`fully_shard` on every block, `torch.compile` on every block and the loss."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with torch.device(setting.device):
        model = Llama(setting.model, setting.seq, setting.recompute).to(setting.device)
    table = dict(model.named_parameters())
    with torch.no_grad():
        for spec in parameters(setting.model):
            index = torch.arange(spec.numel, device=setting.device)
            table[_their_name(spec.name)].copy_(_initial(spec, index).view(spec.shape))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    loss_of = torch.compile(_loss) if setting.compile == "block" else _loss
    for block in model.blocks:
        if setting.compile == "block":
            block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, fused=True)

    def step(ids: Tensor, targets: Tensor) -> float:
        loss = loss_of(model(ids), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip)
        adam.step()
        adam.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step, None


CONTENDERS: dict[str, Callable[[Setting], tuple[Step, TrainProgram | None]]] = {"shardwise": shardwise, "FSDP2": fsdp2}


# -- one measurement, in a process of its own


def _measure(name: str, setting: Setting) -> dict[str, Any]:
    """{"seconds": of each timed step, "losses", "setup_s": before the first timed step, "peak_bytes": or None}."""
    started = time.perf_counter()
    _alone(setting.device)
    step, program = CONTENDERS[name](setting)
    cuda = setting.device == "cuda"
    seconds: list[float] = []
    losses: list[float] = []
    setup = 0.0
    for index in range(WARM_UP + setting.steps):
        if index == WARM_UP:
            setup = time.perf_counter() - started
            if cuda:
                torch.cuda.reset_peak_memory_stats()
        ids, targets = setting.tokens(index)
        if cuda:
            torch.cuda.synchronize()
        before = time.perf_counter()
        losses.append(step(ids, targets))
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - before)
    peak = torch.cuda.max_memory_allocated() if cuda else None
    if program is not None and not cuda:
        with StepMeasurement(program) as measurement:
            step(*setting.tokens(0))
        peak = measurement.role(0).peak_bytes
    return {"seconds": seconds[WARM_UP:], "losses": losses, "setup_s": setup, "peak_bytes": peak}


def _alone(device: str) -> None:
    """A process group of one rank, on `device`."""
    if device == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    backend, gpu = ("nccl", torch.device("cuda", 0)) if device == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=gpu)


def _peak_rate(device: str) -> dict[str, Any]:
    _alone(device)
    return {"flops_per_s": matmul_rate(torch.device(device), torch.bfloat16)}


def _child(pipe: Any) -> None:
    """Run what comes through the pipe, and send its result back."""
    try:
        function, arguments = pipe.recv()
        pipe.send(function(*arguments))
    except EOFError:
        return  # nothing came
    except FAILURE as error:
        memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
        line = shorten(f"{type(error).__name__}: {error}", 160, placeholder=" ...")
        where = "" if memory else traceback.format_exc()
        pipe.send({"failure": "out of memory" if memory else line, "traceback": where})
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Processes:
    """Runs functions, each in a new process. ahead: start the next one while a function runs, which takes seconds."""

    def __init__(self, ahead: bool) -> None:
        self._ahead = ahead
        self._next: tuple[Any, Any] | None = None

    def _start(self) -> tuple[Any, Any]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(theirs,))
        process.start()
        theirs.close()
        return process, ours

    def run(self, function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        """`function(*arguments)`; {"failure": one line} where it fails, whose traceback goes to standard error."""
        process, pipe = self._next or self._start()
        pipe.send((function, arguments))
        self._next = self._start() if self._ahead else None
        try:
            result: dict[str, Any] = pipe.recv()
        except EOFError:
            process.join()
            result = {"failure": f"the process ended with {process.exitcode}"}
        process.join()
        sys.stderr.write(result.pop("traceback", ""))
        return result

    def close(self) -> None:
        """End the process that waits, if there is one."""
        if self._next is not None:
            process, pipe = self._next
            pipe.close()
            process.join()


# -- all of them


@dataclass(frozen=True)
class Machine:
    """name; memory in bytes; peak: FLOP/s by the catalog, None where it does not know the device; measured: FLOP/s of
    large bf16 matrix products here."""

    device: str
    name: str
    memory: int | None
    peak: float | None
    measured: float

    @classmethod
    def here(cls, device: str, processes: Processes) -> Machine:
        found = processes.run(_peak_rate, device)
        if "failure" in found:
            raise SystemExit(f"the device cannot be used: {found['failure']}")
        if device == "cpu":
            return cls(device, "CPU", None, None, found["flops_per_s"])
        properties = torch.cuda.get_device_properties(0)
        known = DEVICES.get(properties.name)
        peak = lookup(known).device.peak_flops["bfloat16"] if known else None
        return cls(device, properties.name, properties.total_memory, peak, found["flops_per_s"])

    @property
    def reference(self) -> float:
        """What MFU is a share of."""
        return self.peak or self.measured

    def cluster(self) -> Cluster | None:
        """This device as `estimate` takes it; None for the CPU."""
        if self.device == "cpu":
            return None
        unknown = Link(None, None)
        return Cluster(1, 1, Device(self.name, "cuda", self.memory, None, {}, "torch"), unknown, unknown)


def compare(setting: Setting, machine: Machine, rounds: int, processes: Processes) -> dict[str, Any]:
    """Ours and theirs by turns, `rounds` times; a row of the results."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, done in runs.items():
            if not any("failure" in run for run in done):
                done.append(processes.run(_measure, name, setting))
    predicted = estimate(setting.model, setting.layout, setting.workload, machine.cluster()).roles[0].peak_bytes
    row: dict[str, Any] = {
        "model": setting.model.name, "seq": setting.seq, "micro": setting.micro, "recompute": setting.recompute,
        "compile": setting.compile, "layout": str(setting.layout), "predicted_bytes": predicted,
    }  # fmt: skip
    for name, done in runs.items():
        row[name] = _summary(setting, machine, done)
    ours = row["shardwise"]
    if ours.get("peak_bytes"):
        ours["predicted_error"] = predicted / ours["peak_bytes"] - 1
    if all("tokens_per_s" in row[name] for name in CONTENDERS):
        row["speed"] = ours["tokens_per_s"] / row["FSDP2"]["tokens_per_s"]
        row["loss_difference"] = max(
            abs(a / b - 1) for a, b in zip(ours["losses"], row["FSDP2"]["losses"], strict=True)
        )
    return row


def _summary(setting: Setting, machine: Machine, runs: list[dict[str, Any]]) -> dict[str, Any]:
    if failed := [run["failure"] for run in runs if "failure" in run]:
        return {"failure": failed[0]}
    seconds = [s for run in runs for s in run["seconds"]]
    rate = setting.micro * setting.seq / statistics.median(seconds)

    mfu = training_flops_per_token(setting.model, setting.seq) * rate / machine.reference
    peaks = [run["peak_bytes"] for run in runs if run["peak_bytes"] is not None]
    return {
        "tokens_per_s": rate, "mfu": mfu, "median_step_s": statistics.median(seconds),
        "step_s": seconds, "setup_s": runs[0]["setup_s"], "losses": runs[0]["losses"],
        "peak_bytes": max(peaks) if peaks else None,
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    """Three lines a setting."""
    print(
        f"{row['model']}, {row['micro']} x {row['seq']} tokens, recompute={row['recompute']}, compile={row['compile']}"
    )
    for name in CONTENDERS:
        found = row[name]
        if "failure" in found:
            print(f"  {name:<10} {found['failure']}" + _predicted(row) * (name == "shardwise"))
            continue
        line = f"  {name:<10} {found['tokens_per_s']:>9,.0f} tokens/s   MFU {found['mfu']:6.1%}"
        line += f"   peak {format_bytes(found['peak_bytes'])}" if found["peak_bytes"] else ""
        if name == "shardwise":
            line += _predicted(row) + f" ({found['predicted_error']:+.1%})"
        print(line)
    if "speed" in row:
        print(f"  shardwise / FSDP2: {row['speed']:.2f} (losses differ by at most {row['loss_difference']:.2%})")


def _predicted(row: dict[str, Any]) -> str:
    return f", predicted {format_bytes(row['predicted_bytes'])}"


def settings(args: argparse.Namespace, device: str) -> list[Setting]:
    if args.quick:
        return [
            Setting(get(name), seq, max(1, args.tokens // seq), recompute, compiled, args.steps, device)
            for name, seq, recompute, compiled in QUICK
        ]
    models = [TINY if name == TINY.name else get(name) for name in args.models]
    return [
        Setting(model, seq, max(1, args.tokens // seq), recompute, compiled, args.steps, device)
        for model in models
        for seq in args.seq
        for recompute in args.recompute
        for compiled in args.compile
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: does the script work?")
    parser.add_argument("--quick", action="store_true", help="seven settings, one round, few steps")
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--seq", nargs="+", type=int)
    parser.add_argument("--recompute", nargs="+", choices=("none", "selective", "full"))
    parser.add_argument("--compile", nargs="+", choices=("off", "block"))
    parser.add_argument("--tokens", type=int, help="tokens a step; at least one sequence")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, help="timed steps of each process")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        print("no CUDA device here: a tiny model on the CPU shows that the script works; GPU figures stay unmeasured")
        args.tiny = True
    args.quick = args.quick and not args.tiny
    large = {
        "models": ["llama-3.2-1b", "llama-3.2-3b"], "seq": [4096, 8192], "recompute": ["none", "selective", "full"],
        "compile": ["off", "block"], "tokens": 8192, "rounds": 2, "steps": 10,
    }  # fmt: skip
    if args.quick:
        large |= {"rounds": 1, "steps": 6}
    tiny = {"models": [TINY.name], "seq": [64], "recompute": ["none", "full"], "tokens": 128, "rounds": 1, "steps": 3}
    for name, value in (large | tiny if args.tiny else large).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main() -> None:
    args = arguments()
    processes = Processes(ahead=args.quick)
    machine = Machine.here("cpu" if args.tiny else "cuda", processes)
    peak = f"{machine.peak / 1e12:,.0f} TFLOP/s by the catalog" if machine.peak else "not in the catalog"
    print(f"{machine.name}: bf16 matrix products at {machine.measured / 1e12:,.3g} TFLOP/s measured, peak {peak}")
    print(f"MFU is a share of the {'catalog' if machine.peak else 'measured'} rate; torch {torch.__version__}")
    about = {"machine": asdict(machine), "torch": torch.__version__, "measures_gpu": not args.tiny}
    chosen, rows = settings(args, machine.device), []
    sizes = {setting.model.name: format_count(count(setting.model)) for setting in chosen}
    for setting in chosen:
        rows.append(compare(setting, machine, args.rounds, processes))
        show(rows[-1])
        if args.json:  # after each setting: what is cut off leaves the others
            args.json.write_text(json.dumps(about | {"parameters": sizes, "rows": rows}, indent=1) + "\n")
    processes.close()
    if args.tiny:
        print("a tiny model on the CPU: these figures say nothing about a GPU, whose own are unmeasured")


if __name__ == "__main__":
    main()
