"""Files of `shardwise emit` in the engines' own parsers, in an environment that has the engine: by hand, and three of
them by `make parsers`.

PYTHONPATH=src:tests python docs/emit_parsers.py ENGINE[:VERSION] ...   prints a row of docs/emit_parsers.md for each

The exit code is 1 where a parser rejects a file, or accepts a broken one.

Every parser gets `COUNT` random layouts, brought to the nearest that the engine expresses, and as many files with an
unknown option. megatron needs its source on PYTHONPATH; nothing needs a GPU.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
import types
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib import import_module, metadata
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from harness.emitted import requests
from shardwise.interop import EngineFile, write
from shardwise.layout import Layout

COUNT = 60
SEED = "parsers"
WRONG = "shardwise_wrong"


def words_of(text: str, program: str) -> list[str]:
    """Arguments of a script's program, without the user's own."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    return [word for word in words[words.index(program) + 1 :] if word != "$@"]


def deepspeed(text: str, layout: Layout) -> None:
    os.environ |= {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    config = import_module("deepspeed.runtime.config")
    config.dist.get_rank = lambda *_: 0
    config.dist.get_world_size = lambda *_: layout.ranks
    # Tensor and pipeline parallelism give DeepSpeed their groups as an object.
    groups = types.SimpleNamespace(get_data_parallel_world_size=lambda: layout.dp)
    parsed = config.DeepSpeedConfig(json.loads(text), mpu=groups if layout.tp * layout.pp > 1 else None)
    assert parsed.train_micro_batch_size_per_gpu == layout.micro and parsed.zero_optimization_stage == layout.zero


def accelerate(text: str, layout: Layout) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.yaml"
        path.write_text(text)
        config = import_module("accelerate.commands.config.config_args").load_config_from_file(str(path))
    assert config.num_processes == layout.ranks
    sizes = getattr(config, "parallelism_config", None) or {}
    if sizes:
        bare = {key.removeprefix("parallelism_config_"): value for key, value in sizes.items()}
        bare = {key: value for key, value in bare.items() if key.endswith(("_size", "_backend"))}
        assert import_module("accelerate").ParallelismConfig(**bare).total_size == layout.ranks


def transformers(text: str, layout: Layout) -> None:
    data = json.loads(text)
    sizes = import_module("transformers.distributed").DistributedConfig(**data["distributed_config"])
    assert sizes.tp_size * sizes.fsdp_size * sizes.dp_replicate_size == layout.ranks
    arguments = import_module("transformers").TrainingArguments
    found = arguments(output_dir=tempfile.gettempdir(), use_cpu=True, **data["training_arguments"])
    assert found.per_device_train_batch_size == layout.micro


def torchrun(text: str, layout: Layout) -> None:
    parsed = import_module("torch.distributed.run").get_args_parser().parse_args(words_of(text, "torchrun"))
    assert int(parsed.nnodes.partition(":")[0]) * int(parsed.nproc_per_node) == layout.ranks and parsed.module
    from shardwise.cli.declare import read

    read("train", parsed.training_script_args[1:])


def torchtitan(text: str, layout: Layout) -> None:
    manager = import_module("torchtitan.config").ConfigManager()
    words = words_of(text, "torchtitan.train")
    config = manager.parse_args(words)
    assert config.parallelism.tensor_parallel_degree == layout.tp
    assert config.parallelism.pipeline_parallel_degree == layout.pp


def megatron(text: str, layout: Layout) -> None:
    torch, typing = import_module("torch"), import_module("typing")
    vars(typing).setdefault("override", lambda method: method)  # Python 3.12 brought it.
    device = types.SimpleNamespace(major=9, minor=0)
    environment = {"WORLD_SIZE": f"{layout.ranks}", "RANK": "0"}
    if "CUDA_DEVICE_MAX_CONNECTIONS=1" in text:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    else:
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    with (
        patch.dict(os.environ, environment),
        patch.object(torch.cuda, "get_device_properties", lambda *_: device),
        patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        patch.object(torch.cuda, "device_count", lambda: 8),
        patch.object(sys, "argv", ["pretrain_gpt.py", *words_of(text, "pretrain_gpt.py")]),
    ):
        arguments = import_module("megatron.training.arguments")
        found = arguments.validate_args(arguments.parse_args())
    assert found.data_parallel_size == layout.dp and found.context_parallel_size == layout.cp


def sglang(text: str, layout: Layout) -> None:
    parse = import_module("sglang.srt.server_args")
    parser = import_module("argparse").ArgumentParser()
    parse.ServerArgs.add_cli_args(parser)
    found = parser.parse_args([word.replace("$NODE_RANK", "0") for word in words_of(text, "sglang.launch_server")])
    assert found.tp_size == layout.tp and found.pp_size == layout.pp and found.dp_size == layout.dp


def vllm(text: str, layout: Layout) -> None:
    platforms: Any = import_module("vllm.platforms")
    platforms.current_platform = import_module("vllm.platforms.cpu").CpuPlatform()
    arguments = import_module("vllm.engine.arg_utils").EngineArgs
    parser = arguments.add_cli_args(import_module("vllm.utils.argparse_utils").FlexibleArgumentParser())
    found = arguments.from_cli_args(parser.parse_args(words_of(text, "serve")[1:]))
    assert found.tensor_parallel_size == layout.tp and found.pipeline_parallel_size == layout.pp
    assert found.data_parallel_size == layout.dp and found.enable_expert_parallel == (layout.ep > 1)


PARSERS: dict[str, Callable[[str, Layout], None]] = {
    parser.__name__: parser
    for parser in (deepspeed, accelerate, transformers, torchrun, torchtitan, megatron, vllm, sglang)
}
DISTRIBUTIONS = {"torchrun": "torch", "megatron": ""}


def broken(file: EngineFile) -> str:
    """The file with an option that its engine does not have."""
    if file.file.endswith(".json"):
        data = json.loads(file.text)
        table = "zero_optimization" if "zero_optimization" in data else "distributed_config"
        return json.dumps(data | {table: data[table] | {WRONG: 1}})
    if file.file.endswith(".yaml"):
        return f"{file.text}{WRONG}: 1\n"
    head, mark, rest = file.text.partition('"$@"')
    if not mark:
        return f"{file.text.rstrip()} --{WRONG} 1\n"
    return f"{head}{mark} --{WRONG} 1{rest}"


def attempt(engine: str, text: str, layout: Layout) -> str:
    """Why a parser rejects a text; empty where it does not."""
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
            PARSERS[engine](text, layout)
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1] if said.getvalue().strip() else "exit"
    except ImportError:
        raise  # The environment lacks a package: no verdict.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def row(engine: str, version: str) -> dict[str, Any]:
    """Counts of accepted files and rejected broken ones, and the reason of each wrong answer. version: of the files;
    empty for the newest."""
    accepted = rejected = 0
    wrong: list[str] = []
    for _, request in requests(engine, COUNT, SEED):
        file = write(engine, replace(request, version=version))
        reason = attempt(engine, file.text, file.layout)
        accepted += not reason
        wrong += [f"{file.layout} ({request.model.name}): {reason}"] if reason else []
        # Rejecting what is rejected anyway tells nothing.
        rejected += not reason and bool(attempt(engine, broken(file), file.layout))
    name = "" if version else DISTRIBUTIONS.get(engine, engine)
    version = metadata.version(name) if name else version or "main"
    return {"engine": engine, "version": version, "accepted": accepted, "rejected": rejected, "wrong": wrong}


if __name__ == "__main__":
    if not sys.argv[1:] or {word.partition(":")[0] for word in sys.argv[1:]} - set(PARSERS):
        sys.exit(__doc__)
    failed = False
    for word in sys.argv[1:]:
        engine, _, asked = word.partition(":")
        one = row(engine, asked)
        counts = (f"{one[name]} of {COUNT}" for name in ("accepted", "rejected"))
        print(f"| {engine} {one['version']} |", " | ".join(counts), "|", flush=True)
        print(*one["wrong"][:8], sep="\n", end="\n" * bool(one["wrong"]), file=sys.stderr)
        failed |= not one["accepted"] == one["rejected"] == COUNT
    sys.exit(failed)
