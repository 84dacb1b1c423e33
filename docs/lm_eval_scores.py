"""A small model scored by lm-evaluation-harness, through `shardwise serve` and in `transformers`: a multiple-choice
task and rolling perplexity, both local. Prints the scores and the largest difference between log-likelihoods.

python docs/lm_eval_scores.py [FOLDER] [--layout tp=2]   prints the table of docs/serving.md

By hand, in an environment with `shardwise[serve]` and `lm_eval[hf,api]`. Nothing is downloaded. Without FOLDER, a Llama
with random weights and a tokenizer of bytes is made.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONTEXT = 256
WINDOW = CONTEXT - 2
"""Tokens of a window of rolling perplexity. The harness sends one more as its context, and asks for one more."""
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "life", "world", "school", "état", "日本", "🙂")
QUESTIONS, TEXTS = 24, 4
TASKS = {
    "local_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": name, "aggregation": "mean"} for name in ("acc", "acc_norm")],
    },
    "local_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    },
}


def write_model(folder: Path) -> None:
    """A Llama with random weights, and a tokenizer whose tokens are bytes."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.12, eos_token_id=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_tasks(folder: Path) -> None:
    """The tasks and their data, JSON lines."""
    draw = random.Random(1)

    def words(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    questions: list[dict[str, Any]] = [
        {
            "question": f"Question: {words(12)}?\nAnswer:",
            "choices": [words(draw.randint(1, 6)) for _ in range(4)],
            "answer": draw.randrange(4),
        }
        for _ in range(QUESTIONS)
    ]
    # Shorter than a window, and several windows long.
    texts: list[dict[str, Any]] = [{"text": words(20 + 90 * index)} for index in range(TEXTS)]
    for (name, task), rows in zip(TASKS.items(), (questions, texts), strict=True):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **source, **task}))


@contextmanager
def served(model: Path, layout: str) -> Iterator[str]:
    """The address of `shardwise serve`, in fp32."""
    command = [sys.executable, "-m", "shardwise", "serve", str(model), "--port", "0", "--precision", "fp32", "--json"]
    command += ["--layout", layout, "--context", str(CONTEXT)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait()


def scores(kind: str, arguments: dict[str, Any], tasks: Path) -> dict[str, Any]:
    """Results of the harness with one of its kinds of models."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    result: dict[str, Any] = lm_eval.simple_evaluate(
        model=kind, model_args=arguments, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    return result


def likelihoods(result: dict[str, Any], task: str) -> list[float]:
    """Log-likelihoods of all requests of a task, in order."""
    samples = sorted(result["samples"][task], key=lambda sample: sample["doc_id"])
    first = [answer[0] for sample in samples for answer in sample["resps"]]
    return [float(one[0] if isinstance(one, tuple | list) else one) for one in first]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="a Hugging Face folder (a small one is made)")
    parser.add_argument("--layout", default="tp=2", help="of the server (tp=2)")
    parser.add_argument("--batch", type=int, default=4, help="prompts in a request (4)")
    args = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = args.model or folder / "tiny"
        if args.model is None:
            write_model(model)
        write_tasks(folder)
        common = {"pretrained": str(model), "dtype": "float32", "device": "cpu", "max_length": WINDOW}
        theirs = scores("hf", common, folder)
        with served(model, args.layout) as url:
            api = {"model": model.name, "tokenizer": str(model), "tokenizer_backend": "huggingface"}
            api |= {"base_url": f"{url}/completions", "max_length": CONTEXT, "batch_size": args.batch}
            ours = scores("local-completions", api, folder)
    print("| task | score | transformers | serve |\n|---|---|---|---|")
    worst = 0.0
    for task in TASKS:
        for score, value in theirs["results"][task].items():
            if isinstance(value, float) and "stderr" not in score:
                print(f"| {task} | {score.split(',')[0]} | {value:.6f} | {ours['results'][task][score]:.6f} |")
        pairs = list(zip(likelihoods(theirs, task), likelihoods(ours, task), strict=True))
        worst = max(worst, *(abs(one - other) / max(1.0, abs(one)) for one, other in pairs))
        print(f"| {task} | log-likelihoods | {len(pairs)} | {len(pairs)} |")
    print(f"\nlargest relative difference between log-likelihoods: {worst:.1e}")
    return 0 if worst < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
