"""A long sequence trains over context-parallel processes: memory as predicted, loss and gradients as on one process.

    python benchmarks/long_context.py [--seq 16384 131072] [--cp 4 8] [--kind ring] [--json FILE]

One small layer in float64. The reference is the plain decoder with torch's loss, in a process of its own; torch's fused
attention keeps no score matrix. Every cp then trains one step from the same weights on the same sequence, under the
follower of all storages. Printed: the largest relative difference of loss and gradients (norm of the difference over
the norm, parameter by parameter, on every rank), and the bytes of the busiest rank by class beside the predicted ones.
Ranks have one thread each. Exits with 1 where a difference exceeds 1e-9, a class is not exact or a peak is more than 5%
from the prediction.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import peers
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
import train_step
from torch import Tensor

from shardwise.decoder import Decoder
from shardwise.decoder.random import initial_values
from shardwise.layout import Layout, UnitPlan, Workload, unit_plan
from shardwise.model import ModelConfig
from shardwise.model.parameters import parameters
from shardwise.predict.memory.step import predict_bytes
from shardwise.report.step_report import Bytes
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.job.setup import local_view, make_comms
from shardwise.runtime.measure.memory import StepMeasurement
from shardwise.runtime.pipeline.step import TrainProgram

MODEL = ModelConfig(
    "long", vocab=61, hidden=16, layers=1, heads=1, kv_heads=1, head_dim=8, ffn=44, max_positions=1 << 20
)
SEED, LR, PATIENCE = 0, 1e-4, 3600.0
EXACT = ("parameters", "gradients", "optimizer", "comm", "saved")
TOLERANCE, PEAK_TOLERANCE = 1e-9, 0.05


def sequence(seq: int) -> tuple[Tensor, Tensor]:
    """Token ids and targets, each [1, seq]."""
    tokens = torch.randint(MODEL.vocab, (1, seq + 1), generator=torch.Generator().manual_seed(SEED))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def reference(rank: int, seq: int, folder: str) -> None:
    """One process: leaves loss and gradients in `folder`."""
    torch.set_num_threads(1)
    decoder, table = Decoder(MODEL), {p.name: p for p in parameters(MODEL)}
    for name, tensor in decoder.named_parameters():
        parameter = table[name]
        first = initial_values(parameter, torch.arange(parameter.numel), SEED)
        tensor.data = first.view(parameter.shape).double()
    ids, targets = sequence(seq)
    loss = F.cross_entropy(decoder(peers.plain_batch(ids))[0], targets[0])
    loss.backward()
    grads = {name: tensor.grad for name, tensor in decoder.named_parameters()}
    torch.save({"loss": loss.item(), "grads": grads}, Path(folder, "reference"))


def trained(rank: int, job: dict[str, Any]) -> None:
    """One rank: a step, compared with the reference; leaves differences and bytes in the job's folder."""
    train_step.join(rank, job["cp"], job)
    layout = Layout.parse(f"cp={job['cp']},cpkind={job['kind']},precision=fp64")
    comms = make_comms(layout, MODEL, rank, timeout=PATIENCE, transport="shared")
    plan = unit_plan(MODEL, layout, Workload(job["seq"], 1), rank=rank, backend=comms.backend)
    config = OptimizerConfig(lr=LR)
    program = TrainProgram(plan, comms, config, lambda p, i: initial_values(p, i, SEED), torch.device("cpu"))
    expected, worst = torch.load(Path(job["folder"], "reference")), 0.0
    plain_step = program.optimizer.step

    def compare(lr: float) -> float:
        nonlocal worst
        worst = _largest_difference(program, expected["grads"])
        return plain_step(lr)

    program.optimizer.step = compare  # type: ignore[method-assign]
    ids, targets = sequence(job["seq"])
    pair = local_view(peers.plain_batch(ids), targets, plan)
    with StepMeasurement(program) as measurement:
        loss, _, _ = program.step([pair], LR)
    result = {
        "loss": abs(loss / expected["loss"] - 1),
        "gradients": worst,
        "predicted": asdict(predict_bytes(plan)),
        "observed": asdict(measurement.role(rank).bytes),
    }
    Path(job["folder"], f"out-{job['cp']}-{rank}").write_text(json.dumps(result))
    comms.close()


def _largest_difference(program: TrainProgram, expected: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm, of the gradient that differs most."""
    worst = 0.0
    for flat in program.engine.units.values():
        for start, placed in zip(flat.unit.offsets, flat.unit.placed, strict=True):
            theirs = expected[placed.name].reshape(-1)
            mine = flat.grads_interval[start : start + placed.numel]
            worst = max(worst, float((mine - theirs).norm() / theirs.norm()))
    return worst


def one_process(seq: int) -> Bytes:
    """Predicted bytes of the layout without context parallelism."""
    layout = Layout(precision="fp64")
    plan: UnitPlan = unit_plan(MODEL, layout, Workload(seq, 1), backend="shared")
    return predict_bytes(plan)


def checked(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst of all ranks, and whether all of it is as asked."""
    pairs = [(Bytes(**each["predicted"]), Bytes(**each["observed"])) for each in results]
    peaks = [predicted.total / observed.total - 1 for predicted, observed in pairs]
    exact = all(getattr(a, name) == getattr(b, name) for a, b in pairs for name in EXACT)
    found = {name: max(each[name] for each in results) for name in ("loss", "gradients")}
    busiest = max(range(len(pairs)), key=lambda rank: pairs[rank][1].total)
    found |= {"classes exact": exact, "peak error": max(peaks, key=abs)}
    found |= {"predicted": pairs[busiest][0].to_json(), "observed": pairs[busiest][1].to_json()}
    found["peaks"] = [pairs[busiest][0].total, pairs[busiest][1].total]
    within = max(found["loss"], found["gradients"]) <= TOLERANCE and abs(found["peak error"]) <= PEAK_TOLERANCE
    return found | {"as asked": exact and within}


def show(text: str, found: dict[str, Any], seconds: float) -> None:
    predicted, observed = (peak / 1e6 for peak in found["peaks"])
    classes = ", ".join(f"{name} {found['observed'][name] / 1e6:.2f}" for name in EXACT)
    print(f"{text}: step {seconds:.0f} s with the start; loss off by {found['loss']:.1e}, "
          f"gradients by {found['gradients']:.1e}; peak {observed:.1f} MB, predicted {predicted:.1f}; "
          f"{classes} MB, {'as predicted' if found['classes exact'] else 'NOT as predicted'}", flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, nargs="+", default=[16384, 131072])
    parser.add_argument("--cp", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--kind", choices=("ring", "allgather"), default="ring")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    every: dict[str, Any] = {}
    for seq in args.seq:
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            mp.spawn(reference, (seq, folder), nprocs=1)
            words = (
                f"one process: {time.perf_counter() - started:.0f} s, peak predicted {one_process(seq).total / 1e6:.1f}"
            )
            print(f"{seq} tokens, {words} MB", flush=True)
            for cp in args.cp:
                started = time.perf_counter()
                job = {"folder": folder, "matmul": "highest", "seq": seq, "cp": cp, "kind": args.kind}
                mp.spawn(trained, (job,), nprocs=cp)
                found = checked([json.loads(Path(folder, f"out-{cp}-{rank}").read_text()) for rank in range(cp)])
                every[f"{seq} cp={cp}"] = found
                show(f"{seq} tokens, cp={cp}", found, time.perf_counter() - started)
                Path(folder, "store").unlink(missing_ok=True)
    if args.json:
        args.json.write_text(json.dumps(every, indent=1) + "\n")
    return 0 if all(found["as asked"] for found in every.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
