"""What recording cannot see: other names of families, and fields that a class turns into others before it reads them.

Sources: the configuration classes of transformers 5.24, and the published code beside the families' `config.json` files
(baichuan-inc, xverse, internlm, XiaomiMiMo, THUDM, microsoft on the Hugging Face Hub). `tests/model/test_shapes.py`
counts a published configuration of each.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.model.shapes.formulas import Scope, evaluate
from shardwise.model.shapes.recording import flat


@cache
def aliases() -> dict[str, Any]:
    """model_type -> `as`: family with tensors of the same sizes; `fields`: its names of fields, null for those that
    leave shapes alone; `set`: fields with a value, or formulas of fields, where they are as they stand or missing;
    `words`: a list of numbers -> the list that it stands for, and its words."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("aliases.json").read_text(encoding="utf-8"))
    return found


PREDICTING = {"qwen3_next": 1}
"""Families whose files have layers for multi-token prediction that their configuration does not name: `mtp.` tensors of
the published index."""
SCALE = 4 / 128
"""Bytes of scales beside a byte of an indexer's key (inference/model.py of DeepSeek-V3.2-Exp: `k_cache` in FP8, with an
fp32 number per 128)."""
UNWINDOWED = ("phimoe",)
"""Families with a `sliding_window` in their configuration that keep the keys of all tokens."""
SIZES = re.compile(
    "size|dim|rank|heads?$|heads_|layers?$|experts?|width|inner|hidden|intermediate|interval|freq|group|latent|kernel"
)
"""Names of fields that shapes may depend on."""
SHAPELESS = re.compile(
    "^rotary|^rope|^time_step|^max_window|^dual_chunk|^img_|^image_|^mm_|^sparse_config|vision|_token"
)
"""Names of those that they do not."""
WITHOUT_LATENT = "glm4_moe"
"""Family of a DeepSeek-V2 with `use_mla: false`: plain attention, and experts of the same sizes."""
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_BLOCKS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
"""Letters of Nemotron-H's `hybrid_override_pattern`."""
_COMPRESSED = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
"""Entries of DeepSeek-V4's `compress_ratios`."""


def family_name(model_type: str, data: Mapping[str, Any]) -> str:
    """The family with tensors of the same sizes."""
    if model_type == "deepseek_v2" and data.get("use_mla") is False:
        return WITHOUT_LATENT
    alias: str = aliases().get(model_type, {}).get("as", model_type)
    return alias


def prepared(model_type: str, data: dict[str, Any]) -> dict[str, Any]:
    """The fields of the family's data, from the published fields under `model_type`. Raises `UserError` for a kind of
    layer that is none of the family's."""
    alias = aliases().get(model_type, {})
    names = alias.get("fields", {})
    # A nested field is named with dots; one that is renamed gives way to no other.
    inner = {name: value for name, value in flat(data).items() if "." in name and name in names}
    result = {names.get(k, k): v for k, v in {**data, **inner}.items() if names.get(k, k) is not None}
    for name, value in alias.get("set", {}).items():
        if isinstance(value, str):
            result[name] = evaluate(value, Scope(result))
        else:
            result.setdefault(name, value)
    for name, (into, words) in alias.get("words", {}).items():
        if isinstance(numbers := result.pop(name, None), list):
            if unknown := next((n for n in numbers if type(n) is not int or not 0 <= n < len(words)), None):
                raise UserError(f"{name} holds {str(unknown)[:40]!r}; known are 0 to {len(words) - 1}")
            result[into] = [words[n] for n in numbers]
    # Defaults of a class are no sizes of models that another class has.
    needed = [] if not alias or {"n_embd", "d_model"} & {*result} else _NEEDED
    for name in [*needed, *(to for name, to in names.items() if "." in name)]:
        if result.get(name) is None:
            raise UserError(f"required field {next((n for n, to in names.items() if to == name), name)} is missing")
    layers = result.get("num_hidden_layers")
    if data.get("use_mla") is False:
        unused = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        result = {"num_nextn_predict_layers": 0} | {k: v for k, v in result.items() if k not in unused}
    for name, value in list(result.items()):
        if (name in ("no_rope_layers",) and value == []) or (name == "moe_layer_end_index" and value == -1):
            del result[name]
    if model_type == "glm_moe_dsa" and not result.get("indexer_types") and type(layers) is int:
        every, first = result.pop("index_topk_freq", None) or 1, result.pop("index_skip_topk_offset", None) or 2
        if type(every) is int and type(first) is int:
            each = ["full" if max(i - first + 1, 0) % every == 0 else "shared" for i in range(layers)]
            result["indexer_types"] = each
    if isinstance(pattern := result.pop("hybrid_override_pattern", None), str) and model_type == "nemotron_h":
        result["layers_block_type"] = [_BLOCKS.get(letter, letter) for letter in pattern]
    if isinstance(ratios := result.pop("compress_ratios", None), list) and type(layers) is int:
        result["layer_types"] = [_COMPRESSED.get(ratio, "full_attention") for ratio in ratios][:layers]
    if isinstance(hashed := result.pop("num_hash_layers", None), int) and type(layers) is int:
        result["mlp_layer_types"] = ["hash_moe" if i < hashed else "moe" for i in range(layers)]
    if isinstance(windows := result.pop("hybrid_layer_pattern", None), list):
        result["layer_types"] = ["sliding_attention" if each else "full_attention" for each in windows]
    if isinstance(sparse := result.get("moe_layer_freq"), list):
        del result["moe_layer_freq"]
        result["mlp_layer_types"] = ["sparse" if each else "dense" for each in sparse]
    return result
