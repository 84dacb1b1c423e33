"""`split` of modules and losses that run in plain PyTorch: they run, or one line names the module and why not."""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.pool import run_ranks
from shardwise import Layout, UserError, split
from shardwise.errors import DivergedError
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.module.describe import describe

pytestmark = pytest.mark.usefixtures("alone")
SETTINGS = OptimizerConfig(clip=0.0)
LR = 1e-2
X = torch.linspace(-1, 1, 8).view(2, 4)


@dataclass(frozen=True)
class Result:
    x: Tensor
    others: dict[str, Tensor]


class Counting(nn.Module):
    """A block that writes buffers: in place, by its batch norm, and by a new tensor, which it also reads."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x + self.map(self.norm(x)) * self.mean


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, before: Result | Tensor) -> Result:
        x = before.x if isinstance(before, Result) else before
        return Result(torch.tanh(self.map(x)), {"x": x})


class Unknown(Wrapped):
    def forward(self, before: object) -> object:
        class Box:
            x = super(Unknown, self).forward(getattr(before, "x", before)).x

        return Box()


class Checkpointed(Wrapped):
    """Which is recomputed around its forward pass."""

    def __call__(self, before: Result | Tensor) -> Result:
        return checkpoint(super().__call__, before, use_reentrant=False)


class InPlace(nn.Module):
    """Changes its input, which nothing but recomputation needs."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x += self.map(x).detach()
        return self.map(x)


class TooLate(InPlace):
    def forward(self, x: Tensor) -> Tensor:
        y = self.map(x)
        x += 1.0
        return y


class Halves(nn.Module):
    """Returns views of one tensor, which autograd does not let anyone change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if isinstance(x, tuple):
            x[0].add_(1.0)
            x = torch.cat(x, -1)
        first, second = self.map(x).chunk(2, -1)
        return first, second


def batch_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())


def weight_normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


class Chain(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.enter(x))

    def rest(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        if isinstance(x, Result):
            return x.x + x.others["x"]
        return getattr(x, "x", x)


def squares(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    y = model(x)
    return y.square().sum(), y.numel()


def preference(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    with torch.no_grad():
        reference = model(2 * x)
    y = model(x)
    return F.softplus(reference - y).sum(), y.numel()


def by_methods(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """The blocks run twice."""
    y = model.rest(model.enter(x))
    return (y - model.rest(0.5 * y)).square().sum(), y.numel()


def slopes(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().sum(), x.numel()


@pytest.mark.parametrize("layout", ["dp=1", "recompute=full", "zero=3"])
@pytest.mark.parametrize(
    ("block", "loss"),
    [(Counting, squares), (Wrapped, squares), (weight_normed, squares), (Wrapped, preference), (Counting, by_methods)],
    ids=["written-buffers", "dataclasses", "weight-norm", "reference-pass", "methods"],
)
def test_training_is_that_of_plain_pytorch(block, loss, layout):
    trained(block, loss, layout)


def test_statistics_of_a_batch_norm_stay_wide_in_half_precision():
    losses = []
    for precision in ("fp64", "bf16"):
        module = split(Chain(batch_normed), f"precision={precision}", optimizer=SETTINGS)
        losses.append([module.train_step(squares, X, lr=LR).loss for _ in range(3)])
    norm = module.module.blocks[0][1]
    assert (norm.weight.dtype, norm.running_var.dtype) == (torch.bfloat16, torch.float32)
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.parametrize("mode", ["stop", "skip"])
def test_a_step_that_is_not_finite_leaves_statistics_as_they_were(mode):
    """In place, by a batch norm's kernel, and by a new tensor."""
    module = split(Chain(Counting), "recompute=full,precision=fp32", on_nonfinite=mode)
    module.train_step(squares, X)
    before = {name: buffer.clone() for name, buffer in module.module.named_buffers()}
    with pytest.raises(DivergedError) if mode == "stop" else nullcontext():
        assert module.train_step(squares, X * torch.nan).skipped
    for name, buffer in module.module.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert not module.train_step(squares, X).skipped
    assert module.module.blocks[0].calls == before["blocks.0.calls"] + 1


def test_methods_run_outside_of_a_step():
    module = split(Chain(Wrapped), "precision=fp32")
    assert torch.equal(module.rest(module.enter(X)), module(X))
    for message in run_ranks("harness.module_jobs:outside", 2, "dp=2,zero=3"):
        assert "outside of a step call that, not its methods or submodules" in message


@pytest.mark.parametrize("layout", ["dp=1", "zero=3"])
def test_a_block_may_change_its_input_in_place(layout):
    trained(InPlace, squares, layout)


def trained(block, loss, layout):
    plain = Chain(block).double()
    groups = [
        {"params": [p for p in plain.parameters() if (p.dim() > 1) == matrix], "weight_decay": decay}
        for matrix, decay in ((True, SETTINGS.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, LR, SETTINGS.betas, SETTINGS.eps)
    module = split(Chain(block), f"{layout},precision=fp64", optimizer=SETTINGS)
    for _ in range(3):
        optimizer.zero_grad()
        total, count = loss(plain, X.double())
        (total / count).backward()
        optimizer.step()
        outcome = module.train_step(loss, X.double(), lr=LR)
        assert outcome.loss == pytest.approx(float(total.detach()) / count, rel=1e-12)
    buffers = dict(module.module.named_buffers())
    for name, expected in plain.named_buffers():
        torch.testing.assert_close(buffers[name], expected, rtol=1e-9, atol=1e-12)
    assert outcome.grad_norm == pytest.approx(
        float(torch.stack([p.grad.norm() for p in plain.parameters()]).norm()), rel=1e-9
    )


IN_PLACE = r"the backward pass of blocks\.1 needs a tensor that was changed in place"


@pytest.mark.parametrize(
    ("block", "recompute", "loss", "message"),
    [
        (TooLate, "none", squares, IN_PLACE),
        (TooLate, "full", squares, IN_PLACE),
        (InPlace, "full", squares, IN_PLACE),
        (Halves, "none", squares, r"an input of blocks\.1, or of a block before it, is changed in place"),
        (Unknown, "none", squares, r"blocks\.0 returns a Box without a tensor that has a gradient"),
        (Checkpointed, "none", squares, r"blocks\.1 runs again in the backward pass, as with torch\.utils\.checkpoint"),
        (Wrapped, "none", slopes, r"loss_fn computes a gradient of the module itself"),
    ],
)
def test_what_does_not_run_is_named(block, recompute, loss, message):
    module = split(Chain(block), f"precision=fp32,recompute={recompute}")
    with pytest.raises(UserError, match=message) as caught:
        module.train_step(loss, X)
    assert "\n" not in str(caught.value)


def test_a_weight_that_is_computed_is_not_cut():
    message = r"blocks\.0 is a ParametrizedLinear whose weight is computed from others; .* replicate it"
    with pytest.raises(UserError, match=message):
        describe(Chain(weight_normed), Layout(tp=2), {"blocks.*": "column"}, [])
