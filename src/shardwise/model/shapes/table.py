"""What recording cannot see: other names of families, and fields that a class turns into others before it reads them.

Sources: the configuration classes of transformers 5.24, and the published `config.json` files of the families.
"""

from __future__ import annotations

from typing import Any

ALIASES = {"kimi_k2": "deepseek_v3"}
"""model_type -> family."""


def prepared(model_type: str, data: dict[str, Any]) -> dict[str, Any]:
    """The fields that the family's data knows, from those that are published."""
    return data
