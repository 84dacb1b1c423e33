"""`ClassGenerator`: one rank's share of a model by its class of transformers, which answers by transformers' cache.

Each sequence has its cache, by transformers' rules for its layers (full, windowed, states), and its forward pass in an
engine step: its logits are those of the class alone.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shardwise.checkpoint import Checkpoint
from shardwise.errors import LayoutError, UserError
from shardwise.layout import Workload, unit_plan
from shardwise.runtime.module.buffers import restore_buffers
from shardwise.runtime.module.class_model import ClassModel, ClassSplit
from shardwise.runtime.module.class_run import check_head
from shardwise.runtime.module.experts import use_exact_products
from shardwise.runtime.module.initial import MetaValues, place_buffers, values_of
from shardwise.runtime.module.parts import PartRunner
from shardwise.runtime.zero.flat_unit import Values, torch_dtype

if TYPE_CHECKING:
    from shardwise.model.parameters import Parameter
    from shardwise.runtime.transport.comms import Comms
    from shardwise.serving.engine import Progress
    from shardwise.serving.job import ServingJob, Weights
    from shardwise.serving.scheduler import Chunk, EngineStep, Sequence


def planned(job: ServingJob) -> ServingJob:
    """The engine with the plan by which the class is divided. Raises `UserError` for what it cannot do."""
    layout, model = job.layout, ClassModel.of(job.model)
    cp, zero, ep = layout.cp > 1, layout.zero > 0, layout.ep > layout.tp
    unable = {f"cp={layout.cp}": cp, f"zero={layout.zero}": zero, f"ep={layout.ep}": ep}
    for words in (words for words, wrong in unable.items() if wrong):
        raise LayoutError(
            f"{words} has no generation of a model by its class of transformers yet: choose tp, ep up to tp, pp and dp"
        )
    if job.quantize != "none":
        raise UserError(f"--int8 does not suit {job.model.name}, which runs by its class of transformers: leave it out")
    split = model.split(layout, 8 * layout.tp)
    check_head(model, split)
    if not _argument(model):
        raise UserError(f"{model.name}: {model.kind.__name__} has no cache of transformers, so nothing is generated")
    return replace(job, reuse=False, **split.chosen)


def _argument(model: ClassModel) -> str:
    """The name under which a class takes a cache; empty for one without."""
    names = inspect.signature(model.kind.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), "")


def divided(job: ServingJob) -> ClassSplit:
    """The model under the layout."""
    return ClassModel.of(job.model).divided(job.layout, job.class_plan, job.class_parts)


class ClassGenerator:
    """What `TokenGenerator` is to a decoder here."""

    def __init__(self, job: ServingJob, comms: Comms, rank: int, device: torch.device, split: ClassSplit) -> None:
        self.job, self.comms, self.rank, self.device, self._split = job, comms, rank, device, split
        self.model = ClassModel.of(job.model)
        self._argument = _argument(self.model)
        blueprint = split.described.blueprint
        self.plan = unit_plan(blueprint, job.layout, Workload(), rank=rank, backend=comms.backend)
        self.stage = next(iter(self.plan.stages))
        self.dtype = torch_dtype(job.layout.dtype)
        self.nonfinite = ""
        self._caches: WeakKeyDictionary[Sequence, Any] = WeakKeyDictionary()
        comms.quick = True

    def load(self, weights: Weights | None, progress: Progress) -> None:
        """Read the model, and keep what this rank holds. Raises `UserError`."""
        module, values = self._split.module, self._values(weights)
        if weights is None:
            module = self.model.pretrained(Path(self.job.weights))
            values = values_of({name: parameter.detach() for name, parameter in module.named_parameters()})
        if self.job.layout.precision == "fp64":
            use_exact_products(module)
        place_buffers(module, self.job.layout, values, self.device)
        if isinstance(weights, Checkpoint):
            restore_buffers(module, weights)
        self._config: Any = module.config
        self.runner = PartRunner(module.eval(), self._split.described, self.plan, self.comms, self.device)
        self.engine = self.runner.engine
        units = list(self.engine.units.values())
        for number, flat in enumerate(units):
            if not flat.fill(values).isfinite().all():
                self.nonfinite = self.nonfinite or flat.unit.placed[0].name
            progress(number + 1, len(units))

    def _values(self, weights: Weights | None) -> Values:
        """Values of a checkpoint's parameters; those of the class for buffers that it has not."""
        latest: dict[str, Tensor] = {}

        class Stored(MetaValues):
            def __call__(self, parameter: Parameter, index: Tensor) -> Tensor:
                assert weights is not None
                if parameter.name not in latest:
                    latest.clear()
                    values = weights.read(f"model/{parameter.name}", dtype="float32")
                    latest[parameter.name] = torch.from_numpy(values)
                return latest[parameter.name][index.cpu()].to(index.device, torch.float64)

        return Stored(self._split.module, 0, self.model)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of weights on this rank."""
        return sum(tensor.nbytes for tensor in self.engine.storages()["parameters"])

    @property
    def cache_bytes(self) -> int:
        """Bytes of all pages, if sequences fill them. There is no memory for them before there are tokens."""
        counted, tokens, stages = self.job.model.counted, self.job.pages * self.job.page, self.runner.stages
        assert counted is not None
        first, stop = stages.blocks[self.stage] if stages else (0, None)
        return int(counted.cache_bytes(tokens, self.job.layout.tp, first, stop, self.dtype.itemsize))

    def begin(self, step: EngineStep) -> None:
        """As of `TokenGenerator`."""
        self.comms.phase = "prefill" if step.prefill else "decode"

    def decode(self, step: EngineStep) -> None:
        """As of `TokenGenerator`: no step has a static form."""

    def rows(self, step: EngineStep) -> None:
        """As of `TokenGenerator`."""

    def tokens_here(self, step: EngineStep) -> int:
        """As of `TokenGenerator`."""
        return step.tokens

    @torch.inference_mode()
    def forward(self, step: EngineStep, rows: None, x: Tensor | None) -> Tensor:
        """As of `TokenGenerator`."""
        from transformers import DynamicCache

        self.comms.pulse.work("the forward pass")
        streams = iter(x.split([chunk.stop - chunk.start for chunk in step.chunks], 1) if x is not None else ())
        outputs: list[Any] = []
        for chunk in step.chunks:
            sequence = chunk.sequence
            if chunk.start == 0:  # it is new, or is computed again
                self._caches[sequence] = DynamicCache(config=self._config)
            cache = self._caches[sequence]
            ids = torch.tensor([sequence.tokens[chunk.start : chunk.stop]], device=self.device)
            options = {self._argument: cache, "use_cache": True} | self._kept(chunk)
            run = partial(self.runner.run, input_ids=ids, **options)
            if self.runner.stages is None:
                self.engine.begin_evaluation()
                outputs.append(run())
            else:
                outputs.append(self.runner.run_stage(self.stage, next(streams, None), run))
                _follow(cache, chunk.stop)
        if self.stage < self.job.layout.pp - 1:
            return self._sent(torch.cat(outputs, 1))
        return torch.cat([
            out.logits[0, [row - chunk.stop for row in chunk.rows], : self.job.model.vocab]
            for chunk, out in zip(step.chunks, outputs, strict=True)
        ])  # fmt: skip

    def _sent(self, x: Tensor) -> Tensor:
        """What a stage has made. Raises `UserError` where the next one expects something else."""
        wanted = self.job.model.hidden, self.dtype
        if (x.shape[-1], x.dtype) != wanted:
            raise UserError(
                f"pp: blocks of {self.model.name} return {x.dtype} [..., {x.shape[-1]}] where stages exchange "
                f"{self.dtype} [..., {self.job.model.hidden}]: leave pp out"
            )
        return x

    def _kept(self, chunk: Chunk) -> dict[str, int]:
        """The class computes logits from the first row that is asked for, where it can leave out those before it."""
        names = inspect.signature(self.model.kind.forward).parameters
        return (
            {"logits_to_keep": chunk.stop - min(chunk.rows, default=chunk.stop - 1)}
            if "logits_to_keep" in names
            else {}
        )

    def idle(self) -> None:
        """As of `TokenGenerator`: replicas need nothing of each other."""

    def hop(self) -> float:
        """As of `TokenGenerator`."""
        return 0.0


def _follow(cache: Any, tokens: int) -> None:
    """Layers of other stages have no keys here, but their lengths, from which a class makes positions and masks."""
    for layer in cache.layers:
        if hasattr(layer, "get_seq_length") and (missing := tokens - layer.get_seq_length()) > 0:
            layer.update(*[torch.zeros(1, 1, missing, 1, dtype=torch.int8)] * 2)
        if hasattr(layer, "has_previous_state"):
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
