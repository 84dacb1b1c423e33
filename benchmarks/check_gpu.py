"""Does shardwise compute correctly on the CUDA devices here? Losses, memory, resume and generation, against the CPU.

    python benchmarks/check_gpu.py [--json FILE] [--tiny]      or: make check-gpu

Needs `PYTHONPATH=src` and no network: torch, numpy, rich and safetensors. A few minutes on one device: most of a check
is the start of its processes, so that some run side by side. Each check is a row: ok, failed, or skipped with the
reason. Layouts of two and four ranks run over NCCL, or staged through host memory where there are fewer devices, and
their ledgers are compared with the prediction. The exit code is 1 if a check failed.

Without a CUDA device, or with --tiny, the same checks run in a short form on the CPU, which shows that the script
works. No tokenizer is needed: the text is a corpus of random tokens that repeat.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise import api
from shardwise.decoder.attention import Rope
from shardwise.decoder.modules import RMSNorm
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.transport_buffers import STAGED
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.ops.context import OpContext, Options
from shardwise.ops.cuda.cross_entropy import BLOCKS, ONE_PASS, LossForm
from shardwise.ops.table import lower
from shardwise.report import compare
from shardwise.runtime.job.config import LaunchConfig, OptimizerConfig, TrainConfig
from shardwise.runtime.job.launch import RunFailed
from shardwise.runtime.tensor.loss import summed_cross_entropy
from shardwise.serving.job import ServingJob
from shardwise.serving.messages import Finished, Sampling, Token
from shardwise.serving.service import Service

VOCAB, SEQ, BATCH = 512, 64, 8
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 5e-3}
"""Largest relative difference of a loss between devices, by precision. bf16: kernels round in another order."""
PEAK = 0.03
"""Largest relative error of the predicted peak of memory."""
MODELS = ("tiny-llama", "tiny-gpt", "tiny-gemma2", "tiny-olmo2", "tiny-mixtral", "tiny-qwen3-moe", "tiny-deepseek")
LAYOUTS = (
    ("tiny-llama", "dp=2"), ("tiny-llama", "dp=2,zero=3"), ("tiny-llama", "tp=2,sp"), ("tiny-llama", "pp=2"),
    ("tiny-llama", "cp=2"), ("tiny-mixtral", "dp=2,ep=2"), ("tiny-llama", "dp=2,tp=2,zero=3"),
    ("tiny-llama", "tp=2,pp=2,schedule=interleaved,virtual=2"),
)  # fmt: skip
DECODED = (
    ("tiny-llama", "fp32", "none"), ("tiny-llama", "bf16", "none"), ("tiny-llama", "bf16", "int8"),
    ("tiny-gpt", "fp32", "none"), ("tiny-gemma2", "fp32", "none"), ("tiny-olmo2", "fp32", "none"),
)  # fmt: skip
DECODE_TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 5e-2}
"""Largest difference of a logit between forms of a decode step, in parts of the largest logit."""
FAILURES = (UserError, RunFailed, AssertionError, RuntimeError, OSError)


class Skip(Exception):
    """Reason why a check is not possible here."""


@dataclass
class Row:
    """One check's outcome. seconds: of the whole check."""

    name: str
    outcome: str
    detail: str
    seconds: float


def model_of(name: str) -> ModelConfig:
    """A model of the catalog with a small vocabulary and without dropout, whose masks differ between devices."""
    return replace(get(name), vocab=VOCAB, dropout=0.0, attention_dropout=0.0)


def write_corpus(folder: Path) -> Path:
    """A prepared corpus of tokens that often repeat what came 8 tokens before."""
    random = np.random.default_rng(0)
    counts = {"train": 60_000, "validation": 6_000}
    folder.mkdir(parents=True)
    for split, count in counts.items():
        tokens = random.integers(1, VOCAB, count, dtype=np.uint16)
        for i in np.flatnonzero(random.random(count) < 0.7):
            tokens[i] = tokens[max(i - 8, 0)]
        tokens.astype("<u2").tofile(folder / f"{split}.bin")
    about = {
        "format": 1, "source": "random", "fingerprint": "random", "dtype": "<u2", "eos": 0, "vocab_size": VOCAB,
        "text_bytes": 4 * sum(counts.values()), "token_counts": counts, "document_counts": dict.fromkeys(counts, 1),
    }  # fmt: skip
    (folder / "corpus.json").write_text(json.dumps(about))
    return folder


class Checks:
    """Checks on one kind of device. tiny: the short form."""

    def __init__(self, folder: Path, device: str, tiny: bool) -> None:
        self.folder, self.device, self.tiny = folder, device, tiny
        self.corpus = write_corpus(folder / "corpora" / "random")
        self._runs = itertools.count(1)
        self._kept: dict[tuple[str, str], Future[list[float]]] = {}
        self._keeping = threading.Lock()
        self._here = threading.Lock()
        """For checks that compute in this process: a capture of a CUDA graph forbids other work."""

    def config(self, name: str, layout: str, device: str, **options: object) -> TrainConfig:
        """A short training run with a directory of its own."""
        return TrainConfig(
            model=model_of(name), layout=Layout.parse(layout), workload=Workload(seq=SEQ, batch=BATCH), data="random",
            out=str(self.folder / f"run-{next(self._runs)}"), corpus=str(self.corpus), device=device, tensorboard=False,
            **{"steps": 4, "optimizer": OptimizerConfig(lr=1e-3), "validate_batches": 1} | options,  # type: ignore[arg-type]
        )  # fmt: skip

    def train(self, config: TrainConfig) -> api.TrainResult:
        with open(os.devnull, "w") as output:
            return api.run(config, LaunchConfig(progress=lambda line: None, rank0_stdout=output.fileno()))

    def on_cpu(self, name: str, layout: str) -> list[float]:
        """Losses of the same steps on one CPU rank, computed for the first check that asks."""
        with self._keeping:
            first = (name, layout) not in self._kept
            found = self._kept.setdefault((name, layout), Future())
        if first:
            try:
                found.set_result(self.train(self.config(name, layout, "cpu")).losses)
            except FAILURES as error:
                found.set_exception(error)
        return found.result()

    def losses(self, name: str, layout: str, precision: str) -> str:
        """Losses on the device equal the CPU's."""
        text = f"{layout},precision={precision}".removeprefix(",")
        found = self.train(self.config(name, text, self.device)).losses
        reference = f"precision={precision}"
        return close(found, self.on_cpu(name, reference), TOLERANCE[precision])

    def memory(self, layout: str) -> str:
        """Ledger and peak of memory as predicted."""
        config = self.config("tiny-llama", layout, self.device, report=True)
        if not self.tiny:
            wide = replace(config.model, hidden=512, heads=8, kv_heads=8, ffn=1376, head_dim=64)
            config = replace(config, model=wide, workload=Workload(seq=256, batch=BATCH))
        result = self.train(config)
        outcome = compare(result.predicted, result.report)
        assert outcome.equal_ledger, f"the ledger differs: {outcome.differences[:1]}"
        assert abs(outcome.peak_error) <= PEAK, f"the predicted peak is off by {outcome.peak_error:.1%}"
        return f"ledger equal, predicted peak off by {outcome.peak_error:.2%}"

    def resume(self, first: str, second: str) -> str:
        """A run that is saved on one device resumes on the other with the losses of one run."""
        straight = self.train(self.config("tiny-llama", "precision=fp32", first, steps=6)).losses
        begun = self.train(self.config("tiny-llama", "precision=fp32", first, steps=3))
        with open(os.devnull, "w") as output:
            resumed = api.resume(
                begun.out, steps=6, out=str(self.folder / f"resumed-{next(self._runs)}"), device=second,
                progress=lambda line: None, rank0_stdout=output.fileno(),
            )  # fmt: skip
        return close(resumed.losses[-3:], straight[3:], TOLERANCE["fp32"])

    def generation(self, layout: str = "") -> str:
        """Greedy answers of the device are the CPU's, token by token."""
        run = self.train(self.config("tiny-llama", "precision=fp32", "cpu", steps=8)).out
        answers = [
            self._answers(run, device, layout if device == self.device else "") for device in ("cpu", self.device)
        ]
        assert answers[0] == answers[1], f"{answers[1]} instead of {answers[0]}"
        return f"{sum(map(len, answers[0]))} tokens of {len(answers[0])} requests equal"

    def _answers(self, run: Path, device: str, layout: str) -> list[list[int]]:
        """Tokens of requests of different lengths, which are computed together."""
        text = f"{layout},precision=fp32".removeprefix(",")
        job = ServingJob(model_of("tiny-llama"), Layout.parse(text), str(run), context=128, device=device)
        requests = [(19, 24), (3, 40), (50, 11), (33, 30), (16, 17)]
        tokens: list[list[int]] = [[] for _ in requests]
        ended = threading.Semaphore(0)

        def take(index: int, answer: Token | Finished) -> None:
            if isinstance(answer, Token):
                tokens[index].append(answer.token)
            else:
                ended.release()

        with Service(job) as service:
            service.start()
            for index, (prompt, count) in enumerate(requests):
                ids = list(range(1 + index, 1 + index + prompt))
                service.submit(ids, Sampling(max_tokens=count), partial(take, index))
            for _ in requests:
                if not ended.acquire(timeout=120):
                    raise RuntimeError("no answer within two minutes")
        return tokens

    def decode_steps(self, name: str, precision: str, quantize: str = "none") -> str:
        """Decode steps with static shapes, as CUDA graphs where there is a device, give the logits of eager ones."""
        import gpu_decode  # beside this script

        with self._here:
            worst, forms = gpu_decode.difference(model_of(name), precision, quantize, torch.device(self.device))
        assert worst <= DECODE_TOLERANCE[precision], f"logits differ by {worst:.1e} of the largest one; {forms}"
        return f"logits within {worst:.1e} of the largest one; {forms}"

    def ranks(self, name: str, layout: str) -> str:
        """A layout over several ranks: the losses of one rank, and the predicted ledger."""
        result = self.train(self.config(name, f"{layout},precision=fp32", self.device, report=True))
        outcome = compare(result.predicted, result.report)
        assert outcome.equal_ledger, f"the ledger differs: {outcome.differences[:1]}"
        shared = self.sharing(layout)
        ways = {row.algorithm for role in result.report.roles for row in role.transport}
        assert bool(shared) == any(way.endswith(STAGED) for way in ways), f"collectives went by {sorted(ways)}"
        losses = close(result.losses, self.on_cpu(name, "precision=fp32"), TOLERANCE["fp32"])
        return f"ledger equal, {losses}{shared}"

    def sharing(self, layout: str) -> str:
        """What a row says where ranks share devices: they then communicate through the host's memory."""
        world, devices = Layout.parse(layout).ranks, torch.cuda.device_count()
        if self.device == "cpu" or devices >= world:
            return ""
        return f"; staged: {world} ranks on {devices} device{'s' if devices > 1 else ''}"

    def compiled(self) -> str:
        """Blocks compiled by torch give the CPU's losses."""
        if self.device == "cpu" and shutil.which("c++") is None:
            raise Skip("torch.compile needs a C++ compiler on the CPU")
        return self.losses("tiny-llama", "compile=block", "fp32")

    def form(self, name: str, dtype: torch.dtype) -> str:
        """A form for CUDA gives the output and the gradients of the plain module, on the device."""
        if name in CUDA_ALONE and self.device == "cpu":
            raise Skip(CUDA_ALONE[name])
        mine, plain = FORMS[name](torch.device(self.device), dtype)
        worst = max(float((a - b).norm() / b.norm()) for a, b in zip(mine, plain, strict=True))
        assert worst <= FORM_TOLERANCE[dtype], f"differs by {worst:.1e}"
        return f"outputs and gradients within {worst:.1e}"

    def every(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Name and function of each check, the most basic first."""
        for name in FORMS:
            for dtype in FORM_TOLERANCE:
                title = f"form {name} {str(dtype).removeprefix('torch.')}"
                yield title, lambda n=name, d=dtype: self.form(n, d)
        for name in MODELS[:1] if self.tiny else MODELS:
            for precision in ("fp32",) if self.tiny else TOLERANCE:
                yield f"losses {name} {precision}", lambda n=name, p=precision: self.losses(n, "", p)
        for layout in () if self.tiny else ("recompute=selective", "recompute=full", "attention=math"):
            yield f"losses tiny-llama {layout}", lambda text=layout: self.losses("tiny-llama", text, "fp32")
        yield "losses compiled blocks", self.compiled
        for layout in ("",) if self.tiny else ("", "recompute=full", "precision=fp32", "compile=block"):
            yield f"memory {layout or 'bf16'}", lambda text=layout: self.memory(text)
        yield f"resume cpu to {self.device}", lambda: self.resume("cpu", self.device)
        if self.device != "cpu":
            yield f"resume {self.device} to cpu", lambda: self.resume(self.device, "cpu")
        for name, precision, quantize in DECODED[:1] if self.tiny else DECODED:
            check = partial(self.decode_steps, name, precision, quantize)
            yield " ".join(("decode steps", name, precision, quantize)).removesuffix(" none"), check
        yield "generation", self.generation
        for name, layout in LAYOUTS[1:3] if self.tiny else LAYOUTS:
            yield f"ranks {name} {layout}", lambda n=name, text=layout: self.ranks(n, text)
        if not self.tiny:
            yield "generation tp=2", self._generation_split

    def _generation_split(self) -> str:
        return self.generation("tp=2") + self.sharing("tp=2")


Outcomes = tuple[list[torch.Tensor], list[torch.Tensor]]
"""(output and gradients of a form, those of the plain module in float64)."""


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def _module(form: torch.nn.Module, plain: torch.nn.Module, x: torch.Tensor, *others: object) -> Outcomes:
    """A module with the form of the table, and the module itself in float64."""
    lower(form, OpContext("", Options("train", "cuda")))
    wide = x.double().requires_grad_()
    x.requires_grad_()
    grad = _random(x.device, x.dtype, *x.shape).flip(0)
    outcomes = []
    for module, leaf, dy in ((form, x, grad), (plain, wide, grad.double())):
        out = module(leaf, *(_as(other, leaf.dtype) for other in others))
        weights = list(module.parameters())
        outcomes.append([out, *torch.autograd.grad(out, [leaf, *weights], dy)])
    return tuple([tensor.detach().double() for tensor in found] for found in outcomes)  # type: ignore[return-value]


def _as(value: object, dtype: torch.dtype) -> object:
    return tuple(tensor.to(dtype) for tensor in value) if isinstance(value, tuple) else value


def _norm(device: torch.device, dtype: torch.dtype) -> Outcomes:
    form, plain = RMSNorm(512, 1e-5).to(device, dtype), RMSNorm(512, 1e-5).to(device, torch.float64)
    form.weight.data = _random(device, dtype, 512)
    plain.weight.data = form.weight.data.double()
    return _module(form, plain, _random(device, dtype, 4, 96, 512))


def _rotary(device: torch.device, dtype: torch.dtype) -> Outcomes:
    form, plain = Rope(model_of("tiny-llama")), Rope(model_of("tiny-llama"))
    width = form.config.head_dim
    tables = form.whole(torch.arange(96, device=device).expand(4, 96), torch.float64)
    rounded = tuple(table.to(dtype).double() for table in tables)
    return _module(form, plain, _random(device, dtype, 4, 96, 8, width), rounded)


def _loss(form: LossForm, device: torch.device, dtype: torch.dtype) -> Outcomes:
    logits, targets = 4 * _random(device, dtype, 4, 96, 3000), torch.arange(384, device=device).view(4, 96)
    targets[1, 2] = -100
    wide = logits.double().requires_grad_()
    logits.requires_grad_()
    plain = torch.nn.functional.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="sum")
    alone: Any = _Alone()
    loss = summed_cross_entropy(logits * 1, targets, 0, 3000, alone, form=form)
    grads = [torch.autograd.grad(out / 383, leaf)[0] for out, leaf in ((loss, logits), (plain, wide))]
    return [loss.detach().double(), grads[0].double()], [plain.detach(), grads[1]]


class _Alone:
    """The loss's view of a rank that shares no vocabulary."""

    def size(self, axes: object) -> int:
        return 1


FORMS: dict[str, Callable[[torch.device, torch.dtype], Outcomes]] = {
    "norm": _norm, "rotary": _rotary, "loss": partial(_loss, BLOCKS),
    "loss kernels": partial(_loss, ONE_PASS),
}  # fmt: skip
CUDA_ALONE = {
    "norm": "the backward of torch's fused RMSNorm exists on CUDA alone",
    "loss kernels": "Triton's kernels run on CUDA alone",
}
FORM_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest relative difference of a form from the plain module in float64."""


def close(found: list[float], expected: list[float], tolerance: float) -> str:
    """The largest relative difference, in words. Raises `AssertionError` beyond the tolerance."""
    assert len(found) == len(expected) > 0, f"{len(found)} losses instead of {len(expected)}"
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    assert worst <= tolerance and math.isfinite(worst), f"losses differ by {worst:.1e}, more than {tolerance:.0e}"
    return f"losses within {worst:.1e}"


def checked(name: str, check: Callable[[], str]) -> Row:
    """One check, with its outcome in one line."""
    begun = time.perf_counter()
    try:
        outcome, detail = "ok", check()
    except Skip as reason:
        outcome, detail = "skipped", str(reason)
    except FAILURES as error:
        outcome, detail = "failed", f"{type(error).__name__}: {error}".splitlines()[0]
    return Row(name, outcome, detail, time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--tiny", action="store_true", help="the short form on the CPU, even beside a GPU")
    parser.add_argument("--only", default="", metavar="TEXT", help="checks with TEXT in their name")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not args.tiny else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, short form"
    print(f"{name}, torch {torch.__version__}", flush=True)
    rows = []
    side_by_side = max(2, (os.cpu_count() or 1) // 2)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(side_by_side) as pool:
        checks = Checks(Path(folder), device, device == "cpu").every()
        started = [(check, pool.submit(checked, check, function)) for check, function in checks if args.only in check]
        for check, outcome in started:
            rows.append(outcome.result())
            print(f"{rows[-1].outcome:8}{check:50} {rows[-1].seconds:5.1f} s  {rows[-1].detail}", flush=True)
    if args.json:
        about = {"device": name, "devices": torch.cuda.device_count(), "torch": torch.__version__}
        args.json.write_text(json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    raise SystemExit(int(any(row.outcome == "failed" for row in rows)))


if __name__ == "__main__":
    main()
