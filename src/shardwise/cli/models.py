"""The MODEL argument and its `--set`, for every command that takes a model."""

from __future__ import annotations

import argparse

from shardwise.model import ModelConfig
from shardwise.model.catalog import resolve
from shardwise.model.changes import change


def add_model(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """Add MODEL and --set."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?" if optional else None,
        help="a name of the catalog (llama-3-70b) or of Hugging Face's hub (Qwen/Qwen2.5-32B), a config.json, or the "
        "folder that holds one",
    )
    parser.add_argument(
        "--set", metavar="FIELD=VALUE,...", action="append", default=[], help="change the model, such as layers=2"
    )


def model_of(args: argparse.Namespace) -> ModelConfig:
    """The model that the arguments describe. Raises `UserError`."""
    return change(resolve(args.model), ",".join(args.set))
