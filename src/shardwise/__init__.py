"""shardwise: split large language models across devices, run exactly that split, and hold plan and run together.

    from shardwise import Cluster, Layout, Workload, estimate, train

Importing this package imports little else: each name below comes from its room when it is first used.
"""

from typing import TYPE_CHECKING

from shardwise.calls import speaks_python
from shardwise.errors import UserError
from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise.api import TrainResult, train
    from shardwise.cli.functions import emit, explain, generate
    from shardwise.cluster import Cluster
    from shardwise.layout import Layout, Workload
    from shardwise.model import ModelConfig
    from shardwise.model.blueprint import Blueprint
    from shardwise.model.lora import Lora
    from shardwise.planner import plan
    from shardwise.planner.serving import plan_serving
    from shardwise.predict import estimate
    from shardwise.report import StepReport, compare
    from shardwise.runtime.module.split import split
    from shardwise.runtime.module.suggest import suggest
    from shardwise.runtime.module.trace import trace
    from shardwise.runtime.module.verify import verify

__version__ = "0.1.0"

__all__ = [
    "Blueprint",
    "Cluster",
    "Layout",
    "Lora",
    "ModelConfig",
    "StepReport",
    "TrainResult",
    "UserError",
    "Workload",
    "__version__",
    "compare",
    "emit",
    "estimate",
    "explain",
    "generate",
    "plan",
    "plan_serving",
    "split",
    "suggest",
    "trace",
    "train",
    "verify",
]

lazily(__name__, speaks_python)
