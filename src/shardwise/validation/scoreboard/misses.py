"""Why rows are off by more than a quarter, as far as a row and its prediction tell."""

from __future__ import annotations

from shardwise.validation.scoreboard.score import Prediction

NETWORK = ("tensor", "data", "pipeline")


def reason(one: Prediction) -> str:
    """The reason found for a row that is far off, in one line, or that none was."""
    share = {name: part / one.seconds for name, part in one.parts.items()}
    traffic = sum(share.get(name, 0.0) for name in NETWORK)
    if 0.1 < share.get("host", 0.0) < 0.5:
        return "host and device take about as long here, and how far each waits for the other is not known"
    unstated = [words for words in one.case.assumed if not words.startswith("ZeRO")]
    if one.case.model.experts and one.case.kind == "train":
        return (
            "experts: capacities and layers beside the blocks (multi-token prediction), kernels of a release and "
            "uneven loads are not modelled"
        )
    if traffic > 0.25:
        direction = "faster" if one.error > 0 else "slower"
        return (
            f"{traffic:.0%} of the prediction is exposed traffic, at the share of the links that this device's runs "
            f"reach on average: this cluster's network was {direction}"
        )
    if unstated:
        return f"the row does not say everything ({'; '.join(unstated)})"
    return "no reason found"
