"""Check that a model, split, computes what it computes on one device.

Small local processes compare, in float64, the output of every submodule and the gradient of every parameter. The exit
code is 1 where they differ; the first module or parameter that does is named.

shardwise verify model.py:build --layout tp=2 --plan "*.*.up=column,*.*.down=row"

shardwise verify Qwen/Qwen3-Next-80B-A3B-Instruct --layout dp=2,tp=2,ep=2,zero=3

MODEL is built by its class of transformers, with random weights and small sizes of the same kind; tokens are random.
tp, ep and pp follow the plans that the class publishes, else suggested ones.

`build` is a function without arguments that returns the module. `example`, in the same file, is the inputs of one
forward pass, or a function that makes them: a dictionary of keyword arguments, a tuple or one tensor.
"""

from typing import Any

from shardwise.cli.declare import CommandOptions, arg, word
from shardwise.cli.models import OfflineOptions, config_of_trace
from shardwise.cli.output import print_result
from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.layout.modules import check_module_layout
from shardwise.model.catalog import resolve
from shardwise.records import dataclass
from shardwise.runtime.installed import require

SUGGEST = "suggest"
"""Value of --plan for the plan that is suggested."""


@dataclass
class SplitOptions(CommandOptions):
    """How a module is split."""

    plan: str | None = arg(
        "PATTERN=STYLE,... of tensor parallelism, or suggest for one that is found (the model's own)", "TEXT"
    )
    blocks: str | None = arg("classes or paths, by commas, of what is gathered alone", "NAMES")
    parts: str | None = arg("all modules in order of the forward pass, by commas, for pp (the model's own)", "PATTERNS")


@dataclass
class VerifyOptions(SplitOptions, OfflineOptions):
    model: str = word(
        "a config.json, a folder with one, a name of the hub or of `list models`; or FILE.py:NAME, the function that "
        "builds the module",
        "MODEL",
    )
    layout: str = arg("how it is split: dp=2,tp=2,zero=3", "TEXT")
    example: str | None = arg("of FILE.py: inputs of a forward pass, in the same file (example)", "NAME")
    full: bool = arg("of a configuration: build the sizes in it, not small ones")
    tolerance: float | None = arg("largest error as a share of a norm (1e-9; of classes with fp32 in them 1e-6)", "X")


def run(args: VerifyOptions) -> int:
    require("verify", "torch")
    from shardwise.runtime.module.suggest import suggest
    from shardwise.runtime.module.verify import verify

    request = _of_file(args) if names_code(args.model) else _of_configuration(args)
    if args.blocks:
        request["blocks"] = args.blocks.split(",")
    if args.plan:
        of = request["model"], request["example"]
        request["plan"] = suggest(*of, blocks=request.get("blocks")) if args.plan == SUGGEST else plan_of(args.plan)
    if args.parts:
        request["parts"] = args.parts.split(",")
    if args.tolerance is not None:
        request["tolerance"] = args.tolerance
    result = verify(**request)
    print_result(args, result.to_json(), [str(result)])
    return 0 if result else 1


def names_code(text: str) -> bool:
    """Whether MODEL is a function in a file, and no configuration."""
    return ".py:" in text or text.endswith(".py")


def _of_file(args: VerifyOptions) -> dict[str, Any]:
    """The arguments of `verify` for a function in a file."""
    from shardwise.runtime.module.verify import FromFile

    if args.full:
        raise UserError("--full is for a configuration: the function in the file decides about sizes")
    model = FromFile.parse(args.model)
    return {"model": model, "layout": args.layout, "example": FromFile(model.path, args.example or "example")}


def _of_configuration(args: VerifyOptions) -> dict[str, Any]:
    """The arguments of `verify` for a model by its class of transformers."""
    from shardwise.runtime.module.class_model import ClassModel

    if args.example is not None:
        raise UserError("--example is for FILE.py:NAME: the inputs of a configuration's model are random tokens")
    layout = Layout.parse(args.layout)
    check_module_layout(layout)
    model = ClassModel.of(config_of_trace(args.model) or resolve(args.model))
    return (model if args.full else model.small(layout)).verification(layout)


def plan_of(text: str) -> dict[str, str]:
    """The plan of `PATTERN=STYLE,...`. Raises `UserError`."""
    plan = {}
    for item in text.split(","):
        pattern, equals, style = (part.strip() for part in item.partition("="))
        if not (pattern and equals and style):
            raise UserError(f"--plan: {item!r} is not PATTERN=STYLE, such as blocks.*.up=column")
        plan[pattern] = style
    return plan
