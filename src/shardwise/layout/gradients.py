"""Gradients of a rank's units: which are complete when, and the axes over which they are summed."""

from shardwise.layout.axes import DATA, PP, SHARD, STAGE, TP, Axes
from shardwise.layout.unit import GRADIENT_BITS, Unit, experts_of
from shardwise.layout.units import UnitPlan


def norm_over(plan: UnitPlan) -> Axes:
    """Axes of the sum that makes the norm of all gradients: those along which ranks hold different parameters.
    Experts and all else differ along others: there it is all ranks, and copies count once together."""
    return STAGE + PP if plan.blueprint.routes else SHARD + TP + PP


def gradients_over(plan: UnitPlan) -> Axes:
    """Axes over which ranks may differ in the parameters that have a gradient in a step. Tensor-parallel ranks
    compute with the same ones, but for experts, whose rows may go elsewhere."""
    return STAGE + PP if plan.blueprint.routes else DATA + PP


def trained_units(plan: UnitPlan, part: str) -> list[Unit]:
    return [unit for unit in plan.units_of(part) if not unit.frozen]


def finished_after(plan: UnitPlan, part: str) -> list[Unit]:
    """The units whose gradients are complete once `part`'s backward is over."""
    names = [part, experts_of(part)]
    sharing = plan.blueprint.sharing
    # The last of the rank's parts, in the order of backward passes, that holds or reads a shared parameter.
    if sharing and part == next((name for name in plan.parts if name in sharing), None):
        names.append("tied")
    # A frozen unit has another name.
    return [plan.by_name[name] for name in names if name in plan.by_name]


def packed_gradients(plan: UnitPlan, unit: Unit) -> int:
    """Bytes of one rank's interval of the gradients in 4 bits, with its scales; 0 where they are summed as they
    are."""
    quantized = any(hop.op == "all_to_all" for hop in unit.reduce)
    return unit.packed_bytes(GRADIENT_BITS) if quantized else 0


def residuals(plan: UnitPlan, unit: Unit) -> tuple[int, int]:
    """Elements of the errors that a rank keeps, in fp32, and adds to a unit's next gradients: of its own gradient,
    and of the sums that it packs again where there is a second hop."""
    if not (plan.layout.feedback and packed_gradients(plan, unit)):
        return 0, 0
    first, *second = (hop for hop in unit.reduce if hop.op == "all_to_all")
    return unit.padded, unit.padded // plan.mesh.size(first.axes) if second else 0


def feeds_back(plan: UnitPlan) -> bool:
    """Whether errors of packed gradients are a part of the training state."""
    return plan.layout.feedback and plan.layout.stage > 0
