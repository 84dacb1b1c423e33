"""The host's update of offloaded state beside one fused call of torch, and the disk that state is kept on.

    python benchmarks/host_update.py [--elements 33554432] [--rounds 9] [--disk DIR] [--json FILE] [--tiny]

Contenders, on one thread, in turn within each round, each over all elements:

- ours: the runtime's `Optimizer._update`, chunk after chunk of 128K elements: bf16 gradients are converted and clipped,
  `torch._fused_adamw_` updates fp32 master weights and moments, weights are written in bf16;
- chunks: the same chunks without converting anything, on fp32 gradients and fp32 weights alone;
- torch: one `torch._fused_adamw_` of all elements, on fp32 gradients and fp32 weights alone;
- DeepSpeed's CPU Adam, where `deepspeed` can be imported.

Prints parameters/s by the thread's own clock, and the ratio of each contender's speed to torch's: the median over
rounds, the lowest and the highest. Then the disk: whole requests of 12 MiB read and written one after the other by
direct I/O (`os.preadv`, `os.pwrite` into mmap), which is what `calibrate device` measures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from shardwise.cli.calibrate_device import cpu_name
from shardwise.errors import UserError
from shardwise.layout.homes import CHUNK
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.measure.hardware import FILE, REQUEST, disk_rates
from shardwise.runtime.zero.update import update

CONFIG = OptimizerConfig()
Update = Callable[[], object]


def state(elements: int) -> list[torch.Tensor]:
    """Weights, gradients and moments, fp32 [elements], filled so that all pages are there."""
    weights, gradients, first, second = (torch.full((elements,), fill) for fill in (0.1, 1e-3, 1e-4, 1e-6))
    return [weights, gradients, first, second]


def ours(elements: int) -> Update:
    """Chunks with conversions, as the runtime updates offloaded state."""
    master, wide, first, second = state(elements)
    gradients, weights = wide.to(torch.bfloat16), master.to(torch.bfloat16)
    del wide
    chunk, step = torch.empty(min(CHUNK, elements)), torch.ones(())

    def call() -> None:
        for at in range(0, elements, CHUNK):
            part = slice(at, at + CHUNK)
            local = chunk[: len(master[part])].copy_(gradients[part])
            local.mul_(0.999)
            update("adamw", (master[part], local, first[part], second[part]), step, CONFIG, CONFIG.lr, decay=True)
            weights[part].copy_(master[part])

    return call


def chunks(elements: int) -> Update:
    """Chunks alone."""
    tensors, step = state(elements), torch.ones(())

    def call() -> None:
        for at in range(0, elements, CHUNK):
            update("adamw", [tensor[at : at + CHUNK] for tensor in tensors], step, CONFIG, CONFIG.lr, decay=True)

    return call


def fused(elements: int) -> Update:
    """One call of torch."""
    weights, gradients, first, second = ([tensor] for tensor in state(elements))
    step = [torch.ones(())]

    def call() -> None:
        torch._fused_adamw_(
            weights, gradients, first, second, [], step, lr=CONFIG.lr, beta1=CONFIG.betas[0], beta2=CONFIG.betas[1],
            weight_decay=CONFIG.weight_decay, eps=CONFIG.eps, amsgrad=False, maximize=False,
        )  # fmt: skip

    return call


def deepspeed(elements: int) -> Update | None:
    """DeepSpeed's CPU Adam on fp32 weights and gradients; None where it is not installed or does not build."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        weights = torch.nn.Parameter(torch.full((elements,), 0.1))
        weights.grad = torch.full((elements,), 1e-3)
        optimizer = DeepSpeedCPUAdam([weights], lr=CONFIG.lr, betas=CONFIG.betas, weight_decay=CONFIG.weight_decay)
        optimizer.step()
    except Exception as error:  # its extension is compiled on first use, which fails in many ways
        print(f"without DeepSpeed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return None
    return optimizer.step


def seconds(call: Update) -> float:
    """Seconds of this thread, which stand still while another program has the core."""
    started = time.thread_time()
    call()
    return time.thread_time() - started


def measured(elements: int, rounds: int) -> dict[str, Any]:
    """Rows of the contenders that there are."""
    contenders: dict[str, Update] = {"ours": ours(elements), "chunks": chunks(elements), "torch": fused(elements)}
    if (other := deepspeed(elements)) is not None:
        contenders["deepspeed"] = other
    for call in contenders.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds):
        # Each contender is first as often as the others.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times[name].append(seconds(contenders[name]))
    rows = {}
    for name, took in times.items():
        ratios = [reference / own for reference, own in zip(times["torch"], took, strict=True)]
        rows[name] = {
            "parameters_per_second": elements / statistics.median(took),
            "of_torch": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
        }
    return rows


def disk(folder: Path, nbytes: int) -> dict[str, Any]:
    try:
        rates = disk_rates(folder, nbytes)
    except UserError as error:
        return {"why_not": str(error)}
    return {"read": rates.read, "write": rates.write, "request_bytes": REQUEST, "file_bytes": nbytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 25)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a moment's work, for a test")
    args = parser.parse_args()
    torch.set_num_threads(1)
    elements, rounds, nbytes = (3 * CHUNK + 1, 2, 2 * REQUEST) if args.tiny else (args.elements, args.rounds, FILE)
    rows, streamed = measured(elements, rounds), disk(args.disk, nbytes)
    for name, row in rows.items():
        rate = row["parameters_per_second"] / 1e6
        print(f"{name:10} {rate:7.0f} M parameters/s, {row['of_torch']:.2f} of torch "
              f"({row['lowest']:.2f} to {row['highest']:.2f})")  # fmt: skip
    print(streamed.get("why_not") or f"disk: read {streamed['read'] / 1e9:.2f} GB/s, "
          f"write {streamed['write'] / 1e9:.2f} GB/s")  # fmt: skip
    if args.json:
        about = {"benchmark": "host_update", "date": str(date.today()), "torch": torch.__version__, "threads": 1,
                 "processor": cpu_name(), "elements": elements, "rounds": rounds,
                 "chunk": CHUNK}  # fmt: skip
        args.json.write_text(json.dumps(about | {"update": rows, "disk": streamed}, indent=1) + "\n")


if __name__ == "__main__":
    main()
