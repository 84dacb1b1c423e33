"""Mistakes put into engines' adapters, and ranks that compare such an adapter with the plain model."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardwise.certify import adapter as good
from shardwise.certify.adapter import OPTIMIZER, Adapter, EngineRun
from shardwise.certify.compare import Case, compare_case
from shardwise.certify.engines import fsdp2, pipelining
from shardwise.certify.reference import Reference
from shardwise.certify.result import Cell
from shardwise.certify.tiny import IGNORED


@dataclass(frozen=True)
class Fault:
    """A mistake: functions in place of an adapter's, where it shows, and words of the guess."""

    engine: str
    layout: str
    functions: dict[str, Any]
    property: str
    kind: str
    variant: str = "plain"
    parameter: str = ""
    fix: str = ""
    """The merged pull request that has fixed it in an engine."""


def after(function: Callable[..., Any], change: Callable[[EngineRun], object]) -> Callable[..., Any]:
    """The function, then a change of the run."""

    def changed(run: EngineRun, *args: Any) -> Any:
        result = function(run, *args)
        change(run)
        return result

    return changed


@torch.no_grad()
def times(factor: float, part: str = "", rank: int | None = None) -> Callable[[EngineRun], None]:
    def change(run: EngineRun) -> None:
        for name, p in run.model.named_parameters():
            if p.grad is not None and part in name and rank in (None, dist.get_rank()):
                p.grad.mul_(factor)

    return change


@torch.no_grad()
def swap(first: str, second: str, gradients: bool = False) -> Callable[[EngineRun], None]:
    def change(run: EngineRun) -> None:
        a, b = (run.model.get_parameter(name) for name in (first, second))
        x, y = (a.grad, b.grad) if gradients else (a.data, b.data)
        kept = x.clone()
        x.copy_(y)
        y.copy_(kept)

    return change


def own_buffers(model: nn.Module, layout: dict[str, Any]) -> nn.Module:
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    return DistributedDataParallel(model, init_sync=False, broadcast_buffers=False)


def shards_alone(model: nn.Module, layout: dict[str, Any]) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return fully_shard(model, mesh=mesh["dp_shard"])


def mean_of_means(run: EngineRun, ids: Tensor, labels: Tensor, tokens: int) -> float:
    own = max(1, int((labels != IGNORED).sum()))
    summed = F.cross_entropy(run.logits(run.engine, ids).flatten(0, 1), labels.flatten(), reduction="sum")
    (summed / own).backward()
    return summed.item() / tokens


def all_labels(run: EngineRun, ids: Tensor, labels: Tensor, tokens: int) -> float:
    return good.backward(run, ids, labels, 24 * 8) * 24 * 8 / tokens


def rank0_rows(run: EngineRun, ids: Tensor, labels: Tensor, tokens: int) -> float:
    dist.broadcast(ids := ids.clone(), 0)
    dist.broadcast(labels := labels.clone(), 0)
    return good.backward(run, ids, labels, tokens)


def seeded(change: Callable[[int], int]) -> Callable[..., float | None]:
    """Backward with masks of another seed."""

    def backward(run: EngineRun, *words: Any) -> float | None:
        torch.manual_seed(change(torch.initial_seed()))
        return good.backward(run, *words)

    return backward


def head_side(engine: Any, ids: Tensor) -> Tensor:
    model = engine.module if isinstance(engine, DistributedDataParallel) else engine
    if not isinstance(engine, DistributedDataParallel):
        return engine(ids)
    table = model.table.forward
    model.table.forward = lambda ids: F.embedding(ids, model.table.weight.detach())
    try:
        return engine(ids)
    finally:
        model.table.forward = table


def local_norm(run: EngineRun, most: float, axis: str = "") -> float:
    """The norm of this rank's shards."""
    grads = [p.grad.to_local() for p in run.model.parameters() if p.grad is not None]
    return _clipped(run, sum(float(g.square().sum()) for g in grads) ** 0.5, most)


def replicas_norm(run: EngineRun, most: float) -> float:
    grads = [p.grad.to_local() for p in run.model.parameters() if p.grad is not None]
    total = torch.tensor(sum(float(g.square().sum()) for g in grads), dtype=torch.float64)
    dist.all_reduce(total)
    return _clipped(run, float(total.sqrt()), most)


def norm_without_head(run: EngineRun, most: float) -> float:
    named = run.model.named_parameters()
    total = sum(float(p.grad.square().sum()) for name, p in named if name != "head.weight" and p.grad is not None)
    return _clipped(run, total**0.5, most)


def _clipped(run: EngineRun, norm: float, most: float) -> float:
    times(min(1.0, most / (norm + 1e-6)))(run)
    return norm


def stage_norm(run: EngineRun, most: float) -> float:
    """The norm of a pipeline rank's own stage."""
    norm = sum(float(g.square().sum()) for g in pipelining.gradients(run).values()) ** 0.5
    return _clipped(run, norm, most)


def norm_of_first_shard(run: EngineRun, most: float) -> float:
    """Of one weight, tensor-parallel rank 0's shard alone."""
    grads = {name: p.grad for name, p in run.model.named_parameters()}
    shard = grads.pop("blocks.0.up.weight").to_local().square().sum()
    dist.broadcast(shard, 0)
    return _clipped(run, float(shard + sum(good.full(g).square().sum() for g in grads.values())) ** 0.5, most)


def undivided(model: nn.Module, layout: dict[str, Any]) -> nn.Module:
    split = fsdp2.parallelize(model, layout)
    for unit in (*split.blocks, split):
        unit.set_gradient_divide_factor(1.0)
    return split


def scaled_by_all_ranks(run: EngineRun, ids: Tensor, labels: Tensor, tokens: int) -> float:
    """A mean over data-parallel ranks, multiplied by the number of all ranks."""
    loss = good.loss(run.logits(run.engine, ids), labels) / tokens
    (loss * dist.get_world_size()).backward()
    return loss.item()


def summed_loss(run: EngineRun, ids: Tensor, labels: Tensor, tokens: int) -> float | None:
    """A pipeline's loss, divided after its backward passes."""
    loss = pipelining.backward(run, ids, labels, 1)
    return None if loss is None else loss / tokens


def first_micro_batch(run: EngineRun, ids: Tensor, labels: Tensor, tokens: int) -> float | None:
    """Gradients of micro-batches behind the first are dropped."""
    loss = pipelining.backward(run, ids, labels, tokens)
    run.optimizer.zero_grad()
    others = labels.clone()
    others[len(labels) // 4 :] = IGNORED
    pipelining.backward(run, ids, others, tokens)
    return loss


def clipped_twice(run: EngineRun, most: float) -> float:
    norm = good.clip(run, most)
    times(most / norm)(run)
    return norm


@torch.no_grad()
def decay_again(run: EngineRun, trained: bool = True) -> None:
    for p in run.model.parameters():
        if trained or not p.requires_grad:
            p.mul_(1 - OPTIMIZER["lr"] * OPTIMIZER["weight_decay"])


def lazy_rank(run: EngineRun) -> None:
    if dist.get_rank() == 1:
        run.optimizer.zero_grad()
    else:
        good.step(run)


@torch.no_grad()
def drop_rows(name: str, start: int) -> Callable[[EngineRun], None]:
    return lambda run: run.model.get_parameter(name).grad[start:].zero_()


def drop(name: str) -> Callable[[EngineRun], None]:
    def change(run: EngineRun) -> None:
        run.model.get_parameter(name).grad = None

    return change


def load_weights(run: EngineRun, folder: str) -> None:
    good.load(run, folder)
    run.optimizer = good.optimizer(run, **OPTIMIZER)


MASKS = "loss", "other dropout masks", "dropout"
FAULTS = {
    "gradients not reduced": Fault(
        "ddp", "dp=2", {"parallelize": lambda model, layout: model, "broadcasts": False},
        "gradients", "missing mean over dp"
    ),
    "gradients of a replica alone": Fault(
        "fsdp2", "dp_replicate=2,dp_shard=2", {"parallelize": shards_alone}, "gradients", "mean over dp_replicate"
    ),
    "loss scaled by tensor-parallel ranks, too": Fault(
        "tensor_parallel", "tp=2", {"backward": scaled_by_all_ranks}, "gradients", "factor 2 = tp",
        fix="huggingface/transformers#45994",
    ),
    "mean over shards left out": Fault(
        "fsdp2", "dp_shard=2", {"parallelize": undivided}, "gradients", "factor 2 = dp_shard",
        fix="NVIDIA/Megatron-LM#3023",
    ),
    "some weights' gradients not divided": Fault(
        "fsdp2", "dp_shard=2", {"backward": after(good.backward, times(2, "blocks.1.up"))}, "gradients",
        "factor 2 = dp_shard", parameter="blocks.1.up.weight", fix="NVIDIA/Megatron-LM#5956",
    ),
    "scaled again by every stage": Fault(
        "pipelining", "pp=2", {"backward": after(pipelining.backward, times(0.25, rank=0))}, "gradients",
        "factor 0.25", parameter="table.weight", fix="deepspeedai/DeepSpeed#8154",
    ),
    "micro-batches dropped": Fault(
        "pipelining", "pp=2", {"backward": first_micro_batch}, "gradients", "dropped: 3 of 4 micro-batches",
        fix="deepspeedai/DeepSpeed#7967",
    ),
    "a pipeline's loss divided too late": Fault(
        "pipelining", "pp=2", {"backward": summed_loss}, "gradients", "factor 192", fix="pytorch/torchtitan#4194",
    ),
    "norm of a stage": Fault(
        "pipelining", "pp=2", {"clip": stage_norm}, "norm", "missing sum over pp", fix="pytorch/torchtitan#649",
    ),
    "norm with one rank's shard of a weight": Fault(
        "tensor_parallel", "tp=2", {"clip": norm_of_first_shard}, "norm", "parameters left out",
        fix="NVIDIA/Megatron-LM#5916",
    ),
    "doubled": Fault("ddp", "dp=2", {"backward": after(good.backward, times(2))}, "gradients", "factor 2"),
    "divided twice": Fault("fsdp2", "dp_shard=4", {"backward": after(good.backward, times(0.25))}, "gradients", "1/4"),
    "tripled": Fault("ddp", "dp=2", {"backward": after(good.backward, times(3))}, "gradients", "factor 3"),
    "mean of ranks' means": Fault(
        "ddp", "dp=2", {"backward": mean_of_means}, "gradients", "mean over ranks in place of tokens", "uneven",
        fix="pytorch/torchtitan#2206",
    ),
    "ignored labels count": Fault("ddp", "dp=2", {"backward": all_labels}, "gradients", "factor 0.", "uneven"),
    "all ranks have rank 0's rows": Fault("ddp", "dp=2", {"backward": rank0_rows}, "gradients", "rows alone"),
    "norm of a shard": Fault("fsdp2", "dp_shard=2", {"clip": local_norm}, "norm", "missing sum over dp_shard"),
    "norm over replicas, too": Fault(
        "fsdp2", "dp_replicate=2,dp_shard=2", {"clip": replicas_norm}, "norm", "root of 2 = dp_replicate"
    ),
    "norm without the head": Fault("ddp", "dp=2", {"clip": norm_without_head}, "norm", "head.weight is not in it"),
    "not clipped": Fault("ddp", "dp=2", {"clip": lambda run, most: good.clip(run, 1e9)}, "clipped", "not clipped"),
    "clipped twice": Fault("ddp", "dp=2", {"clip": clipped_twice}, "clipped", "clipped by another norm"),
    "layers swapped in a load": Fault(
        "fsdp2", "dp_shard=2", {"load": after(good.load, swap("blocks.0.q.weight", "blocks.1.q.weight"))},
        "resume", "weights of blocks.1.q.weight", parameter="blocks.0.q.weight",
    ),
    "moments not restored": Fault("fsdp2", "dp_shard=2", {"load": load_weights}, "resume", "optimizer state not"),
    "a weight not restored": Fault(
        "ddp", "dp=2", {"load": after(good.load, lambda run: run.model.norm.weight.data.add_(1))},
        "resume", "weights not restored",
        parameter="norm.weight",
    ),
    "a buffer not restored": Fault(
        "ddp", "dp=2", {"load": after(good.load, lambda run: run.model.positions.mul_(2))},
        "resume", "gradients after the load"
    ),
    "tied from one side": Fault("ddp", "dp=2", {"logits": head_side}, "gradients", "tied weight", "tied"),
    "frozen decayed": Fault(
        "ddp", "dp=2", {"step": after(good.step, lambda run: decay_again(run, trained=False))},
        "steps", "frozen parameter decayed", "frozen"
    ),
    "decayed twice": Fault("ddp", "dp=2", {"step": after(good.step, decay_again)}, "steps", "decayed twice"),
    "buffers not broadcast": Fault("ddp", "dp=2", {"parallelize": own_buffers}, "loss", "buffers of rank 0"),
    "weights not broadcast": Fault(
        "ddp", "dp=2", {"parallelize": lambda model, layout: DistributedDataParallel(model, init_sync=False)},
        "loss", "weights or buffers of rank 0",
    ),
    "a stale copy": Fault("ddp", "dp=2", {"step": lazy_rank}, "steps", "stale copy: the weights before the step, on 1"),
    "other dropout masks": Fault("ddp", "dp=2", {"backward": seeded(lambda seed: seed + 1)}, *MASKS),
    "equal masks of a sequence's parts": Fault(
        "tensor_parallel", "tp=2,sp=1", {"backward": seeded(lambda seed: seed % 100_000)}, *MASKS
    ),
    "masks of each rank": Fault(
        "tensor_parallel", "tp=2", {"backward": seeded(lambda seed: seed + dist.get_rank())}, *MASKS
    ),
    "gradients not reset": Fault(
        "ddp", "dp=2", {"step": lambda run: run.optimizer.step()},
        "gradients", "last step's gradient", fix="deepspeedai/DeepSpeed#7839",
    ),
    "part of a padded vocabulary": Fault(
        "ddp", "dp=2", {"backward": after(good.backward, drop_rows("head.weight", 60))}, "gradients",
        "dropped part: 1 of 61 rows", "padded", parameter="head.weight",
    ),
    "a gradient left out": Fault(
        "ddp", "dp=2", {"backward": after(good.backward, drop("blocks.1.up.weight"))}, "gradients", "dropped",
        parameter="blocks.1.up.weight",
    ),
    "two gradients swapped": Fault(
        "ddp", "dp=2", {"backward": after(good.backward, swap("blocks.0.q.weight", "blocks.0.k.weight", True))},
        "gradients", "gradient of blocks.0.k.weight", parameter="blocks.0.q.weight",
    ),
}  # fmt: skip


def compare_faults(rank: int, names: list[str]) -> dict[str, dict[str, Cell]]:
    return {
        name: _cells(
            replace(Adapter.load_from(fault.engine), **fault.functions),
            Case(fault.layout, "tiny", fault.variant, fault.layout),
        )
        for name in names
        for fault in [FAULTS[name]]
    }


def compare_clean(rank: int, cases: list[tuple[str, Case]]) -> list[dict[str, Cell]]:
    return [_cells(Adapter.load_from(engine), case) for engine, case in cases]


def _cells(adapter: Adapter, case: Case) -> dict[str, Cell]:
    folder: list[Any] = [tempfile.mkdtemp(prefix="certified-")]
    dist.broadcast_object_list(folder, 0)
    return compare_case(
        adapter, Reference(adapter, case.model, case.variant, case.layout), case, Path(folder[0]), _meet
    )


def _meet(words: str) -> list[str]:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, words)
    return told
