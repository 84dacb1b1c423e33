"""Modules without a description: three of the tests' own, and `transformers` classes with few, random weights."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.float64 import oracle

VOCAB, WIDTH, SEQ, WIDE = 24, 16, 8, 256


class SkipBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + scale * y, {"change": y}


class SkipMLP(nn.Module):
    """Blocks whose changes skip to the head. x: [batch, width]."""

    def __init__(self, width: int = WIDTH, blocks: int = 3, device: str = "cpu") -> None:
        super().__init__()
        with torch.device(device):
            self.enter = nn.Linear(width, width)
            self.blocks = nn.ModuleList(SkipBlock(width) for _ in range(blocks))
            self.scale = nn.Parameter(torch.ones(width))
            self.head = nn.Linear(width, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        changes = torch.zeros_like(x)
        for block in self.blocks:
            x, others = block(x, scale=self.scale)
            changes = changes + others["change"]
        return self.head(x + 0.5 * changes)


class WideMLP(SkipMLP):
    """As wide as blocks of bases in fewer bits need it, on two ranks."""

    def __init__(self) -> None:
        super().__init__(WIDE, blocks=2)


class PlainBlock(nn.Module):
    """x + down(gelu(up(norm(x)))), one tensor. runs: a buffer that counts its forward passes in training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.register_buffer("scale", torch.full((width,), 0.5))
        self.register_buffer("runs", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        if self.training:
            self.runs += 1
        x = x if more is None else x + more
        return x + self.scale.to(x.dtype) * self.down(F.gelu(self.up(self.norm(x))))


class PlainMLP(nn.Module):
    """A map, four blocks with a function between them, a map. x: [batch, width]."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.blocks = nn.ModuleList(PlainBlock(width) for _ in range(4))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class PastStages(PlainMLP):
    def forward(self, x: Tensor) -> Tensor:
        x = first = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x + first)


class Conditioned(PlainMLP):
    """Whose blocks all take what comes before them, too."""

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.enter(x)
        for block in self.blocks:
            x = block(x, first)
        return self.head(x)


class ScaledMap(nn.Linear):
    """A map with a forward of its own: autograd adds up its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class TiedModel(nn.Module):
    """A table that is the head's weight, with blocks between. ids: [batch, seq]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(PlainBlock(WIDTH) for _ in range(4))
        self.head = ScaledMap(WIDTH, VOCAB, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class NestedBlock(nn.Module):
    """x + feed(norm(x)), whose maps are in a module of their own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed(self.norm(x))


class NestedModel(nn.Module):
    """A table, blocks, a norm and a head. ids: [batch, seq]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(NestedBlock(WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Unordered(nn.Module):
    """Blocks in another order than that of registration, one of them twice and under two names. ids: [batch, seq]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, twice = nn.Embedding(VOCAB, WIDTH), NestedBlock(WIDTH)
        self.last = nn.ModuleList([twice, NestedBlock(WIDTH), twice])
        self.first = nn.ModuleList(NestedBlock(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in (*self.first, *self.last):
            x = block(x)
        return self.head(x)


class StateSpaceBlock(nn.Module):
    def __init__(self, width: int, states: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(width, 2 * width, bias=False)
        self.decay = nn.Parameter(torch.rand(width, states))
        self.gain = nn.Parameter(torch.randn(width, states) / states)
        self.kernel = nn.Conv1d(width, width, 3, padding=2, groups=width)
        self.leave = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        signal, gate = self.enter(x).chunk(2, -1)
        signal = self.kernel(signal.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        state, out = torch.zeros(*signal[:, 0].shape, self.decay.shape[1], dtype=x.dtype), []
        for token in signal.unbind(1):
            state = state * torch.sigmoid(self.decay) + token.unsqueeze(-1)
            out.append((state * self.gain).sum(-1))
        return x + self.leave(torch.stack(out, 1) * F.silu(gate))


class StateSpace(nn.Module):
    """Token table, state-space blocks, a head. ids: [batch, seq]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.blocks = nn.ModuleList(StateSpaceBlock(WIDTH) for _ in range(2))
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SharedBlock(nn.Module):
    """Weights of maps are also read past these: a shared one's, and one whose map, and bias, nothing uses."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.shared = shared
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.shared.weight) + F.linear(x, self.unused.weight)
        return x + self.down(torch.tanh(self.up(self.shared(x)))) + 0.1 * y


class SharedWeights(nn.Module):
    """A table that is the head's weight, and a map that two blocks share. ids: [batch, seq]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(SharedBlock(shared) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class StackedExperts(nn.Module):
    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 2 * inner, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, inner) / inner**0.5)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, slot = torch.where(chosen == number)
            gate, value = F.linear(tokens[token], up).chunk(2, -1)
            rows = F.linear(F.silu(gate) * value, down) * weights[token, slot, None]
            out = out.index_add(0, token, rows)
        return out


class RoutedBlock(nn.Module):
    """x plus its chosen experts of `norm(x)`."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.experts = StackedExperts(experts, width, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(y).softmax(-1).topk(2, -1)
        return x + self.experts(y, chosen, weights).view_as(x)


class RoutedModel(nn.Module):
    """Token table, blocks of experts, a head. The last expert of the second block has no token. ids: [batch, seq]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(RoutedBlock(WIDTH, 4) for _ in range(2))
        nn.init.constant_(self.blocks[1].router.bias[3:], -100.0)
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.shift.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class AttentionBlock(nn.Module):
    """Attention over all tokens so far, then a feed-forward. x: [batch, seq, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._heads(self.norm(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part(x).unflatten(2, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))


class AttentionModel(nn.Module):
    """Two tables, four blocks, a norm and a head. ids: [batch, seq]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(AttentionBlock(WIDTH) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]) if position_ids is None else position_ids)
        for block in self.ordered():
            x = block(x)
        return self.head(self.norm(x))

    def ordered(self) -> Iterator[nn.Module]:
        return iter(self.blocks)


class HeadsBlock(nn.Module):
    """Attention by torch's module, then a feed-forward. x: [batch, seq, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.feed = NestedBlock(width)

    def forward(self, x: Tensor) -> Tensor:
        y, mask = self.norm(x), nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.feed(x + self.attention(y, y, y, need_weights=False, attn_mask=mask, is_causal=True)[0])


class GroupedModel(AttentionModel):
    """Its blocks are in lists of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(HeadsBlock(WIDTH) for _ in range(2)) for _ in range(2))

    def ordered(self) -> Iterator[nn.Module]:
        return (block for group in self.blocks for block in group)


OWN: dict[str, type[nn.Module]] = {
    "skips": SkipMLP,
    "wide": WideMLP,
    "states": StateSpace,
    "shared": SharedWeights,
    "routed": RoutedModel,
    "plain": PlainMLP,
    "tied": TiedModel,
    "nested": NestedModel,
}
PLANS: dict[str, dict[str, str]] = {
    "skips": {"blocks.*.up": "column", "blocks.*.down": "row", "head": "colwise_gather_output"},
    "wide": {"blocks.*.up": "column", "blocks.*.down": "row"},
    "states": {
        "table": "vocab",
        "blocks.*.enter": "colwise_gather_output",
        "blocks.*.leave": "rowwise_split_input",
        "head": "vocab",
    },
    "shared": {"table": "vocab", "blocks.*.up": "column", "blocks.*.down": "row"},
    "routed": {
        "table": "vocab",
        "blocks.*.experts": "experts",
        "blocks.*.experts.up": "packed_column",
        "blocks.*.experts.down": "row",
    },
    "plain": {"blocks.*.up": "column", "blocks.*.down": "row"},
    "tied": {"blocks.*.up": "column", "blocks.*.down": "row"},
    "attends": {f"blocks.*.{name}": "column" for name in ("q", "k", "v", "up")}
    | {"blocks.*.out": "row", "blocks.*.down": "row", "head": "vocab"},
    "nested": {"table": "vocab", "blocks.*.feed.0": "column", "blocks.*.feed.2": "row", "head": "vocab"},
}


def own_batch(name: str, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets with -100 for what does not count, of different numbers in the rows)."""
    generator = torch.Generator().manual_seed(seed)
    if name in ("skips", "plain", "wide"):
        targets = torch.randint(VOCAB, (rows,), generator=generator)
        targets[: rows // 4] = -100
        width = WIDE if name == "wide" else WIDTH
        return torch.randn(rows, width, generator=generator, dtype=torch.float64), targets
    ids = torch.randint(VOCAB, (rows, SEQ), generator=generator)
    targets = ids.roll(-1, 1)
    for row in range(rows):
        targets[row, : row % SEQ] = -100
    return ids, targets


def logits_of(out: Any) -> Any:
    """Those of a module's result, as `transformers` has them or alone."""
    return getattr(out, "logits", out)


def summed_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(cross-entropy summed over the targets that count, how many these are)."""
    inputs, targets = batch
    logits = logits_of(model(inputs))
    loss = F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1), reduction="sum", ignore_index=-100)
    return loss, (targets != -100).sum()


def llama(**changes: object) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SMALL | changes))


def qwen3(**changes: object) -> nn.Module:
    """Its norms of queries and keys see the gradients of a rank's own heads alone."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**_SMALL | {"head_dim": 8} | changes))
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            nn.init.normal_(parameter, 1.0, 0.2)
    return model


def phi3(**changes: object) -> nn.Module:
    """Queries, keys and values in one map, gate and up in another."""
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**_SMALL | {"pad_token_id": 0} | changes))


def gpt2(**changes: object) -> nn.Module:
    """Maps with transposed weights, and a head with the table's weight."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 48}
    return GPT2LMHeadModel(GPT2Config(**sizes | {"bos_token_id": 0, "eos_token_id": 0} | changes))


def gemma3(**changes: object) -> nn.Module:
    """Four norms per block, windows, norms of queries and keys, and a scaled table that is the head's weight."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**_SMALL | {"head_dim": 8, "sliding_window": 4} | changes))


def t5(**changes: object) -> nn.Module:
    """Encoder and decoder, whose blocks hand on the first one's position biases."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 48}
    return T5ForConditionalGeneration(T5Config(**sizes | {"decoder_start_token_id": 0} | changes))


def vit(**changes: object) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return ViTForImageClassification(ViTConfig(**sizes | {"image_size": 16, "patch_size": 4} | changes))


def mixtral(**changes: object) -> nn.Module:
    """Stacked experts; their grouped products have no float64."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**_SMALL | {"num_local_experts": 4} | changes))


def deepseek(**changes: object) -> nn.Module:
    """Latent attention, a dense block, then shared experts beside routed ones in groups."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {
        "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_key_value_heads": 4, "n_routed_experts": 8,
        "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 16,
        "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    }  # fmt: skip
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**_SMALL | sizes | changes))
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            nn.init.normal_(parameter)
    return model


_SMALL = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
FAMILIES = {"llama": llama, "qwen3": qwen3, "phi3": phi3, "gemma3": gemma3, "gpt2": gpt2}
MIXTURES = {"mixtral": mixtral, "deepseek": deepseek}


def qwen3_moe(**changes: object) -> nn.Module:
    """Stacked experts in every block, which compute one by one."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SMALL | sizes | {"experts_implementation": "eager"} | changes))


def _four_small(family: Callable[..., nn.Module]) -> nn.Module:
    return family(vocab_size=VOCAB, num_hidden_layers=4, use_cache=False)


ATTENDING: dict[str, Callable[[], nn.Module]] = {
    "attends": AttentionModel,
    "llama": lambda: oracle(_four_small(llama)),
    "qwen3_moe": lambda: oracle(_four_small(qwen3_moe)),
}
"""One of the tests' own and two of `transformers`, whose blocks call `scaled_dot_product_attention`."""
COMPILED: dict[str, Callable[[], nn.Module]] = {
    "attends": AttentionModel,
    "rounded llama": lambda: _four_small(llama),
    "rounded qwen3_moe": lambda: _four_small(qwen3_moe),
}
"""The same for a compiler: norms and routers of `transformers` compute in fp32."""


def exact(family: str) -> nn.Module:
    """A family's model that computes in float64 throughout."""
    return oracle((FAMILIES | MIXTURES)[family]())


def four_layers(family: Callable[..., nn.Module], changes: dict[str, object]) -> nn.Module:
    return family(**{"num_hidden_layers": 4} | changes)


PIPED = {
    "llama": partial(four_layers, llama, {}),
    "qwen3": partial(four_layers, qwen3, {"tie_word_embeddings": True}),
    "gpt2": partial(gpt2, n_layer=4),
    "gpt2 apart": partial(gpt2, n_layer=4, tie_word_embeddings=False),
    "mixtral": partial(four_layers, mixtral, {}),
    "deepseek": partial(four_layers, deepseek, {}),
}
"""Families with four blocks; the tables of two are tied."""
GPT2_PARTS = ["transformer.wte", "transformer.wpe", "transformer.h.*", "transformer.ln_f", "lm_head"]
PARTS = {
    "states": ["table", "blocks.*", "head"],
    "routed": ["table", "blocks.*", "head"],
    "plain": ["enter", "blocks.*", "head"],
    "attends": ["table", "places", "blocks.*", "norm", "head"],
    "tied": ["table", "blocks.*", "head"],
}
GPT2_PLAN = {
    "transformer.h.*.attn.c_attn": "colwise_gather_output",
    "transformer.h.*.attn.c_proj": "rowwise_split_input",
    "transformer.h.*.mlp.c_fc": "column",
    "transformer.h.*.mlp.c_proj": "row",
    "lm_head": "vocab",
}


T5_PLAN = {
    "*.block.*.layer.*.DenseReluDense.wi": "column",
    "*.block.*.layer.*.DenseReluDense.wo": "row",
    "lm_head": "colwise_gather_output",
}


def t5_example() -> dict[str, Tensor]:
    ids = token_example()["input_ids"]
    return {"input_ids": ids, "decoder_input_ids": ids.roll(1, 1)[:, :5], "use_cache": False}  # type: ignore[dict-item]


def image_example() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(5))}


def token_example(rows: int = 4, seq: int = 7) -> dict[str, Tensor]:
    ids = torch.randint(1, 48, (rows, seq), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "use_cache": False}  # type: ignore[dict-item]
