"""Predicted memory of LoRA beside numbers that others published (`lora_memory.json`); nothing is fitted to them.

python docs/lora_memory.py   writes the tables of docs/lora.md
"""

import json
from pathlib import Path
from typing import Any

from shardwise import Workload, estimate
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.model.changes import change
from shardwise.model.lora import Lora
from shardwise.predict.arguments import as_cluster
from shardwise.predict.memory.capacity import usable_bytes

PAGE, DATA = (Path(__file__).with_name(f"lora{end}") for end in (".md", "_memory.json"))
START, END = "<!-- tables of lora_memory.py -->\n", "<!-- end of the tables -->\n"
CARDS = {"24 GB": "1xRTX-4090", "48 GB": "1xRTX-A6000", "80 GB": "1xA100-80GB-SXM"}
MODELS = {"llama-3.1-8b": "8B", "qwen2.5-32b": "32B", "llama-3.1-70b": "70B"}
BASES = {"nf4": "rank=32,base=nf4", "": "rank=32"}


def peak(model: ModelConfig, layout: str, devices: str, seq: int, batch: int) -> float:
    """Bytes of the fullest device."""
    return max(role.bytes.total for role in estimate(model, layout, Workload(seq, batch), devices).roles)


def longest(model: ModelConfig, devices: str) -> int:
    """Tokens of the longest sequence that fits, in steps of 64."""
    room, low, high = usable_bytes(as_cluster(devices)), 0, 1 << 14
    while high - low > 1:
        middle = (low + high) // 2
        fits = peak(model, "recompute=full", devices, 64 * middle, 1) <= room
        low, high = (middle, high) if fits else (low, middle)
    return 64 * low


def runs(data: dict[str, Any]) -> list[str]:
    lines = ["| | run | tokens | published GB | predicted |", "|---|---|---|---|---|"]
    for row in data["runs"]:
        model = change(get(row["model"]), row.get("set", "")).replace(lora=Lora.parse(row["lora"]))
        gb = peak(model, row["layout"], row["devices"], row["seq"], row["batch"]) / 1e9
        kind = "QLoRA" if "nf4" in row["lora"] else "LoRA"
        kind += "" if "recompute" in row["layout"] else ", nothing recomputed"
        name = f"{row['engine']} | {row.get('size', row['model'])} {kind}"
        tokens = f"{row['batch']}x{row['seq']}"
        lines.append(f"| {name} | {tokens} | {row['gb']:.3g} | {gb:.3g} |")
    return lines


def cards(data: dict[str, Any]) -> list[str]:
    """Longest sequences by card, those of others behind."""
    published = {(row["model"], row["card"]): row["tokens"] for row in data["lengths"]}
    smallest = {(row["model"], row["base"]): row["gb"] for row in data["smallest"]}
    lines = ["| | GB at 2048 | " + " | ".join(CARDS) + " |", "|---|---|---|---|---|"]
    for name, short in MODELS.items():
        for base, lora in BASES.items():
            model = get(name).replace(lora=Lora.parse(lora), max_positions=1 << 20)
            gb = peak(model, "recompute=full", CARDS["80 GB"], 2048, 1) / 1e9
            cells = []
            for card, devices in CARDS.items():
                theirs = published.get((name, card)) if base else None
                beside = "" if theirs is None else f" ({theirs:,})"
                cells.append(f"{longest(model, devices):,}{beside}")
            kind = "QLoRA" if base else "LoRA"
            lines.append(f"| {short} {kind} | {gb:.3g} ({smallest[name, base]}) | " + " | ".join(cells) + " |")
    return lines


def tables() -> str:
    data = json.loads(DATA.read_text())
    return "\n".join([*runs(data), "", *cards(data), ""])


def main() -> None:
    head, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(head + START + tables() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
