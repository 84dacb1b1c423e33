"""From a model's tensors and attributes to its parts, operations and caches."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from shardwise.errors import UserError
from shardwise.model.blueprint import Cut, Parameter, Part
from shardwise.model.config import Experts, LatentAttention, ModelConfig
from shardwise.model.counted import Counted, LayerCache
from shardwise.model.formats import weight_format
from shardwise.model.operations import AttentionCore, Elementwise, LinearOp, Operation, Width
from shardwise.model.precision import Precision
from shardwise.model.shapes.reading import Shaped
from shardwise.model.shapes.table import PREDICTING, SCALE, UNWINDOWED

_ACTIVE = ("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk", "num_experts_per_token", "moe_top_k",
           "num_experts_per_topk", "router_top_k", "ffn_config.moe_top_k", "expert_top_k")  # fmt: skip
"""Attributes for the number of experts of a token."""
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx", "max_seq_len")
_ROW = re.compile(r"(o_proj|out_proj|down_proj|dense_4h_to_h|wo|w2|fc2|fc_out|c_proj|output_linear|linear_out|out_lin"
                  r"|attention\.dense|self_attention\.dense|attn\.dense|ffn_out|output\.dense|linear_2)$")  # fmt: skip
"""Modules whose inputs tensor parallelism divides, where a class has no plan of its own."""
_COLUMN = re.compile(r"(q_proj|k_proj|v_proj|qkv_proj|gate_proj|up_proj|gate_up_proj|query_key_value|dense_h_to_4h|fc1"
                     r"|fc_in|c_fc|c_attn|Wqkv|w1|w3|q_b_proj|kv_b_proj|in_proj\w*|query|key|value"
                     r"|linear_1)$")  # fmt: skip
_KEYS = re.compile(r"(k_proj|v_proj|key|value|k|v)$")
_CONV1D = ("gpt2", "gpt-sw3", "openai-gpt", "imagegpt")
"""Families whose matrices are [inputs, outputs]."""
_ATTENTION = re.compile(r"attn|attention|temporal_block|mixer")
_DOWN = re.compile(r"down|w2|fc2|output|linear_out")


@dataclass(frozen=True)
class _Reading:
    """What the reader has of a model: attributes by the names that all families share."""

    family: Mapping[str, Any]
    attributes: Mapping[str, Any]
    model_type: str
    precision: Precision | None = None

    def get(self, *names: str) -> Any:
        own = self.family["names"]
        return next((v for n in names if (v := self.attributes.get(own.get(n, n))) is not None), None)

    def at(self, name: str, layer: int) -> Any:
        own = self.family["names"].get(name, name)
        value = self.attributes.get(f"{own}/layers") or self.attributes.get(own)
        return value[layer] if isinstance(value, list) and layer < len(value) else value

    def integer(self, *names: str, default: int = 0) -> int:
        return next((v for n in names if type(v := self.get(n)) is int), default)


def interpret(
    name: str, model_type: str, family: Mapping[str, Any], attributes: Mapping[str, Any], tensors: Sequence[Shaped],
    reason: str, notes: Sequence[str] = (), precision: Precision | None = None,
) -> ModelConfig:  # fmt: skip
    """The model of these tensors. Raises `UserError` where they are no language model's."""
    read = _Reading(family, attributes, model_type, precision)
    stacks = _stacks(tensors)
    layers: list[list[Shaped]] = [[] for _ in range(sum(stacks.values()))]
    starts = dict(zip(stacks, accumulate(stacks.values(), initial=0), strict=False))
    ends: list[Shaped] = []
    for tensor in tensors:
        stack = tensor[0].partition(".{}")[0]
        if tensor[1] >= 0 and stack in starts:
            layers[starts[stack] + tensor[1]].append(tensor)
        else:
            ends.append(tensor)
    vocab = read.get("vocab_size")
    table = next((t for t in ends if len(t[2]) == 3 and type(vocab) is int and vocab <= t[2][1] < vocab + 1024
                  and not re.search("lm_head|embed_out", t[0])), None)  # fmt: skip
    if table is None or not layers:
        raise UserError(f"{name}: no language model: {model_type} has no table of tokens or no layers")
    config = _config(name, read, layers, ends, table, _experts(read, layers))
    parts, caches = _parts(config, read, layers, ends, table)
    stored: dict[str, int] = defaultdict(int)
    for part in parts:
        for p in part.parameters:
            stored[p.stored] += part.count * p.numel * bool(p.stored)
    most = max(stored, key=lambda words: stored[words])
    predicting = _predicting(read, layers, caches, config.hidden)
    cache_type = weight_format(precision.cache).dtype if precision and precision.cache else ""
    counted = Counted(model_type, reason, parts, caches, most, cache_type, tuple(notes), predicting)
    return replace(config, counted=counted)


def _predicting(read: _Reading, layers: Sequence[Sequence[Shaped]], caches: Sequence[LayerCache], hidden: int) -> int:
    """Parameters of the layers for multi-token prediction: the last layer with attention, a map of the token's and the
    stream's vectors to one, three norms (DeepSeek-V3, section 2.2); tables are those of the model."""
    count = read.integer("num_nextn_predict_layers", "mtp_num_hidden_layers") or PREDICTING.get(read.model_type, 0)
    last = next((i for i in reversed(range(len(layers))) if caches[i].kind != "linear"), 0)
    return count * (sum(math.prod(shape) for _, _, shape in layers[last]) + 2 * hidden**2 + 3 * hidden)


def _stacks(tensors: Sequence[Shaped]) -> dict[str, int]:
    """Prefix of each stack of layers -> its layers. Lists of single matrices are none."""
    found: dict[str, int] = {}
    for name, layer, _ in tensors:
        if layer >= 0 and re.search(r"(layers?|h|blocks?|block)$", name.partition(".{}")[0]):
            stack = name.partition(".{}")[0]
            found[stack] = max(found.get(stack, 0), layer + 1)
    return found


def _experts(read: _Reading, layers: Sequence[Sequence[Shaped]]) -> Experts | None:
    routed = [[t for t in layer if _is_expert(t)] for layer in layers]
    (count, ffn), dense = max(map(_expert_size, routed), default=(0, 0)), 0
    if not count:
        return None
    while dense < len(layers) and not routed[dense]:
        dense += 1
    name, active = next(((n, v) for n in _ACTIVE if type(v := read.attributes.get(n)) is int and v), ("", 1))
    if active > count:
        raise UserError(f"{name}={active} is more than the {count} experts")
    most = max(layers, key=lambda layer: sum(map(_is_expert, layer)))
    shared = sum(s[-2] for n, _, s in most if re.search(r"shared\w*\.(gate_proj|up_proj|w1|input_linear)\.weight$", n))
    width = max(ffn, 1)
    return Experts(count, active, width, shared=-(-shared // width) if shared else 0, dense_layers=dense)


def _is_expert(tensor: Shaped) -> bool:
    return ".experts." in tensor[0] and "shared" not in tensor[0]


def _expert_size(routed: Sequence[Shaped]) -> tuple[int, int]:
    """(experts, their width) of a layer."""
    sizes = [(s[1], s[2:]) if s[0] == 1 else (s[0], s[1:]) for n, _, s in routed if len(s) + (s[0] == 1) >= 3]
    matrices = [(count, shape) for count, shape in sizes if len(shape) == 2]
    down = [
        (c, min(shape))
        for (c, shape), (n, _, _) in zip(sizes, routed, strict=False)
        if len(shape) == 2 and _DOWN.search(n)
    ]
    if not matrices:
        return 0, 0
    return down[0] if down else (matrices[0][0], min(matrices[0][1]))


def _config(
    name: str, read: _Reading, layers: Sequence[Sequence[Shaped]], ends: Sequence[Shaped], table: Shaped,
    experts: Experts | None,
) -> ModelConfig:  # fmt: skip
    """The nearest `ModelConfig`: its sizes stand for activations and times."""
    hidden = read.integer("hidden_size", "d_model", default=table[2][-1])
    heads = read.integer("num_attention_heads", "num_heads", "n_heads", default=max(1, hidden // 64))
    kv = next((v for i in range(len(layers)) if type(v := read.at("num_key_value_heads", i)) is int and v), None)
    kv = kv or read.integer("num_kv_heads", "attn_config.kv_n_heads", default=heads)
    latent = _latent(read, layers)
    if latent or heads % kv:
        kv = heads
    head = next((v for i in range(len(layers)) if type(v := read.at("head_dim", i)) is int and v), None)
    head = latent.head_dim if latent else head or max(1, hidden // heads)
    positions = read.integer(*_POSITIONS, default=1 << 20)
    head += head % 2
    return ModelConfig(
        name, table[2][1], hidden, len(layers), heads, _ffn(read, layers, hidden), max(1, positions), kv, head,
        experts=experts, latent_attention=latent, tied=not any(_is_head(t, table) for t in ends),
        gated=any(re.search("gate", n) for layer in layers for n, *_ in layer),
    )  # fmt: skip


def _is_head(tensor: Shaped, table: Shaped) -> bool:
    return bool(re.search(r"(lm_head|embed_out|output)\.?", tensor[0])) and table[2][1] in tensor[2]


def _ffn(read: _Reading, layers: Sequence[Sequence[Shaped]], hidden: int) -> int:
    found = [s[-1] for layer in layers for n, _, s in layer if len(s) == 3 and ".experts." not in n and
             re.search(r"(down_proj|dense_4h_to_h|w2|fc2|fc_out|c_proj|wo)\.weight$", n)
             and "attn" not in n]  # fmt: skip
    width = max(found, default=0) or read.integer("intermediate_size", default=0)
    return width or read.integer("moe_intermediate_size", default=4 * hidden)


def _latent(read: _Reading, layers: Sequence[Sequence[Shaped]]) -> LatentAttention | None:
    if not any("kv_a_proj" in n or "kv_b_proj" in n for layer in layers for n, *_ in layer):
        return None
    nope, rope, value = (read.integer(n, default=64) for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank = read.integer("kv_lora_rank", default=512)
    return LatentAttention(read.integer("q_lora_rank"), rank, max(1, nope), rope + rope % 2, min(value, nope + rope))


def _parts(
    config: ModelConfig, read: _Reading, layers: Sequence[Sequence[Shaped]], ends: Sequence[Shaped], table: Shaped
) -> tuple[tuple[Part, ...], tuple[LayerCache, ...]]:
    """(embedding, blocks, head), and the cache of each layer."""
    head = [
        t
        for t in ends
        if _is_head(t, table) or (re.search(r"(final|^norm|\.norm|ln_f|lm_head)", t[0]) and t is not table)
    ]
    first = [table, *(t for t in ends if t is not table and t not in head)]
    caches = tuple(_cache(config, read, i, layer) for i, layer in enumerate(layers))
    blocks: list[Part] = []
    for i, layer in enumerate(layers):
        parameters = tuple(_stored(read, t, p) for t in layer if (p := _parameter(config, read, t)).numel)
        operations = tuple(_operations(config, read, i, layer, parameters, caches[i]))
        last = blocks[-1] if blocks else None
        if last and (last.parameters, last.operations) == (parameters, operations):
            blocks[-1] = replace(last, count=last.count + 1)
        else:
            blocks.append(Part("blocks", "block", "counted", parameters, operations, 2, 2, i, 1))
    tokens = replace(_parameter(config, read, table), cut="vocab", name="tokens.weight")
    embedding = (tokens, *(_parameter(config, read, t) for t in first[1:]))
    outputs = tuple(replace(p, cut="vocab") if config.vocab in p.shape[:1] else p
                    for p in (_parameter(config, read, t) for t in head))  # fmt: skip
    ways: tuple[Operation, ...] = (
        Elementwise("rmsnorm", (Width(config.hidden),)),
        LinearOp("logits", Width(config.hidden), (Width(config.vocab, cut=True),)),
    )
    lookup: tuple[Operation, ...] = (Elementwise("lookup", (Width(config.hidden),)),)
    reads = ("embedding.tokens.weight",) if config.tied else ()
    return (
        Part("embedding", "embedding", "counted", embedding, lookup, 0, 1),
        *blocks,
        Part("head", "head", "counted", outputs, ways, 1, 0, reads=reads),
    ), caches


def _stored(read: _Reading, tensor: Shaped, p: Parameter) -> Parameter:
    if read.precision is None or len(p.shape) < 2 or not tensor[0].endswith(("weight", "_proj")) or "conv" in tensor[0]:
        return p
    name = tensor[0].replace("{}", str(tensor[1])).removesuffix(".weight")
    return replace(p, stored=read.precision.of(name, p.shape))


def _parameter(config: ModelConfig, read: _Reading, tensor: Shaped) -> Parameter:
    """A tensor as a parameter: two-dimensional, with its cut."""
    name, _, (count, *shape) = tensor
    inside = re.sub(r"^.*?\.\{\}\.", "", name)
    if _is_expert(tensor):
        return _expert(inside, count, shape)
    module = inside.rpartition(".")[0]
    cut = _cut(read, name, module)
    conv = read.model_type in _CONV1D and len(shape) == 2 and ".wte" not in name and ".wpe" not in name
    heads = 0
    if cut == "column" and _KEYS.search(module) and config.kv_heads < config.heads and shape[0] % config.kv_heads == 0:
        cut, heads = "kv heads", config.kv_heads
    if len(shape) > 2 or not shape or count > 1:
        shape, cut = [count * (shape or [1])[0], math.prod(shape[1:])], "replicated"
        shape = shape if shape[1] > 1 else shape[:1]
    if cut == "row" and len(shape) == 1:
        cut = "replicated"
    return Parameter(inside, tuple(shape), decay=len(shape) > 1, cut=cut, heads=heads, transposed=conv)


def _expert(inside: str, count: int, shape: list[int]) -> Parameter:
    if count == 1:
        count, *shape = shape
    if len(shape) < 2:
        return Parameter(inside, (count, *shape), cut="expert", heads=count, decay=False)
    width = math.prod(shape[:-1])
    down = bool(_DOWN.search(inside))
    outputs_first = not down
    packed = 1 if outputs_first else 0
    return Parameter(inside, (count * width, shape[-1]), cut="expert", heads=count, packed=packed)


def _cut(read: _Reading, name: str, module: str) -> Cut:
    """The cut under tensor parallelism: by the class's plan, else by the module's name."""
    path = name.replace(".{}.", ".*.").rpartition(".")[0]
    for pattern, kind in read.family["cuts"].items():
        if path.endswith(pattern) or re.sub(r"^(model|transformer)\.", "", path) == pattern:
            if "row" in kind:
                return "row"
            return "column" if "col" in kind else "replicated"
    if re.search(r"(gate|router|wg)$", module) or "norm" in module or "indexer" in module:
        return "replicated"
    return "row" if _ROW.search(module) else "column" if _COLUMN.search(module) else "replicated"


def _cache(config: ModelConfig, read: _Reading, layer: int, tensors: Sequence[Shaped]) -> LayerCache:
    """The cache of one layer, by its tensors and its entry in the list of layer types."""
    kind = str(
        read.at("layer_types", layer) or read.at("layers_block_type", layer) or read.at("attention_layers", layer)
    )
    names = " ".join(n for n, *_ in tensors)
    state = math.prod(_scan(config, read, kind, tensors)) + sum(
        s[1] * s[-1] for n, _, s in tensors if "conv1d" in n and len(s) == 4
    )
    index = read.integer("index_head_dim") * (1 + SCALE) if re.search("indexer", names) else 0
    shared = read.integer("num_kv_shared_layers")
    if shared and layer >= config.layers - shared:
        return LayerCache("none")
    if config.latent_attention and re.search("kv_a_proj|kv_b_proj", names):
        down = (s[1] for n, _, s in tensors if "kv_a_proj" in n and n.endswith("weight"))
        kept = next(down, config.latent_attention.cached)
        return LayerCache("latent", kept, extra=int(index), window=_window(read, kind))
    if "compress" in kind:
        rates = {k.rpartition(".")[2]: v for k, v in read.attributes.items() if k.startswith("compress_rates.")}
        width = read.integer("head_dim", default=config.head_dim)
        window = read.integer("sliding_window")
        return LayerCache("compressed", width, every=rates.get(kind, 1), extra=int(index // max(1, rates.get(kind, 1))),
                          state=window * width)  # fmt: skip
    numbers, heads = _key_numbers(config, read, layer, tensors)
    if not numbers:
        return LayerCache("linear", state=state) if state else LayerCache("none")
    window = _window(read, kind)
    return LayerCache("window" if window else "full", numbers, heads, window, extra=int(index), state=state)


def _key_numbers(config: ModelConfig, read: _Reading, layer: int, tensors: Sequence[Shaped]) -> tuple[int, int]:
    """(numbers per token of keys and values, key/value heads) of a layer with softmax attention; 0 for others."""
    found = [(n, s) for n, _, s in tensors if n.endswith(".weight") and len(s) == 3]
    keys = [
        s[1]
        for n, s in found
        if re.search(r"(k_proj|\.key|\.k)\.weight$", n) and "linear_attn" not in n and "indexer" not in n
    ]
    values = [s[1] for n, s in found if re.search(r"(v_proj|\.value|\.v)\.weight$", n) and "linear_attn" not in n]
    kind = str(read.at("layer_types", layer) or read.at("layers_block_type", layer) or "")
    if kind in ("linear_attention", "mamba", "recurrent", "conv", "moe", "mlp"):
        return 0, 0
    heads = read.at("num_key_value_heads", layer) or config.kv_heads
    heads = heads if type(heads) is int else config.kv_heads
    if keys:
        return keys[0] + (values[0] if values else keys[0]), heads
    fused = any(
        re.search(r"qkv|query_key_value|c_attn|Wqkv|attn\.att_proj|self_attn|attention|kv_proj", n) for n, _ in found
    )
    multi = read.get("multi_query") and not read.get("new_decoder_architecture")
    return (
        (2 * (1 if multi else config.kv_heads) * config.head_dim, 1 if multi else config.kv_heads) if fused else (0, 0)
    )


def _window(read: _Reading, kind: str) -> int:
    """Tokens that a layer of this kind keeps; 0 for all."""
    if "chunked" in kind:
        return read.integer("attention_chunk_size")
    if "sliding" in kind or kind == "local":
        return read.integer("sliding_window", "window_size")
    types = read.get("layer_types") or read.get("layers_block_type")
    if types or read.get("use_sliding_window") is False or not read.family.get("windowed"):
        return 0
    if read.model_type in UNWINDOWED:
        return 0
    return read.integer("sliding_window")


def _scan(config: ModelConfig, read: _Reading, kind: str, tensors: Sequence[Shaped]) -> tuple[int, int, int]:
    """(heads, numbers of a key, of a value) of a layer's recurrent state; 0 for layers without one."""
    decays = [s for n, _, s in tensors if n.endswith("A_log") and len(s) == 3]
    if decays:  # Mamba 1: a state for each channel
        return decays[0][1], decays[0][2], 1
    if kind != "linear_attention" and not re.search("A_log|mamba|linear_attn", " ".join(n for n, *_ in tensors)):
        return 0, 0, 0
    heads = read.integer("linear_num_value_heads", "linear_num_heads", "mamba_num_heads", "mamba_n_heads", "num_heads")
    keys = read.integer("linear_key_head_dim", "linear_head_dim", "ssm_state_size", "mamba_d_state", "state_size")
    values = read.integer("linear_value_head_dim", "linear_head_dim", "mamba_head_dim", "mamba_d_head", "head_dim")
    values = values or config.head_dim
    return heads or config.heads, keys or values, values


def _operations(
    config: ModelConfig, read: _Reading, layer: int, tensors: Sequence[Shaped], parameters: Sequence[Parameter],
    cache: LayerCache,
) -> Iterator[Operation]:  # fmt: skip
    """Operations of a layer in the order in which most blocks have them: norm, maps, attention, its output; norm,
    feed-forward part."""
    stream = (Width(config.hidden),)
    matrices = [p for p in parameters if len(p.shape) == 2 and p.cut != "expert" and min(p.shape) > 8]
    attention = [p for p in matrices if _ATTENTION.search(p.name) and "mlp" not in p.name]
    out = [p for p in attention if p.cut == "row" or re.search(r"(out_proj|o_proj|o_b_proj)\.weight$", p.name)][-1:]
    rest = [p for p in matrices if p not in attention]
    yield Elementwise("rmsnorm", stream)
    for p in attention:
        if p not in out:
            yield _linear(p)
    yield _core(config, read, layer, cache, tensors)
    yield from map(_linear, out)
    yield Elementwise("residual", stream)
    yield Elementwise("rmsnorm", stream)
    routers = [p for p in rest if re.search(r"(gate|router|wg)(\.\w+)?\.weight$", p.name) and config.experts
               and config.experts.count in p.shape]  # fmt: skip
    for p in routers:
        yield LinearOp("router", Width(p.shape[1]), (Width(p.shape[0]),), "stream")
    for p in rest:
        if p not in routers:
            yield _linear(p)
    if not rest and not out:
        yield LinearOp("linear", Width(1), (Width(1),))
    if config.experts and any(p.cut == "expert" for p in parameters):
        yield from _routed(config, parameters)
    yield Elementwise("gated activation", (Width(config.ffn, cut=True),))
    yield Elementwise("residual", stream)


def _linear(p: Parameter) -> LinearOp:
    rows, columns = (p.shape[1], p.shape[0]) if p.transposed else p.shape
    return LinearOp("linear", Width(columns, p.cut == "row"), (Width(rows, p.cut in ("column", "kv heads")),))


def _routed(config: ModelConfig, parameters: Sequence[Parameter]) -> Iterator[Operation]:
    e = config.experts
    assert e
    yield Elementwise("dispatch", (Width(config.hidden),), "routed", e.count, e.active)
    for p in parameters:
        if p.cut == "expert" and p.numel > e.count * max(config.hidden, e.ffn):
            columns, rows = p.shape[1], p.shape[0] // e.count
            cut = columns == e.ffn
            yield LinearOp("linear", Width(columns, cut), (Width(rows, not cut),), "routed", e.count, e.active)


def _core(
    config: ModelConfig, read: _Reading, layer: int, cache: LayerCache, tensors: Sequence[Shaped]
) -> AttentionCore:
    """The attention of a layer. Linear attention stands as a window whose products cost as much as its scan."""
    latent = config.latent_attention
    if cache.kind == "linear":
        heads, keys, values = _scan(config, read, "linear_attention", tensors)
        chunk = read.integer("chunk_size", "mamba_chunk_size", default=64)
        # A chunk's own products, and the state that is read and written once for each token.
        return AttentionCore(
            heads, heads, keys, values, max(1, chunk // 2 + 2 * keys * values // max(1, keys + values))
        )
    if not cache.numbers and not re.search("attn|attention", " ".join(n for n, *_ in tensors)):
        return AttentionCore(1, 1, 1, 1, 1)
    window = cache.window
    if cache.kind == "indexed" or cache.extra:
        window = read.integer("index_topk", default=window)
    if latent:
        return AttentionCore(config.heads, config.heads, latent.head_dim, latent.v_head_dim, window)
    heads = read.at("num_attention_heads", layer)
    width = read.at("head_dim", layer)
    return AttentionCore(
        heads if type(heads) is int else config.heads, cache.heads or config.kv_heads,
        width if type(width) is int and width else config.head_dim, config.head_dim, window,
    )  # fmt: skip
