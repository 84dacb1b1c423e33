"""The table of claims as it is stored: what is said, what must come out, and why the common figure is wrong."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal


@dataclass(frozen=True)
class Claim:
    """One figure. verdict: "reproduce", or "correct" where what is said is wrong and `why` says so. inputs: what it is
    for. expect: name -> what must come out, within `rel_tol`; a text is a formula, or an order in words."""

    id: str
    verdict: Literal["reproduce", "correct"]
    says: str
    expect: Mapping[str, Any]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    rel_tol: float | None = None
    why: str = ""
    note: str = ""


@cache
def claims() -> dict[str, Claim]:
    """All of them by id, in the table's order."""
    text = (resources.files("shardwise.validation") / "claims.json").read_text(encoding="utf-8")
    return {row["id"]: Claim(**row) for row in json.loads(text)["claims"]}
