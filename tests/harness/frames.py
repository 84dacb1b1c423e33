"""The frame of a search that has one layout alone."""

from itertools import product

from shardwise.layout import Layout, Workload
from shardwise.model.parameters import Model
from shardwise.planner.pricing import check_priced
from shardwise.planner.space import BatchChoice, Homes, LayoutColumns, ScheduleChoice, ZeroChoice, weighed


def frame_of(model: Model, layout: Layout, workload: Workload) -> LayoutColumns:
    """Raises `UserError` for a layout that has no price, and `StopIteration` for stages that no search cuts."""
    check_priced(layout, workload)

    def choice(kind, **effective):
        return kind(**{name: getattr(layout, name) for name in kind._fields} | effective)

    sharding = choice(ZeroChoice, zero=layout.stage, shard=layout.shard_ranks if layout.stage else 1)
    ends = (1, 1) if layout.stage_count > model.layers else (0, 0)
    if layout.stages:
        count = len(layout.stages)
        some = (e for e in sorted(product(range(3), repeat=2), key=sum) if (model.layers + sum(e)) % count == 0)
        ends = next(ends for ends in some if weighed(model.layers, count, ends) == layout.stages)
    order = ScheduleChoice(layout.schedule, layout.virtual, ends) if layout.pp > 1 else ScheduleChoice("1f1b", 1)
    return LayoutColumns(
        layout.tp, layout.pp, layout.dp * layout.cp, layout.attention, workload.batch, model.layers,
        (choice(BatchChoice),), (sharding,), (order,), layout.ep, choice(Homes),
    )  # fmt: skip
