"""DeepSpeed: ZeRO stages 1 to 3, and AutoTP."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.certify.adapter import EngineRun, joined

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
from deepspeed.runtime.tensor_parallel import init_utils
from deepspeed.utils import groups, safe_get_full_fp32_param, safe_get_full_grad

name = "DeepSpeed"
needs = ("deepspeed", "torch")
axes, data = ("dp", "tp"), ("dp",)
space = {"dp": (1, 2, 3, 4), "tp": (1, 2), "zero": (1, 2, 3), "accumulate": (1, 2)}
variants = ("plain", "uneven", "tied", "frozen", "padded")
exact = False
skips = ("clipped",)
# It would compile C++ for shared memory; gloo does without.
setattr(sys.modules["deepspeed.comm.torch"], "build_shm_op", lambda: None)  # noqa: B010
RULES = [
    {"patterns": [r".*\.(q|k|v|up)\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.(o|down)\.weight$"], "partition_type": "row"},
]
"""What AutoTP splits. It knows Hugging Face's names; these are the tiny decoder's."""


class Deferred:
    """The engine, made when the optimizer's settings are known."""

    def __init__(self, model: nn.Module, layout: dict[str, Any]) -> None:
        self.model, self.layout = model.float(), layout
        self.engine: Any = None
        self.shapes = {name: p.shape for name, p in model.named_parameters()}

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """AutoTP leaves the parts of tensor-parallel ranks to the caller."""
        split = self.layout.get("tp", 1) > 1
        return joined(tensor, self.shapes[name], groups.get_tensor_model_parallel_group() if split else None)

    def start(self, most: float, settings: dict[str, Any]) -> None:
        tp, parts = self.layout.get("tp", 1), self.layout.get("accumulate", 1)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": parts, "gradient_clipping": most,
            "zero_optimization": {"stage": self.layout.get("zero", 1), "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW", "params": {**settings, "torch_adam": True}},
        }  # fmt: skip
        if tp > 1:
            layers = {"use_default_specs": False, "layer_specs": RULES}
            config["tensor_parallel"] = {"autotp_size": tp, "partition_config": layers}
            deepspeed.tp_model_init(self.model, tp_size=tp, dtype=torch.float32)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.engine, *_ = deepspeed.initialize(model=self.model, model_parameters=trained, config=config)
        init_utils._TP_MODEL_INIT_ARGS = None  # else it splits the next model, too


parallelize = Deferred


def optimizer(run: EngineRun, **settings: Any) -> None:
    run.engine.start(run.most, settings)


def backward(run: EngineRun, ids: Tensor, labels: Tensor, tokens: int) -> float:
    """Micro-batches, whose gradients DeepSpeed divides by their number and by the data ranks."""
    engine, parts = run.engine.engine, run.engine.layout.get("accumulate", 1)
    total = 0.0
    for number, (some, right) in enumerate(zip(ids.chunk(parts), labels.chunk(parts), strict=True)):
        engine.set_gradient_accumulation_boundary(number == parts - 1)
        loss = F.cross_entropy(engine(some).flatten(0, 1), right.flatten(), reduction="sum") / tokens
        engine.backward(loss * run.data[1] * parts)
        total += loss.item()
    return total


def gradients(run: EngineRun) -> dict[str, Tensor]:
    named = {name: safe_get_full_grad(p) for name, p in run.model.named_parameters() if p.requires_grad}
    return {name: run.engine.whole(name, gradient) for name, gradient in named.items() if gradient is not None}


def clip(run: EngineRun, most: float) -> float:
    """The whole step: DeepSpeed clips in it."""
    run.engine.engine.step()
    return float(run.engine.engine.get_global_grad_norm())


def step(run: EngineRun) -> None:
    """`clip` has made it."""


def parameters(run: EngineRun) -> dict[str, Tensor]:
    """Masters of what trains, weights of what is frozen."""
    values = {}
    for name, p in run.model.named_parameters():
        whole = safe_get_full_fp32_param(p) if p.requires_grad else None
        if whole is None:
            with deepspeed.zero.GatheredParameters(p, enabled=hasattr(p, "ds_id")):
                whole = p.detach().clone()
        values[name] = run.engine.whole(name, whole)
    return values


def save(run: EngineRun, folder: str) -> None:
    run.engine.engine.save_checkpoint(folder)


def load(run: EngineRun, folder: str) -> None:
    run.engine.engine.load_checkpoint(folder)
