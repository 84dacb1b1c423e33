"""Writing a checkpoint's weights as a Hugging Face folder that `transformers` loads, one band of a tensor at a time.

The tokenizer comes along, and what the weights that training started from had beside it: chat template, special tokens,
generation settings. Of a tokenizer that the run has trained, the end of text ends answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardwise.checkpoint.dtypes import finite, raw
from shardwise.checkpoint.huggingface.bands import ExportTensor, ReadsWeights, bands, export_tensors
from shardwise.checkpoint.huggingface.companions import GENERATION, TOKENIZER, Companions, base_dtype, companions_of
from shardwise.checkpoint.huggingface.output import Exported, OutputFolder
from shardwise.checkpoint.huggingface.weights import INDEX, SINGLE
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.resharding import model_of
from shardwise.checkpoint.writer import safetensors_header
from shardwise.errors import UserError
from shardwise.model.config import ModelConfig
from shardwise.model.huggingface import to_huggingface

DTYPES = ("bfloat16", "float32", "float16")
"""dtypes of exported weights."""
MAX_SHARD_BYTES = 5_000_000_000
"""Bytes of tensors in one file, as transformers writes them."""


def export(
    checkpoint: Checkpoint,
    folder: Path | str,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Exported:
    """Write a checkpoint's weights to a new folder: config.json, generation_config.json, and one safetensors file or
    several with an index.

    dtype: one of `DTYPES`, of every tensor but routers' biases; None for that of the weights that the run started from,
    else "bfloat16". max_shard_bytes: of tensors in one file; a
    larger tensor has one of its own. Raises `UserError` when no family of Hugging Face computes the model, the folder
    is in use or cannot be written, or the checkpoint is damaged; nothing of it is left.
    """
    model = model_of(checkpoint)
    if model.lora:
        raise UserError(f"{checkpoint.folder} has adapters alone: merge them into their weights (checkpoint merge)")
    return export_weights(
        checkpoint, model, Path(folder), dtype_of(checkpoint, dtype), _companions(checkpoint), max_shard_bytes
    )


def export_weights(
    source: ReadsWeights,
    model: ModelConfig,
    folder: Path,
    dtype: str,
    companions: Companions | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Exported:
    """`export` of the weights of `model` from any source. companions: what is written beside them. Raises `UserError`
    as `export`."""
    if dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if max_shard_bytes < 1:
        raise UserError(f"max_shard_bytes must be a positive integer, not {max_shard_bytes}")
    # Left out, they are the family's own in transformers: other tokens of this tokenizer.
    ids = companions.ids() if companions else {"bos_token_id": None, "eos_token_id": None}
    config = to_huggingface(model) | {"torch_dtype": dtype} | ids
    shards = _shards(export_tensors(model, dtype), max_shard_bytes)
    with OutputFolder.new(folder) as output:
        nonfinite = _write_shards(output, source, shards)
        files = companions.files() if companions else {}
        for name, contents in files.items():
            output.write(name, [contents])
        if GENERATION not in files:
            output.write_json(GENERATION, ids)
        output.write_json("config.json", config)
    return Exported(folder, tuple(output.files), sum(map(len, shards)), _nbytes(shards), nonfinite, dtype)


def dtype_of(checkpoint: Checkpoint, dtype: str | None) -> str:
    """dtype of an export: the requested one, else that of the weights that the run started from, else bfloat16."""
    started = isinstance(checkpoint.manifest.about.get("weights"), str)
    return dtype or (base_dtype(companions_of(checkpoint), DTYPES) if started else None) or DTYPES[0]


def _companions(checkpoint: Checkpoint) -> Companions | None:
    """The tokenizer with which the run's text was made into tokens, if it is still there, and what was beside it."""
    if (folder := companions_of(checkpoint)) is not None:
        return Companions(folder / TOKENIZER, folder)
    corpus = checkpoint.manifest.about.get("corpus")
    path = Path(corpus, "tokenizer.json") if isinstance(corpus, str) and corpus else None
    try:
        return Companions(path) if path and path.is_file() else None
    except (OSError, ValueError):
        return None


def _shards(tensors: list[ExportTensor], limit: int) -> list[list[ExportTensor]]:
    shards: list[list[ExportTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.spec.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.spec.nbytes
    return shards


def _nbytes(shards: list[list[ExportTensor]]) -> int:
    return sum(tensor.spec.nbytes for shard in shards for tensor in shard)


def _write_shards(output: OutputFolder, source: ReadsWeights, shards: list[list[ExportTensor]]) -> tuple[str, ...]:
    """Returns the tensors that are not finite."""
    count, nonfinite = len(shards), dict[str, None]()

    def contents(tensors: list[ExportTensor]) -> Iterator[bytes | memoryview]:
        yield safetensors_header({"format": "pt"}, [(tensor.name, tensor.spec) for tensor in tensors])
        for tensor in tensors:
            for band in bands(source, tensor):
                if not finite(band, tensor.spec.dtype):
                    nonfinite[tensor.name] = None
                yield raw(band)

    owners: dict[str, str] = {}
    for i, tensors in enumerate(shards):
        name = SINGLE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        output.write(name, contents(tensors))
        owners |= {tensor.name: name for tensor in tensors}
    if count > 1:
        content = {"metadata": {"total_size": _nbytes(shards)}, "weight_map": dict(sorted(owners.items()))}
        output.write_json(INDEX, content)
    return tuple(nonfinite)
