"""Weights in Hugging Face folders: read to start from (`open_weights`), written for others to use (`export`).

A parameter says itself where it is stored, so any family of `model/families/` with names can be read and written. The
weights of experts are one tensor per expert in these files, or one for all experts of a block. Checked against
transformers 5.23, which the tests read and write with.
"""

from shardwise.checkpoint.huggingface.exporting import Exported, dtype_of, export
from shardwise.checkpoint.huggingface.peft import PeftAdapters, base_of, export_adapters, merge, merge_checkpoint
from shardwise.checkpoint.huggingface.weights import HuggingFaceWeights, open_weights

__all__ = [
    "Exported",
    "HuggingFaceWeights",
    "PeftAdapters",
    "base_of",
    "dtype_of",
    "export",
    "export_adapters",
    "merge",
    "merge_checkpoint",
    "open_weights",
]
