"""Engine profiles: facts about an engine's software, as far as the time of a step depends on it (`engines.toml`)."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

from shardwise.errors import UserError, did_you_mean
from shardwise.predict.time.features import EVERYTHING, Features
from shardwise.records import dataclass


@dataclass(frozen=True)
class EngineProfile:
    """Profile of one piece of software (`engines.toml`)."""

    name: str
    attention: Literal["fused", "scores"] = "fused"
    """"fused" (FlashAttention and the like) or "scores" (explicit products with a softmax between them)."""
    fused_softmax: bool = True
    """One kernel for scale, mask and softmax."""
    fused_activation: bool = False
    """One kernel for bias and activation."""
    fused_dropout_add: bool = False
    """One kernel for bias, dropout and residual."""
    fused_rope: bool = False
    """One kernel for the rotation."""
    rope_passes: tuple[float, float] = (6.0, 6.0)
    """Passes of 16 bits over queries and keys of a rotation that is not fused, (forward, backward)."""
    fused_norm: bool = True
    """One kernel for an RMSNorm, not one for each of its operations."""
    torch_norm: bool = False
    """That kernel is torch's, slower than a copy of as many bytes."""
    products_apart: bool = False
    """Maps of one input are a product each, whose gradients of the input autograd adds."""
    fused_loss: bool = False
    """Cross-entropy without fp32 copies of the logits."""
    loss_passes: tuple[float, float] = (2.0, 2.0)
    """Passes of 16 bits over the logits of a fused loss, (forward, backward)."""
    dropout: bool = False
    """Dropout is on."""
    graphs: bool = False
    """Kernels are captured, so that the host is not waited for."""
    captured: tuple[str, ...] = ()
    """Parts of blocks with experts whose kernels are captured, of "attention", "router" and "experts"."""
    exchange: Literal["rows", "tokens", "gather"] = "rows"
    """How tokens go to their experts (`exchange.py`): every row by itself, or a token once to each node and rank; when
    serving also all tokens to all ranks."""
    exchange_overlap: bool = False
    """Tokens are exchanged beside the computation of another micro-batch."""
    exchange_launches: tuple[int, int] = (4, 4)
    """Operations that the host calls to exchange tokens of a block, (forward, backward)."""
    overlap_launches: int = 0
    """Operations that the host calls in each block with experts to run two micro-batches beside each other."""
    expert_kernels: tuple[int, int] = (6, 10)
    """Kernels launched one after another in each block for each expert of the rank, with products in (16 bits, a
    narrower type)."""
    biases_by_expert: bool = False
    """Biases of experts' last product are added expert by expert, times the tokens' weights in fp32."""
    fused_experts: bool = False
    """With products in a narrow type, an activation and what is quantised after it are inside experts' products."""
    compiled: bool = False
    """Element-wise chains are one kernel."""
    wgrad_accumulates: bool = False
    """Weight gradients are added to an accumulator inside the product, which reads and writes it."""
    tensor_overlap: bool = False
    """The tensor-parallel collective of a backward product runs beside the weight gradient's."""
    ring_bytes: tuple[float, float] = (0.0, 0.0)
    """Bytes moved per element of a rank's queries to merge each further piece of a ring's attention, (forward,
    backward)."""
    ring_overlap: bool = True
    """A ring's messages run beside the attention to the piece before."""
    kv_repeated: bool = False
    """Context parallelism sends keys and values once for each head of queries."""
    tensor_pipelined: bool = False
    """Every tensor-parallel collective runs in pieces beside the product that it belongs to, forward as well."""
    gathers_narrow: bool = False
    """Under sequence parallelism, inputs of narrow products are gathered in their narrow type."""
    gathers_again: bool = True
    """Under sequence parallelism, inputs are not kept whole but gathered again for the weights' gradients."""
    selective: Literal["core", "operations"] = "core"
    """What recompute=selective repeats: the attention's core, or all operations but attention and every other
    product."""
    uncertain: bool = False
    """Nothing is known of the software: its times have a range of their own."""
    grad_overlap: bool = True
    """Gradients are reduced beside the last backward."""
    gather_overlap: bool = True
    """Parameters are gathered beside computation."""
    gathers_at_end: bool = False
    """Parameters that stages 1 and 2 have updated are gathered before the step ends, beside nothing."""
    gathers_by_stage: bool = False
    """Under a pipeline stage 3 gathers a stage's parameters once for several micro-batches, and not for each."""
    resident_stages: int = 0
    """Stages of a pipeline rank that stay gathered at a time; of more, each round of micro-batches gathers the others
    anew. 0: all."""
    keeps_last: bool = False
    """Without a pipeline stage 3 keeps the last block's parameters from its forward to its backward pass."""
    pipeline_overlap: bool = False
    """Sends between stages run beside computation."""
    scatter_hops: bool = False
    """A stage's output travels in tp pieces."""
    tied_apart: bool = False
    """Gathered blocks alternate between two slots, where a micro-batch finds those of the one before. A tied table has
    its own, and both ends of a pipeline send each other their shards of its gradients."""
    by_unit: bool = False
    """Below stage 3 gradients are reduced and parameters gathered block by block, not in larger buckets."""
    grad_bytes: float | Literal["plan"] = 2.0
    """Bytes of a gradient as it is accumulated and reduced; "plan": as the layout's `UnitPlan` has it."""
    optimizer_bytes: float = 30.0
    """Bytes moved through memory per parameter and step."""
    accumulate_bytes: tuple[float, float] | Literal["plan"] = (0.0, 0.0)
    """Bytes that kernels of their own move per parameter to add a gradient to the accumulator below stage 2: of a
    step's first micro-batch, and of each later one."""
    gather_copies: tuple[float, float] = (0.0, 0.0)
    """Bytes that copies beside a gather of stage 3 move per gathered parameter, and per parameter of the shard."""
    reduce_copies: float = 0.0
    """Bytes that copies beside a reduction of stage 3 move per gradient."""
    vocab_multiple: int = 1
    """The vocabulary is padded to a multiple of this, times tp."""
    attention_kernel: str = "measured"
    """"measured" (the device's best, as in its constants), "flash2" (FlashAttention-2) or "triton" (FlashAttention in
    Triton)."""
    softmax_multiple: int = 1
    """The fused softmax needs sequences x heads of a rank to be a multiple of this."""
    metric_losses: int = 0
    """Further losses computed on the logits for metrics."""
    qkv_copied: bool = False
    """The gradients of queries, keys and values are concatenated."""
    sequence_copies: bool = False
    """Under sequence parallelism, shards of several sequences are copied to lie end to end when they are gathered and
    when they are to be scattered."""
    shard_add_bytes: tuple[float, float] | Literal["plan"] = (0.0, 0.0)
    """The same per parameter of a rank's shard, to which reduced gradients are added under stages 2 and 3."""
    pipeline_launches: int = 0
    """Work of the host for a stage's sends, receives and bookkeeping of one micro-batch, in launches."""
    head_replicated: bool = False
    """Serving: every tp rank has the whole output head."""
    head_quantised: bool = False
    """Serving: the head is stored as the blocks are."""
    reads_peers: bool = False
    """Serving: all-reduces of small messages read the peers' buffers at once."""
    scales_apart: bool = False
    """Serving: products with int8 weights are multiplied with their scales by a kernel of its own."""
    host_overlap: bool = False
    """Serving: without a pipeline, the host prepares a pass while the one before it runs."""
    decode_kernels: int = 6
    """Serving: launches of a block beside its products and its attention."""
    grouped_experts: str = ""
    """Serving: the routed experts of a layer are one launch, whose measured constants have this name (`experts.py`)."""
    cache_share: float = 0.9
    """Serving: share of the memory that the engine fills, of what is free after loading."""
    cache_of_all: bool = False
    """Serving: that is the share of the whole memory, weights and workspace included."""
    static_share: bool = False
    """Serving: it holds weights and the cache alone, and is of what libraries leave; passes have the rest."""
    reserve_bytes: float = 0.0
    """Serving: bytes of workspace, context and libraries; 0: counted (`memory/engine_workspace.py`)."""
    context_bytes: tuple[float, float] = (0.0, 0.0)
    """Serving: bytes of the driver's context and of libraries, (one rank, several)."""
    graph_bytes: float = 0.0
    """Serving: bytes of captured graphs, which are not in the share that the engine fills."""
    int4: str = "int4-g128z"
    """Serving: format of weights in 4 bits (`weight_format`)."""
    narrow_cache: bool = False
    """Serving: keys and values have 8 bits where weights have 8 or 4 of floating point."""
    padded_experts: tuple[int, ...] = ()
    """Serving: multiples of hidden size and width to which experts in MXFP4 are padded, on most devices, on Hopper, and
    on devices with products of 4 bits."""
    windowed_cache: bool = False
    """Serving: a layer with a window keeps no more tokens than that."""
    most_sequences: int = 256
    """Serving: limit of one iteration."""
    large_sequences: int = 0
    """Serving: the same on devices of 70 GiB and more, but for the A100; 0: no other."""
    most_tokens: int = 8192
    """Serving: limit of one iteration."""
    small_tokens: int = 0
    """Serving: the same of a server on devices below 70 GiB, and on the A100; 0: no other."""
    graph_sizes: tuple[int, ...] = ()
    """Serving: numbers of sequences for which decoding was captured as graphs; others are padded to the next one."""
    request_s: float = 0.0
    """Serving: host's seconds per request and iteration."""
    stream_s: float = 0.0
    """Serving: seconds of the server's front end for each token that it streams."""
    stages_see_all: bool = False
    """Serving: in a pipeline, each stage's host goes through the requests of all groups for every pass of one."""
    features: Features = EVERYTHING
    """Layouts that it can run when training, with sources of their own."""
    facts: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)
    """Field -> where it can be read; every field has one but the name and the features."""


def listed(rows: Mapping[str, list[Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """(field -> value, field -> source) of a table of the file."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, (value, _) in rows.items()}
    return values, {name: source for name, (_, source) in rows.items()}


class _Profiles(Mapping[str, EngineProfile]):
    """All profiles. Only used profiles are parsed: the whole file takes as long as the rest of an estimate."""

    def __init__(self) -> None:
        text = Path(__file__).with_name("engines.toml").read_text(encoding="utf-8")
        starts = re.finditer(r"^\[([\w-]+)\]$", text, re.MULTILINE)
        names, places = zip(*((start[1], start.start()) for start in starts), strict=True)
        cuts = zip(places, (*places[1:], len(text)), strict=True)
        self._texts = {name: text[first:last] for name, (first, last) in zip(names, cuts, strict=True)}
        self._parsed: dict[str, EngineProfile] = {}

    def __getitem__(self, name: str) -> EngineProfile:
        if name not in self._parsed:
            self._parsed[name] = self._parse(name)
        return self._parsed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def _parse(self, name: str) -> EngineProfile:
        rows = tomllib.loads(self._texts[name])[name]
        if "base" in rows:
            base = self[rows.pop("base")]
        else:
            fields = [each for each in EngineProfile.__dataclass_fields__ if each not in ("name", "features", "facts")]
            base = EngineProfile(name, facts=dict.fromkeys(fields, rows.pop("unlisted")))
        features, sources = listed(rows.pop("features", {}))
        values, facts = listed(rows)
        can = replace(base.features, **features, sources={**base.features.sources, **sources})
        return replace(base, name=name, features=can, facts={**base.facts, **facts}, **values)


ENGINES: Mapping[str, EngineProfile] = _Profiles()


def engine(name: str) -> EngineProfile:
    """The profile of that name. Raises `UserError` with the nearest one."""
    if name not in ENGINES:
        raise UserError(f"no engine profile {name!r}; {did_you_mean(name, ENGINES, 'known are')}")
    return ENGINES[name]


def attending(engine: EngineProfile, attention: str) -> EngineProfile:
    """The engine with explicit attention where a layout has it and the engine would not."""
    return replace(engine, attention="scores") if attention == "math" and engine.attention != "scores" else engine
