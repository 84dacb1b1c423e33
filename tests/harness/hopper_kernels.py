"""Decode kernels compiled for Hopper, without a device. A program of its own: Triton either compiles or interprets.

    python -m harness.hopper_kernels

Calls `launch`'s functions with tensors on the CPU and compiles what they would start. Prints a line of JSON per kernel:
{"kernel": name, "int8": whether it has an int8 matrix, "conversions": of layouts in its loop, "ptx": words of its PTX}.
"""

from __future__ import annotations

import json
import re
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shardwise.ops.blockwise import ScoreRule
from shardwise.ops.cuda import kernels, launch
from shardwise.ops.cuda.launch import FusedOps, HeadShape, Stored, Tile
from shardwise.ops.paged import DecodeRows
from shardwise.ops.products import quantise

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int8: "*i8", torch.int64: "*i64"}
OPTIONS = ("num_warps", "num_stages", "launch_pdl")
PTX = ("griddepcontrol.wait", "griddepcontrol.launch_dependents", "cvt.rn.f32.s8", "cvt.rn.f32.s16", "prmt.b32")


class Kernel:
    def __init__(self, name: str) -> None:
        self.name, self.function = name, getattr(kernels, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Kernel:
        return self

    def __call__(self, *args: Any, **named: Any) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], list[list[Any]]] = {}
        names = self.function.arg_names
        for name, value in (dict(zip(names, args, strict=False)) | named).items():
            at = (names.index(name),)
            if isinstance(value, Tensor):
                signature[name] = TYPES[value.dtype]
            elif type(value) in (int, float) and name.islower():
                signature[name] = "i32" if isinstance(value, int) else "fp32"
            else:
                signature[name], constants[at] = "constexpr", value
            aligned = isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0 and name != "count")
            if aligned and signature[name] != "constexpr":
                attributes[at] = [["tt.divisibility", 16]]
        ordered = {name: signature[name] for name in names}
        compiled = triton.compile(ASTSource(self.function, ordered, constants, attributes), HOPPER, options)
        loops = re.findall(r"scf\.for.*?\n    }", compiled.asm["ttgir"], re.DOTALL)
        print(json.dumps({
            "kernel": self.name, "int8": "*i8" in signature.values(),
            "conversions": sum(loop.count("convert_layout") for loop in loops),
            "ptx": [word for word in PTX if word in compiled.asm["ptx"]],
        }))  # fmt: skip


class Kernels:
    def __getattr__(self, name: str) -> Kernel:
        return Kernel(name)


def main() -> None:
    launch.kernels = Kernels  # type: ignore[assignment]
    launch.runs_ptx = lambda device: True  # type: ignore[assignment]
    launch._may_depend = lambda device: True  # type: ignore[assignment]
    numbers, scales = quantise(torch.ones(256, 4096))
    matrices = Stored(numbers, scales, None), Stored(torch.ones(256, 4096, dtype=torch.bfloat16), None, None)
    x, gain = torch.ones(1, 4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)
    for matrix in matrices:
        launch.one_row(x, matrix, FusedOps(gain, 1e-5, 1), Tile(8, 2048, 8))
        launch.one_row(x, matrix, FusedOps(residual=x[:, :256]), Tile(4, 1024, 4))
        launch.few_rows(x.expand(8, -1), matrix, None, Tile(64, 128, 4, 4, 2))
    launch.normed(x, gain, 1e-5)
    launch.gated(x, 1)
    rows = DecodeRows(
        *[torch.zeros(1, 1, dtype=torch.int64)] * 3, None, *[torch.zeros(1, 1, dtype=torch.int64)] * 2,
        slots=torch.zeros(1, dtype=torch.int64), table=torch.zeros(1, 4, dtype=torch.int64),
        lengths=torch.ones(1, dtype=torch.int64),
    )  # fmt: skip
    shape, cache = HeadShape(8, 2, 128), torch.zeros(2, 2, 64, 128, dtype=torch.bfloat16)
    tables = torch.ones(1, 64, dtype=torch.bfloat16), torch.ones(1, 64, dtype=torch.bfloat16)
    heads = torch.zeros(1, 12, 128, dtype=torch.bfloat16)
    queries = launch.turn_and_store(heads, shape, tables, None, 0.0, cache, 16, rows)
    launch.attend(queries, shape, cache, 16, rows, ScoreRule(0.1, 0.0, 0))


if __name__ == "__main__":
    main()
