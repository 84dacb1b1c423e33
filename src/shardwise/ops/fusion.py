"""Fused forms: what each replaces, and when it applies. Without torch: the plan, the runtime and predictions ask."""

from collections.abc import Callable, Sequence

from shardwise.model import ModelConfig
from shardwise.records import dataclass


@dataclass(frozen=True)
class FusedForm:
    """One form in place of a module and all that is in it, where `fits`, and where `joined` weights are adjacent."""

    module: str
    """Name of the blocks that it computes (`Part.module`)."""
    replaces: tuple[str, ...]
    """Modules inside whose forms it takes the place of."""
    joined: tuple[tuple[str, ...], ...]
    """Maps of one input that become one product: their weights must be adjacent in memory, and so must their biases."""
    fits: Callable[[ModelConfig], bool]
    attention: tuple[str, ...] = ("sdpa",)
    """Cores of attention that it takes."""

    def adjacent(self, names: Sequence[str]) -> bool:
        """Whether a block's parameters, in the order in which they are in memory, have all joined ones adjacent."""
        for maps in self.joined:
            for leaf in ("weight", "bias"):
                at = [names.index(name) for each in maps if (name := f"{each}.{leaf}") in names]
                if at and at != list(range(at[0], at[0] + len(maps))):
                    return False
        return True


LLAMA_HALVES = FusedForm(
    "llama",
    ("attention_norm", "attention.qkv", "attention.rope", "attention.out", "mlp_norm", "mlp"),
    (("attention.qkv.q", "attention.qkv.k", "attention.qkv.v"), ("mlp.gate_up.gate", "mlp.gate_up.up")),
    fits=lambda model: (
        model.positions == "rope"
        and not (model.qk_norm or model.latent_attention or model.experts)
        and not (model.dropout or model.norm_zero_centered)
        and model.activation == "silu"
    ),
    # Unfused attention saves scaled queries: keeping the ones side by side as well would cost memory.
    attention=("sdpa",),
)
"""A Llama block in two functions, before and after its attention's core (`llama_halves.py`). A compiler fuses by
itself: under compile=block no fused form applies."""

FUSED = (LLAMA_HALVES,)


def fused_form(model: ModelConfig, module: str, attention: str, names: Sequence[str]) -> FusedForm | None:
    """The fused form of a model's blocks. module: theirs; names: of a block's parameters, as they are in memory."""
    return next(
        (
            form
            for form in FUSED
            if form.module == module and attention in form.attention and form.fits(model) and form.adjacent(names)
        ),
        None,
    )
