"""Commands from declarations: the fields of a dataclass are a command's arguments, with their help, limits and rules.

`parser_of` makes the parser, from which help, completion and the site's pages come; `cli/mcp.py` makes tools of the
same fields. `read` reads and checks a command line. A field's type says how it is given: `bool` without a value,
`tuple` several times. A field that is neither `| None` nor has a default is required.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import MISSING, field, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, NoReturn, get_args, get_origin

from shardwise.cli.quantities import length_of
from shardwise.errors import UserError, did_you_mean, nearest
from shardwise.options import Option, kinds
from shardwise.records import dataclass

HIDDEN = argparse.SUPPRESS
"""Help text of an argument that no help shows."""
_ELSEWHERE = {"gpus": "cluster", "users": "concurrency", "clients": "concurrency", "context": "seq"}

Run = Callable[[Any], int]
"""Runs a command or an action with its options. Returns the exit code."""


@dataclass(frozen=True)
class Argument(Option):
    """An `Option` of a command line."""

    positional: bool = False
    nargs: str | None = None
    read: Callable[[str, str], Any] | None = None
    """(flag, text) -> value; also of a default that is a text. Raises `UserError`."""
    needs: str = ""
    """Options that must be given, too."""
    missing: str = ""
    """Message for an option that needs this one, behind its flag ({})."""
    excludes: str = ""
    """Options without effect beside this one."""
    uses: str = ""
    """In place of `excludes`: the only options with an effect beside this one."""
    idle: str = ""
    """Message for an option without effect beside this one, behind its flag."""
    environment: str = ""
    """Variable that the option sets to 1."""

    def _check_number(self, name: str, value: float) -> None:
        if self.positive and type(value) is int and value < 1:
            raise UserError(f"{name} must be a positive integer, not {value}")
        if self.positive or self.least is not None or self.most is not None:
            super()._check_number(name, value)


def arg(help: str = "", metavar: str | None = None, default: Any = None, **more: Any) -> Any:
    """A field that is an option. more: fields of `Argument`."""
    return field(default=default, metadata={"option": Argument(help, metavar, **more)})


def word(help: str = "", metavar: str | None = None, default: Any = None, **more: Any) -> Any:
    """A field that is given without a flag."""
    return arg(help, metavar, default, positional=True, **more)


def borrow(*lenders: tuple[type, str]) -> tuple[tuple[type, str], ...]:
    """Fields of configurations that are options of a command, too: (class, names), ..."""
    return lenders


@dataclass
class CommandOptions:
    """Options of every command and every action.

    The fields of a subclass are its arguments, those of its bases first, from the last base on. `title` puts what a
    class declares itself into a group.
    """

    json: bool = arg("print one JSON object instead of tables")
    traceback: bool = arg("show where an unexpected error came from")

    title: ClassVar[str] = ""
    borrowed: ClassVar[tuple[tuple[type, str], ...]] = ()
    named: ClassVar[tuple[str, ...]] = ()
    """Options that were given."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A borrowed field; None where it was not given."""


class Declared(NamedTuple):
    """An argument of a command."""

    owner: type
    """Class in whose group it is."""
    name: str
    kind: Any
    """Type of the field."""
    default: Any
    option: Argument
    flag: str


def declared(kind: type[CommandOptions]) -> dict[str, Declared]:
    """Name -> every argument, in the order of the help text; those of `CommandOptions` are the last."""
    arguments: dict[str, Declared] = {}
    for owner in [*reversed(kind.__mro__[: kind.__mro__.index(CommandOptions)]), CommandOptions]:
        declares = (kind, " ".join(vars(owner).get("__annotations__", ())))
        for lender, names in (declares, *vars(owner).get("borrowed", ())):
            items, hints = {item.name: item for item in fields(lender)}, kinds(lender)
            for name in (name for name in names.split() if name in items):
                option, default, dashed = items[name].metadata["option"], items[name].default, name.replace("_", "-")
                if not isinstance(option, Argument):
                    option = Argument(**vars(option))
                elif hints[name] is bool:
                    default = False
                elif get_origin(hints[name]) is Literal:
                    option = replace(option, choices=get_args(hints[name]))
                flag = option.flag or (f"--no-{dashed}" if default is True else f"--{dashed}")
                flag = (option.metavar or name.upper()) if option.positional else flag
                arguments.setdefault(name, Declared(owner, name, hints[name], default, option, flag))
    return arguments


def given(options: CommandOptions, kind: type) -> dict[str, Any]:
    """Field -> value of the options that a configuration declares and that were given."""
    values = {item.name: getattr(options, item.name, None) for item in fields(kind) if "option" in item.metadata}
    return {name: value for name, value in values.items() if value is not None}


def changed(options: Any, **values: Any) -> Any:
    """A copy of the options with these values."""
    copied: Any = object.__new__(type(options))
    vars(copied).update(vars(options) | values)
    return copied


def leave_out(options: CommandOptions, names: str, message: str) -> None:
    """Raise `UserError` with this message behind its flag for the first of these options that was given."""
    for name, item in declared(type(options)).items():
        if name in names.split() and name in options.named:
            raise UserError(f"{item.flag} {message}")


# -- Parsers


class _Formatter(argparse.HelpFormatter):
    """Keeps paragraphs apart, and commands as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return text
        return "\n\n".join(
            part if part.startswith("shardwise ") else super(_Formatter, self)._fill_text(part, width, indent)
            for part in text.strip().split("\n\n")
        )


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `UserError`s, and name the option that is near one that it does not have."""

    words: Sequence[str] = ()
    """What is parsed."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.words = args or ()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        options = [word.partition("=")[0] for word in self.words if word.startswith("--")]
        unknown = [option for option in options if option not in self._options()]
        if unknown and message.startswith("the following arguments are required"):
            message = f"unrecognized arguments: {unknown[0]}"  # the mistyped one is most often the one that is missing
        first = message.removeprefix("unrecognized arguments: ").split(maxsplit=1)[0].partition("=")[0]
        if message.startswith("unrecognized") and first.startswith("-"):
            # Without the dashes, which any two words share.
            word, names = first.lstrip("-"), [one.lstrip("-") for one in self._options() if one.startswith("--")]
            other = next(
                (to for name, to in _ELSEWHERE.items() if to in names and word and name.startswith(word)), word
            )
            word = other if not any(name.startswith(word) for name in names) else word
            begun = [name for name in names if (word[1:] and name.startswith(word)) or word.startswith(f"{name}-")]
            near = begun or nearest(word, names, cutoff=0.65)
            message += f"; did you mean --{near[0]}?" if near else ""
        elif message.startswith("unrecognized") and first[:1].isdigit() and "x" in first:
            message += f"; did you mean --cluster {first}?"
        raise UserError(f"{message} (see {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            hint = did_you_mean(str(value), names, "one of")
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {hint}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        # argparse would replace the message of a reader, whose `UserError` is a `ValueError`.
        if arg_string is argparse.SUPPRESS or not isinstance(action.type, partial):
            return arg_string if arg_string is argparse.SUPPRESS else super()._get_value(action, arg_string)
        return action.type(arg_string)

    def _options(self) -> list[str]:
        nested = (each for each in self._actions if isinstance(each, argparse._SubParsersAction))
        parsers = [self, *(parser for each in nested for parser in each.choices.values())]
        return sorted({option for parser in parsers for option in parser._option_string_actions})


def command_of(name: str, action: str | None = None) -> tuple[type[CommandOptions], Run]:
    """(options, what runs) of one of `COMMANDS`, or of one of its `ACTIONS`: name -> both, or a class with `run`."""
    module: Any = import_module(f"shardwise.cli.{name}")
    if action is not None:
        of: Any = module.ACTIONS[action]
        return of if isinstance(of, tuple) else (of, of.run)
    run: Any = getattr(module, "run", None)  # None: the parser requires an action
    return getattr(module, f"{name.capitalize()}Options", CommandOptions), run


def parser_of(name: str, lenient: bool = False) -> Parser:
    """The parser of one of `COMMANDS`. lenient: whether nothing is required."""
    from shardwise.cli.examples import EXAMPLES, broken

    module = import_module(f"shardwise.cli.{name}")
    examples = "\n\n".join(map(broken, EXAMPLES[name]))
    parser = Parser(
        prog=f"shardwise {name}", description=module.__doc__, epilog=f"examples:\n{examples}", allow_abbrev=False,
        formatter_class=_Formatter,
    )  # fmt: skip
    if actions := getattr(module, "ACTIONS", None):
        added_to = parser.add_subparsers(dest="action", metavar="ACTION", required=not hasattr(module, "run"))
        for action in actions:
            kind, _ = command_of(name, action)
            summary = summary_of(kind)
            add_arguments(added_to.add_parser(action, help=summary, description=summary, allow_abbrev=False), kind)
    add_arguments(parser, command_of(name)[0], lenient)
    return parser


def summary_of(kind: Any) -> str:
    """The docstring of an action as its help text."""
    text = " ".join(str(kind.__doc__).removesuffix(".").split())
    return text[:1].lower() + text[1:]


def add_arguments(parser: argparse.ArgumentParser, kind: type[CommandOptions], lenient: bool = False) -> None:
    """Add the arguments of `kind`. What a command line leaves out is not in the namespace."""
    groups: dict[type, argparse._ActionsContainer] = {}
    items = declared(kind)
    for item in items.values():
        if item.owner not in groups:
            title = vars(item.owner).get("title")
            groups[item.owner] = parser.add_argument_group(*title.split(": ")) if title else parser
        text = HIDDEN if item.option.help is HIDDEN else help_of(item, items) or None
        more = typed(item, lenient) | {"default": argparse.SUPPRESS, "help": text}
        if item.option.positional:
            groups[item.owner].add_argument(item.name, **more)
        else:
            groups[item.owner].add_argument(item.flag, dest=item.name, **more)


def help_of(item: Declared, items: dict[str, Declared]) -> str:
    """Help text of one of these arguments: the option that it needs, what it says, its default."""
    needed = [items[name].flag for name in item.option.needs.split()]
    return f"{f'with {needed[0]}: ' if needed else ''}{item.option.help}{_default_text(item)}"


def typed(item: Declared, lenient: bool = False) -> dict[str, Any]:
    """The arguments of argparse that follow from a field's type. lenient: whether nothing is required."""
    option, kind, several = item.option, item.kind, False
    if option.const or kind is bool:
        return {"action": "store_const", "const": option.const or not item.default}
    while get_origin(kind) in (UnionType, tuple):
        several |= get_origin(kind) is tuple
        kind = get_args(kind)[0]
    more: dict[str, Any] = {"choices": option.choices} if option.choices else {"metavar": option.metavar}
    plain = kind if kind in (int, float, Path) else str
    more["type"] = length_of if option.tokens else partial(option.read, item.flag) if option.read else plain
    required = is_required(item) and not lenient
    if option.nargs:
        return more | {"nargs": option.nargs}
    if option.positional:
        return more | {"nargs": ("+" if required else "*") if several else None if required else "?"}
    return more | ({"action": "append"} if several else {"required": required})


def is_required(item: Declared) -> bool:
    """Whether an argument must be given."""
    return item.default is None and NoneType not in get_args(item.kind)


def _default_text(item: Declared) -> str:
    """The default behind the help text, " (100)"."""
    option, value = item.option, item.default
    if option.shown is not None or option.const or isinstance(value, bool) or value in (None, MISSING, "", ()):
        return f" ({option.shown})" if option.shown else ""
    return f" ({value:g})" if isinstance(value, (int, float)) else f" ({value})"


# -- Checks


PROGRAMS = ("audit",)
"""Commands that take a program behind `--` in place of words of their own, as `program` of their options."""


def read(name: str, argv: list[str]) -> tuple[Any, Run]:
    """(options, what runs) of a command's line, with those of the file that --config names. Raises `UserError`."""
    program: dict[str, Any] = {}
    if name in PROGRAMS and "--" in argv:
        at = argv.index("--")
        argv, program = argv[:at], {"program": tuple(argv[at + 1 :])}
    if any(item.partition("=")[0] == "--config" for item in argv):
        from shardwise.cli.run_file import values_of

        values = values_of(name, argv)
    else:
        values = vars(parser_of(name).parse_args(argv))
    kind, run = command_of(name, values.pop("action", None))
    return options_of(kind, values | program), run


def options_of(kind: type[CommandOptions], values: dict[str, Any]) -> Any:
    """The options of these values, which were given. Raises `UserError` for one outside its limits, and for options
    that do not go together."""
    options: Any = object.__new__(kind)
    items, declares = declared(kind), {item.name for item in fields(kind)}
    for name, item in items.items():
        value = values.get(name, item.default if name in declares else None)
        if name not in values and item.option.read and isinstance(value, str):
            value = item.option.read(item.flag, value)
        vars(options)[name] = tuple(value) if isinstance(value, list) and not item.option.read else value
    vars(options).update({name: value for name, value in values.items() if name not in items}, named=tuple(values))
    stated = [item for name, item in items.items() if name in values]
    for item in stated:
        os.environ |= {item.option.environment: "1"} if item.option.environment else {}
        _check_idle(item, getattr(options, item.name), stated)
    for item in stated:
        if needed := [items[name] for name in item.option.needs.split() if name not in values]:
            flags = ", ".join(f"{other.flag} {other.option.metavar}" for other in needed)
            help = f": {needed[0].option.help.partition(';')[0]}" if len(needed) == 1 else ""
            message = needed[0].option.missing.replace("{}", item.flag) or f"needs {flags}{help}"
            raise UserError(f"{item.flag} {message}")
        item.option.check(item.flag, getattr(options, item.name))
    return options


def _check_idle(item: Declared, value: Any, stated: list[Declared]) -> None:
    """Raise `UserError` where one of the options given has no effect beside this one."""
    option, used = item.option, {item.name, *item.option.uses.split(), *declared(CommandOptions)}
    for other in stated:
        if other.name not in used if option.uses else other.name in option.excludes.split():
            beside = f"{item.flag} {value}" if option.choices else item.flag
            raise UserError(f"{other.flag} {option.idle or f'does nothing with {beside}: leave it out'}")
