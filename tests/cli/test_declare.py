"""A command from its declaration: parser, help, required values, limits and rules."""

from importlib import import_module
from pathlib import Path
from typing import Literal

import pytest

from harness.cases import from_table
from shardwise.cli import declare
from shardwise.cli.commands import COMMANDS
from shardwise.cli.declare import HIDDEN, CommandOptions, Parser, arg, borrow, word
from shardwise.cli.quantities import bytes_of
from shardwise.errors import UserError
from shardwise.layout import Workload
from shardwise.records import dataclass


@dataclass
class SharedOptions(CommandOptions):
    """Options of several commands."""

    title = "shared: by two commands"
    borrowed = borrow((Workload, "seq"))
    size: int | None = arg("memory; of one device", "SIZE", read=bytes_of)


@dataclass
class BakeOptions(SharedOptions):
    """A command."""

    file: Path = word("what is read", "FILE")
    more: tuple[str, ...] = arg("repeatable", "TEXT", ())
    kind: Literal["fast", "slow"] = arg("a choice", default="fast", excludes="count", missing="is for a kind: add {}?")
    count: int = arg("a number", "N", 3, positive=True, most=5000)
    share: float | None = arg("a part", "X", least=0, most=1, needs="size")
    room: int = arg("memory", "SIZE", "2KB", read=bytes_of)
    table: bool = arg("a table instead", uses="file")
    warm: bool = arg("warm", needs="kind")
    former: str | None = arg(HIDDEN)


def read(*argv: str) -> BakeOptions:
    parser = Parser(prog="bake")
    declare.add_arguments(parser, BakeOptions)
    options: BakeOptions = declare.options_of(BakeOptions, vars(parser.parse_args(argv)))
    return options


def test_values_have_the_types_of_their_fields() -> None:
    options = read(
        "a.txt", "--more", "x", "--more=y", "--count", "4", "--size", "1KiB", "--share", "0.5", "--seq", "8k"
    )
    assert (options.file, options.more, options.count, options.size) == (Path("a.txt"), ("x", "y"), 4, 1024)
    assert (options.share, options.seq, options.json) == (0.5, 8192, False)


def test_what_is_left_out_has_its_default_and_is_not_named() -> None:
    options = read("a.txt", "--count", "3")
    assert (options.kind, options.count, options.room, options.table) == ("fast", 3, 2000, False)
    assert (options.size, options.more, options.seq) == (None, (), None)
    assert (
        set(options.named) == {"file", "count"} and declare.changed(options, count=4).count == 4 and options.count == 3
    )


@from_table
def test_mistakes(words: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        read(*words.split())
    assert str(error.value) == message


def test_the_help_has_groups_defaults_and_what_an_option_needs() -> None:
    parser = Parser(prog="bake")
    declare.add_arguments(parser, BakeOptions)
    text = " ".join(parser.format_help().split())
    assert "shared: by two commands --size SIZE memory; of one device --seq N tokens per sequence" in text
    assert "--count N a number (3)" in text and "--share X with --size: a part" in text and "usage: bake" in text
    assert "--kind {fast,slow} a choice (fast)" in text and "--room SIZE memory (2KB)" in text
    assert "former" not in text and read("a", "--former", "b").former == "b"


def test_rules_of_all_commands_name_their_options() -> None:
    for name in COMMANDS:
        actions = [None, *getattr(import_module(f"shardwise.cli.{name}"), "ACTIONS", ())]
        for items in (declare.declared(declare.command_of(name, action)[0]) for action in actions):
            rules = " ".join(f"{i.option.needs} {i.option.excludes} {i.option.uses}" for i in items.values())
            assert set(rules.split()) <= items.keys(), name
