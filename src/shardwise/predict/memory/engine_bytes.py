"""Bytes of a rank under another engine's software, from the rows of `engines.toml`.

The arithmetic takes numbers, as `estimate` has them, and arrays of numbers, as a search has them, and gives the same
bytes for both. A block's tensors are summed over the micro-batches in flight; the peak is the largest of three moments:
the backward pass of a block, the loss, and the optimizer's update.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import ceil, prod
from typing import NamedTuple

from shardwise.arrays import Num
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import EDP
from shardwise.layout.keys import changed
from shardwise.layout.optimizers import DEFAULT, ELSEWHERE, OPTIMIZERS
from shardwise.layout.pipeline import stages
from shardwise.layout.placement import place, width_held
from shardwise.layout.units import UnitPlan
from shardwise.model import ModelConfig
from shardwise.model.parameters import Model, blueprint
from shardwise.predict.memory.engine_rows import EngineMemory, TensorRow, engine_memory
from shardwise.predict.memory.engine_settings import USUAL, EngineSettings
from shardwise.predict.memory.sizes import Sizes, shared_width
from shardwise.records import dataclass
from shardwise.report.step_report import Bytes

OWN = ("shardwise", "shardwise-cpu")
"""Profiles of this project's runtime, whose memory is followed event by event."""
GATHERED = 2
"""Blocks whose weights are gathered at one time: the one that computes, and the next."""
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1")
"""Schedules whose micro-batches in flight are known."""
QUANTIZED = 256
"""Elements of a moment of 8 bits that share an fp32 scale: torchao optim/subclass_8bit.py, block_size."""
WEIGHT, ACCUMULATOR = 2, 4
"""Bytes of a gathered weight, and of an element of whole gradients that are added up."""


def widths_of(plan: UnitPlan) -> dict[str, int]:
    """Names of the rows' sizes: tokens of a micro-batch on this rank, and local widths."""
    s, model, layout = Sizes.of(plan), plan.model, plan.layout
    experts, latent = model.experts, model.latent_attention
    expert = width_held(experts.ffn, layout.expert_tp) if experts else 0
    shared, gates = shared_width(plan), 2 if model.gated else 1
    return {
        "tokens": s.tokens,
        "stream": s.stream,
        "routed": _routed_rows(plan, s),
        "hidden": s.hidden,
        "queries": s.q,
        "keys": s.k,
        "values": s.v,
        "attended": s.attended,
        "heads": s.heads,
        "scores": s.heads * s.seq,
        "qk_norm": (s.q + s.k) if model.qk_norm else 0,
        "latent": latent.q_rank + latent.kv_rank + latent.rope_head_dim if latent else 0,
        "statistics": 1 if model.norm == "rmsnorm" else 2,
        "ffn": s.ffn,
        "gate_up": gates * s.ffn,
        "experts": experts.count if experts else 0,
        "expert": expert,
        "expert_gate_up": gates * expert,
        "shared": shared,
        "shared_gate_up": gates * shared,
        "gathered": s.hidden if layout.sp else 0,
        "scattered": s.hidden if layout.tp > 1 else 0,
    }


def _routed_rows(plan: UnitPlan, s: Sizes) -> int:
    """Rows that the experts of this rank take, if tokens spread evenly."""
    experts = plan.model.experts
    if not experts:
        return 0
    shared = plan.layout.expert_tp if plan.layout.sp else 1  # ranks that share an expert see each other's tokens
    return s.stream * experts.active * shared


class MicroBatchNumbers(NamedTuple):
    """Bytes of one micro-batch of a rank. Pairs: of a block without experts, and of one with them."""

    input: Num
    """A block's input, which every block keeps."""
    saved: Num
    saved_routed: Num
    remade: Num
    """Tensors that a block's backward pass computes again."""
    remade_routed: Num
    backward: Num
    """What a block's backward pass holds beside saved and remade tensors."""
    backward_routed: Num
    embedding: Num
    head: Num
    """Saved by the final norm and the projection."""
    loss: Num


def micro_batch(memory: EngineMemory, plan: UnitPlan, settings: EngineSettings = USUAL) -> MicroBatchNumbers:
    """Bytes of a micro-batch under the plan's layout."""
    widths, recompute, narrow = widths_of(plan), plan.layout.recompute, settings.narrow
    freed = frozenset(settings.modules) | frozenset(memory.selective if recompute == "selective" else ())

    def total(rows: Sequence[TensorRow]) -> float:
        sizes = (prod(int(word) if word.isdigit() else widths[word] for word in row.size) for row in rows)
        return float(sum(size * (row.narrow if narrow else row.wide) for size, row in zip(sizes, rows, strict=True)))

    stream = float(widths["stream"] * widths["hidden"] * WEIGHT)
    saved, remade, backward = [], [], []
    for routed in (False, True):
        rows = memory.of_block("saved", routed).values()
        kept = [row for row in rows if row.saved_under(recompute, freed)]
        again = [row for row in rows if row not in kept and row.saved_under("none", frozenset())]
        saved.append(stream + total(kept))
        remade.append(total(again))
        backward.append(total(list(memory.of_block("backward", routed).values())))
    logits = float(widths["tokens"] * width_held(plan.model.vocab, plan.layout.tp))
    each = memory.loss_bytes_tp if plan.layout.tp > 1 else memory.loss_bytes
    return MicroBatchNumbers(
        stream, saved[0], saved[1], remade[0], remade[1], backward[0], backward[1],
        embedding=float(widths["tokens"] * 8), head=2 * stream, loss=logits * each / memory.loss_chunks,
    )  # fmt: skip


class RankNumbers(NamedTuple):
    """Elements of a rank's parameters, whole, and its blocks."""

    block: float
    """Elements of its largest block."""
    blocks: float
    """Trained ones of its blocks, without experts."""
    experts: float
    """Trained ones of its experts."""
    outer: float
    """Trained ones of embedding and head."""
    frozen: float
    dense: tuple[int, ...]
    """Blocks without experts of each chunk."""
    routed: tuple[int, ...]
    """Blocks with experts of each chunk."""
    has_embedding: bool
    has_head: bool


@lru_cache(maxsize=1024)
def part_elements(model: ModelConfig, tp: int, expert_tp: int, ep: int, kind: str, routed: bool) -> tuple[int, ...]:
    """(trained, trained experts, frozen) elements of one part of a kind on one of tp ranks; zeros where there is none.
    expert_tp: ranks that share the width of an expert. routed: a part with experts."""
    layout = Layout(tp=tp, etp=expert_tp if model.experts else 0)
    for part in blueprint(model).of_kind(kind):  # type: ignore[arg-type]
        if part.routes == routed:
            rows = [(p, place(p, layout, 0).numel) for p in part.parameters]
            other, frozen = (sum(n for p, n in rows if p.cut != "expert" and p.frozen == is_) for is_ in (False, True))
            return other, sum(n for p, n in rows if p.cut == "expert") // ep, frozen
    return 0, 0, 0


def dense_blocks(model: ModelConfig, layers: Sequence[int], pp: int, at: int) -> tuple[int, ...]:
    """Blocks without experts, which are the model's first ones, of each chunk of the rank at one place of a pipeline.
    layers: of all stages, those of a rank `pp` apart."""
    first = min(model.experts.dense_layers, model.layers) if model.experts else model.layers
    ends = list(zip(accumulate(layers), layers, strict=True))[at::pp]
    return tuple(max(0, min(first - end, 0) + count) for end, count in ends)


@lru_cache(maxsize=4096)
def rank_numbers(model: ModelConfig, tp: int, ep: int, layers: tuple[int, ...], pp: int, at: int) -> RankNumbers:
    """Elements of the rank at one place of a pipeline. layers: of all stages, those of a rank `pp` apart."""
    dense = dense_blocks(model, layers, pp, at)
    routed = tuple(count - known for count, known in zip(layers[at::pp], dense, strict=True))
    expert_tp = tp if ep == 1 else 1
    plain, mixed = (part_elements(model, tp, expert_tp, ep, "block", each) for each in (False, True))
    has_embedding, has_head = at == 0, at == pp - 1
    ends = [kind for kind, here in (("embedding", has_embedding), ("head", has_head)) if here]
    if model.tied and has_head and not has_embedding:
        ends.append("embedding")  # the head's copy of the table
    outer = [part_elements(model, tp, expert_tp, ep, kind, False) for kind in ends]
    n, r = sum(dense), sum(routed)
    return RankNumbers(
        block=float(max(sum(plain) if n else 0, sum(mixed) if r else 0)),
        blocks=float(n * plain[0] + r * mixed[0]),
        experts=float(r * mixed[1]),
        outer=float(sum(one[0] for one in outer)),
        frozen=float(n * plain[2] + r * mixed[2] + sum(one[2] for one in outer)),
        dense=dense, routed=routed, has_embedding=has_embedding, has_head=has_head,
    )  # fmt: skip


@lru_cache(maxsize=8192)
def in_flight(schedule: str, pp: int, micro_batches: int, virtual: int, at: int) -> tuple[int, ...]:
    """Micro-batches between forward and backward at their most, for each chunk of the rank at one place.

    1F1B: NVIDIA/Megatron-LM core/pipeline_parallel/schedules.py, forward_backward_pipelining_without_interleaving;
    interleaved: get_pp_rank_microbatches in the same file, and torch/distributed/pipelining/schedules.py. Raises
    `UserError` for other schedules of several chunks.
    """
    if pp == 1:
        return (1,)
    if schedule == "gpipe":
        return (micro_batches,)
    if virtual == 1:
        return (min(pp - at, micro_batches),)
    if schedule != "interleaved":
        raise UserError(f"the memory of schedule={schedule} with {virtual} chunks is not known of other engines")
    passes = min(2 * (pp - at - 1) + (virtual - 1) * pp + 1, micro_batches * virtual)
    turns, rest = divmod(passes, pp)
    each, more = divmod(turns, virtual)
    return tuple(pp * (each + (chunk < more)) + rest * (chunk == more) for chunk in range(virtual))


def moments_bytes(memory: EngineMemory, optimizer: str, matrices: bool) -> float:
    """Bytes of a parameter's moments. matrices: of the blocks, which Muon updates with one moment."""
    if optimizer == "adamw8bit":
        return len(ELSEWHERE[optimizer]) * (1 + ACCUMULATOR / QUANTIZED)
    kept = DEFAULT if optimizer == "muon" and not matrices else optimizer
    return len((OPTIMIZERS | ELSEWHERE)[kept]) * memory.moment_bytes


class RankBytes(NamedTuple):
    """Bytes of a rank by class, and at the peak."""

    parameters: Num
    gradients: Num
    optimizer: Num
    saved: Num
    comm: Num
    peak: Num


@dataclass(frozen=True)
class EngineRank:
    """One rank of one layout, or of many: arrays in place of numbers."""

    memory: EngineMemory
    elements: RankNumbers
    micro: MicroBatchNumbers
    stage: Num
    """ZeRO stage."""
    shard: Num
    """Ranks over which it shards."""
    expert_shard: Num
    """Ranks over which it shards experts."""
    dense: Num
    """Blocks without experts, times their micro-batches in flight."""
    routed: Num
    """Blocks with experts, times their micro-batches in flight."""
    ends: Num
    """Micro-batches in flight on the first chunk."""
    pp: int
    optimizer: str
    narrow: bool = False
    offloads: bool = False
    """Saved tensors of blocks are in the host's memory but for two blocks'."""
    remade: tuple[Num, Num] = (0, 0)
    """Blocks in flight that keep only their input (without experts, with experts)."""
    maximum: Callable[[Num, Num], Num] = max

    def _cut(self, nbytes: float, experts: float, least: int) -> Num:
        """Bytes of what is whole below a ZeRO stage, and cut from there on."""
        cuts = (self.stage >= least) * 1
        return nbytes / (1 + (self.shard - 1) * cuts) + experts / (1 + (self.expert_shard - 1) * cuts)

    def _states(self) -> tuple[Num, Num, Num]:
        """Bytes of weights, gradients, optimizer state."""
        m, e = self.memory, self.elements
        block = m.fp8_weight_bytes if self.narrow else m.weight_bytes
        parameters = self._cut(e.blocks * block + e.outer * m.weight_bytes + e.frozen * WEIGHT, e.experts * block, 3)
        gradients = self._cut((e.blocks + e.outer) * m.gradient_bytes, e.experts * m.gradient_bytes, 2)
        inner, outer = (m.master_bytes + moments_bytes(m, self.optimizer, matrices) for matrices in (True, False))
        return parameters, gradients, self._cut(e.blocks * inner + e.outer * outer, e.experts * inner, 1)

    def _gathered(self) -> tuple[Num, Num]:
        """Bytes of gathered weights and whole gradients: all through the step, and beside a block's backward pass."""
        m, e = self.memory, self.elements
        whole, passing = (self.stage == 3) * 1, (self.stage >= 2) * (1 - (self.stage == 3) * (self.keeps_stage * 1))
        trained = e.blocks + e.outer + e.experts
        if self.keeps_stage:
            lasting = whole * ((trained + e.frozen) * WEIGHT + trained * ACCUMULATOR)
        else:
            lasting = whole * (e.outer * WEIGHT * m.keeps_outer)
        in_turn = whole * (0 if self.keeps_stage else GATHERED * WEIGHT * e.block)
        share = e.block * (1 if not e.frozen else (e.blocks + e.experts) / (e.blocks + e.experts + e.frozen))
        return lasting, in_turn + passing * share * m.reduced_bytes

    @property
    def keeps_stage(self) -> bool:
        """Whether stage 3 keeps the weights of the rank whole."""
        return self.pp > 1 and self.memory.keeps_gathered

    def total(self) -> RankBytes:
        """Bytes by class, and the most that is there at one time."""
        m, e, micro, most = self.memory, self.elements, self.micro, self.maximum
        parameters, gradients, optimizer = self._states()
        gathered, in_turn = self._gathered()
        blocks = self.dense * micro.saved + self.routed * micro.saved_routed
        blocks = (
            blocks - self.remade[0] * (micro.saved - micro.input) - self.remade[1] * (micro.saved_routed - micro.input)
        )
        if self.offloads:
            blocks = GATHERED * most(micro.saved, micro.saved_routed * (sum(e.routed) > 0))
        ends = self.ends * micro.embedding * e.has_embedding + micro.head * e.has_head
        saved = blocks + ends
        states = parameters + optimizer
        lasting = states + gathered + gradients * m.lasting_gradients
        again = [(count > 0) * (saved - micro.input)
                 for count, saved in zip(self.remade, (micro.saved, micro.saved_routed), strict=True)]  # fmt: skip
        inside = (micro.remade + again[0] + micro.backward) * (sum(e.dense) > 0)
        inside = most(inside, (micro.remade_routed + again[1] + micro.backward_routed) * (sum(e.routed) > 0))
        peak = lasting + saved + inside + in_turn
        if e.has_head:
            peak = most(peak, lasting + saved + micro.loss + in_turn / GATHERED)
        updated = self._cut((e.blocks + e.outer) * m.update_bytes, e.experts * m.update_bytes, 1)
        peak = most(peak, states + gradients + updated + (gathered if self.keeps_stage else 0))
        return RankBytes(parameters, gradients, optimizer, saved, gathered + in_turn, peak * (1 + m.reserved_share))


def why_not_counted(name: str, model: Model, layout: Layout) -> str:
    """Why the memory of a layout under an engine is counted as this runtime's; empty where the engine's rows are
    known."""
    memory = engine_memory(name)
    if memory is None:
        return f"what {name} saves is not known"
    if model.trace:
        return f"what {name} saves of a traced module is not known"
    for key, value in changed(layout).items():
        if "uncounted" in key.marks:
            return f"{key.text(value)} is not known of {name}"
    if layout.etp:
        return f"a width of experts of its own is not known of {name}"
    if layout.offloads_activations and (not memory.offloads or layout.pp > 1):
        return f"the memory of saved activations in the host's memory is not known of {name}, or not under a pipeline"
    if layout.attention == "math" and not any("scores" in row.size for row in memory.rows["saved"].values()):
        return f"attention=math is not known of {name}"
    if layout.pp > 1 and layout.schedule not in SCHEDULES:
        return f"the memory of schedule={layout.schedule} is not known of {name}"
    return ""


def counts_engine(name: str, model: Model, layout: Layout) -> bool:
    """Whether memory under an engine is counted from its rows."""
    return name not in ("", *OWN) and not why_not_counted(name, model, layout)


def engine_ranks(
    memory: EngineMemory, plan: UnitPlan, places: Sequence[int], settings: EngineSettings = USUAL
) -> list[RankBytes]:
    """Bytes of the ranks at some places of a pipeline. plan: of any rank."""
    model, layout, memory = plan.model, plan.layout, settings.stored(memory)
    if plan.routing.uneven:
        plan = plan.as_micro_batch(0)
    micro, layers = micro_batch(memory, plan, settings), stages(model, layout).layers
    found = []
    for at in places:
        elements = rank_numbers(model, layout.tp, layout.ep, layers, layout.pp, at)
        flying = in_flight(layout.schedule, layout.pp, plan.workload.micro_batches(layout), layout.virtual, at)
        rank = EngineRank(
            memory, elements, micro, layout.stage, layout.shard_ranks if layout.stage else 1,
            max(1, Mesh(layout).size(EDP)) if layout.stage else 1, in_all(elements.dense, flying),
            in_all(elements.routed, flying), flying[0], layout.pp, plan.workload.optimizer, settings.narrow,
            layout.offloads_activations, remade_in_all(elements, flying, settings.layers),
        )  # fmt: skip
        found.append(rank.total())
    return found


def remade_in_all(elements: RankNumbers, flying: Sequence[int], layers: int) -> tuple[int, int]:
    """Blocks without and with experts whose input alone is kept, times their micro-batches in flight. layers: of each
    chunk, the first ones."""
    dense = [min(layers, count) for count in elements.dense]
    routed = [min(layers - known, count) for known, count in zip(dense, elements.routed, strict=True)]
    return in_all(dense, flying), in_all(routed, flying)


def in_all(blocks: Sequence[int], flying: Sequence[int]) -> int:
    """Blocks of all chunks, times their micro-batches in flight."""
    return sum(count * micro for count, micro in zip(blocks, flying, strict=True))


def engine_bytes(name: str, plan: UnitPlan, settings: EngineSettings = USUAL) -> Bytes:
    """Bytes by class of a plan's rank under an engine's software, and the peak; every number is rounded up."""
    memory = engine_memory(name)
    assert memory
    return as_bytes(engine_ranks(memory, plan, (plan.pp_rank,), settings)[0])


def as_bytes(rank: RankBytes) -> Bytes:
    """The bytes of one rank as a report has them."""
    whole = {name: ceil(value) for name, value in rank._asdict().items()}
    return Bytes.of(whole.pop("peak"), **whole)
