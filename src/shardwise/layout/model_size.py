"""Size of a model in a headline: parameters, and the active ones of a token where there are experts."""

from shardwise.model.parameters import Model, count_parts
from shardwise.report.units import format_count


def size_words(model: Model) -> str:
    """`8.03B parameters`, `117B parameters (5.13B active)` of a model with experts, and what its files have besides."""
    total, _, active = count_parts(model)
    used = f" ({format_count(active)} active)" if active != total else ""
    extra = model.counted.predicting if model.counted else 0
    more = f" and {format_count(extra)} for multi-token prediction" if extra else ""
    return f"{format_count(total)} parameters{used}{more}"


def named_size(model: Model) -> str:
    """The model's name, and where it has experts its size, too."""
    total, _, active = count_parts(model)
    return model.name if active == total else f"{model.name}, {size_words(model)},"


def size_json(model: Model) -> dict[str, int]:
    """Numbers of all parameters, and of those that one token uses."""
    total, _, active = count_parts(model)
    extra = model.counted.predicting if model.counted else 0
    more = {"multi_token_prediction_parameters": extra} if extra else {}
    return {"parameters": total, "active_parameters": active, **more}
