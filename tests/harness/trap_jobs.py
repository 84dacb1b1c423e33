"""What ranks run for the tests of single traps: pieces of the runtime, looked at from inside."""

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.jobs import RankOutcome, Training, build, micro_batches, train
from harness.reference import Case, Outcome, global_batch, make_batch, plain_decoder
from shardwise.layout import Layout
from shardwise.layout.axes import DATA
from shardwise.layout.gathers import step_uses
from shardwise.layout.gradients import finished_after
from shardwise.layout.placement import width_held
from shardwise.model import ModelConfig
from shardwise.ops.cuda.cross_entropy import LossForm
from shardwise.runtime.job.setup import make_comms
from shardwise.runtime.tensor.loss import loss_form, summed_cross_entropy
from shardwise.runtime.transport.buffers import Target

Boundary = dict[str, tuple[Tensor, Tensor | None]]
"""Module -> (its output, that output's gradient), of one micro-batch."""


def cross_entropy(rank: int, payload: tuple[Layout, ModelConfig, Tensor, Tensor, int, str]) -> tuple[float, Tensor]:
    """Summed loss, and the gradient of this rank's columns. Padding columns start as large as logits get.

    The last of the payload: how many logits the loss works on at a time, and the device whose form it takes.
    """
    layout, model, logits, targets, chunk, device = payload
    form = loss_form(torch.device(device), None)
    with (
        patch("shardwise.runtime.tensor.loss.loss_chunk", lambda _: chunk),
        patch("shardwise.ops.limits.LOSS_BYTES", 8 * chunk),
    ):
        return _cross_entropy(rank, layout, model, logits, targets, form)


def _cross_entropy(
    rank: int, layout: Layout, model: ModelConfig, logits: Tensor, targets: Tensor, form: LossForm | None
) -> tuple[float, Tensor]:
    comms = make_comms(layout, model, rank, timeout=60.0)
    width = width_held(model.vocab, layout.tp)
    start, stop = min(rank * width, model.vocab), min((rank + 1) * width, model.vocab)
    local = torch.full((*logits.shape[:-1], width), 1e4, dtype=logits.dtype)
    local[..., : stop - start] = logits[..., start:stop]
    local.requires_grad_()
    loss = summed_cross_entropy(local * 1, targets, start, stop, comms, form=form)
    loss.backward()
    assert local.grad is not None
    return loss.item(), local.grad[..., : stop - start].clone()


def boundaries(rank: int, payload: tuple[Case, Layout]) -> Boundary:
    case, layout = payload
    program = build(case, layout, rank)
    found = _watch(program.decoder)
    program.step(micro_batches(case, layout, rank, 0), 1e-3)
    return found


def plain_boundaries(case: Case) -> Boundary:
    """The same of the whole decoder on one device (no rank)."""
    decoder = plain_decoder(case)
    found = _watch(decoder)
    rows = global_batch(case, 0)
    logits = decoder(make_batch(case, rows, 0))
    valid = (rows["targets"] != -100).sum()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows["targets"].flatten(), reduction="sum") / valid
    loss.backward()
    return found


def _watch(decoder: nn.Module) -> Boundary:
    found: Boundary = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            for index, y in enumerate(outputs):
                key = f"{name}[{index}]" if isinstance(output, tuple) else name
                found[key] = (y.detach().clone(), None)
                if y.requires_grad:
                    y.register_hook(lambda g, key=key: found.update({key: (found[key][0], g.detach().clone())}))

        return hook

    for name, module in decoder.named_modules():
        if name:
            module.register_forward_hook(keep(name))
    return found


def initial(rank: int, payload: tuple[Case, Layout]) -> list[tuple[str, int | None, int, int, Tensor]]:
    """Every parameter as the decoder first sees it (below stage 3): (name, dim, start, stop, local tensor)."""
    case, layout = payload
    program = build(case, layout, rank)
    found = []
    for p in (placed for unit in program.plan.units for placed in unit.placed):
        dim = p.dims[0] if p.dims else None
        start, stop = (0, 0) if dim is None else p.box[dim]
        found.append((p.name, dim, start, stop, program.decoder.get_parameter(p.name).detach().clone()))
    return found


def tiny_gradients(rank: int, payload: tuple[Case, Layout, int, float]) -> list[tuple[str, float, float]]:
    """A step whose micro-batches leave given gradients: 1 once, then `count` times `tiny`.

    Returns (unit, smallest, largest) of the accumulated gradients of this rank's interval. Drives the engine as the
    program does, with constants in place of what autograd adds.
    """
    case, layout, count, tiny = payload
    program = build(case, layout, rank)
    engine, plan = program.engine, program.plan
    engine.begin_step()
    for index in range(count + 1):
        engine.begin_micro_batch()
        for use in step_uses(plan):
            engine.use_unit(use.kind, use.part)
            if use.kind == "backward":
                for unit in finished_after(plan, use.part):
                    flat = engine.units[unit.name]
                    for slot in flat.grad_slots:
                        slot.add_sum(torch.full((1, *slot.view.shape), 1.0 if index == 0 else tiny).to(slot.view))
                engine.finish_backward(use.part)
    engine.finish_step()
    return [(n, float(f.grads_interval.min()), float(f.grads_interval.max())) for n, f in engine.units.items()]


def small_pieces(rank: int, payload: tuple[Layout, str]) -> list[Tensor]:
    """bf16 reduce-scatter: the first rank gives 256, the others 1 (which bf16 addition would lose). Its sums in fp32,
    the same added to what was there, and in bf16."""
    from harness.space import MODELS

    layout, transport = payload
    comms = make_comms(layout, MODELS["llama"], rank, timeout=60.0, transport=transport)
    found = []
    for out, adds in ((torch.empty(3), False), (torch.ones(3), True), (torch.empty(3).bfloat16(), False)):
        full = torch.full((layout.dp * 3,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
        comms.reduce_scatter(full, DATA, "test", lambda out=out, adds=adds: Target(out, adds)).wait()
        found.append(out)
    return found


def delayed(rank: int, payload: tuple[Case, Layout, Outcome, int]) -> RankOutcome:
    """`train`, overlapping, while collectives start as late as they may and ranks dawdle."""
    case, layout, reference, seed = payload
    with _late_collectives(seed, rank):
        return train(rank, Training(case, layout, reference, transport="gloo", memory=False))


class _Late:
    """Starts its collective when it is waited for: the last moment at which its buffers may still be needed."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self.start = start

    def wait(self) -> None:
        self.start().wait()


def _late_collectives(seed: int, rank: int) -> Any:
    # All ranks must agree which collectives are late: they draw from equal generators, one draw a call.
    shared, own = random.Random(seed), random.Random(seed * 100 + rank)

    def late(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        time.sleep(own.random() * 2e-3)
        if kwargs.get("async_op") and shared.random() < 0.5:
            return _Late(lambda: original(*args, **kwargs))
        return original(*args, **kwargs)

    return collectives_by(late)


def collectives_by(change: Callable[..., Any]) -> Any:
    """A context in which torch's collectives are `change` of the original and its arguments."""
    names = ("all_reduce", "all_gather_single", "all_to_all_single")
    return patch.multiple(dist, **{name: partial(change, getattr(dist, name)) for name in names})
