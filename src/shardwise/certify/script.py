"""A script that shows a wrong cell without shardwise: the adapter's own functions, the model, and a comparison."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from shardwise.certify import adapter as defaults
from shardwise.certify import tiny
from shardwise.certify.adapter import OPTIMIZER, Adapter, module_of
from shardwise.certify.reference import BINDING, SEED
from shardwise.certify.result import Finding

MOST_LINES = 60
_MAIN = '''
def train(rank, world, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.manual_seed(@SEED)
    plain = build(VARIANT).double()
    torch.manual_seed(@SEED + @BROADCAST * rank)
    model = build(VARIANT).double()
    run = SimpleNamespace(model=model, layout=LAYOUT, data=DATA[rank], logits=logits)
    run.engine = parallelize(model, LAYOUT)
    run.model = run.engine if @REBUILDS else model
    adam = torch.optim.AdamW(plain.parameters(), **ADAM)
    run.optimizer = torch.optim.AdamW(run.model.parameters(), **ADAM)
    for step in range(@STEPS):
        ids, labels = batch(step, VARIANT)
        tokens = int((labels != IGNORED).sum())
        loss = F.cross_entropy(logits(plain, ids).flatten(0, 1), labels.flatten(), reduction="sum") / tokens
        loss.backward()
        index, count = run.data
        mine = slice(index * ROWS // count, (index + 1) * ROWS // count)
        backward(run, ids[mine], labels[mine], tokens)
        right, wrong = {n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None}, gradients(run)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        @TAIL
'''


def reproduction(engine: str, adapter: Adapter, model: str, variant: str, finding: Finding) -> str:
    """Source of the script, at most `MOST_LINES` lines; empty where the adapter's functions are too long, or are
    shardwise's own."""
    return ""
