"""llama.cpp beside `benchmarks/generation.py`: a model of that shape as a GGUF file, and an engine in this process.

Needs `pip install xllamacpp gguf`, wheels of llama.cpp and of its file format; without them there is no such peer.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

Seconds = Callable[[torch.Tensor, int], float]


def missing() -> str | None:
    """What is to be installed; None where all is there."""
    lacking = [name for name in ("xllamacpp", "gguf") if find_spec(name) is None]
    return f"not installed; pip install {' '.join(lacking)}" if lacking else None


def write_gguf(folder: Path, path: Path, blocks: str) -> None:
    """A Hugging Face folder of a Llama with one safetensors file as GGUF. blocks: "BF16" or "Q8_0", the type of the
    blocks' matrices; embedding and head are in bf16, and words are numbers."""
    import gguf
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path), "llama")
    _describe(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        kind = gguf.GGMLQuantizationType[blocks if ".layers." in name else "BF16"]
        if tensor.dim() == 1:
            kind = gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(_ordered(name, tensor.float(), config).numpy(), kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [*special, *(f"t{number}" for number in range(len(special), config["vocab_size"]))]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([word.encode() for word in words])
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(words) - len(special)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _ordered(name: str, matrix: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """llama.cpp turns neighbours by an angle, where Hugging Face turns the halves of a head."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    count = next((heads[part] for part in heads if f"{part}.weight" in name), None)
    if count is None:
        return matrix
    return matrix.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)


def engine(path: Path, batch: int, context: int, threads: int) -> Seconds:
    """(prompts [B, P], tokens) -> seconds from everybody's first token to the last one. context: tokens of each."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel = batch * (context + 256 - context % 256), batch
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup, params.verbosity = False, -1
    server = xllamacpp.Server(params)

    def seconds(prompts: torch.Tensor, tokens: int) -> float:
        arrived: list[list[float]] = [[] for _ in prompts]

        def ask(row: int, prompt: list[int]) -> None:
            wanted = {
                "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "cache_prompt": False,
                "stream": True,
            }  # fmt: skip
            server.handle_completions(wanted, lambda _: arrived[row].append(time.perf_counter()))

        asking = [threading.Thread(target=ask, args=each) for each in enumerate(prompts.tolist())]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        # One piece of the stream is a token; a last one says that it is over.
        if any(len(times) < tokens for times in arrived):
            raise RuntimeError(f"llama.cpp gave {min(map(len, arrived))} of {tokens} tokens")
        return max(times[tokens - 1] for times in arrived) - max(times[0] for times in arrived)

    return seconds
