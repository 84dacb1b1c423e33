"""`TokenGenerator`: one rank's share of a decoder with its weights and its part of the cache, which computes steps.

What a step communicates, `turn_ledger` of `predict/traffic/serving.py` says beforehand; it depends on the plan, on T,
the engine step's tokens, and on B, the rows whose logits are wanted, alone:

- tp: each block sums [T, hidden] twice over tp, the embedding once; where B > 0 the head's logits are gathered, unit
  "logits", tp x B x ceil(vocab / tp) elements;
- cp: a rank computes rows_here(T) = ceil(T / cp) rows, which take T's place above; each block gathers their queries,
  keys and values, and returns the outputs over the keys of each rank in an all-to-all (`runtime/context/cache.py`);
  where B > 0 the head's inputs [B, hidden] are summed over cp;
- experts of other replicas: each mixture exchanges the choices of each expert, int64 [experts of its place], and
  rows [pairs, hidden] there and back, with the ranks of `across_axes`, also where T is 0;
- zero=3: each part's units are gathered for it as `generating_uses` has them, also by ranks whose T is 0;
- pp: a stage sends [T, hidden] to the next one.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.checkpoint import LocalInterval, needs
from shardwise.decoder import Decoder
from shardwise.decoder.attention import Attention, MultiHeadLatentAttention, Rope
from shardwise.decoder.experts import Mixture, Router
from shardwise.layout import Workload, unit_plan
from shardwise.layout.axes import CP
from shardwise.layout.context import PageCut
from shardwise.layout.experts import across_axes, expert_share, experts_across
from shardwise.layout.placement import cache_shape
from shardwise.layout.serving import rows_here
from shardwise.layout.tensor import edges
from shardwise.layout.units import UnitPlan
from shardwise.ops.context import Around
from shardwise.ops.cpu.products import Packed, int8
from shardwise.ops.cuda import launch
from shardwise.ops.cuda.decode import attends
from shardwise.ops.cuda.products import Chooser, CudaProducts
from shardwise.ops.generate import GenerationContext
from shardwise.ops.generate_experts import ServedExperts
from shardwise.ops.paged import DecodeRows, PagedCache, Rows
from shardwise.ops.products import MakeProduct, Plain
from shardwise.ops.table import lower
from shardwise.runtime.context.cache import ContextCache, ContextRows, collect
from shardwise.runtime.expert.exchange import RankExchange
from shardwise.runtime.job.output import say
from shardwise.runtime.pipeline.stages import StageRunner
from shardwise.runtime.tensor.lowering import context_of
from shardwise.runtime.tensor.redistribute import GatherOutputs, redistribution
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.transport.shared_collective import flat_array
from shardwise.runtime.zero.flat_unit import torch_dtype
from shardwise.serving.graphs import DecodeShape, DecodeSteps, Result, alone, capturable, decodes
from shardwise.serving.job import ServingJob, Weights
from shardwise.serving.rows import context_rows_of, rows_of
from shardwise.serving.scheduler import EngineStep

LOGITS = "logits"
"""Unit of the ledger: the gather of the logits."""


def apply_generation(
    decoder: Decoder,
    part: str,
    plan: UnitPlan,
    comms: Comms,
    keep: MakeProduct,
    cache: PagedCache | None,
    device: torch.device,
) -> int:
    """Give the modules of a part, whose weights have been read, the forms of generation.

    keep: how its matrices are kept. cache: a block's. Returns the bytes that the matrices then need less than in their
    flat buffer, to which nothing of the part refers any more where `keep.copies`.
    """
    module = dict(decoder.parts())[part]
    if keep.copies:
        _own_small(module)
    plain = context_of(part, "generate", plan, comms, device)
    arounds = dict(plain.arounds)
    if plan.layout.tp > 1:
        logits = Around(leave=GatherOutputs(comms, LOGITS, plan.model.vocab))
        arounds |= {p.name: logits for p in plan.blueprint.parameters_of(part) if p.cut == "vocab"} | {"vocab": logits}
    share = exchange = None
    if (experts := plan.model.experts) is not None:
        share = expert_share(plan.layout, experts.count, plan.tp_rank)
        exchange = RankExchange(plan, comms, part, across_axes(plan.layout))
        arounds["experts"] = Around(leave=redistribution(edges(plan.layout)["row"].leave, comms, part))
    context = GenerationContext(
        **vars(plain) | {"arounds": arounds, "exchange": exchange},
        keep=keep,
        cache=cache,
        share=share,
        lasting=plan.layout.stage < 3,
    )
    lower(module, context)
    for each in context.copied:
        each.module.register_parameter(each.name, None)
    return sum(each.saved for each in context.copied)


def _own_small(part: nn.Module) -> None:
    for module in part.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 1 or isinstance(module, Router):
                setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))


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
        self.caches = {part: self._cache(part) for part in plan.local.blocks(self.stage)}
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
            # memory, with nothing in it, for units that have none yet
            if self.plan.layout.stage < 3:
                for whole in (self.engine.units[name].whole for name in units):
                    whole.untyped_storage().resize_(whole.nbytes)
                    whole.zero_()
            for held in (piece for piece in pieces if piece.unit in units):
                self.comms.pulse.work(f"the reading of {held.name}")
                done += self._read(weights, held)
                progress(done, total)
            self._adopt(part)
        if self.static:
            self.steps = self._decode_steps()

    def _decode_steps(self) -> DecodeSteps:
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
        return sum(unit.padded for unit in self.plan.units_of(part)) if self._keep(part).copies else 0

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
        keep = self._keep(part)
        self._saved += apply_generation(
            self.stages.decoder, part, self.plan, self.comms, keep, self.caches.get(part), self.device
        )
        if keep.copies:
            for unit in self.plan.units_of(part):
                self.engine.units[unit.name].whole.untyped_storage().resize_(0)

    def _keep(self, part: str) -> MakeProduct:
        """Form in which a part's matrices are stored. A table that is looked up in stays as it is."""
        table = self.plan.blueprint.kind(part) == "embedding" or part in self.plan.blueprint.sharing
        if self.device.type == "cuda" and self.plan.layout.stage < 3 and self.plan.blueprint.kind(part) != "embedding":
            return CudaProducts(self.chooser, self.dtype, int8=self.job.quantize == "int8" and not table)
        if table or self.plan.layout.stage == 3:
            return Plain()
        if self.job.quantize == "int8":
            return int8(self.dtype, self.device)
        return Packed() if Packed.serves(self.dtype, self.device) else Plain()

    def rows(self, step: EngineStep) -> Rows:
        """An engine step as the decoder takes it."""
        if self.cut.cp > 1:
            return context_rows_of(step, self.cut, self.comms.index(CP), self.device)
        return rows_of(step, self.job.page, self.device)

    def tokens_here(self, step: EngineStep) -> int:
        """Rows of an engine step that this rank computes."""
        return rows_here(self.plan.layout, step.tokens)

    @torch.inference_mode()
    def forward(self, step: EngineStep, rows: Rows, x: Tensor | None = None) -> Tensor:
        """An engine step through this rank's stage: from what the stage before has sent to what the next one takes, [1,
        T, hidden]; on the last stage to the logits that are wanted, [B, vocab]."""
        gathers = self.plan.layout.stage == 3
        if gathers:
            self.engine.begin_forward("prefill" if step.prefill else "decode")
        self.comms.pulse.work("the forward pass")
        for part in self.plan.stages[self.stage]:
            if gathers:
                self.engine.use_unit("forward", part)
            if self.plan.blueprint.kind(part) == "head":
                if rows.wanted is not None and not len(rows.wanted):
                    return torch.empty(0, self.plan.model.vocab, dtype=self.dtype, device=self.device)
                if isinstance(rows, ContextRows):
                    assert x is not None
                    x, rows = collect(self.comms, x, rows, part)
            x = self.stages.parts[part].forward(x, rows)
        assert x is not None
        return x

    def decode(self, step: EngineStep) -> Result | None:
        """(logits [B, vocab], greedy tokens [B]) of a step with a static form; None for another one, which `forward`
        computes."""
        if self.steps is None or not decodes(step):
            return None
        self.comms.pulse.work("the forward pass")
        try:
            return self.steps.run(step)
        except Exception as error:  # a kernel that does not compile, a capture that fails: there is another form
            return self._fall_back(step, error)

    def _fall_back(self, step: EngineStep, error: Exception) -> Result | None:
        """Decode steps without kernels, and if these fail, too, no decode steps."""
        kernels, self.chooser.kernels = self.chooser.kernels, False
        self.steps = self._decode_steps() if kernels else None
        without = "Triton's kernels" if kernels else "static shapes"
        self.notices.append(f"decode steps do without {without}: {type(error).__name__}: {str(error)[:300]}")
        say(self.notices[-1])
        return self.decode(step)

    @torch.inference_mode()
    def idle(self) -> None:
        """An engine step without tokens: under zero=3 other ranks gather weights, and this one has a part of them, and
        other replicas have tokens for experts that are here."""
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

    def begin(self, step: EngineStep) -> None:
        """Begin a step: collectives from here on belong to it."""
        self.comms.phase = "prefill" if step.prefill else "decode"

    def hop(self) -> float:
        """Seconds of a message between stages; 0 where it is not measured."""
        return 0.0


def host_array(tensor: Tensor) -> np.ndarray:
    """A tensor's memory on the host as readers of weights fill it: bfloat16 as `uint16`."""
    array = flat_array(tensor)
    return array.view(np.uint16) if tensor.dtype == torch.bfloat16 else array
