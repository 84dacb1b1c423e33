"""How much ZeRO moves in a step, in the unit of its papers: elements that each rank sends, for large groups.

A reduce-scatter or an all-gather of Ψ elements counts as Ψ, an all-reduce as both. The ledger of a layout
(`ledger.py`) is exact where this is the rule: units that are still resident are not gathered again.
"""

from __future__ import annotations

from shardwise.errors import UserError


def elements_moved(params: float, stage: int, micro_batches: int = 1) -> float:
    """Elements of one step with `micro_batches` micro-batches.

    2Ψ without ZeRO and at stage 1; (k + 1)Ψ at stage 2, which reduces each micro-batch; 3kΨ at stage 3, which gathers
    the parameters for forward and again for backward. Source: Rajbhandari et al. 2020, section 7. Raises `UserError`
    for stages that there are not and steps without micro-batches.
    """
    if stage not in (0, 1, 2, 3) or micro_batches < 1:
        raise UserError(f"there is no ZeRO stage {stage!r} with {micro_batches!r} micro-batches")
    gathers, reductions = {0: (1, 1), 1: (1, 1), 2: (1, micro_batches), 3: (2 * micro_batches, micro_batches)}[stage]
    return (gathers + reductions) * params


def zeropp_across_nodes(
    params: float,
    quantised_weights: bool = True,
    secondary_weights: bool = True,
    quantised_gradients: bool = True,
) -> float:
    """What stage 3 moves between nodes in a micro-batch under ZeRO++, in elements of 2 bytes; 3Ψ without any of it.

    quantised_weights (qwZ): forward's gather in 8 bits, and backward's, where it crosses nodes; secondary_weights
    (hpZ): backward gathers from a copy inside the node; quantised_gradients (qgZ): gradients in 4 bits, by all-to-alls.
    Source: Wang et al. 2023, ZeRO++, table 1: 0.5M, 0 and 0.25M in place of M each.
    """
    gather = 0.5 if quantised_weights else 1.0
    again = 0.0 if secondary_weights else gather
    return (gather + again + (0.25 if quantised_gradients else 1.0)) * params
