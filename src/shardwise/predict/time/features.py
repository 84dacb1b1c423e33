"""Layouts that an engine's software can run: its schedules, ZeRO stages and kinds of parallelism, each with a source.

A plan for an engine has only candidates with these features. `shardwise` is this project's runtime; a test compares
its row with `layout.legality.check_runnable`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.layout import Layout


@dataclass(frozen=True)
class Features:
    """Features of one engine, as far as a search chooses among them."""

    tensor: bool = True
    """Tensor parallelism (tp > 1)."""
    sequence: bool = True
    """Megatron's sequence parallelism beside tp (`sp`)."""
    context: tuple[str, ...] = ("ring", "ulysses")
    """Kinds of context parallelism (`cpkind`); empty without any."""
    experts: bool = True
    """Models with experts, and expert parallelism (ep > 1)."""
    schedules: tuple[str, ...] = ("1f1b", "gpipe", "zb-h1", "interleaved")
    """Pipeline schedules; empty without pipelines."""
    uneven: bool = True
    """Layers that do not divide by the number of stages."""
    bare_ends: bool = True
    """Embedding and head as stages of their own (`stages=0/1/.../1/0`)."""
    zero: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages over several data ranks."""
    zero_in_pipeline: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages under a pipeline."""
    hybrid: bool = True
    """Shard groups smaller than all data ranks (HSDP, `shard`)."""
    recompute: tuple[str, ...] = ("none", "selective", "full")
    """Ways to recompute activations."""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False, compare=False)
    """Field -> where it can be read."""

    def stages_of(self, pp: int) -> tuple[int, ...]:
        """ZeRO stages of layouts with this many pipeline ranks."""
        return self.zero if pp == 1 else tuple(stage for stage in self.zero if stage in self.zero_in_pipeline)

    def objection(self, fixed: Mapping[str, Any]) -> str:
        """Why no layout with these keys and values can run, and what could; empty where one may."""
        degrees = {
            "tp": (self.tensor, "tensor parallelism"),
            "pp": (self.schedules, "pipelines"),
            "cp": ("ring" in self.context, "context parallelism"),
            "ep": (self.experts, "expert parallelism"),
            "sp": (self.sequence, "sequence parallelism"),
        }
        for key, (there, words) in degrees.items():
            wanted = fixed.get("sp", False) if key == "sp" else fixed.get(key, 1) > 1
            if wanted and not there:
                return f"it has no {words}; leave {key} out"
        choices: dict[str, tuple[Any, ...]] = {
            "schedule": self.schedules or ("1f1b",),
            "recompute": self.recompute,
            "zero": tuple(sorted({0, *self.zero})),
        }
        for key, known in choices.items():
            if fixed.get(key, known[0]) not in known:
                return f"it has no {key}={fixed[key]}; choose one of {', '.join(map(str, known))}"
        return ""

    def missing(self, layout: Layout, layers: int) -> list[str]:
        """The words of a layout that need a feature which is not here. layers: of the model."""
        chunks = layout.pp * layout.virtual
        bare = layout.pp > 1 and chunks > layers
        checks = {
            f"tp={layout.tp}": layout.tp > 1 and not self.tensor,
            "sp": layout.sp and not self.sequence,
            f"cp={layout.cp}": layout.cp > 1 and layout.cpkind not in self.context,
            f"ep={layout.ep}": layout.ep > 1 and not self.experts,
            f"pp={layout.pp}": layout.pp > 1 and not self.schedules,
            f"schedule={layout.schedule}": layout.pp > 1 and layout.schedule not in self.schedules,
            f"{chunks} stages of {layers} layers": (layers % chunks > 0 and not bare and not self.uneven)
            or (bare and not self.bare_ends),
            f"zero={layout.zero}": layout.data_ranks > 1 and layout.stage not in self.stages_of(layout.pp),
            f"shard={layout.shard}": bool(layout.shard) and not self.hybrid,
            f"recompute={layout.recompute}": layout.recompute not in self.recompute,
        }
        return [word for word, lacks in checks.items() if lacks]


EVERYTHING = Features()
"""All that is searched."""


def _features(source: str, facts: Mapping[str, str], **values: Any) -> Features:
    """source: the software, named before each fact."""
    return Features(**values, sources={name: f"{source}: {fact}" for name, fact in facts.items()})


def _megatron_2022() -> Features:
    return _features(
        "NVIDIA/Megatron-LM v3.0",
        {
            "tensor": "megatron/mpu",
            "sequence": "megatron/arguments.py, --sequence-parallel",
            "context": "none; Megatron-Core 0.5 added it in 2023",
            "experts": "none; Megatron-Core added them in 2023",
            "schedules": "megatron/schedules.py, forward_backward_pipelining_with and _without_interleaving (1F1B)",
            "uneven": "megatron/mpu/initialize.py, get_num_layers asserts that stages divide the layers",
            "bare_ends": "none for decoders: --standalone-embedding-stage leaves the head with its layers",
            "zero": "megatron/arguments.py, --use-distributed-optimizer: stage 1",
            "zero_in_pipeline": "megatron/optimizer/distrib_optimizer.py, within a stage's data ranks",
            "hybrid": "distrib_optimizer.py shards over all data ranks",
            "recompute": "megatron/arguments.py, --recompute-granularity full, selective",
        },
        context=(), experts=False, schedules=("1f1b", "interleaved"), uneven=False, bare_ends=False, zero=(0, 1),
        zero_in_pipeline=(0, 1), hybrid=False,
    )  # fmt: skip


def _megatron_deepspeed(bf16: bool) -> Features:
    stage = (
        "deepspeed/runtime/bf16_optimizer.py always shards over the data ranks, and pipe/engine.py rejects stage 2 "
        "and 3"
        if bf16
        else "deepspeed/runtime/pipe/engine.py: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"
    )
    return _features(
        "bigscience-workshop/Megatron-DeepSpeed on microsoft/DeepSpeed 0.6",
        {
            "tensor": "megatron/mpu",
            "sequence": "none: forked from Megatron-LM 2.4, before it",
            "context": "none",
            "experts": "none in the fork's GPTModelPipe",
            "schedules": "deepspeed/runtime/pipe/schedule.py, TrainSchedule: 1F1B alone",
            "uneven": "deepspeed/runtime/pipe/module.py, _partition_layers balances what does not divide",
            "bare_ends": "megatron/model/gpt_model.py: fails unless each stage has at least one transformer layer",
            "zero": f"{stage}; megatron/training.py, train_step asserts a PipelineEngine whatever the degree",
            "zero_in_pipeline": stage,
            "hybrid": "none",
            "recompute": "megatron/arguments.py, --checkpoint-activations: whole layers",
        },
        sequence=False, context=(), experts=False, schedules=("1f1b",), bare_ends=False,
        zero=(1,) if bf16 else (0, 1), zero_in_pipeline=(1,) if bf16 else (0, 1), hybrid=False,
        recompute=("none", "full"),
    )  # fmt: skip


def _llm_foundry() -> Features:
    return _features(
        "mosaicml/llm-foundry 0.3 on composer 0.16",
        {
            "tensor": "none",
            "sequence": "none",
            "context": "none",
            "experts": "none",
            "schedules": "no pipelines",
            "uneven": "no pipelines",
            "bare_ends": "no pipelines",
            "zero": "composer/trainer/mosaic_fsdp_utils.py, SHARDING_MAP: NO_SHARD, SHARD_GRAD_OP, FULL_SHARD",
            "zero_in_pipeline": "no pipelines",
            "hybrid": "composer/trainer/mosaic_fsdp_utils.py, SHARDING_MAP has no HYBRID_SHARD",
            "recompute": "scripts/train/README.md, activation_checkpointing: whole blocks",
        },
        tensor=False, sequence=False, context=(), experts=False, schedules=(), uneven=False, bare_ends=False,
        zero=(0, 2, 3), zero_in_pipeline=(), hybrid=False, recompute=("none", "full"),
    )  # fmt: skip


def _megatron_bridge() -> Features:
    return _features(
        "NVIDIA-NeMo/Megatron-Bridge on NVIDIA/Megatron-LM core 0.15",
        {
            "tensor": "docs/parallelisms.md, tensor_model_parallel_size",
            "sequence": "docs/parallelisms.md, sequence_parallel",
            "context": "megatron/core/transformer/transformer_config.py, cp_comm_type: p2p (ring), a2a (Ulysses)",
            "experts": "docs/parallelisms.md, expert_model_parallel_size",
            "schedules": "megatron/core/pipeline_parallel/schedules.py, forward_backward_pipelining_with and "
            "_without_interleaving (1F1B)",
            "uneven": "megatron/training/arguments.py, --pipeline-model-parallel-layout",
            "bare_ends": "megatron/training/arguments.py, --pipeline-model-parallel-layout, "
            "--account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split",
            "zero": "the distributed optimizer; docs/training/megatron-fsdp.md: optim, optim_grads, optim_grads_params",
            "zero_in_pipeline": "docs/training/megatron-fsdp.md, compatibility: pipeline parallelism",
            "hybrid": "megatron/training/arguments.py, --num-distributed-optimizer-instances",
            "recompute": "megatron/core/transformer/transformer_config.py, recompute_granularity: full, selective",
        },
        schedules=("1f1b", "interleaved"),
    )  # fmt: skip


def _shardwise() -> Features:
    return _features(
        "this runtime",
        {
            "tensor": "ops/linear.py",
            "sequence": "runtime/transport/comms.py, gather_dim and reduce_scatter_dim",
            "context": "none yet: layout/legality.py, unsupported",
            "experts": "none yet: model/config.py, why_not_runnable",
            "schedules": "schedule/pipeline/registry.py",
            "uneven": "schedule/pipeline/stages.py, Stages.even",
            "bare_ends": "schedule/pipeline/stages.py, Stages",
            "zero": "runtime/zero/engine.py",
            "zero_in_pipeline": "schedule/pipeline/completion.py: UNSHARD and RESHARD",
            "hybrid": "layout/layout.py, shard_ranks and replicate_ranks",
            "recompute": "ops/llama_halves.py",
        },
        context=(), experts=False,
    )  # fmt: skip


FEATURES = {
    "megatron-lm-2022": _megatron_2022(),
    "megatron-deepspeed-2022": _megatron_deepspeed(bf16=False),
    "megatron-deepspeed-bf16": _megatron_deepspeed(bf16=True),
    "llm-foundry": _llm_foundry(),
    "llm-foundry-pure": _llm_foundry(),
    "megatron-bridge": _megatron_bridge(),
    "shardwise": _shardwise(),
    "shardwise-cpu": _shardwise(),
}
"""Engines that train -> their features."""
