"""Layouts that an engine's software can run: its schedules, ZeRO stages and kinds of parallelism (`engines.toml`).

A plan for an engine has only candidates with these features. `shardwise` is this project's runtime; a test compares
its row with `layout.legality.check_runnable`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, replace
from typing import Any

from shardwise.layout import Layout
from shardwise.layout.keys import KEYS, changed
from shardwise.records import dataclass


@dataclass(frozen=True)
class Features:
    """Features of one engine, as far as a search chooses among them."""

    tensor: bool = True
    """Tensor parallelism (tp > 1)."""
    sequence: bool = True
    """Megatron's sequence parallelism beside tp (`sp`)."""
    gathered: bool = False
    """Tensor parallelism that gathers every output (`tpkind=gathered`)."""
    context: tuple[str, ...] = ("ring", "ulysses", "allgather")
    """Kinds of context parallelism (`cpkind`); empty without any."""
    experts: bool = True
    """Models with experts, and expert parallelism (ep > 1)."""
    schedules: tuple[str, ...] = ("1f1b", "gpipe", "zb-h1", "interleaved")
    """Pipeline schedules; empty without pipelines."""
    uneven: bool = True
    """Layers that do not divide by the number of stages."""
    listed: bool = True
    """Stages with chosen numbers of layers (`stages=9/9/9/5`), so that the head counts."""
    bare_ends: bool = True
    """Embedding and head as stages of their own (`stages=0/1/.../1/0`)."""
    zero: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages over several data ranks."""
    zero_in_pipeline: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages under a pipeline."""
    hybrid: bool = True
    """Shard groups smaller than all data ranks (HSDP, `shard`)."""
    copies: bool = False
    """Second copies of gathered parameters near by (ZeRO++'s hpZ, `hpz`)."""
    recompute: tuple[str, ...] = ("none", "selective", "full")
    """Ways to recompute activations."""
    offload: tuple[str, ...] = ()
    """Homes of optimizer state and parameters off the device, updated in this runtime's order (`predict.time.offload`);
    empty without any."""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False, compare=False)
    """Field -> where it can be read."""

    def common(self, other: Features) -> Features:
        """The features that both have."""
        both: dict[str, Any] = {}
        for name in (each.name for each in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, bool):
                both[name] = mine and theirs
            elif isinstance(mine, tuple):
                both[name] = tuple(each for each in mine if each in theirs)
        return replace(self, **both)

    def stages_of(self, pp: int) -> tuple[int, ...]:
        """ZeRO stages of layouts with this many pipeline ranks."""
        return self.zero if pp == 1 else tuple(stage for stage in self.zero if stage in self.zero_in_pipeline)

    def objection(self, fixed: Mapping[str, Any]) -> str:
        """Why no layout with these keys and values can run, and what could; empty where one may."""
        if fixed.get("offload", "none") != "none" and not self.offload:
            return "no offloading is modelled of it; leave offload out"
        if fixed.get("cp", 1) > 1 and "ring" not in self.context:
            return "it has no context parallelism; leave cp out"
        for name, entry in KEYS.items():
            feature, words = entry.feature
            if words and fixed.get(name, entry.default) > entry.default and not getattr(self, feature):
                return f"it has no {words}; leave {name} out"
        choices: dict[str, tuple[Any, ...]] = {
            "schedule": self.schedules or ("1f1b",),
            "recompute": self.recompute,
            "zero": tuple(sorted({0, *self.zero})),
        }
        for key, known in choices.items():
            if fixed.get(key, known[0]) not in known:
                return f"it has no {key}={fixed[key]}; choose one of {', '.join(map(str, known))}"
        return ""

    def missing(self, layout: Layout, layers: int) -> list[str]:
        """The words of a layout that need a feature which is not here. layers: of the model."""
        chunks = layout.stage_count
        bare, different = layout.pp > 1 and chunks > layers, changed(layout).items()
        checks = {
            **{key.text(value): bool(key.feature[0] and not getattr(self, key.feature[0])) for key, value in different},
            f"cp={layout.cp}": layout.cp > 1 and layout.cpkind not in self.context,
            f"schedule={layout.schedule}": layout.pp > 1 and layout.schedule not in self.schedules,
            f"{chunks} stages of {layers} layers": (layers % chunks > 0 and not bare and not self.uneven)
            or (bare and not self.bare_ends),
            f"zero={layout.zero}": layout.data_ranks > 1 and layout.stage not in self.stages_of(layout.pp),
            f"recompute={layout.recompute}": layout.recompute not in self.recompute,
        }
        checks |= {
            f"{key.name}={home}": home not in self.offload
            for key, value in different
            if "nvme" in key.choices and (home := value.partition(":")[0])
        }
        return [word for word, lacks in checks.items() if lacks]


EVERYTHING = Features(copies=True, offload=("cpu", "nvme"))
"""All that is searched."""
