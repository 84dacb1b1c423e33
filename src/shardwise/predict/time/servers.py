"""The time of parameter servers: what a step waits for beside its own arithmetic, with workers that are equally fast.

Every server takes a gradient from each worker and gives weights to each: its port carries as many times the bytes of a
worker's as there are workers, which is why an all-reduce wins as they become more (incast). Source: Li et al. 2014.
"""

from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.model.parameters import Model
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import EngineProfile
from shardwise.predict.time.split import StepShape
from shardwise.predict.time.traffic import held_parameters


def served_parts(
    parts: dict[str, float], model: Model, layout: Layout, split: StepShape, engine: EngineProfile,
    pricing: Pricing, cuda: bool,
) -> dict[str, float]:  # fmt: skip
    """Parts of a step with servers, which make the update: each that of its range. parts: of the step without. Raises
    `UserError` on GPUs, where servers are on the host's cores."""
    if cuda:
        raise UserError(f"the time of sync={layout.sync} is not modelled on GPUs, whose hosts' cores serve")
    servers = layout.parameter_servers.count
    elements = sum(float(count) for count in held_parameters(model, split, engine))
    weight = {"bf16": 2, "fp32": 4, "fp64": 8}[layout.precision]
    gradient = weight if weight > 2 else int(split.gradient_width)
    far = layout.ranks - 1
    own = layout.training_ranks - (0 if layout.parameter_servers.own else 1)
    hop = pricing.collectives.hop

    def port(width: int) -> float:
        return float(hop(own * elements * width / servers, far))

    update = parts.pop("optimizer", 0.0) * layout.tp / servers
    busy = port(gradient) + port(weight) + update * (layout.dp if layout.asynchronous else 1)
    if layout.sync == "ps" or not (layout.staleness or layout.asynchronous):
        return {**parts, "servers": busy - update, "optimizer": update}
    # A worker waits for its own exchange alone, unless the servers are busy for longer than a step.
    compute, alone = sum(parts.values()), float(hop(elements * gradient, far) + hop(elements * weight, far)) + update
    return {**parts, "servers": max(alone, busy - compute)}
