"""This project's own training, or ranks of a script that decides by itself how it is split."""

from typing import Any

from shardwise.errors import UserError
from shardwise.interop.reading.arguments import dashed, launched_ranks, parse
from shardwise.interop.reading.engine_reader import values_of
from shardwise.interop.reading.fields import ConfigFields, Known
from shardwise.interop.reading.settings import Reading
from shardwise.interop.spec import spec
from shardwise.layout import Layout, Workload, check_runnable
from shardwise.layout.optimizers import DEFAULT, OPTIMIZERS
from shardwise.model import ModelConfig


def read(words: list[str], ranks: int | None, *_: Any) -> Reading:
    """Layout of `torchrun ... -m shardwise train MODEL --layout TEXT ...`, of another program plain data parallel.

    Raises `UserError` where nothing says how many processes there are, and for a layout that needs another number.
    """
    engine = spec("torchrun")
    flags = parse(words, {}, engine.standing_alone).flags
    launched = launched_ranks(flags) or ranks
    if launched is None:
        raise UserError("torchrun's arguments do not say how many ranks there are: give --nproc-per-node, or --ranks N")
    fields = ConfigFields(flags, Known(engine.known().keys | {"data", "out"}, ("",)), shown=dashed)
    if "shardwise" not in words or "train" not in words:
        fields.say("doubts", "how its ranks split the model is the program's: counted as plain data parallel")
        return fields.reading("torchrun", Layout(dp=launched))
    names = values_of(engine, fields)
    layout = Layout.parse(names["layout"])
    if layout.ranks != launched:
        raise UserError(f"--layout {layout} needs {layout.ranks} ranks, but torchrun starts {launched}")
    optimizer = fields.word("optimizer", DEFAULT, tuple(OPTIMIZERS))
    rest = words[words.index("train") + 1 :]
    said = {key: names[key] or None for key in ("seq", "batch")}
    said["model"] = rest[0] if rest and not rest[0].startswith("-") else None
    return fields.reading("torchrun", layout, optimizer=None if optimizer == DEFAULT else optimizer, **said)


def check_runs(layout: Layout, model: ModelConfig, work: Workload) -> None:
    """Raise `UserError` for a layout that does not run here."""
    check_runnable(layout, model, work)
