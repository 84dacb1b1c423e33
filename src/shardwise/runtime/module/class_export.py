"""A checkpoint of a model by its class of transformers, as a Hugging Face folder: written by the class itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from shardwise.checkpoint import Checkpoint
from shardwise.checkpoint.huggingface.exporting import Exported, OutputFolder, companions, dtype_of
from shardwise.model import ModelConfig
from shardwise.runtime.module.adapters import merge_adapters
from shardwise.runtime.module.buffers import restore_buffers
from shardwise.runtime.module.class_model import ClassModel


def export_class(
    checkpoint: Checkpoint, model: ModelConfig, folder: Path, dtype: str | None = None, base: Path | None = None
) -> Exported:
    """Write weights and config.json by the class's `save_pretrained`, and the tokenizer beside them. The model is whole
    in memory. dtype: of floating-point tensors, as of `export`. base: the weights to which a checkpoint's adapters are
    added, in fp32. Raises `UserError` as `export`."""
    made, dtype = ClassModel.of(model), dtype_of(checkpoint, dtype)
    module, nonfinite = made() if base is None else made.pretrained(base).float(), []
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if base is not None and not parameter.requires_grad:  # as the folder has it
                continue
            values = torch.from_numpy(np.ascontiguousarray(checkpoint.read(f"model/{name}", dtype="float32")))
            parameter.copy_(values.view(parameter.shape))
            nonfinite += [] if bool(values.isfinite().all()) else [name]
        restore_buffers(module, checkpoint)
        merge_adapters(module)
    module.to(getattr(torch, dtype))
    with OutputFolder.new(folder) as output:
        module.save_pretrained(folder)  # type: ignore[operator]
        output.files += sorted(path.name for path in folder.iterdir())
        beside = companions(checkpoint)
        for name, contents in (beside.files() if beside else {}).items():
            if name not in output.files:
                output.write(name, [contents])
    tensors = module.state_dict()
    size = sum(parameter.nbytes for parameter in module.parameters())
    return Exported(folder, tuple(output.files), len(tensors), size, tuple(nonfinite), dtype)
