"""A block's tensors followed one by one beside the closed forms of what is saved, over random models and layouts."""

import pytest

from harness.pairs import pair
from shardwise.layout import UnitPlan
from shardwise.predict.memory.activations import Sizes, block_items
from shardwise.predict.memory.latent_tensors import block_tensors

SEED = 11


def plans(recompute: tuple[str, ...]) -> list[UnitPlan]:
    drawn = (pair(SEED, index)[0] for index in range(150))
    return [plan for plan in drawn if plan.layout.recompute in recompute and plan.first_blocks]


def test_a_forward_pass_leaves_what_is_saved_and_the_output() -> None:
    for plan in plans(("none", "selective")):
        s = Sizes.of(plan)
        part = plan.first_blocks[0]
        block, items = block_tensors(plan, s, part), block_items(plan, s, part)
        most = block.forward(saves=True)
        assert block.live.now == sum(items.values()) - items["input"] + block.stream, plan.layout
        assert most >= block.live.now


def test_a_backward_pass_leaves_the_gradient_of_the_input() -> None:
    for plan in plans(("none", "selective")):
        s = Sizes.of(plan)
        part = plan.first_blocks[0]
        block, items = block_tensors(plan, s, part), block_items(plan, s, part)
        block.backward(keeps_gradient=False)
        assert block.live.now == block.stream - (sum(items.values()) - items["input"]), plan.layout


def test_a_pass_that_saves_nothing_leaves_the_output() -> None:
    for plan in plans(("full", "input")):
        block = block_tensors(plan, Sizes.of(plan), plan.first_blocks[0])
        most = block.forward(saves=False)
        assert block.live.now == block.stream
        again = block_tensors(plan, Sizes.of(plan), plan.first_blocks[0])
        assert again.forward(saves=True) >= most


@pytest.mark.parametrize("keeps", [False, True])
def test_adding_to_gradients_never_needs_less(keeps: bool) -> None:
    for plan in plans(("none", "selective", "full", "input")):
        s = Sizes.of(plan)
        part = plan.first_blocks[0]
        first, later = (block_tensors(plan, s, part, adds=adds).backward(keeps) for adds in (False, True))
        assert first <= later
