"""The MODEL argument and its `--set`, for every command that takes a model."""

from pathlib import Path
from typing import Any

from shardwise.cli.declare import CommandOptions, arg, word
from shardwise.errors import UserError
from shardwise.model import ModelConfig
from shardwise.model.blueprint import Blueprint
from shardwise.model.blueprint_file import configuration, read_blueprint
from shardwise.model.catalog import resolve
from shardwise.model.changes import change
from shardwise.model.hub import OFFLINE
from shardwise.model.lora import Lora
from shardwise.model.parameters import Model, blueprint
from shardwise.records import dataclass
from shardwise.runtime.job.output import say


@dataclass
class OfflineOptions(CommandOptions):
    """Access to the hub."""

    offline: bool = arg("do not fetch an unknown model's config.json from the hub", environment=OFFLINE)


@dataclass
class ModelOptions(OfflineOptions):
    """MODEL, which several commands need not have."""

    model: str | None = word(
        "a name from `list models` (llama-3-70b) or the Hugging Face Hub (Qwen/Qwen2.5-32B), a config.json, a folder "
        "with one, or a file that `trace` wrote",
        "MODEL",
    )
    set: tuple[str, ...] = arg("change fields of the model, such as layers=2", "FIELD=VALUE,...", ())


@dataclass
class LoraOptions(CommandOptions):
    """Adapters of a model."""

    lora: str | None = arg(
        "train only LoRA adapters: rank=16,alpha=32,targets=q_proj+v_proj (alpha: 2 x rank; targets: all linear "
        "layers), or a folder that peft wrote; base=int8, fp8 or nf4 stores frozen weights in 8 or 4 bits",
        "TEXT",
    )


def model_of(args: Any, runs: bool = False) -> ModelConfig:
    """The model that the arguments describe. runs: whether a run follows, which warns of what adapters' settings it
    leaves out. Raises `UserError`."""
    described = config_of_trace(args.model)
    if described is not None and described is not args.model:
        from shardwise.runtime.job.losses import by_class

        described = by_class(described)
    model = change(described or resolve(args.model, stored=getattr(args, "serve", False)), ",".join(args.set))
    if getattr(args, "lora", None) is None:
        return model
    if runs and (model.experts or model.latent_attention):  # which decoders here train whole
        from shardwise.runtime.job.losses import by_class

        model = by_class(model)
    if (folder := adapters_of(args)) is not None:
        from shardwise.checkpoint.huggingface import PeftAdapters

        adapters = PeftAdapters.open(folder, model.replace(lora=Lora(1, base=_folder(args.lora)[1])))
        if adapters.warning and not runs:
            say(f"shardwise: warning: {adapters.warning}")
        return adapters.model
    adapted = model.replace(lora=Lora.parse(args.lora))
    blueprint(adapted)  # raises for targets that it has not
    return adapted


def config_of_trace(model: str | ModelConfig) -> ModelConfig | None:
    """The configuration of a traced class of transformers, or the one given; None where the text names none."""
    if isinstance(model, ModelConfig):
        return model
    if (config := configuration(read_blueprint(model))) is None:
        return None
    from shardwise.model.huggingface import read_fields

    return read_fields(dict(config), Path(model).stem)


def adapters_of(args: Any) -> Path | None:
    """The folder of adapters that --lora names. Raises `UserError` for an empty one."""
    if args.lora == "":
        raise UserError("--lora is empty: give rank=16, or a folder that peft wrote")
    if args.lora is None or "=" in _folder(args.lora)[0]:
        return None
    return Path(_folder(args.lora)[0])


def _folder(text: str) -> tuple[str, str]:
    """(folder, format of the base) of `FOLDER` or `FOLDER,base=nf4`."""
    folder, _, base = text.partition(",base=")
    return folder, base


def subject_of(args: Any) -> Model:
    """The model that the arguments describe, or the traced module of a file, whose rows are the usual --seq. Raises
    `UserError`."""
    return traced_of(args) or model_of(args)


def traced_of(args: Any) -> Blueprint | None:
    """The traced module of MODEL; None where that is no file of one. Raises `UserError`."""
    traced = read_blueprint(args.model)
    if traced is None:
        return None
    if args.set:
        raise UserError(f"--set changes a configuration, and {args.model} is a traced module: trace a changed one")
    if other := next((name for name in ("lora", "isolate_documents") if getattr(args, name, None)), None):
        flag = f"--{other.replace('_', '-')}"
        raise UserError(f"{flag} changes what was traced, and {args.model} is a trace without it: leave {flag} out")
    if args.seq is None and traced.trace is not None:
        args.seq = traced.trace.seq
    return traced
