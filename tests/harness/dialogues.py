"""Dialogues and pairs for tests: a small chat tokenizer, records, and the losses of a plain loop over single dialogues.

The loop knows nothing of rows: it takes a row of a run apart into its dialogues, computes each alone by the class of
transformers in float64, and divides by what counts over the whole batch.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.data import Corpus
from shardwise.layout import Layout
from shardwise.runtime.job.config import OptimizerConfig, learning_rate
from shardwise.runtime.module.class_model import ClassModel
from shardwise.runtime.module.class_run import kept_reference

COLORS = ("red", "green", "blue", "gray")
START, END = "<|im_start|>", "<|im_end|>"
IGNORED = -100
SETTINGS = OptimizerConfig(lr=5e-3, warmup=0, weight_decay=0.0, clip=0.0)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def chats(count: int) -> list[dict[str, Any]]:
    """Dialogues of one to three answers, of very different lengths."""
    return [
        {"messages": [each for k in range(1 + i % 3)
                      for each in (turn("user", f"Is {i + k} ü?"), turn("assistant", COLORS[i % 4] * (1 + i % 5)))]}
        for i in range(count)
    ]  # fmt: skip


def pairs(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": [turn("user", f"Is {i} ü?")], "chosen": [turn("assistant", COLORS[i % 4] * (1 + i % 3))],
         "rejected": [turn("assistant", "no " * (1 + i % 4))]}
        for i in range(count)
    ]  # fmt: skip


def write_records(file: Path, records: Iterable[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return file


def write_tokenizer(folder: Path, records: Sequence[dict[str, Any]], generation: bool = True) -> None:
    """tokenizer.json and a template in the folder. generation: whether the template marks answers."""
    from tokenizers import AddedToken

    from shardwise.data.tokenizer import train

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train((json.dumps(record, ensure_ascii=False) for record in records), 290)
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in (START, END)])
    tokenizer.save(str(folder / "tokenizer.json"))
    first, last = ("{% generation %}", "{% endgeneration %}") if generation else ("", "")
    template = (
        "{% for m in messages %}{{ '" + START + "' + m.role + '\n' }}{% if m.role == 'assistant' %}" + first
        + "{{ m.content + '" + END + "' }}" + last + "{% else %}{{ m.content + '" + END + "' }}{% endif %}{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '" + START + "assistant\n' }}{% endif %}"
    )  # fmt: skip
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))


def write_chat_model(folder: Path, model_type: str = "llama", seed: int = 0) -> None:
    """A small model with random weights of 300 tokens, and such a tokenizer."""
    small = ClassModel({"model_type": model_type, "tie_word_embeddings": False}, folder.name).small(
        Layout.parse("tp=2")
    )
    changed = {"vocab_size": 300, "eos_token_id": 2, "pad_token_id": None, "max_position_embeddings": 512}
    torch.manual_seed(seed)
    ClassModel({**small.config.to_dict(), **changed}, folder.name)().save_pretrained(folder)
    write_tokenizer(folder, chats(30))


def _dialogues(rows: dict[str, np.ndarray], halves: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids, targets) of each dialogue of the rows that has an answer, without what pads it."""
    for row, (ids, targets) in enumerate(zip(rows["inputs"], rows["targets"], strict=True)):
        groups = np.repeat([0, 1], len(ids) // 2) if halves else rows["documents"][row]
        for group in np.unique(groups):
            inside, answers = np.flatnonzero(groups == group), np.flatnonzero((groups == group) & (targets != IGNORED))
            if len(answers):
                cut = slice(inside[0], answers[-1] + 1)
                yield torch.from_numpy(ids[cut])[None], torch.from_numpy(targets[cut])


def _scores(module: nn.Module, rows: dict[str, np.ndarray], halves: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits, targets) of the tokens of each dialogue's answers."""
    for ids, targets in _dialogues(rows, halves):
        counts = targets != IGNORED
        yield module(input_ids=ids, use_cache=False).logits[0][counts], targets[counts]


def plain_losses(
    module: nn.Module, corpus: Corpus, seq: int, batch: int, steps: int, *, kind: str = "sft", second: Any = None
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step. second: the reference of dpo, or the teacher of distill, both in float64."""
    sampler, losses = corpus.sampler("train", seq, 0, isolate=kind != "dpo"), []
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, SETTINGS.lr, SETTINGS.betas, SETTINGS.eps, 0.0)
    for step in range(steps):
        rows = sampler.batch(np.arange(step * batch, (step + 1) * batch))
        loss = _loss(module, rows, kind, second)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(SETTINGS, step, steps)
        optimizer.step()
        losses.append((float(loss.detach()), float(norm)))
    return losses


def _loss(module: nn.Module, rows: dict[str, np.ndarray], kind: str, second: Any) -> Tensor:
    if kind == "dpo":
        sums = [-F.cross_entropy(logits, targets, reduction="sum") for logits, targets in _scores(module, rows, True)]
        with torch.no_grad():
            before = [-F.cross_entropy(*score, reduction="sum") for score in _scores(second, rows, True)]
        differences = [new - old for new, old in zip(sums, before, strict=True)]
        gains = torch.stack(differences[::2]) - torch.stack(differences[1::2])
        return -F.logsigmoid(0.1 * gains).mean()
    parts = list(_scores(module, rows, False))
    count = sum(len(targets) for _, targets in parts)
    if kind == "sft":
        return torch.stack([F.cross_entropy(*score, reduction="sum") for score in parts]).sum() / count
    with torch.no_grad():
        goals = [(logits / 2).softmax(-1) for logits, _ in _scores(second, rows, False)]
    each = [(p * (p.log() - (logits / 2).log_softmax(-1))).sum() for (logits, _), p in zip(parts, goals, strict=True)]
    return 4 * torch.stack(each).sum() / count


def kept_on_disks(rank: int, folder: Path) -> dict[str, Any] | None:
    """The reference that a rank finds, whose disk has its number as a name."""
    return kept_reference([folder / str(rank)], "the same", rank)
