"""Weights in Hugging Face folders: read to start from (`open_weights`), written for others to use (`export`).

Families: llama, mistral, qwen2, qwen3, gpt2, gpt_neox. A parameter says itself where it is stored. Checked against
transformers 5.23, which the tests read and write with.
"""

from shardwise.checkpoint.huggingface.exporting import Exported, export
from shardwise.checkpoint.huggingface.weights import HuggingFaceWeights, open_weights

__all__ = ["Exported", "HuggingFaceWeights", "export", "open_weights"]
