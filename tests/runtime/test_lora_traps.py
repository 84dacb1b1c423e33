"""Adapters and frozen weights that would be silently wrong, numbered as in tests/mutation."""

import pytest
import torch
import torch.nn.functional as F

from harness.checks import assert_covered, assert_parity, assert_replicas_equal, train
from harness.reference import Case, OneDevice, global_batch, make_batch, reference, values
from harness.space import MODELS
from shardwise.decoder import Decoder
from shardwise.layout import Layout, Workload
from shardwise.model.lora import Lora
from shardwise.model.parameters import parameters


def case_of(name: str, *targets: str, alpha: float = 7.0) -> Case:
    return Case(MODELS[name].replace(lora=Lora(3, alpha, targets)), Workload(12, 4), "fp64")


def holds(case: Case, text: str) -> None:
    layout = Layout.parse(f"{text},precision=fp64")
    ranks = train(case, layout, memory=False)
    assert_parity(case, layout, ranks)
    assert_replicas_equal(ranks)
    assert_covered(case, layout, ranks)


@pytest.mark.parametrize("targets", [("q", "up"), ("out", "down")])
def test_trap_35_the_whole_factor_of_a_cut_map_sees_all_ranks(targets: tuple[str, ...]) -> None:
    """Under tp each rank has a part of the gradient of A beside cut outputs, and of B beside cut inputs."""
    holds(case_of("llama", *targets), "tp=2")
    holds(case_of("llama", *targets), "tp=2,dp=2,sp,zero=3")


def test_trap_35_replicated_key_heads_have_one_adapter() -> None:
    holds(case_of("mqa", "k", "v"), "tp=3")


def test_trap_35_frozen_weights_stay() -> None:
    """Norms and biases, too, with weight decay, in one device's reference as well as over ranks."""
    case = case_of("gpt2")
    before = {p.name: values(p, torch.arange(p.numel)).view(p.shape) for p in parameters(case.model)}
    after = reference(case).final
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert moved == {name for name in after if ".lora_" in name}
    holds(case, "dp=2,zero=2")
    holds(case, "pp=2,dp=2,zero=3")


def test_trap_35_adapters_are_scaled_and_pass_gradients() -> None:
    """Against a model whose weights are W + alpha / rank · B A: its gradient of W gives those of A and B."""
    case = case_of("llama", alpha=7.0)
    device, rows = OneDevice(case), global_batch(case, 0)
    scale, merged = 7.0 / 3, Decoder(case.model.replace(lora=None)).double()
    for name, weight in merged.named_parameters():
        weight.data = device.named[name].detach().clone()
        if (a := name.replace("weight", "lora_a")) in device.named:
            weight.data += scale * device.named[a.replace("_a", "_b")].detach() @ device.named[a].detach()
    logits, targets = merged(make_batch(case, rows, 0)), rows["targets"].flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum") / (targets != -100).sum()
    loss.backward()
    expected, _ = device.step(rows, 0)
    assert abs(float(loss.detach()) - expected) < 1e-12 * expected
    fresh = OneDevice(case).named
    for name, weight in merged.named_parameters():
        if (a := name.replace("weight", "lora_a")) in fresh:
            b = a.replace("_a", "_b")
            for mine, theirs in (
                (device.grads[a], scale * fresh[b].T @ weight.grad),
                (device.grads[b], scale * weight.grad @ fresh[a].T),
            ):
                assert (mine - theirs).norm() <= 1e-11 * theirs.norm() and theirs.norm() > 0, name
    holds(case, "dp=2")
