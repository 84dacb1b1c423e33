"""`read`: from a file or arguments to the engine that they are for, and its reader."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.data.extras import require
from shardwise.errors import UserError
from shardwise.interop.reading import (
    accelerate,
    deepspeed,
    megatron,
    sglang,
    torchrun,
    torchtitan,
    transformers,
    vllm,
)
from shardwise.interop.reading.arguments import split
from shardwise.interop.reading.settings import Reading

ENGINES = ("vllm", "sglang", "deepspeed", "megatron", "torchtitan", "accelerate", "transformers", "torchrun")
_TITLES = {"megatron": "Megatron-LM", "torchrun": "torchrun", "sglang": "SGLang"}
"""Engines that are read from arguments alone."""

Data = Mapping[str, Any] | list[str]


@dataclass(frozen=True)
class _Source:
    """Input of a reader. data: a table, or the words of a command line. folder: where files that it names lie."""

    data: Data
    kind: str
    folder: Path


def read(config: Sequence[str], ranks: int | None = None, engine: str | None = None) -> Reading:
    """Contents of a configuration.

    config: one path of a file (.json, .toml, .yaml, a shell script or a text with arguments), or arguments, as one text
    or word by word. ranks: processes that it is for, where it does not say. engine: one of `ENGINES`; left out, it is
    recognised. Raises `UserError` for what cannot be read or recognised, and values that contradict each other.
    """
    if engine is not None and engine not in ENGINES:
        raise UserError(f"no engine {engine!r}; there are {', '.join(ENGINES)}")
    source = _source(config)
    engine = engine or _recognised(source)
    if isinstance(source.data, list) and engine in ("deepspeed", "accelerate", "transformers"):
        raise UserError(f"{engine} is read from its configuration file, not from arguments")
    if not isinstance(source.data, list) and engine in _TITLES:
        raise UserError(f"{_TITLES[engine]} is read from its arguments: give them, or the script that has them")
    if engine == "accelerate":
        assert not isinstance(source.data, list)
        return accelerate.read(source.data, ranks, lambda name: _table(source.folder / name))
    readers: dict[str, Callable[[Any, int | None], Reading]] = {
        "vllm": vllm.read,
        "deepspeed": deepspeed.read,
        "megatron": megatron.read,
        "torchtitan": torchtitan.read,
        "torchrun": torchrun.read,
        "sglang": sglang.read,
        "transformers": transformers.read,
    }
    return readers[engine](source.data, ranks)


def _source(config: Sequence[str]) -> _Source:
    if not config:
        raise UserError("nothing to explain: give a configuration file, or an engine's arguments")
    path = Path(config[0])
    if len(config) > 1 or (" " in config[0] and not _is_file(path)):
        words = [word for text in config for word in (split(text) if len(config) == 1 else [text])]
        return _Source(words, "arguments", Path())
    if path.suffix in (".json", ".toml", ".yaml", ".yml"):
        return _Source(_table(path), path.suffix.lstrip("."), path.parent)
    if not _is_file(path):
        raise UserError(f"no file {config[0]!r}; give a configuration file, or an engine's arguments as one text")
    return _Source(split(_text(path)), "arguments", path.parent)


def _is_file(path: Path) -> bool:
    # What is far too long for a path, or has a null byte, is an error to the system, and no file to us.
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"cannot read {path}: it is no text") from None


def _table(path: Path) -> Mapping[str, Any]:
    """The table of a JSON, TOML or YAML file. Raises `UserError` where it is none."""
    text = _text(path)
    yaml = require("yaml", "export", f"reading {path.name}") if path.suffix not in (".json", ".toml") else None
    try:
        if path.suffix == ".json":
            data = json.loads(text)
        elif yaml is None:
            data = tomllib.loads(text)
        else:
            try:
                data = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(" ".join(str(error).split())) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid {path.suffix.lstrip('.').upper()}: {error}") from None
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        raise UserError(f"{path} holds no table of keys and values")
    return data


def _recognised(source: _Source) -> str:
    """The engine that a configuration is for. Raises `UserError` where nothing tells."""
    data = source.data
    if isinstance(data, list):
        words = " ".join(data)
        signs = {
            "sglang": ("sglang", "--mem-fraction-static"),
            "vllm": ("vllm", "--tensor-parallel-size", "--gpu-memory-utilization", "--max-num-seqs"),
            "torchtitan": ("torchtitan", "--parallelism.", "--training."),
            "megatron": ("pretrain_", "--tensor-model-parallel-size", "--micro-batch-size", "--num-layers"),
            "torchrun": ("torchrun",),
        }
        found = next((name for name, marks in signs.items() if any(mark in words for mark in marks)), None)
    elif source.kind == "toml":
        found = "torchtitan"
    elif "distributed_type" in data:
        found = "accelerate"
    elif any(key in data for key in (*transformers.TABLES, "per_device_train_batch_size")):
        found = "transformers"
    elif any(key.replace("-", "_") in ("tensor_parallel_size", "max_model_len", "max_num_seqs") for key in data):
        found = "vllm"
    else:
        found = "deepspeed" if source.kind == "json" else None
    if found is None:
        raise UserError(f"no engine is recognised in this; say which with --engine: {', '.join(ENGINES)}")
    return found
