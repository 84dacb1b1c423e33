"""Options of a training step on a command line: its workload, and the software that runs it."""

from typing import Any

from shardwise.cli.declare import CommandOptions, arg, borrow, given
from shardwise.layout import Workload
from shardwise.layout.usual_workload import usual_workload
from shardwise.model.parameters import Model
from shardwise.predict.memory.engine_rows import engine_memory
from shardwise.predict.memory.engine_settings import EngineSettings
from shardwise.records import dataclass


@dataclass
class StepOptions(CommandOptions):
    """The workload of a training step."""

    borrowed = borrow((Workload, "seq batch isolate_documents optimizer"))


@dataclass
class EngineOptions(CommandOptions):
    """Another engine's software."""

    engine: str | None = arg("software whose memory and time are predicted (shardwise)", "NAME")
    precision: str | None = arg("that engine's products: fp8 or mxfp8", "TYPE")
    recompute_modules: str | None = arg("modules that it recomputes: layernorm+mlp", "A+B")
    recompute_layers: int | None = arg("blocks of a chunk that it recomputes", "N")


def engine_of(args: EngineOptions) -> dict[str, Any]:
    """The arguments of `predict.estimate` for `EngineOptions`, where they were given. Raises `UserError`."""
    if all(value is None for value in (args.engine, args.precision, args.recompute_modules, args.recompute_layers)):
        return {}
    from shardwise.predict.time.profiles import engine

    if args.engine is not None and engine_memory(args.engine) is None:
        engine(args.engine)
    modules = tuple((args.recompute_modules or "").replace("+", " ").split())
    return {
        "engine": args.engine,
        "settings": EngineSettings(args.precision or "", modules, args.recompute_layers or 0),
    }


def workload_of(args: Any, model: Model, multiple: int = 1) -> tuple[Workload, tuple[str, ...]]:
    """The workload of --seq, --batch and the flags of a training step, and a note for each number that was not given.

    multiple: a usual batch is a multiple of it. Raises `UserError`.
    """
    usual = usual_workload(model, args.seq, args.batch, multiple)
    return Workload(**given(args, Workload) | {"seq": usual.seq, "batch": usual.batch}), usual.notes
