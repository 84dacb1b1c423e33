"""Masks and gradients of SFT and DPO beside TRL's, on tiny data.

    pip install trl        # in an environment of its own
    PYTHONPATH=src:tests python docs/beside_trl.py RESULTS.md

TRL tokenizes, masks and collates the records itself, one dialogue in a row; our rows are those of a run, of dialogues
packed. Both losses are of one module in float64 with weights by one seed; DPO's reference has another.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.dialogues import chats, pairs, write_records, write_tokenizer
from shardwise.data import Corpus, prepare
from shardwise.data.dialogues import stored
from shardwise.layout import Layout
from shardwise.runtime.module.class_model import ClassModel
from shardwise.runtime.module.losses import LossRows, margins, preference_loss, token_loss

SEQ, BETA = 256, 0.1
Sequences = list[tuple[list[int], list[int]]]
"""(tokens, 1 for each that counts), in order."""


def module(seed: int) -> nn.Module:
    config = ClassModel({"model_type": "llama"}, "llama").small(Layout()).config.to_dict()
    torch.manual_seed(seed)
    return ClassModel({**config, "vocab_size": 300, "pad_token_id": None}, "llama")().double()


def ours(corpus: Corpus) -> Sequences:
    tokens = np.concatenate([corpus.tokens(split) for split in ("train", "validation")])
    parts = [tokens[start : start + length].astype(np.int64) for start, length in stored(tokens)]
    return [((part // 2).tolist(), (part & 1).tolist()) for part in parts]


def rows_of(corpus: Corpus, packed: bool) -> LossRows:
    """All rows of both splits."""
    made = []
    for split in ("train", "validation"):
        sampler = corpus.sampler(split, SEQ, 0, packed)
        made.append(sampler.rows(np.arange(sampler.windows)))
    tensors = {name: torch.from_numpy(np.concatenate([rows[name] for rows in made])) for name in made[0]}
    return LossRows(tensors["inputs"], tensors["targets"], tensors.get("positions"))


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    loss().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest relative difference of a parameter's gradient."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in a)


def _trainer(kind: str, folder: Path, records: list[dict[str, Any]], **more: Any) -> Any:
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    names = {"sft": ("SFTTrainer", "SFTConfig"), "dpo": ("DPOTrainer", "DPOConfig")}[kind]
    trainer, config = (getattr(trl, name) for name in names)
    options = more.pop("options")
    return trainer(
        args=config(str(folder / "out"), report_to=[], use_cpu=True, bf16=False, max_length=SEQ,
                    gradient_checkpointing=False, **options),
        train_dataset=Dataset.from_list(records), processing_class=AutoTokenizer.from_pretrained(folder / "tok"),
        **more,
    )  # fmt: skip


def sft(folder: Path, records: list[dict[str, Any]]) -> tuple[bool, float]:
    """(whether all masks are equal, the largest difference of a gradient)."""
    model = module(0)
    options = {"assistant_only_loss": True} if "messages" in records[0] else {"completion_only_loss": True}
    trainer = _trainer("sft", folder, records, model=model, options=options)
    theirs = [(row["input_ids"], [int(label >= 0) for label in row["labels"]]) for row in trainer.train_dataset]
    corpus = _corpus(folder, records)
    batch = trainer.data_collator(list(trainer.train_dataset))
    rows = rows_of(corpus, packed=True)

    def mean() -> Tensor:
        loss, count = token_loss(model, rows)
        return loss / count

    wanted = gradients(model, lambda: trainer.compute_loss(model, dict(batch)))
    return sorted(ours(corpus)) == sorted(theirs), difference(gradients(model, mean), wanted)


def dpo(folder: Path, records: list[dict[str, Any]]) -> tuple[bool, float]:
    """As of `sft`."""
    model, reference = module(0), module(1)
    trainer = _trainer("dpo", folder, records, model=model, ref_model=reference, options={"beta": BETA})
    theirs = [
        (row["prompt_ids"] + row[f"{part}_ids"], [0] * len(row["prompt_ids"]) + [1] * len(row[f"{part}_ids"]))
        for row in trainer.train_dataset for part in ("chosen", "rejected")
    ]  # fmt: skip
    corpus = _corpus(folder, records)
    rows = rows_of(corpus, packed=False)
    with torch.no_grad():
        rows = rows._replace(reference=margins(reference, rows))
    batch = trainer.data_collator(list(trainer.train_dataset))

    def mean() -> Tensor:
        loss, count = preference_loss(model, rows, BETA)
        return loss / count

    wanted = gradients(model, lambda: trainer.compute_loss(model, dict(batch)))
    return sorted(ours(corpus)) == sorted(theirs), difference(gradients(model, mean), wanted)


def _corpus(folder: Path, records: list[dict[str, Any]]) -> Corpus:
    file = write_records(folder / "records.jsonl", records)
    return prepare(str(file), folder / "corpora", tokenizer=folder / "tok", vocab=300)


def _plain(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same as texts: of messages, their contents."""

    def text(value: Any) -> str:
        return " ".join(message["content"] for message in value)

    return [{name: text(value) for name, value in record.items()} for record in records]


def main(results: Path) -> None:
    import transformers
    import trl

    answers = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs(12)]
    cases: list[tuple[str, Callable[..., tuple[bool, float]], list[dict[str, Any]]]] = [
        ("SFT, `messages`, answers alone", sft, chats(12)),
        ("SFT, `prompt` and `completion`", sft, answers),
        ("SFT, the same as plain texts", sft, _plain(answers)),
        ("DPO, messages", dpo, pairs(12)),
        ("DPO, plain texts", dpo, _plain(pairs(12))),
    ]
    lines = [f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}", "",
             "| data | tokens and masks | largest difference of a gradient |", "|---|---|---|"]  # fmt: skip
    for name, compare, records in cases:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            write_tokenizer(folder / "tok", chats(12))
            equal, error = compare(folder, records)
            lines.append(f"| {name} | {'equal' if equal else 'differ'} | {error:.0e} |")
            print(lines[-1], flush=True)
            assert equal and error < 1e-6, name
    results.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
