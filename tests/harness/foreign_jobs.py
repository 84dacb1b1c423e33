"""Jobs of the tests of other trainers' checkpoints: FSDP2 that saves or resumes, and our own training that resumes."""

import os
import random
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from harness.jobs import _errors, build
from harness.oracles import _whole, adamw
from harness.reference import Case, global_batch, make_batch, plain_decoder
from shardwise.checkpoint import Checkpoint
from shardwise.checkpoint.foreign import import_checkpoint
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import DP
from shardwise.layout.optimizers import states_of
from shardwise.model import ModelConfig
from shardwise.model.parameters import parameters
from shardwise.runtime.checkpointing import restore
from shardwise.runtime.job.setup import local_view
from shardwise.runtime.zero.optimizer import learning_rate

SAVED, STEPS = 3, 6
"""Steps before the checkpoint, and steps in all."""


@dataclass
class Saved:
    """losses: one a step. held: `model/`, `first/` and `second/` + our parameter's name -> whole tensor when saved."""

    losses: list[float]
    held: dict[str, Tensor]


def fsdp(rank: int, payload: tuple[Case, str, dict[str, str], bool]) -> Saved:
    """Train under FSDP2 and save after `SAVED` steps. Payload: case, folder, our parameter names -> the saved ones, and
    whether the optimizer's state is flattened."""
    case, folder, names, flat = payload
    decoder = _sharded(case)
    named = dict(decoder.named_parameters())
    adam = adamw(case, named)
    saved = Saved([], {})
    for step in range(STEPS):
        saved.losses.append(_fsdp_step(case, decoder, adam, step))
        if step + 1 == SAVED:
            saved.held = held(named, adam)
            dcp.save(_renamed(decoder, adam, names, flat), checkpoint_id=folder)
    return saved


def fsdp_resume(rank: int, payload: tuple[Case, str, dict[str, str]]) -> Saved:
    """Load an exported checkpoint into FSDP2, and train the steps after it. Payload: case, folder, and our parameter
    names -> the exported ones. held: everything as loaded."""
    case, folder, names = payload
    decoder = _sharded(case)
    named = dict(decoder.named_parameters())
    adam = adamw(case, named)
    template = _renamed(decoder, adam, names, False)
    dcp.load(template, checkpoint_id=folder)
    back = {theirs: name for name, theirs in names.items()}
    optimizer = template["optim"]
    optimizer["state"] = {back[name]: entry for name, entry in optimizer["state"].items()}
    for group in optimizer["param_groups"]:
        group["params"] = [back[name] for name in group["params"]]
    weights = {back[name]: tensor for name, tensor in template["model"].items()}
    set_state_dict(decoder, adam, model_state_dict=weights, optim_state_dict=optimizer)
    assert {float(state["step"]) for state in adam.state.values()} == {float(SAVED)}
    saved = Saved([], held(named, adam))
    saved.losses += [_fsdp_step(case, decoder, adam, step) for step in range(SAVED, STEPS)]
    return saved


def _sharded(case: Case) -> Any:
    decoder = plain_decoder(case)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in decoder.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(decoder, mesh=mesh)
    return decoder


def _fsdp_step(case: Case, decoder: Any, adam: torch.optim.AdamW, step: int) -> float:
    """Train one step. Returns its loss over all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    share = case.workload.batch // world
    every = global_batch(case, step)
    mine = {name: tensor[rank * share : (rank + 1) * share] for name, tensor in every.items()}
    valid = (every["targets"] != -100).sum()
    logits = decoder(make_batch(case, mine, step))
    loss = F.cross_entropy(logits.flatten(0, 1), mine["targets"].flatten(), reduction="sum") / valid
    adam.zero_grad()
    # FSDP2 averages gradients over ranks.
    (loss * world).backward()
    # Not `clip_grad_norm_`: torch 2.9 adds its 1e-6 to every rank's part of the norm.
    norm: Any = torch.nn.utils.get_total_norm([p.grad for p in decoder.parameters()])
    torch.nn.utils.clip_grads_with_norm_(decoder.parameters(), case.optimizer.clip, norm.full_tensor())
    for group in adam.param_groups:
        group["lr"] = learning_rate(case.optimizer, step, STEPS)
    adam.step()
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item()


def held(named: dict[str, Any], adam: torch.optim.AdamW) -> dict[str, Tensor]:
    found = {}
    for name, parameter in named.items():
        state = adam.state[parameter]
        kinds = {"model": parameter.detach(), "first": state["exp_avg"], "second": state["exp_avg_sq"]}
        found |= {f"{kind}/{name}": _whole(tensor) for kind, tensor in kinds.items()}
    return found


def _renamed(decoder: Any, adam: Any, names: dict[str, str], flat: bool) -> dict[str, Any]:
    """What a training script would save: flat as torchtitan does, else in two parts."""
    model, optimizer = get_state_dict(decoder, adam, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    model = {names[name]: tensor for name, tensor in model.items()}
    if flat:
        assert all(names[name] == name for name in names), "flat keys are renamed by nobody"
        return {**model, "optimizer": optimizer, "train_state": torch.tensor([SAVED])}
    optimizer["state"] = {names[name]: entry for name, entry in optimizer["state"].items()}
    return {"model": model, "optim": optimizer}


@dataclass(frozen=True)
class Going:
    """What a rank goes on from. held: as `Saved.held`. rows, lrs: the next steps' sequences, and learning rates."""

    folder: str
    held: dict[str, Tensor]
    rows: list[dict[str, Tensor]]
    lrs: list[float]


def go_on(rank: int, payload: tuple[Case, Layout, list[Going]]) -> list[tuple[float, list[float]]]:
    """For each: (the squared distance of all that this rank has loaded from what it should be, losses of the steps)."""
    case, layout, sources = payload
    mesh = Mesh.of(layout, case.model)
    data_rank = mesh.index(DP, rank)
    share = case.workload.batch // layout.dp
    found = []
    for source in sources:
        program = build(case, layout, rank)
        position = restore(program, Checkpoint.open(source.folder))
        apart = 0.0
        for index, kind in enumerate(states_of("adamw")):
            reference = {n.partition("/")[2]: t for n, t in source.held.items() if n.startswith(f"{kind}/")}
            for state in program.optimizer.states:
                mine = state.get(index, 0, state.flat.stop - state.flat.start)
                apart += sum(_errors(state.flat, mine, reference).values())
        losses = []
        for step, (rows, lr) in enumerate(zip(source.rows, source.lrs, strict=True), position.step):
            batches = []
            for start in range(data_rank * share, (data_rank + 1) * share, layout.micro):
                part = {name: tensor[start : start + layout.micro].clone() for name, tensor in rows.items()}
                batches.append(local_view(make_batch(case, part, step), part["targets"], program.plan))
            losses.append(program.step(batches, lr)[0])
        found.append((apart, losses))
    return found


LLAMA = ModelConfig(
    "small-llama", vocab=37, hidden=20, layers=2, heads=4, kv_heads=2, head_dim=6, ffn=29, max_positions=16
)
GPT = ModelConfig(
    "small-gpt", vocab=37, hidden=20, layers=2, heads=4, ffn=31, max_positions=16, norm="layernorm",
    positions="learned", activation="gelu_tanh", gated=False, bias="all", tied=True,
)  # fmt: skip


class Trap:
    """What makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def refused(folder: Path, out: Path, model: ModelConfig, **options: Any) -> str:
    """The one-line error of an import, which leaves nothing."""
    with pytest.raises(UserError) as error:
        import_checkpoint(folder, out, model, **options)
    assert not out.exists()
    assert "\n" not in str(error.value)
    return str(error.value)


def refusals_of_mutants(folder: Path, files: list[Path], out: Path, model: ModelConfig, rounds: int) -> int:
    """How often an import refuses a folder with one file changed, in one line; it may read it, and raises nothing
    else."""
    chance, refusals = random.Random(5), 0
    for attempt in range(rounds):
        path = chance.choice(files)
        data = path.read_bytes()
        changed = bytearray(data)
        for _ in range(chance.choice((1, 1, 3, 30))):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        path.unlink()  # it may still be mapped
        path.write_bytes(changed[: chance.randrange(len(changed))] if attempt % 10 == 0 else changed)
        try:
            import_checkpoint(folder, out, model)
        except UserError as error:
            refusals += 1
            assert "\n" not in str(error)
        shutil.rmtree(out, ignore_errors=True)
        path.unlink()
        path.write_bytes(data)
    return refusals


def inside(content: Any, path: str) -> Any:
    """Values of nested dictionaries and lists at keys joined by slashes."""
    for key in path.split("/") if path else ():
        content = content[int(key) if key.isdecimal() else key]
    return content


def rows_of(tokens: Tensor) -> dict[str, Tensor]:
    """A step of sequences, [batch, seq + 1] token ids, as `global_batch` gives it."""
    batch, seq = tokens.shape[0], tokens.shape[1] - 1
    return {
        "ids": tokens[:, :-1].contiguous(),
        "targets": tokens[:, 1:].contiguous(),
        "index": torch.arange(batch * seq).view(batch, seq),
        "positions": torch.arange(seq).expand(batch, seq).contiguous(),
        "documents": torch.zeros(batch, seq, dtype=torch.int64),
    }


def random_state(model: ModelConfig, dtype: torch.dtype = torch.float32, steps: int = 2) -> dict:
    generator = torch.Generator().manual_seed(1)
    weights = {p.name: torch.randn(p.shape, generator=generator).to(dtype) for p in parameters(model)}
    state = {
        name: {"exp_avg": tensor + 1, "exp_avg_sq": tensor.square(), "step": torch.tensor(float(steps))}
        for name, tensor in weights.items()
    }
    groups = [{"params": list(weights), "lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-7, "weight_decay": 0.2}]
    return {"model": weights, "optim": {"state": state, "param_groups": groups}}


def save_dcp(state: dict, folder: Path) -> Path:
    # torch warns that it is the only rank that saves.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder
