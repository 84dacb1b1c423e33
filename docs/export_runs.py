"""A checkpoint of ours, exported as DeepSpeed's universal format: DeepSpeed loads it under each ZeRO stage on 2 CPU
ranks, and its next losses are compared with those of our own runtime, resumed from the checkpoint itself.

PYTHONPATH=src:tests python docs/export_runs.py   prints the table of docs/export.md

By hand, or by tests/docs/test_engine_runs.py, in an environment with DeepSpeed (`make parsers` makes .venv/engines).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from harness.foreign_jobs import SAVED, STEPS, Going, adamw
from harness.oracles import _decoder
from harness.pool import run_ranks
from harness.reference import Case, global_batch, make_batch
from shardwise.checkpoint import Checkpoint
from shardwise.checkpoint.foreign import export_foreign, import_checkpoint
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.model.parameters import parameters
from shardwise.runtime.zero.optimizer import learning_rate

MODEL = ModelConfig(
    "small-llama", vocab=37, hidden=20, layers=2, heads=4, kv_heads=2, head_dim=6, ffn=29, max_positions=16
)
CASE = Case(MODEL, Workload(seq=8, batch=4), "fp32")
RANKS, LIMIT = 2, 900


def checkpoint_of_ours(folder: Path) -> tuple[Path, dict[str, Any]]:
    """(a checkpoint after `SAVED` steps, whole tensors by stored name)."""
    names = {p.name: p.name for p in parameters(MODEL)}
    first = run_ranks("harness.foreign_jobs:fsdp", RANKS, (CASE, str(folder / "saved"), names, False))[0]
    import_checkpoint(folder / "saved", folder / "ours", MODEL)
    return folder / "ours", first.held


def our_losses(checkpoint: Path, held: dict[str, Any]) -> list[float]:
    """Losses of the steps after the checkpoint, in our runtime."""
    steps = range(SAVED, STEPS)
    rows, lrs = [global_batch(CASE, step) for step in steps], [learning_rate(CASE.optimizer, s, STEPS) for s in steps]
    going, layout = Going(str(checkpoint), held, rows, lrs), Layout.parse("dp=2,zero=1,precision=fp32")
    ((_, losses),) = run_ranks("harness.foreign_jobs:go_on", RANKS, (CASE, layout, [going]))[0]
    return losses


def their_losses(stage: int, optimizer: str, exported: Path) -> list[float]:
    """Losses of the steps after the checkpoint, in DeepSpeed. optimizer: whose AdamW, "DeepSpeed" or "torch"."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(
            [*command, __file__, "rank", str(stage), optimizer, str(exported), str(out)],
            check=True, timeout=LIMIT, env=environment, stdout=sys.stderr,
        )  # fmt: skip
        return json.loads(out.read_text())


def rank_main(stage: int, optimizer: str, exported: Path, out: Path) -> None:
    """Load, check that AdamW's step and settings came along, and train."""
    torch, dist, deepspeed = (import_module(name) for name in ("torch", "torch.distributed", "deepspeed"))
    deepspeed.init_distributed(dist_backend="gloo")
    decoder = _decoder(CASE)
    adam = adamw(CASE, dict(decoder.named_parameters()))
    decays = [group["weight_decay"] for group in adam.param_groups]
    config: dict[str, Any] = {
        "train_batch_size": CASE.workload.batch, "gradient_clipping": CASE.optimizer.clip,
        "zero_optimization": {"stage": stage}, "checkpoint": {"load_universal": True},
    }  # fmt: skip
    if optimizer == "torch":
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        engine, *_ = deepspeed.initialize(model=decoder, optimizer=adam, config=config)
    else:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.0}}
        groups = [{name: group[name] for name in ("params", "weight_decay")} for group in adam.param_groups]
        engine, *_ = deepspeed.initialize(model=decoder, model_parameters=groups, config=config)
    # A decoder that is not loaded would show: it starts from other weights.
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.data.zero_()
    path, _ = engine.load_checkpoint(str(exported))
    assert path is not None and engine.global_steps == SAVED
    groups = engine.optimizer.param_groups
    if stage == 3:
        # Its loader gives every group the first one's settings.
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = decay
    if stage == 3 and optimizer == "torch":
        # It sets numbers, and torch's AdamW counts tensors.
        for state in engine.optimizer.optimizer.state.values():
            state["step"] = torch.tensor(float(state["step"]))
    losses = [step_of(engine, groups, step, torch, dist) for step in range(SAVED, STEPS)]
    if dist.get_rank() == 0:
        out.write_text(json.dumps(losses))
    dist.barrier()
    # gloo's threads abort the interpreter's own end now and then.
    os._exit(0)


def step_of(engine: Any, groups: Any, step: int, torch: Any, dist: Any) -> float:
    """Train one step. Returns its loss over all ranks."""
    rank, share = dist.get_rank(), CASE.workload.batch // RANKS
    every = global_batch(CASE, step)
    mine = {name: tensor[rank * share : (rank + 1) * share] for name, tensor in every.items()}
    logits = engine(make_batch(CASE, mine, step))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), mine["targets"].flatten(), reduction="sum")
    loss = loss / (every["targets"] != -100).sum()
    for group in groups:
        group["lr"] = learning_rate(CASE.optimizer, step, STEPS)
    # DeepSpeed averages gradients over ranks.
    engine.backward(loss * RANKS)
    engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item()


def differences(cases: Iterable[tuple[int, str]]) -> Iterator[float]:
    """The largest relative difference of a loss, for each (ZeRO stage, optimizer) that resumes the checkpoint."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        checkpoint, held = checkpoint_of_ours(folder)
        export_foreign(Checkpoint.open(checkpoint), folder / "out", "deepspeed-universal", names="shardwise")
        ours = our_losses(checkpoint, held)
        for stage, optimizer in cases:
            theirs = their_losses(stage, optimizer, folder / "out")
            yield max(abs(a - b) / abs(b) for a, b in zip(theirs, ours, strict=True))


def main() -> None:
    print("| resumed by | steps | largest relative difference of a loss, fp32 |\n|---|---|---|", flush=True)
    cases = [(stage, optimizer) for optimizer in ("DeepSpeed", "torch") for stage in (1, 2, 3)]
    for (stage, optimizer), apart in zip(cases, differences(cases), strict=True):
        name = f"DeepSpeed {metadata.version('deepspeed')}, ZeRO-{stage}, {optimizer}'s AdamW"
        print(f"| {name} | {STEPS - SAVED} | {apart:.1e} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_main(int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]))
    if sys.argv[1:]:
        sys.exit(__doc__)
    main()
