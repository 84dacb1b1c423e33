"""torchtitan's configuration: arguments since 0.3, TOML before. Names: pytorch/torchtitan, config/job_config.py of 0.2,
config/configs.py of 0.3 and of the main branch in August 2026, which counts tokens in place of sequences.
"""

from __future__ import annotations

from typing import Any

from shardwise.interop.reading.known_keys import rows
from shardwise.interop.writing import fsdp
from shardwise.interop.writing.canonical import SHARDING, defaults
from shardwise.interop.writing.commands import command, commented, nodes_of, torchrun, with_comments
from shardwise.interop.writing.old_limits import Limit, only, without
from shardwise.interop.writing.request import EngineWriter, WriteRequest
from shardwise.layout import Layout
from shardwise.model import ModelConfig
from shardwise.model.catalog import catalog

KEYS = rows("torchtitan", "layout")
MODELS = rows("torchtitan", "models")
SCHEDULES = rows("torchtitan", "schedules")
CLIP = 1.0
TOML, TOKENS = "0.2", "main"


def objection(model: ModelConfig) -> str:
    """Why torchtitan has no such model; empty where it has."""
    if model.name not in MODELS or catalog()[model.name] != model:
        return f"it has models of its own; known here are {', '.join(MODELS)}"
    return ""


def write(request: WriteRequest) -> tuple[str, list[str]]:
    """The script, or with 0.2 the TOML, and comments on what it leaves to its user."""
    module, flavor = MODELS[request.model.name].split()
    tables = _tables(request)
    comments = ["data, learning rate and checkpoints are those of torchtitan's own configuration of the model"]
    if request.version == TOML:
        tables["model"] = {"name": module, "flavor": flavor}
        tables["activation_checkpoint"] = {"mode": request.layout.recompute}
        return _toml(tables), [*comments, f"start {request.layout.ranks} ranks: torchrun -m torchtitan.train"]
    if nodes_of(request)[0] > 1:
        comments.append("run it on every node, with HEAD_ADDRESS set to the first node's address")
    registered = f"{module}_{flavor}".lower().replace(".", "_").replace("-", "_")
    words = [
        *torchrun(request),
        '-m torchtitan.train "$@"',
        f"--module {module}",
        f"--config {registered}",
        *(_word(f"--{name}.{key}", value) for name, table in tables.items() for key, value in table.items()),
        f"activation-checkpoint:{request.layout.recompute}",
    ]
    return command(words), comments


def _word(flag: str, value: Any) -> str:
    return flag if value is True else f"{flag} {value}"


def _tables(request: WriteRequest) -> dict[str, dict[str, Any]]:
    layout = request.layout
    half = layout.precision == "bf16"
    training = _batch(request) | {
        "max_norm": CLIP,
        KEYS["precision"]: "bfloat16" if half else "float32",
        "mixed_precision_reduce": "float32",
    }
    if layout.offload != "none":
        training[KEYS["offload"]] = True
    # torchtitan rejects CUDA graphs beside a pipeline, and beside all-to-alls of experts.
    if (layout.pp > 1 or request.model.experts) and request.version != TOML:
        training["disable_cuda_graphs"] = True
    compiled = {"compile": {"enable": True}} if layout.compile == "block" else {}
    return {"training": training, "parallelism": _parallelism(request), **compiled}


def _batch(request: WriteRequest) -> dict[str, Any]:
    """Sequences, or tokens. A pipeline's micro-batches are one local batch; without one, local batches are
    accumulated."""
    layout, work = request.layout, request.workload
    local = work.batch // layout.dp if layout.pp > 1 else layout.micro
    if request.version == TOKENS:
        return {
            "max_context_length": work.seq,
            "num_tokens_per_microbatch_per_dp_rank": layout.micro * work.seq,
            "num_tokens_per_train_step": work.batch * work.seq,
        }
    return {"seq_len": work.seq, "local_batch_size": local, "global_batch_size": work.batch}


def _parallelism(request: WriteRequest) -> dict[str, Any]:
    layout = request.layout
    # FSDP shards over shard x cp, and replicas are apart from both.
    shard = layout.shard_ranks // layout.cp if layout.zero else 1
    table: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp // shard,
        KEYS["shard"]: shard,
        KEYS["tp"]: layout.tp,
        KEYS["pp"]: layout.pp,
        KEYS["cp"]: layout.cp,
        KEYS["ep"]: layout.ep,
        # Its default keeps parameters gathered beside a pipeline alone.
        KEYS["zero"]: "never" if layout.zero == 2 else "always",
    }
    if layout.pp == 1:
        return table
    table |= {
        KEYS["schedule"]: SCHEDULES[layout.schedule],
        # Left out, the first and the last stage have one layer less.
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
    }
    if request.version == TOKENS:
        return table | {"num_pp_microbatches": request.workload.micro_batches(layout)}
    return table | {KEYS["micro"]: layout.micro}


def _toml(tables: dict[str, dict[str, Any]]) -> str:
    lines = []
    for name, table in tables.items():
        lines.append(f"\n[{name}]")
        for key, value in table.items():
            text = f'"{value}"' if isinstance(value, str) else str(value).lower()
            lines.append(f"{key} = {text}")
    return "\n".join(lines) + "\n"


def _comment(text: str, comments: list[str]) -> str:
    if text.startswith("\n["):
        return commented(comments) + text
    return with_comments(text, comments)


def _virtual(layout: Layout) -> int:
    from shardwise.schedule.pipeline import find

    return find(layout.schedule).virtual


LIMITS = (
    *fsdp.LIMITS,
    Limit("zero", lambda x: x.zero == 0 and x.cp > 1, lambda _: defaults(*SHARDING) | {"zero": 3},
          "it has DDP without context parallelism, and FSDP (zero=2, 3)"),
    only("cpkind", ("ring",), "ring", "its context parallelism is written as a ring"),
    Limit("sp", lambda x: x.tp > 1 and not x.sp, lambda _: {"sp": True}, "its tensor parallelism is with sp"),
    only("schedule", tuple(SCHEDULES), "1f1b", "torch has no such schedule"),
    Limit("virtual", lambda x: x.pp > 1 and x.virtual != _virtual(x), lambda x: {"virtual": _virtual(x), "stages": ()},
          "torchtitan derives the chunks from the schedule"),
    Limit("ep", lambda x: x.tp > 1 and x.ep % x.tp > 0, lambda x: {"ep": x.tp, "etp": 0},
          "its expert parallelism spans tensor parallelism", experts=True),
    Limit("shard", lambda x: bool(x.shard) and (x.shard_ranks * x.tp) % x.ep > 0, lambda _: {"shard": 0},
          "experts are spread inside a shard group", experts=True),
    without("shard", lambda x: x.zero == 0, "DDP shards nothing"),
)  # fmt: skip

WRITER = EngineWriter(
    name="torchtitan",
    title="torchtitan",
    keys={"dp": "data_parallel_replicate_degree", "sp": "on with tp", "offload_params": KEYS["offload"],
          "grads": "mixed_precision_reduce", "virtual": KEYS["schedule"]} | KEYS,
    left={
        "attention": "the model's configuration chooses attention",
        "algorithm": "NCCL chooses algorithms: see NCCL_ALGO",
        "node": "NCCL finds the nodes by itself",
    },
    limits=LIMITS,
    write=write,
    comment=_comment,
    file="torchtitan.sh",
    profile="torchtitan",
    fixed=fsdp.GRADS,
    files={TOML: "torchtitan.toml"},
    optimizers=("adamw",),
    loads_model=True,
    versions=("0.3", TOKENS, TOML),
    objection=objection,
)  # fmt: skip
