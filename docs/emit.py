"""The page of what each engine can express, made from the writers themselves.

python docs/emit.py   writes docs/emit.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from shardwise.errors import UserError
from shardwise.interop import WRITERS, EngineSpec, WriteRequest, nearest_layout
from shardwise.layout import Layout, Workload, check
from shardwise.layout.keys import CHOICES
from shardwise.model.catalog import get

PAGE = Path(__file__).with_name("emit.md")

VALUES = {
    "zero": ("0", "1", "2", "3"),
    "offload": ("none", "cpu", "cpu:0.5", "nvme"),
    "order": ("pp-dp-cp-tp", "dp-pp-cp-tp", "pp-tp-cp-dp"),
    **{key: CHOICES[key] for key in ("cpkind", "schedule", "recompute", "attention", "offload_params", "compile")},
    **{key: CHOICES[key] for key in ("precision", "grads")},
}
"""Keys of few values. Values of the others are bounded by numbers of ranks alone."""
BASES = (
    "dp=4", "dp=4,zero=3", "dp=4,zero=3,offload=cpu", "dp=4,zero=3,grads=fp32", "dp=2,pp=2", "dp=2,pp=2,virtual=2",
    "dp=2,pp=2,tp=2", "cp=2", "cp=2,zero=3,grads=fp32", "dp=4,precision=fp32",
)  # fmt: skip
"""Layouts in which each value is tried."""

HEAD = """\
# Layouts for other engines

`shardwise emit MODEL --layout LAYOUT --for ENGINE` writes a layout as another engine's configuration. `shardwise plan
... --emit ENGINE` does it for the best layout that the engine can express: it prices with the engine's profile, and
shows the step under every engine's. `shardwise explain FILE` reads the result back.

```sh
shardwise emit llama-3-8b --layout dp=8,tp=2,zero=1,sp --seq 8192 --batch 128 --for megatron --out train.sh
shardwise emit llama-3-8b --layout tp=4,dp=2 --prompt 1024 --output 256 --concurrency 64 --for vllm
shardwise emit llama-3-8b --layout dp=16,zero=3 --for fsdp2 --cluster 2x8xH100 --slurm
shardwise plan llama-3-8b --cluster 8xH100 --seq 4096 --batch 64 --emit deepspeed --out ds.json
```

Random layouts of every engine are read back with every key of the table (a test), [accepted by the engines' own
parsers](emit_parsers.md), and some were [trained](emit_runs.md). `python docs/emit.py` makes this page.

What an engine cannot express is an error that names the key, the version that was read, and the nearest layout that it
can. Where the engine has one value for a key, the file gets that value with a comment, such as `grads=fp32` for FSDP2.
Defaults that differ are explicit: gradient clipping (1.0), the type that gradients are summed in, dropout, padding of
the vocabulary, the batch in every unit that the engine counts. Learning rates, data and checkpoints are yours.
Without `--cluster` a node has 8 ranks; with it, a server whose weights do not fit is an error, and a training that does
not fit has a comment. `--slurm` writes the job that starts the engine on all nodes.

`ddp` and `fsdp2` are programs for `torchrun` that need torch, numpy and transformers alone: they load a Hugging Face
folder, read the tokens that `shardwise train` has prepared (`train.bin`, with its type in `corpus.json`) in the same
order, and have its AdamW and learning rate. On gloo, a test compares 12 layouts with `shardwise train --weights
FOLDER`: losses to 1e-6 in fp32, and the bytes of each kind of collective. DDP's bf16 gradients need NCCL. A tied
table is gathered once per micro-batch, and recomputation beside `tp` stops before a block's last all-reduce.

## Keys
An option expresses the key, all its values or those named. *code*: the file says in a comment what your code or
environment has to do. Empty: other values than the default are errors.
"""


def page() -> str:
    """The text of the page."""
    engines = [writer for writer in WRITERS.values() if writer.name != "torchrun"]
    titles = " | ".join(f"{writer.title}" for writer in engines)
    table = [f"| key | {titles} |", f"|---{'|---' * len(engines)}|"]
    for field in fields(Layout):
        cells = [_cell(writer, field.name) for writer in engines]
        if any(cells):
            table.append(f"| `{field.name}` | {' | '.join(cells)} |")
    without = ", ".join(f"`{field.name}`" for field in fields(Layout) if not any(_cell(w, field.name) for w in engines))
    return "\n".join(
        [
            HEAD,
            *table,
            "",
            f"`torchrun` starts this project's own training and expresses every layout that runs here. It alone has "
            f"{without}.",
            "",
            f"{' and '.join(writer.title for writer in engines if writer.serves)} serve, the others train. "
            f"`--engine-version` chooses one of several versions ({_versions(engines)}).",
            "",
        ]
    )


def _cell(writer: EngineSpec, key: str) -> str:
    if key in writer.left:
        return "*code*"
    option = writer.keys.get(key, "")
    values = f": {', '.join(_expressed(writer, key))}" if option and key in VALUES else ""
    return f"`{option}`{values}" if option else ""


def _expressed(writer: EngineSpec, key: str) -> list[str]:
    """Values of a key that the engine keeps in some layout."""
    model, work = get("llama-3-8b"), Workload() if writer.serves else Workload(4096, 64)
    kept = set()
    for base in BASES:
        for value in VALUES[key]:
            try:
                layout = Layout.parse(f"{base},{key}={value}")
                check(layout, model)
                if key == "cpkind" and layout.cp == 1:
                    continue  # It has no effect.
            except UserError:
                continue
            near = nearest_layout(writer.name, WriteRequest(model, layout, work))
            if near is not None and str(getattr(near, key)) == value and getattr(near, key) == getattr(layout, key):
                kept.add(value)
    return [value for value in VALUES[key] if value in kept]


def _versions(engines: Sequence[EngineSpec]) -> str:
    """Engines of several versions, with these."""
    several = {writer.title: ", ".join(filter(None, writer.versions)) for writer in engines}
    return "; ".join(f"{title}: {versions}" for title, versions in several.items() if versions)


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(__doc__)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
