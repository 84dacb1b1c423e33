"""Families of models: a file each. A new one is listed here."""

from shardwise.model.config import ModelConfig
from shardwise.model.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from shardwise.model.families.family import Family
from shardwise.model.families.gemma import GEMMA2
from shardwise.model.families.gpt2 import GPT2
from shardwise.model.families.llama import LLAMA, MISTRAL
from shardwise.model.families.mixtral import MIXTRAL
from shardwise.model.families.neox import GPT_NEOX
from shardwise.model.families.olmo import OLMO2
from shardwise.model.families.qwen import QWEN2, QWEN3, QWEN3_MOE

FAMILIES = {
    family.model_type: family
    for family in (
        DEEPSEEK_V3, DEEPSEEK_V2, QWEN3_MOE, MIXTRAL, OLMO2, GEMMA2, QWEN3, QWEN2, GPT2, GPT_NEOX, LLAMA,
        MISTRAL,
    )
}  # fmt: skip
"""Hugging Face's `model_type` -> family. A model belongs to the first one whose features it has."""


def family_of(config: ModelConfig) -> Family:
    """The family that is nearest to a model: of two with the same mathematics, the first one."""
    return next(family for family in FAMILIES.values() if family.fits(config))


__all__ = ["FAMILIES", "Family", "family_of"]
