"""A torchrun line: this project's own training, or ranks of a script that decides by itself how it is split."""

from __future__ import annotations

from shardwise.errors import UserError
from shardwise.interop.reading.arguments import dashed, launched_ranks, parse
from shardwise.interop.reading.fields import ConfigFields
from shardwise.interop.reading.known_keys import Known, known
from shardwise.interop.reading.settings import Reading
from shardwise.layout import Layout
from shardwise.layout.optimizers import DEFAULT, OPTIMIZERS

ALONE = frozenset({"standalone", "no_python", "isolate_documents"})


def read(words: list[str], ranks: int | None) -> Reading:
    """Layout of `torchrun ... -m shardwise train MODEL --layout TEXT ...`, of another program plain data parallel.

    Raises `UserError` where nothing says how many processes there are, and for a layout that needs another number.
    """
    arguments = parse(words, {}, ALONE)
    launched = launched_ranks(arguments.flags) or ranks
    if launched is None:
        raise UserError("torchrun's arguments do not say how many ranks there are: give --nproc-per-node, or --ranks N")
    if "shardwise" not in words or "train" not in words:
        fields = ConfigFields(arguments.flags, Known(known("torchrun").keys, ("",)), shown=dashed)
        fields.unsettle("how its ranks split the model is the program's: counted as plain data parallel")
        return fields.reading("torchrun", Layout(dp=launched))
    fields = ConfigFields(arguments.flags, Known(known("torchrun").keys | {"data", "out"}, ("",)), shown=dashed)
    layout = Layout.parse(fields.word("layout"))
    if layout.ranks != launched:
        raise UserError(f"--layout {layout} needs {layout.ranks} ranks, but torchrun starts {launched}")
    optimizer = fields.word("optimizer", DEFAULT, tuple(OPTIMIZERS))
    rest = words[words.index("train") + 1 :]
    model = rest[0] if rest and not rest[0].startswith("-") else None
    return fields.reading(
        "torchrun",
        layout,
        seq=fields.integer("seq") or None,
        batch=fields.integer("batch") or None,
        optimizer=None if optimizer == DEFAULT else optimizer,
        model=model,
    )
