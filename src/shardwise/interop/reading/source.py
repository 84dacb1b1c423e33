"""Inputs of `read`: tables of files, and commands of scripts, containers and Python programs."""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.data.extras import require
from shardwise.errors import UserError, near_path, os_errors
from shardwise.interop.reading.arguments import parse
from shardwise.interop.reading.recognized import engine_of, engines, names
from shardwise.interop.reading.shell import Command, commands

_TABLES = (".json", ".toml", ".yaml", ".yml")
_REPLICAS = ("replicas", "num_replicas", "replicaCount")
_HJSON = (
    (r"(?:#|//)[^\n]*|/\*.*?\*/", ""),
    (r"([A-Za-z_]\w*)(?=\s*:)", r'"\2"'),
    (r"(?<=[\w\"\]}])[ \t]*\n\s*(?=\")", ","),
    (r",(?=\s*[}\]])", ""),
)
"""What DeepSpeed's reader (hjson) allows beside JSON, outside texts -> JSON."""


_LAUNCHERS = {
    "torch.distributed.run": ("torchrun",),
    "torch.distributed.launch": ("torchrun",),
    "accelerate.commands.launch": ("accelerate", "launch"),
}
"""Module that starts programs -> its command."""


@dataclass(frozen=True)
class ConfigInput:
    """One input. table: keys and values; a command has its `words` in their place."""

    table: Mapping[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] | None = None
    folder: Path = Path()
    """Where files that it names are."""
    variables: Mapping[str, str] = field(default_factory=dict)
    engine: str = ""
    """Engine, where its kind tells."""
    open: tuple[str, ...] = ()
    """Choices that nothing here makes, a sentence each."""

    def file(self, name: str) -> Mapping[str, Any]:
        """Table of a file that this names. Raises `UserError` where it cannot be read."""
        # Such a path is the user's folder's, which is often above the file's.
        folders = (self.folder, *self.folder.absolute().parents)
        paths = (path for folder in folders for path in _meant(folder, name))
        return table_of(next(filter(_is_file, paths), self.folder / name))


def sources(config: Sequence[str]) -> list[ConfigInput]:
    """Inputs in a file, or in arguments. Raises `UserError` for what cannot be read."""
    if not config:
        raise UserError("nothing to explain: give a configuration file, or an engine's arguments")
    path = Path(config[0])
    if len(config) > 1:
        return [ConfigInput(words=_by_program(config))]
    if " " in config[0] and not _is_file(path):
        return _started(commands(config[0]), Path())
    if path.suffix in _TABLES:
        data = _documents(path)
        found = [source for one in data for source in _contained(one, path.parent)]
        return found or [ConfigInput(_one_table(path, data), folder=path.parent)]
    if not _is_file(path):
        raise UserError(
            f"no file {config[0]!r}{near_path(path)}; give a configuration file, or an engine's arguments as one text"
        )
    text = _text(path)
    if path.suffix == ".py":
        return _called(text, path)
    return _started(commands(text, sourced=partial(_sourced, path.parent)), path.parent)


def table_of(path: Path) -> Mapping[str, Any]:
    """The table of a JSON, TOML or YAML file. Raises `UserError` where it is none."""
    return _one_table(path, _documents(path))


def _started(found: Sequence[Command], folder: Path, *more: str) -> list[ConfigInput]:
    return [
        ConfigInput(words=_by_program(one.words), folder=folder, variables=one.variables, open=(*one.open, *more))
        for one in found
    ]


def _by_program(words: Sequence[str]) -> tuple[str, ...]:
    """Words with a launcher's program in place of its module (python -m torch.distributed.run)."""
    result: list[str] = []
    for word in words:
        if result[-1:] == ["-m"] and word in _LAUNCHERS:
            result[-1:] = _LAUNCHERS[word]
        else:
            result.append(word)
    return tuple(result)


def _meant(folder: Path, name: str) -> list[Path]:
    """What a name in a script in `folder` may be: a folder in a variable that nothing sets is taken to be that one."""
    parts = name.split("/")
    first = 1 if name.startswith(("$", "`")) else 0
    return [folder / "/".join(parts[start:]) for start in range(first, len(parts) if first else 1)]


def _sourced(folder: Path, name: str) -> str:
    """Text of a file that a script in `folder` sources; empty where it is not there."""
    return next((_text(path) for path in _meant(folder, name) if _is_file(path)), "")


def _is_file(path: Path) -> bool:
    # What is far too long for a path, or has a null byte, is an error to the system, and no file to us.
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _text(path: Path) -> str:
    with os_errors(f"read {path}", typed=path, damaged=f"cannot read {path}: it is no text"):
        return path.read_text(encoding="utf-8")


def _documents(path: Path) -> list[Any]:
    """Documents of a file; of JSON and TOML one."""
    text = _text(path)
    yaml = require("yaml", "export", f"reading {path.name}") if path.suffix not in (".json", ".toml") else None
    try:
        if path.suffix == ".json":
            return [_json(text)]
        if yaml is None:
            return [tomllib.loads(text)]
        try:
            return [one for one in yaml.safe_load_all(text) if one is not None]
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid {path.suffix.lstrip('.').upper()}: {error}") from None


def _one_table(path: Path, documents: Sequence[Any]) -> Mapping[str, Any]:
    data = documents[0] if len(documents) == 1 else None
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        raise UserError(f"{path} holds no table of keys and values")
    return data


def _json(text: str) -> Any:
    """JSON, or hjson as people write it for DeepSpeed. Raises `ValueError`, as DeepSpeed also for a key that is there
    twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise ValueError(f"{twice} is there twice")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=once)
    except ValueError as error:
        for pattern, instead in _HJSON:
            text = re.sub(rf'("(?:[^"\\\n]|\\.)*")|{pattern}', partial(_outside, instead), text, flags=re.DOTALL)
        try:
            return json.loads(text, object_pairs_hook=once)
        except ValueError:
            raise error from None


def _outside(instead: str, match: re.Match[str]) -> str:
    """A text as it is, and `instead` for what is outside texts."""
    return match[1] or match.expand(instead)


def _contained(node: Any, folder: Path, replicas: int = 1, depth: int = 0) -> Iterator[ConfigInput]:
    """Commands of containers (Kubernetes, compose), and the engine's arguments of a Ray Serve application."""
    if depth > 30 or not isinstance(node, Mapping | list):
        return
    if isinstance(node, list):
        for one in node:
            yield from _contained(one, folder, replicas, depth + 1)
        return
    replicas = next((node[key] for key in _REPLICAS if isinstance(node.get(key), int)), replicas)
    more = (f"{replicas} replicas of it are started; this is one",) if replicas > 1 else ()
    if isinstance(node.get("engine_kwargs"), Mapping) or isinstance(node.get("model_loading_config"), Mapping):
        model = node.get("model_loading_config") or {}
        named = {"model": model.get("model_source", model.get("model_id"))} if isinstance(model, Mapping) else {}
        yield ConfigInput(named | (node.get("engine_kwargs") or {}), folder=folder, engine="vllm", open=more)
    elif isinstance(chart := node.get("vllmConfig"), Mapping):
        # vLLM's Helm chart: tensorParallelSize is --tensor-parallel-size.
        table = {re.sub("([A-Z])", r"_\1", str(key)).lower(): value for key, value in chart.items()}
        flags = parse([str(word) for word in table.pop("extra_args", None) or []], {}, frozenset()).flags
        yield ConfigInput({"model": node.get("modelURL")} | table | flags, folder=folder, engine="vllm", open=more)
    elif isinstance(node.get("image"), str) and any(key in node for key in ("command", "args", "entrypoint")):
        parts = [node.get(key) or [] for key in ("entrypoint", "command", "args")]
        text = " ".join(part if isinstance(part, str) else shlex.join(map(str, part)) for part in parts)
        # Replicas that are one server's nodes are no servers.
        more = () if "--nnodes" in text else more
        yield from _started(commands(f"{shlex.quote(node['image'])} {text}"), folder, *more)
    else:
        for one in node.values():
            yield from _contained(one, folder, replicas, depth + 1)


def _called(text: str, path: Path) -> list[ConfigInput]:
    """Calls of engines in a Python program: LLM(model=..., tensor_parallel_size=4) is a table. A value that is no
    constant is "$" and its text. Without calls, dictionaries with an engine's keys. Raises `UserError` where there is
    none."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UserError(f"{path} is not valid Python") from None
    packages = {package: name for name, one in engines().items() for package in one.packages}
    calls = list(dict.fromkeys(call for one in engines().values() for call in one.calls))
    modules: dict[str, str] = {}
    values: dict[str, ast.expr | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            root = (getattr(node, "module", None) or node.names[0].name).partition(".")[0]
            modules |= {(alias.asname or alias.name): root for alias in node.names}
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            values[name] = None if name in values else node.value
    inputs: list[ConfigInput] = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        parts = ast.unparse(call.func).split(".")
        if (engine := packages.get(modules.get(parts[0], ""))) and parts[-1] in calls:
            table = {one.arg: _constant(one.value, values) for one in call.keywords if one.arg}
            if call.args and engines()[engine].serves:
                table["model"] = _constant(call.args[0], values)
            if parts[-1] == "LLMConfig":
                inputs += _contained(table, path.parent)
                continue
            spread = ("a dictionary of arguments (**) is not read",) * any(one.arg is None for one in call.keywords)
            inputs.append(ConfigInput(table, folder=path.parent, engine=engine, open=spread))
    if not inputs:
        tables = [_constant(value, values) for value in values.values() if isinstance(value, ast.Dict)]
        named = [one for one in tables if isinstance(one, dict) and all(isinstance(key, str) for key in one)]
        inputs = [ConfigInput(one, folder=path.parent, engine=name) for one in named if (name := engine_of(names(one)))]
    if not inputs:
        raise UserError(f"{path} is a Python program without a call that is known here: {', '.join(calls)}")
    return inputs


def _constant(node: ast.expr, values: Mapping[str, ast.expr | None]) -> Any:
    source = values.get(node.id) if isinstance(node, ast.Name) else None
    try:
        return ast.literal_eval(source or node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return f"${ast.unparse(node)}"
