"""The decoders in plain PyTorch. This room says what is computed, and nothing about who computes it."""

from shardwise.decoder.decoder import Decoder
from shardwise.decoder.modules import Batch, causal_mask

__all__ = ["Batch", "Decoder", "causal_mask"]
