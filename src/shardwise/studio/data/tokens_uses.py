"""Tokens, who uses which strategy: software, what for, and where its documentation says so."""

from typing import NamedTuple

from shardwise.studio.columns import How, Table

TENSOR, GATHERING, STAGES = "tensor parallelism", "ZeRO-3 (sharded weights)", "pipeline parallelism"
STRATEGIES = (TENSOR, GATHERING, STAGES)


class Software(NamedTuple):
    """One piece of software."""

    software: str
    does: str
    strategies: tuple[str, ...]
    """Its usual ones, of `STRATEGIES`."""
    how: str
    """The setting."""
    source: str


USES = (
    Software("vLLM", "serves", (TENSOR, STAGES),
        "--tensor-parallel-size in a node, --pipeline-parallel-size across nodes", "docs.vllm.ai, Parallelism"),
    Software("SGLang", "serves", (TENSOR, STAGES), "--tp-size, --pp-size", "docs.sglang.ai, Server Arguments"),
    Software("TensorRT-LLM", "serves", (TENSOR, STAGES), "tp_size, pp_size",
        "nvidia.github.io/TensorRT-LLM, Parallelism"),
    Software("Text Generation Inference", "serves", (TENSOR,), "--num-shard",
        "huggingface.co/docs/text-generation-inference, Tensor Parallelism"),
    Software("DeepSpeed", "trains", (GATHERING, STAGES), '"zero_optimization": {"stage": 3}',
        "deepspeed.ai, Zero Redundancy Optimizer"),
    Software("PyTorch FSDP2, torchtitan", "trains", (GATHERING, TENSOR, STAGES),
        "data_parallel_shard_degree, tensor_parallel_degree", "github.com/pytorch/torchtitan, docs/fsdp.md"),
    Software("Megatron-LM", "trains", (TENSOR, STAGES),
        "--tensor-model-parallel-size, --use-distributed-optimizer (ZeRO-1)",
        "github.com/NVIDIA/Megatron-LM, README"),
)  # fmt: skip


def uses_table() -> Table:
    """A row for each piece of software; "yes" where a strategy is one of its usual ones."""
    units = dict.fromkeys(("software", "does", *STRATEGIES, "setting", "source"), "")
    rows = [
        (use.software, use.does, *("yes" if name in use.strategies else "" for name in STRATEGIES), use.how, use.source)
        for use in USES
    ]
    return Table.of_rows("Who uses which strategy", units, rows)


def how_uses() -> How:
    return How(
        [
            "What the software's own documentation offers for dense models; experts are in the Experts view.",
            "Servers keep weights where they are, since a pass has few tokens. Trainers shard them, since a pass has "
            "many, and since gradients and optimizer state need several times the weights' memory.",
        ],
        "",
        "docs/published_choices.md",
    )
