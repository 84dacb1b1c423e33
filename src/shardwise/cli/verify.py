"""Check that a module of your own, split, computes what it computes on one device.

Small local processes compare, in float64, the output of every submodule and the gradient of every parameter. The exit
code is 1 where they differ; the first module or parameter that does is named.

shardwise verify model.py:build --layout dp=2,tp=2,zero=3 --plan "blocks.*.up=column,blocks.*.down=row"

`build` is a function without arguments that returns the module. `example`, in the same file, is the inputs of one
forward pass, or a function that makes them: a dictionary of keyword arguments, a tuple or one tensor.
"""

from __future__ import annotations

import argparse

from shardwise.cli.output import print_json, show
from shardwise.errors import UserError
from shardwise.runtime.installed import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="FILE.py:NAME", help="the function that builds the module")
    parser.add_argument("--layout", required=True, metavar="TEXT", help="how it is split: dp=2,tp=2,zero=3")
    parser.add_argument("--example", default="example", metavar="NAME", help="inputs, in the same file (example)")
    parser.add_argument("--plan", metavar="TEXT", help="PATTERN=STYLE,... of tensor parallelism (the model's own)")
    parser.add_argument("--blocks", metavar="NAMES", help="classes or paths, by commas, of what is gathered alone")
    parser.add_argument("--parts", metavar="PATTERNS", help="all modules in order, by commas, for pp (the model's own)")
    parser.add_argument("--tolerance", type=float, metavar="X", help="largest error as a share of a norm (1e-9)")


def run(args: argparse.Namespace) -> int:
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
    if args.json:
        print_json(result.to_json())
    else:
        show(str(result))
    return 0 if result else 1


def plan_of(text: str) -> dict[str, str]:
    """The plan of `PATTERN=STYLE,...`. Raises `UserError`."""
    plan = {}
    for word in text.split(","):
        pattern, equals, style = (part.strip() for part in word.partition("="))
        if not (pattern and equals and style):
            raise UserError(f"--plan: {word!r} is not PATTERN=STYLE, such as blocks.*.up=column")
        plan[pattern] = style
    return plan
