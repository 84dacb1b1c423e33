"""Check that a module of your own, split, computes what it computes on one device.

Small local processes compare, in float64, the output of every submodule and the gradient of every parameter. The exit
code is 1 where they differ; the first module or parameter that does is named.

shardwise verify model.py:build --layout dp=2,tp=2,zero=3 --plan "blocks.*.up=column,blocks.*.down=row"

`build` is a function without arguments that returns the module. `example`, in the same file, is the inputs of one
forward pass, or a function that makes them: a dictionary of keyword arguments, a tuple or one tensor.
"""

from __future__ import annotations

from shardwise.cli.declare import CommandOptions, arg, word
from shardwise.cli.output import print_result
from shardwise.errors import UserError
from shardwise.records import dataclass
from shardwise.runtime.installed import require


@dataclass
class ModuleOptions(CommandOptions):
    """A module in a file, and its split."""

    model: str = word("the function that builds the module", "FILE.py:NAME")
    example: str = arg("inputs of a forward pass, in the same file", "NAME", "example")
    plan: str | None = arg("PATTERN=STYLE,... of tensor parallelism (the model's own)", "TEXT")
    blocks: str | None = arg("classes or paths, by commas, of what is gathered alone", "NAMES")
    parts: str | None = arg("all modules in order of the forward pass, by commas, for pp (the model's own)", "PATTERNS")


@dataclass
class VerifyOptions(ModuleOptions):
    layout: str = arg("how it is split: dp=2,tp=2,zero=3", "TEXT")
    tolerance: float | None = arg("largest error as a share of a norm (1e-9)", "X")


def run(args: VerifyOptions) -> int:
    from shardwise.runtime.module.verify import TOLERANCE, FromFile, verify

    require("verify", "torch")
    model = FromFile.parse(args.model)
    result = verify(
        model,
        args.layout,
        FromFile(model.path, args.example),
        plan=plan_of(args.plan) if args.plan else None,
        blocks=args.blocks.split(",") if args.blocks else None,
        parts=args.parts.split(",") if args.parts else None,
        tolerance=TOLERANCE if args.tolerance is None else args.tolerance,
    )
    print_result(args, result.to_json(), [str(result)])
    return 0 if result else 1


def plan_of(text: str) -> dict[str, str]:
    """The plan of `PATTERN=STYLE,...`. Raises `UserError`."""
    plan = {}
    for item in text.split(","):
        pattern, equals, style = (part.strip() for part in item.partition("="))
        if not (pattern and equals and style):
            raise UserError(f"--plan: {item!r} is not PATTERN=STYLE, such as blocks.*.up=column")
        plan[pattern] = style
    return plan
