"""`TokenGenerator`: one rank's share of a decoder with its weights and its part of the cache, which computes turns.

What a turn communicates, `turn_ledger` of `predict/traffic/serving.py` says beforehand; it depends on the plan, on T,
the turn's tokens, and on B, the rows whose logits are wanted, alone:

- tp: each block sums [T, hidden] twice over tp, the embedding once; where B > 0 the head's logits are gathered, unit
  "logits", tp x B x ceil(vocab / tp) elements;
- cp: a rank computes rows_here(T) = ceil(T / cp) rows, which take T's place above; each block gathers their queries,
  keys and values, and returns the outputs over the keys of each rank in an all-to-all (`runtime/context/cache.py`);
  where B > 0 the head's inputs [B, hidden] are summed over cp;
- experts of other replicas: each mixture exchanges the choices of each expert, int64 [experts of its place], and
  rows [pairs, hidden] there and back, with the ranks of `across_axes`, also where T is 0;
- zero=3: each part's units are gathered for it as `UnitPlan.generating_uses` has them, also by ranks whose T is 0;
- pp: a stage sends [T, hidden] to the next one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint import LocalInterval, needs
from shardwise.decoder.attention import Attention, Rope
from shardwise.decoder.experts import Mixture
from shardwise.decoder.latent_attention import MultiHeadLatentAttention
from shardwise.layout import Workload, unit_plan
from shardwise.layout.axes import CP
from shardwise.layout.context import PageCut
from shardwise.layout.experts import experts_across
from shardwise.layout.placement import cache_shape
from shardwise.ops.cpu.products import Packed, int8
from shardwise.ops.cuda import launch
from shardwise.ops.cuda.decode import attends
from shardwise.ops.cuda.products import Chooser, CudaProducts
from shardwise.ops.generate_experts import ServedExperts
from shardwise.ops.paged import DecodeRows, PagedCache, Rows
from shardwise.ops.products import MakeProduct, Plain
from shardwise.predict.serving_layout import rows_here
from shardwise.runtime.context.cache import ContextCache, ContextRows, collect
from shardwise.runtime.pipeline.stages import StageRunner
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.transport.shared_collective import flat_array
from shardwise.runtime.zero.flat_unit import torch_dtype
from shardwise.serving.graphs import DecodeShape, DecodeSteps, Result, alone, capturable, decodes
from shardwise.serving.job import ServingJob, Weights
from shardwise.serving.maps import apply_generation
from shardwise.serving.rows import context_rows_of, rows_of
from shardwise.serving.scheduler import EngineStep

Progress = Callable[[int, int], object]
"""(bytes read, of so many)."""


class TokenGenerator:
    """Forward passes of one rank. rank: of the whole job. static: whether decode steps have static shapes
    (`graphs.py`); where it is left out, on CUDA devices if the layout and the model allow it."""

    def __init__(
        self, job: ServingJob, comms: Comms, rank: int, device: torch.device, *, static: bool | None = None
    ) -> None:
        self.job, self.comms, self.rank, self.device = job, comms, rank, device
        self.plan = plan = unit_plan(job.model, job.layout, Workload(), rank=rank, backend=comms.backend)
        self.stages = StageRunner(plan, comms, device)
        self.engine = self.stages.engine
        self.dtype = torch_dtype(plan.layout.dtype)
        self.stage = next(iter(plan.stages))
        self.nonfinite = ""
        """The first parameter read here that has an element which is not finite."""
        self._saved = 0
        """Bytes that weights take less than in their flat buffers."""
        self.cut = PageCut(job.page, job.layout.cp)
        if static is None:
            static = device.type == "cuda" and capturable(job.layout, job.model)
        self.static = static
        self.steps: DecodeSteps | None = None
        self.chooser = Chooser(launch.serve(self.dtype, device))
        self.notices: list[str] = []
        """Lines about forms that were chosen, or could not be used."""
        self.caches = {part: self._cache(part) for part in plan.blocks(self.stage)}
        if plan.layout.stage < 3:
            for unit in self.engine.units.values():
                unit.whole.untyped_storage().resize_(0)  # until it is read
        comms.quick = True

    def _cache(self, part: str) -> PagedCache:
        job, shape = self.job, cache_shape(self.job.model, self.job.layout.tp)
        if self.cut.cp > 1:
            return ContextCache(self.comms, self.cut, part, shape, job.pages, self.dtype, self.device)
        cache = PagedCache(shape, job.pages + self.static, job.page, self.dtype, self.device)
        if self.static:
            cache.tensor[:, :, job.pages * job.page :] = 0  # the spare page, which is attended to and never begins
        return cache

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values on this rank, without the spare page of static decode steps."""
        pages = self.job.pages
        return sum(cache.tensor.nbytes // (pages + self.static) * pages for cache in self.caches.values())

    @property
    def parameter_bytes(self) -> int:
        """Bytes of weights on this rank."""
        return sum(tensor.nbytes for tensor in self.engine.storages()["parameters"]) - self._saved

    def load(self, weights: Weights, progress: Progress = lambda done, of: None) -> None:
        """Read what this rank holds, and nothing else, straight to where it stays. Raises `UserError`.

        Memory comes part by part, and what is kept in another form is there twice for one part alone: those with the
        most of it first, as long as there is little else.
        """
        pieces = needs(self.job.model, self.job.layout, self.rank)
        total = sum(held.stop - held.start for held in pieces) * self.dtype.itemsize
        done, read = 0, set()
        for part in sorted(self.plan.parts, key=self._twice, reverse=True):
            units = [unit.name for unit in self.plan.units_of(part) if unit.name not in read]
            read.update(units)
            self._make_room(units)
            for held in (piece for piece in pieces if piece.unit in units):
                self.comms.pulse.work(f"the reading of {held.name}")
                done += self._read(weights, held)
                progress(done, total)
            self._adopt(part)
        if self.static:
            self.steps = self._decode_steps()

    def _decode_steps(self) -> DecodeSteps:
        """Decode steps with static shapes."""
        job = self.job
        assert alone(job.layout), "a step that communicates has no static form"
        for module in self.stages.decoder.modules():
            if isinstance(module, Rope):
                module.move(self.device)
        cores = [m for m in self.stages.decoder.modules() if isinstance(m, Attention | MultiHeadLatentAttention)]
        gathers = not self.chooser.kernels or not all(attends(module) for module in cores)
        shape = DecodeShape(job.page, job.pages, -(-job.context // job.page), gathers)
        capture = self.device.type == "cuda" and capturable(job.layout, job.model)
        return DecodeSteps(self._decode, shape, self.device, capture, self.chooser.measure)

    def _decode(self, rows: DecodeRows) -> Tensor:
        x: Tensor | None = None
        for part in self.plan.stages[self.stage]:
            x = self.stages.parts[part].forward(x, rows)
        assert x is not None
        return x

    def _twice(self, part: str) -> int:
        """Elements of a part that are there twice while it is laid out."""
        return sum(unit.padded for unit in self.plan.units_of(part)) if self._keep(part).copies else 0

    def _make_room(self, units: list[str]) -> None:
        """Memory, with nothing in it, for units that have none yet."""
        if self.plan.layout.stage < 3:
            for whole in (self.engine.units[name].whole for name in units):
                whole.untyped_storage().resize_(whole.nbytes)
                whole.zero_()

    def _read(self, weights: Weights, held: LocalInterval) -> int:
        """Fill a run of a unit's interval; returns its bytes."""
        flat = self.engine.units[held.unit]
        target = flat.interval[held.start - flat.start : held.stop - flat.start]
        on_host = target if target.device.type == "cpu" else torch.zeros_like(target, device="cpu")
        weights.read(f"model/{held.name}", held.local, self.job.layout.dtype, out=host_array(on_host))
        if on_host is not target:
            target.copy_(on_host)
        # The sum alone: of finite weights it is finite, and that takes one pass.
        if not self.nonfinite and not target.sum().isfinite():
            self.nonfinite = held.name
        return target.nbytes

    def _adopt(self, part: str) -> None:
        """Keep a part's weights in the form in which they are multiplied with."""
        keep = self._keep(part)
        self._saved += apply_generation(
            self.stages.decoder, part, self.plan, self.comms, keep, self.caches.get(part), self.device
        )
        if keep.copies:
            for unit in self.plan.units_of(part):
                self.engine.units[unit.name].whole.untyped_storage().resize_(0)

    def _keep(self, part: str) -> MakeProduct:
        """Form in which a part's matrices are stored. A table that is looked up in stays as it is."""
        table = self.plan.kind(part) == "embedding" or part in self.plan.blueprint.sharing
        if self.device.type == "cuda" and self.plan.layout.stage < 3 and self.plan.kind(part) != "embedding":
            return CudaProducts(self.chooser, self.dtype, int8=self.job.quantize == "int8" and not table)
        if table or self.plan.layout.stage == 3:
            return Plain()
        if self.job.quantize == "int8":
            return int8(self.dtype, self.device)
        return Packed() if Packed.serves(self.dtype, self.device) else Plain()

    def rows(self, turn: EngineStep, *, score: bool = False) -> Rows:
        """A turn as the decoder takes it. score: the logits of all its tokens are wanted."""
        if self.cut.cp > 1:
            return context_rows_of(turn, self.cut, self.comms.index(CP), self.device, score=score)
        return rows_of(turn, self.job.page, self.device, score=score)

    def tokens_here(self, turn: EngineStep) -> int:
        """Rows of a turn that this rank computes."""
        return rows_here(self.plan.layout, turn.tokens)

    @torch.inference_mode()
    def forward(self, turn: EngineStep, rows: Rows, x: Tensor | None = None) -> Tensor:
        """A turn through this rank's stage: from what the stage before has sent to what the next one takes, [1, T,
        hidden]; on the last stage to the logits that are wanted, [B, vocab]."""
        gathers = self.plan.layout.stage == 3
        if gathers:
            self.engine.begin_forward("prefill" if turn.prefill else "decode")
        self.comms.pulse.work("the forward pass")
        for part in self.plan.stages[self.stage]:
            if gathers:
                self.engine.use_unit("forward", part)
            if self.plan.kind(part) == "head":
                if rows.wanted is not None and not len(rows.wanted):
                    return torch.empty(0, self.plan.model.vocab, dtype=self.dtype, device=self.device)
                if isinstance(rows, ContextRows):
                    assert x is not None
                    x, rows = collect(self.comms, x, rows, part)
            x = self.stages.parts[part].forward(x, rows)
        assert x is not None
        return x

    def decode(self, turn: EngineStep) -> Result | None:
        """(logits [B, vocab], greedy tokens [B]) of a step with a static form; None for another one, which `forward`
        computes."""
        if self.steps is None or not decodes(turn):
            return None
        self.comms.pulse.work("the forward pass")
        try:
            return self.steps.run(turn)
        except Exception as error:  # a kernel that does not compile, a capture that fails: there is another form
            return self._fall_back(turn, error)

    def _fall_back(self, turn: EngineStep, error: Exception) -> Result | None:
        """Decode steps without kernels, and if these fail, too, no decode steps."""
        kernels, self.chooser.kernels = self.chooser.kernels, False
        self.steps = self._decode_steps() if kernels else None
        without = "Triton's kernels" if kernels else "static shapes"
        self.notices.append(f"decode steps do without {without}: {type(error).__name__}: {str(error)[:300]}")
        print(self.notices[-1], file=sys.stderr, flush=True)
        return self.decode(turn)

    @torch.inference_mode()
    def idle(self) -> None:
        """A turn without tokens: under zero=3 other ranks gather weights, of which this one has a part, and other
        replicas have tokens for experts that are here."""
        self.comms.phase = "decode"
        gathers, across = self.plan.layout.stage == 3, experts_across(self.plan.layout) > 1
        if gathers:
            self.engine.begin_forward("decode")
        for part in self.plan.stages[self.stage]:
            if gathers:
                self.engine.use_unit("forward", part)
            for module in self.stages.parts[part].modules() if across else ():
                if isinstance(module, Mixture):
                    experts = module.forward
                    assert isinstance(experts, ServedExperts)
                    experts.serve_others()

    def begin(self, turn: EngineStep) -> None:
        """Begin a step: collectives from here on belong to it."""
        self.comms.phase = "prefill" if turn.prefill else "decode"

    def hop(self) -> float:
        """Seconds of a message between stages; 0 where it is not measured."""
        return 0.0


def host_array(tensor: Tensor) -> np.ndarray:
    """A tensor's memory on the host as readers of weights fill it: bfloat16 as `uint16`."""
    array = flat_array(tensor)
    return array.view(np.uint16) if tensor.dtype == torch.bfloat16 else array
