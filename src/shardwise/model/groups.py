"""Parameters of a model by the mechanism that has them."""

from shardwise.model.adapters import A, B
from shardwise.model.blueprint import Parameter, Part
from shardwise.model.parameters import Model, blueprint

GROUPS = ("embedding", "attention", "MLP", "experts", "norms", "adapters", "head", "other")
"""MLP: dense feed-forward parts. experts: routed and shared ones, and their router. head: the output projection, empty
where it is tied to the embedding. other: of a traced module, whose names say nothing."""


def group_of(part: Part, parameter: Parameter) -> str:
    """One of `GROUPS`."""
    words = parameter.name.split(".")
    if words[-1] in (A, B):
        return "adapters"
    if any(word == "norm" or word.endswith("_norm") for word in words):
        return "norms"
    if part.kind in ("embedding", "head"):
        return part.kind
    if parameter.cut == "expert" or words[:2] in (["mlp", "router"], ["mlp", "shared"]):
        return "experts"
    return {"attention": "attention", "mlp": "MLP"}.get(words[0], "other")


def count_groups(model: Model) -> dict[str, int]:
    """Number of parameters by group, tied ones once; groups that a model lacks are left out."""
    counts = dict.fromkeys(GROUPS, 0)
    for part in blueprint(model).parts:
        for parameter in part.parameters:
            counts[group_of(part, parameter)] += part.count * parameter.numel
    return {group: number for group, number in counts.items() if number}
