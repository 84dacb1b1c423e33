"""Programs of other engines, with and without a mistake, and what an audit of them must say."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from harness.cases import table

HEAD = table(__file__, "HEAD")

TAIL = table(__file__, "TAIL")

STEP = table(__file__, "STEP")

DDP = "from torch.nn.parallel import DistributedDataParallel\nmodel = DistributedDataParallel(net())"

FSDP2 = "from torch.distributed.fsdp import fully_shard\nmodel = net()\n"
TP = """from torch.distributed.tensor.parallel import parallelize_module, ColwiseParallel, RowwiseParallel
plan = {{'up': ColwiseParallel(), 'down': RowwiseParallel()}}
"""

MODELS = {
    "ddp": (2, "dp=2", DDP),
    "ddp4": (4, "dp=4", DDP),
    "by hand": (
        2, "dp=2",
        "model = net()\n"
        "for p in model.parameters():\n"
        "    p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))  # MICRO",
    ),
    "fsdp2": (2, "dp=2,zero=3", FSDP2 + "for part in (*model, model): fully_shard(part)"),
    "fsdp2 kept": (
        2, "dp=2,zero=2", FSDP2 + "for part in (*model, model): fully_shard(part, reshard_after_forward=False)",
    ),
    "fsdp1": (
        2, "dp=2,zero=3",
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "from torch.distributed.fsdp.wrap import ModuleWrapPolicy\n"
        "model = FSDP(net(), auto_wrap_policy=ModuleWrapPolicy({{Block}}), device_id=torch.device('cpu'))",
    ),
    "hsdp": (
        4, "dp=4,zero=3,shard=2",
        FSDP2 + "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('r', 's'))\n"
        "for part in (*model, model): fully_shard(part, mesh=mesh)",
    ),
    "zero1": (2, "dp=2,zero=1", DDP),
    "tp": (
        2, "tp=2",
        TP + "mesh, model = init_device_mesh('cpu', (2,)), net()\n"
        "for block in model: parallelize_module(block, mesh, plan)",
    ),
    "fsdp2 tp": (
        4, "dp=2,tp=2,zero=3",
        TP + FSDP2 + "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\n"
        "for block in model:\n"
        "    parallelize_module(block, mesh['tp'], plan)\n"
        "    fully_shard(block, mesh=mesh['dp'])\n"
        "fully_shard(model, mesh=mesh['dp'])",
    ),
}  # fmt: skip
"""Kind -> ranks, its layout, and its model."""

PIPELINE = table(__file__, "PIPELINE")

BY_HAND = table(__file__, "BY_HAND")

WHOLE: dict[str, tuple[int, str, str]] = {}
"""Kind -> ranks, its layout, and its program up to the last step: of libraries that tests do not need."""
PIPELINES = {
    "pp by hand": (3, "pp=3,schedule=gpipe", 1, ""),
    "gpipe": (2, "pp=2,schedule=gpipe", 1, "ScheduleGPipe"),
    "1f1b": (2, "pp=2", 1, "Schedule1F1B"),
    "1f1b4": (4, "pp=4", 1, "Schedule1F1B"),
    "interleaved": (2, "pp=2,schedule=interleaved,virtual=2", 2, "ScheduleInterleaved1F1B"),
}

NEVER = {("unequal", kind) for kind in ("gpipe", "1f1b", "1f1b4", "interleaved", "trainer")}
"""Mistakes that programs of a kind cannot make: torch's schedules and the Trainer fix the number of micro-batches."""
MISTAKES = ("skipped", "reordered", "size", "dtype", "group", "died", "error", "caught", "unequal")


@dataclass(frozen=True)
class Program:
    """A program, and what is true of it."""

    name: str
    ranks: int
    layout: str
    text: str
    mistake: str = ""
    wrong: int = 0
    at: int = 0
    """Optimizer steps before the mistake's step."""
    lines: tuple[int, ...] = field(default=())
    """Numbers of the lines that may be named."""


def lines_of(text: str, *tags: str) -> tuple[int, ...]:
    return tuple(n for n, line in enumerate(text.splitlines(), 1) if line.endswith(tuple(f"# {tag}" for tag in tags)))


NAMED = {
    "skipped": ("LOSS",), "reordered": ("LOSS",), "size": ("LOSS",), "dtype": ("LOSS",), "group": ("LOSS",),
    "error": ("ERROR",), "caught": ("ERROR",), "unequal": ("MICRO",), "died": ("MICRO", "STEP", "LOSS"),
}  # fmt: skip
"""Mistake -> tags of the lines that name it."""


def program(kind: str, seed: int, mistake: str = "") -> Program:
    """A program of a kind, at sizes, and with a rank and a step of its mistake, that the seed draws."""
    draw = random.Random(f"{kind} {seed} {mistake}")
    piped = kind in PIPELINES
    ranks, layout = (PIPELINES | MODELS | WHOLE)[kind][:2]
    sizes = {
        "layers": draw.randint(2, 4),
        "width": draw.choice([8, 16, 24]),
        "micro": draw.choice([4, 6] if piped else [1, 2, 3]),
        "steps": draw.randint(4, 5),
    }
    wrong, step = draw.randrange(ranks), draw.randint(1, 2)
    if piped:
        _, _, chunks, schedule = PIPELINES[kind]
        body = (PIPELINE if schedule else BY_HAND).format(chunks=chunks, schedule=schedule, **sizes)
    elif kind in WHOLE:
        body = WHOLE[kind][2].format(**sizes)
    else:
        body = "\n" + MODELS[kind][2].replace("{{", "{").replace("}}", "}") + STEP.format(**sizes)
        if kind == "zero1":
            body = body.replace(
                "opt = torch.optim.AdamW(model.parameters(), lr=1e-3)",
                "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
                "opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)",
            )
    head = HEAD.format(mistake=mistake, rank=wrong, step=step, **sizes)
    text = head + body + TAIL
    return Program(kind, ranks, layout, text, mistake, wrong, step, lines_of(text, *NAMED[mistake]) if mistake else ())


KINDS = (*MODELS, *PIPELINES)
