"""Model configuration: the few numbers that fix every parameter's shape and the mathematics of a decoder.

`ModelConfig` comes from a Hugging Face `config.json` (`huggingface.py`), from the catalog (`catalog.py`) or from its
constructor. Its parts (`blueprint.py`), as those of a user's module, are what layouts, checkpoints and predictions
read.
"""

import math
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal

from shardwise.codec import Json
from shardwise.errors import UserError
from shardwise.model.counted import Counted
from shardwise.model.lora import Lora
from shardwise.records import dataclass

Norm = Literal["rmsnorm", "layernorm"]
NormPlacement = Literal["pre", "post", "both"]
QKNormScope = Literal["head", "all heads"]
Positions = Literal["rope", "learned", "alibi"]
Activation = Literal["silu", "gelu", "gelu_tanh"]
Bias = Literal["none", "qkv", "all"]


_LATER = frozenset(
    [
        "norm_placement",
        "norm_zero_centered",
        "qk_norm_scope",
        "score_scale",
        "score_softcap",
        "logit_softcap",
        "window",
        "full_attention_every",
        "scaled_embedding",
        "lora",
        "counted",
    ]
)
"""Fields of `ModelConfig` that earlier versions lack."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3's frequency-dependent stretching of the rotary angles (the `llama3` rope type)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """Stretching of slow rotary angles by a factor (YaRN, Peng et al. 2023), as DeepSeek has it."""

    factor: float
    original_max_positions: int
    """Positions before the stretching: angles are told apart by their rotations over these."""
    beta_fast: float = 32.0
    """Rotations from which on an angle is kept."""
    beta_slow: float = 1.0
    """Rotations up to which an angle is divided by the factor; in between it is a mixture of both."""
    mscale: float = 1.0
    """Attention scores are multiplied by the square of 0.1 mscale ln(factor) + 1."""

    @property
    def score_factor(self) -> float:
        """Factor of attention scores."""
        return (0.1 * self.mscale * math.log(self.factor) + 1.0) ** 2 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class Experts:
    """Mixture-of-experts feed-forward: `count` routed experts of width `ffn`, `active` of them for each token.

    Raises `UserError` when the numbers contradict each other.
    """

    count: int
    active: int
    ffn: int
    shared: int = 0
    """Experts that see every token, computed as one feed-forward part of width `shared * ffn`."""
    dense_layers: int = 0
    """Leading layers that keep the dense feed-forward (DeepSeek-V3 has 3)."""
    router_bias: bool = False
    """Whether a bias is added to the scores when experts are chosen, and only then (DeepSeek-V3)."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of experts from the router's logits."""
    normalized: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """Factor of the weights, after that."""
    groups: int = 1
    """Groups of neighboring experts, of which a token may choose from `active_groups`."""
    active_groups: int = 1
    group_score: Literal["max", "top 2"] = "top 2"
    """Score of a group: its best expert's, or the sum of its two best (DeepSeek-V3)."""
    balance: Literal["sequence", "micro-batch", "global"] = "sequence"
    """Tokens over which the balance loss counts: a sequence, a micro-batch, or all that are routed at the same time."""
    balance_loss: float = 0.0
    """Coefficient of the balance loss (Fedus et al. 2022); 0 means none."""
    z_loss: float = 0.0
    """Coefficient of the mean squared log-sum-exp of the router's logits (Zoph et al. 2022)."""
    bias_rate: float = 0.0
    """Change of the router's bias per step, towards equal loads (Wang et al. 2024)."""
    capacity: float = 0.0
    """Tokens that an expert takes of one sequence, over its share; later ones are dropped. 0 means no bound."""

    def __post_init__(self) -> None:
        for field in ("count", "ffn"):
            if (number := getattr(self, field)) < 1:
                raise UserError(f"experts: {field} must be a positive integer, not {number!r}")
        if not 1 <= self.active <= self.count:
            raise UserError(f"a token cannot choose {self.active} of {self.count} experts")
        if self.groups < 1 or self.count % self.groups or not 1 <= self.active_groups <= self.groups:
            raise UserError(f"{self.count} experts cannot be in {self.groups} groups, {self.active_groups} active")
        if self.active > self.count // self.groups * self.active_groups:
            raise UserError(f"{self.active_groups} of {self.groups} groups have fewer than {self.active} experts")
        if self.bias_rate and not self.router_bias:
            raise UserError("bias_rate moves the router's bias, which router_bias=False leaves out")

    def without_training(self) -> "Experts":
        """A copy with the defaults of the options that only training reads: what the weights alone are for."""
        return replace(self, balance="sequence", balance_loss=0.0, z_loss=0.0, bias_rate=0.0, capacity=0.0)

    def most(self, tokens: int) -> int:
        """Tokens of a sequence that one expert takes at most."""
        return math.ceil(self.capacity * tokens * self.active / self.count) if self.capacity else tokens


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's multi-head latent attention: the ranks of its low-rank projections and its head widths.

    Raises `UserError` for numbers that are no widths.
    """

    q_rank: int
    """Rank of the queries' projection; 0 for one direct map (DeepSeek-V2-Lite)."""
    kv_rank: int
    """Numbers per token that keys and values of all heads are made of."""
    nope_head_dim: int
    """Width of the part of a head's queries and keys that is not rotated."""
    rope_head_dim: int
    """Width of the rotated part, whose keys all heads share."""
    v_head_dim: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "q_rank" else 1
            if type(value) is not int or value < least:
                raise UserError(f"latent attention: {field.name} must be an integer of at least {least}, not {value!r}")
        if self.v_head_dim > self.head_dim:
            raise UserError(
                f"latent attention: v_head_dim={self.v_head_dim} is wider than the queries' and keys' {self.head_dim}"
            )

    @property
    def head_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def cached(self) -> int:
        """Numbers per token in the cache of generation: the latent, and the keys' shared part."""
        return self.kv_rank + self.rope_head_dim


@dataclass(frozen=True)
class ModelConfig(Json):
    """A decoder-only language model.

    Widths are in elements. Raises `UserError` when the numbers contradict each other. Versions without the mechanisms
    that are not used read its JSON, too.
    """

    json_name = "a shardwise model description"
    json_omits = _LATER

    name: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    ffn: int
    max_positions: int
    kv_heads: int = 0
    """0 means as many as `heads` (no grouped-query attention)."""
    head_dim: int = 0
    """0 means hidden / heads."""
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    positions: Positions = "rope"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | YarnScaling | None = None
    rotary_fraction: float = 1.0
    """Share of each head's width that is rotated (GPT-NeoX: 0.25)."""
    activation: Activation = "silu"
    gated: bool = True
    bias: Bias = "none"
    norm_placement: NormPlacement = "pre"
    """Norms of a block: of the input of attention and feed-forward, of their output (OLMo-2), or of both (Gemma-2)."""
    norm_zero_centered: bool = False
    """Whether norms multiply by 1 + weight (Gemma)."""
    qk_norm: bool = False
    """Norms of queries and keys."""
    qk_norm_scope: QKNormScope = "head"
    """Whether each head has a mean square of its own (Qwen3), or all heads have one (OLMo-2)."""
    score_scale: float | None = None
    """Attention scores are divided by the square root of this; None means head_dim."""
    score_softcap: float | None = None
    """Attention scores s become c tanh(s / c)."""
    logit_softcap: float | None = None
    """Logits x become c tanh(x / c)."""
    window: int = 0
    """Tokens that a token of a local layer attends to, itself included; 0 means all before it, in every layer."""
    full_attention_every: int = 0
    """With a window: every so many layers one attends to all tokens (Gemma-2: 2); 0 means none does."""
    scaled_embedding: bool = False
    """Whether token vectors are multiplied by the square root of hidden (Gemma)."""
    tied: bool = False
    parallel_residual: bool = False
    embedding_norm: bool = False
    """A LayerNorm directly after the embedding (BLOOM)."""
    dropout: float = 0.0
    attention_dropout: float = 0.0
    experts: Experts | None = None
    latent_attention: LatentAttention | None = None
    lora: Lora | None = None
    """Low-rank adapters, beside which all other parameters are frozen; None trains these."""
    counted: Counted | None = None
    """Parts and caches of a model that is planned from its tensors' shapes alone; its other fields are then the nearest
    that there are."""
    published_params: float | None = None
    """The parameter count that the model's authors state, for comparison only."""
    trace: ClassVar[None] = None
    """Its steps follow from its sizes."""

    def __post_init__(self) -> None:
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        for field in ("vocab", "hidden", "layers", "heads", "ffn", "max_positions", "kv_heads"):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise UserError(f"model {self.name!r}: {field} must be a positive integer, not {value!r}")
        if latent := self.latent_attention:
            if self.head_dim not in (0, latent.head_dim) or self.kv_heads != self.heads:
                raise UserError(
                    f"model {self.name!r}: latent attention has head_dim={latent.head_dim}, its two parts together, "
                    f"and kv_heads={self.heads}, as many as heads"
                )
            object.__setattr__(self, "head_dim", latent.head_dim)
        if not self.head_dim:
            if self.hidden % self.heads:
                raise UserError(
                    f"model {self.name!r}: hidden={self.hidden} is not divisible by heads={self.heads}; give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if self.head_dim < 1:
            raise UserError(f"model {self.name!r}: head_dim must be a positive integer, not {self.head_dim!r}")
        if self.heads % self.kv_heads:
            raise UserError(f"model {self.name!r}: heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        for field in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, field) < 1.0:
                raise UserError(f"model {self.name!r}: {field} must lie in [0, 1), not {getattr(self, field)!r}")
        for field in ("score_scale", "score_softcap", "logit_softcap"):
            if (number := getattr(self, field)) is not None and not 0.0 < number < float("inf"):
                raise UserError(f"model {self.name!r}: {field} must be a positive number, not {number!r}")
        for field in ("window", "full_attention_every"):
            if type(value := getattr(self, field)) is not int or value < 0:
                raise UserError(f"model {self.name!r}: {field} must be an integer of at least 0, not {value!r}")
        if not 0.0 <= self.rotary_fraction <= 1.0:
            raise UserError(f"model {self.name!r}: rotary_fraction must lie in [0, 1], not {self.rotary_fraction!r}")
        if self.lora and not self.counted and (self.experts or self.latent_attention):
            what = "experts" if self.experts else "latent attention"
            raise UserError(f"model {self.name!r}: there are no adapters for {what} yet; leave lora out")
        if self.rotated % 2:
            raise UserError(f"model {self.name!r}: the rotated part of head_dim={self.head_dim} must be even")

    @property
    def plain_attention(self) -> bool:
        """Whether attention is softmax(q kᵀ / sqrt(head_dim)) v over all tokens before, which fused kernels compute."""
        return not self.score_softcap and not self.window and self.score_factor == self.head_dim**-0.5

    @property
    def score_factor(self) -> float:
        """Factor of attention scores."""
        stretched = self.rope_scaling.score_factor if isinstance(self.rope_scaling, YarnScaling) else 1.0
        return float((self.score_scale or self.head_dim) ** -0.5 * stretched)

    @property
    def rotated(self) -> int:
        """Numbers of each query and key head that are rotated by their position."""
        if self.positions != "rope":
            return 0
        return (
            self.latent_attention.rope_head_dim if self.latent_attention else int(self.head_dim * self.rotary_fraction)
        )

    @property
    def value_dim(self) -> int:
        """Width of a head of values, and of its output."""
        return self.latent_attention.v_head_dim if self.latent_attention else self.head_dim

    @property
    def narrow_values(self) -> bool:
        return self.value_dim < self.head_dim

    @property
    def q_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key (or value) heads together."""
        return self.kv_heads * self.head_dim

    def layer_window(self, layer: int) -> int:
        """Tokens that a token of this layer attends to; 0 means all before it."""
        every = self.full_attention_every
        return 0 if every and (layer + 1) % every == 0 else self.window

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward part is a mixture of experts."""
        return self.experts is not None and layer >= self.experts.dense_layers

    def why_not_runnable(self) -> str | None:
        """The reason why no decoder here computes this model, or None when one does."""
        if self.counted:
            return self.counted.reason
        if self.experts and not (self.norm == "rmsnorm" and self.norm_placement == "pre" and self.gated):
            return "experts run only in blocks with RMSNorm before a gated feed-forward"
        bare = self.norm == "rmsnorm" and self.norm_placement == "pre" and self.bias == "none" and not self.qk_norm
        if self.latent_attention and not (bare and self.positions == "rope" and not self.window):
            return "latent attention runs only in blocks with RMSNorm before it and RoPE, without biases and windows"
        if self.positions == "alibi":
            return "ALiBi positions are counted but not runnable here"
        if self.norm == "layernorm" and self.gated:
            return "LayerNorm with a gated feed-forward has no decoder here"
        if self.embedding_norm:
            return "a norm after the embedding is counted but not runnable here"
        if self.norm == "layernorm" and self.activation == "silu":
            return "LayerNorm with SiLU has no decoder here"
        if self.norm == "layernorm" and (self.norm_placement != "pre" or self.norm_zero_centered):
            return "LayerNorm runs only before attention and feed-forward, and multiplies by its weight"
        llama = self.gated and self.positions == "rope" and self.bias != "all" and self.activation != "gelu"
        if self.norm == "rmsnorm" and (self.parallel_residual or not llama):
            return (
                "RMSNorm runs only with RoPE, a gated SiLU or tanh-GELU activation, sequential residuals and at most "
                "qkv biases"
            )
        return None

    def replace(self, **changes: Any) -> "ModelConfig":
        """A copy with some fields changed; derived fields (`kv_heads`, `head_dim`) are kept unless named."""
        made = replace(self, **changes)
        if self.counted is None or not changes.keys() & {"layers", "experts"} or "counted" in changes:
            return made
        mixed = made.experts is not None and not made.experts.dense_layers
        return replace(made, counted=self.counted.cut(made.layers, mixed, made.experts is not None))
