"""The time of a step, of a prefill and of a decode step, from measured kernels up. `docs/prediction.md` explains it."""

from typing import TYPE_CHECKING

from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise.predict.time.constants import Constants, constants, known_devices
    from shardwise.predict.time.kernels import Kernels
    from shardwise.predict.time.pricing import Pricing
    from shardwise.predict.time.profiles import ENGINES, EngineProfile, engine
    from shardwise.predict.time.ranges import Range, time_range
    from shardwise.predict.time.serving import ServedModel, ServedSeconds, ServingLayout
    from shardwise.predict.time.split import StepShape
    from shardwise.predict.time.step import StepSeconds, training_step

__all__ = [
    "ENGINES",
    "Constants",
    "EngineProfile",
    "Kernels",
    "Pricing",
    "Range",
    "ServedModel",
    "ServedSeconds",
    "ServingLayout",
    "StepSeconds",
    "StepShape",
    "constants",
    "engine",
    "known_devices",
    "time_range",
    "training_step",
]

lazily(__name__)
