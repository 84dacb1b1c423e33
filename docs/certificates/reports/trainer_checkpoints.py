"""transformers pull request 48569: the Trainer's checkpoint of an optimizer whose state tensor-parallel ranks split.

The Trainer of transformers 5.24 raises an error for such a checkpoint when it is made. `guard=0` calls its functions
that save and load the optimizer without that.
"""

import tempfile
from types import SimpleNamespace

import torch.distributed as dist
from accelerate import ParallelismConfig
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainingArguments
from transformers.distributed import checkpoint

from shardwise.certify.engines import transformers as engine
from shardwise.certify.engines.transformers import *  # noqa: F403

variants = ("plain",)
space = engine.space | {"guard": (1, 0)}
ParallelismConfig._validate_accelerator = lambda *words: None  # it takes no CPU ranks


def parallelize(model, layout):
    split = engine.parallelize(model, layout)
    if layout.get("guard", 1):
        Trainer(split, TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to=[]))
    return split


def trainer_of(run):
    """What the functions read of a trainer."""
    arguments = SimpleNamespace(
        should_save=dist.get_rank() == 0, world_size=dist.get_world_size(), device=run.model.device
    )
    return SimpleNamespace(
        args=arguments,
        optimizer=run.optimizer,
        lr_scheduler=LambdaLR(run.optimizer, lambda step: 1.0),
        is_deepspeed_enabled=False,
        is_fsdp_enabled=False,
        is_fsdp_xla_v1_enabled=False,
    )


def save(run, folder):
    run.engine.save_pretrained(folder, distributed_checkpoint=True)
    Trainer._save_optimizer_and_scheduler(trainer_of(run), folder)
    dist.barrier()


def load(run, folder):
    checkpoint._load_model_checkpoint_distributed(run.model, folder)
    Trainer._load_optimizer_and_scheduler(trainer_of(run), folder)
