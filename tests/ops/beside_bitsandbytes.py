"""NF4 of bitsandbytes beside ours: `python tests/ops/beside_bitsandbytes.py` compares, with `--record` writes nf4.json.

Quantization is bitsandbytes' own in PyTorch (`backends/default`), as on a GPU. Its library for CPUs, which is left out
here, gives one of some hundred scales near a midpoint the neighbour's code.
"""

import hashlib
import json
import sys
from pathlib import Path
from unittest import mock

import torch

from shardwise.decoder.bases import FrozenBase, quantized
from shardwise.model.lora import NF4

RECORDED = Path(__file__).parent / "nf4.json"
SHAPE = 9, 1920


def matrix() -> torch.Tensor:
    """A matrix of 270 blocks, by arithmetic alone."""
    at = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float64)
    return (((at * 7919) % 10007 / 10007 - 0.5) * (1 + (at // 64 * 31) % 17)).view(SHAPE).float()


def main() -> None:
    with mock.patch("ctypes.cdll.LoadLibrary", side_effect=OSError):
        import bitsandbytes
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for shape, dtype in (((96, 192), torch.float32), ((300, 448), torch.bfloat16), ((2048, 1024), torch.float32)):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype) / 50
        theirs = dequantize_4bit(*quantize_4bit(weight, blocksize=64, quant_type=NF4, compress_statistics=True))
        ours = FrozenBase(NF4, shape[1]).dense(*quantized(NF4, weight.split(16), dtype), dtype)
        print(shape, dtype, f"largest difference {(ours.double() - theirs.double()).abs().max():.1e}")
    numbers, state = quantize_4bit(matrix(), blocksize=64, quant_type=NF4, compress_statistics=True)
    made = {
        "bitsandbytes": bitsandbytes.__version__,
        "numbers": hashlib.sha256(numbers.numpy().tobytes()).hexdigest(),
        "scales": state.absmax.numpy().tobytes().hex(),
        "mean": float(state.offset),
        "second": state.state2.absmax.tolist(),
        "dequantized": dequantize_4bit(numbers, state).flatten()[::577].tolist(),
    }
    if "--record" in sys.argv:
        RECORDED.write_text(json.dumps(made, indent=1) + "\n")
    print("recorded values equal" if json.loads(RECORDED.read_text()) == made else "recorded values differ")


if __name__ == "__main__":
    main()
