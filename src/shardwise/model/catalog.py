"""Well-known models by name, each with the parameter count that its authors or its published weights state.

Shapes come from the papers and `config.json` files named beside them. A test counts every entry's parameters: an
integer in `published_params` is exact, a float is a rounded figure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from shardwise.errors import UserError
from shardwise.model.config import Experts, LatentAttention, ModelConfig, RopeScaling, YarnScaling


def catalog() -> dict[str, ModelConfig]:
    """Name -> model, in reading order."""
    return dict(_catalog())


def get(name: str) -> ModelConfig:
    """The model of that name, in any case. Raises `UserError` with the nearest names when there is none."""
    found = _catalog().get(name.strip().lower())
    if found is None:
        raise UserError(f"no model {name!r} in the catalog; {_nearest(name)}")
    return found


def resolve(text: str, fetch: bool = True, stored: bool = False) -> ModelConfig:
    """A catalog name, else the path of a `config.json` or of its folder, else a name of Hugging Face's hub.

    The catalog goes first; write `./gpt2` for a folder of that name. Of a hub's name, owner/name, the `config.json` in
    the local cache is read, else the second half is looked up in the catalog, else the list of popular models
    (`hub.json`) has it, else the hub is asked for its `config.json`: with `fetch`, and unless HF_HUB_OFFLINE is set.
    stored: the list goes before the catalog where it says in which precision an id's files are, as servers load them.
    Raises `UserError` when it is none of these.
    """
    text = text.strip()
    if found := _catalog().get(text.lower()):
        return found
    from shardwise.model import hub
    from shardwise.model.huggingface import read_fields, read_model

    # Path.exists raises for a name that is too long.
    if text and os.path.exists(text):  # noqa: PTH110
        return read_model(text)
    if path := hub.cached(text):
        return read_model(path, text)
    entry = hub.listed(text)
    if entry and stored and "quantization_config" in entry[1]:
        return read_fields(entry[1], entry[0])
    if found := _of_hub(text):
        return found
    if entry:
        return read_fields(entry[1], entry[0])
    near = _nearest(text)
    if not hub.is_hub_id(text) or hub.offline() or not fetch:
        forbidden = f", which is not asked (--offline, {hub.OFFLINE})" if hub.is_hub_id(text) and fetch else ""
        raise UserError(
            f"no model {text!r}: neither in the catalog, nor a config.json or a folder with one, nor in the cache of "
            f"Hugging Face's hub{forbidden}; {near}"
        )
    from shardwise.model.hub_fetch import fetch as fetched

    try:
        return read_model(fetched(text), text)
    except UserError as error:
        raise UserError(f"no model {text!r}: not known here, and {error}{_suggestion(near)}") from None


def _suggestion(near: str) -> str:
    return f"; {near}" if near.startswith("did you mean") else ""


def _of_hub(text: str) -> ModelConfig | None:
    """The catalog's model whose name is a hub's, but for its owner and for what does not change a model's shape."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        return None
    name = text.lower().partition("/")[2].removeprefix("meta-")
    first = r"|v0\.1" if name.startswith("mixtral") else ""  # of others a later version has another shape
    return _catalog().get(name) or _catalog().get(re.sub(rf"(-(instruct|chat|base|hf|it{first}))+$", "", name))


def _nearest(name: str) -> str:
    # A name from a model hub, owner/name, is most often meant by its second half.
    import difflib

    from shardwise.model.hub import hub_models

    others = [other for other in hub_models() if other != name.strip()]
    listed = difflib.get_close_matches(name.strip(), others, n=2, cutoff=0.8) if "/" in name else []
    near = listed + difflib.get_close_matches(name.strip().lower().rsplit("/", 1)[-1], _catalog(), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(_catalog())}"


@cache
def _catalog() -> dict[str, ModelConfig]:
    models = [
        *_small(), *_gpts(), *_llamas(), *_mistrals(), *_qwens(), *_qwen_mixtures(), *_olmos(), *_gemmas(),
        *_deepseeks(),
    ]  # fmt: skip
    return {model.name: model for model in models}


def _small() -> list[ModelConfig]:
    """Ours, to train on a laptop."""
    return [
        ModelConfig("tiny-llama", 2048, 128, layers=4, heads=8, ffn=352, max_positions=512, kv_heads=4),
        _gpt("tiny-gpt", 2048, 128, layers=4, heads=8, ffn=512, max_positions=512),
        _OLMO2.replace(**_TINY, name="tiny-olmo2", heads=8, kv_heads=4, head_dim=16),
        _GEMMA2.replace(**_TINY, name="tiny-gemma2", heads=4, kv_heads=2, head_dim=32, window=64),
        ModelConfig(
            **_TINY | {"ffn": 176}, name="tiny-mixtral", heads=8, kv_heads=4,
            experts=Experts(4, 2, 176, balance_loss=0.02),
        ),
        ModelConfig(
            **_TINY, name="tiny-qwen3-moe", heads=8, kv_heads=4, norm_eps=1e-6, rope_theta=1e6, qk_norm=True,
            experts=Experts(16, 4, 48, balance_loss=0.001),
        ),
        ModelConfig(
            **_TINY, name="tiny-deepseek", heads=8, norm_eps=1e-6,
            experts=Experts(
                16, 4, 48, shared=1, dense_layers=1, groups=4, active_groups=2, scale=2.5, balance_loss=0.0001,
                bias_rate=0.001, **_LOSS_FREE,
            ),
            latent_attention=LatentAttention(48, 32, nope_head_dim=16, rope_head_dim=8, v_head_dim=16),
        ),
    ]  # fmt: skip


_TINY: dict[str, Any] = {
    "vocab": 2048, "hidden": 128, "layers": 4, "ffn": 352, "max_positions": 512, "published_params": None,
}  # fmt: skip
# DeepSeek-V3's routing, which a bias balances (section 2.1.2).
_LOSS_FREE: dict[str, Any] = {"router_bias": True, "scoring": "sigmoid"}
# Defaults of the families' mechanisms, here on the smallest model of each.
_OLMO2 = ModelConfig(
    "olmo-2-1b", 100352, 2048, 16, 16, 8192, 4096, norm_eps=1e-6, rope_theta=500000.0, norm_placement="post",
    qk_norm=True, qk_norm_scope="all heads", published_params=1_484_916_736,
)  # fmt: skip
_GEMMA2 = ModelConfig(
    "gemma-2-2b", 256000, 2304, 26, 8, 9216, 8192, kv_heads=4, head_dim=256, norm_eps=1e-6, activation="gelu_tanh",
    tied=True, norm_placement="both", norm_zero_centered=True, score_scale=256.0, score_softcap=50.0,
    logit_softcap=30.0, window=4096, full_attention_every=2, scaled_embedding=True, published_params=2_614_341_888,
)  # fmt: skip


_gpt = partial(
    ModelConfig, norm="layernorm", positions="learned", activation="gelu_tanh", gated=False, bias="all", tied=True
)
"""GPT-2's mechanisms: LayerNorm, learned positions, tanh GELU, biases everywhere, tied embedding."""


def _series(make: Callable[..., ModelConfig], columns: str, rows: Mapping[str, tuple[Any, ...]]) -> list[ModelConfig]:
    """Models that differ in `columns`, names of arguments of `make`: a row of values for each model's name."""
    return [make(name=name, **dict(zip(columns.split(), row, strict=True))) for name, row in rows.items()]


def _gpts() -> list[ModelConfig]:
    # GPT-2: huggingface.co/openai-community/gpt2{,-medium,-large,-xl}, config.json; counts are of the weights.
    sizes = {
        "gpt2": (768, 3072, 12, 12, 124_439_808),
        "gpt2-medium": (1024, 4096, 24, 16, 354_823_168),
        "gpt2-large": (1280, 5120, 36, 20, 774_030_080),
        "gpt2-xl": (1600, 6400, 48, 25, 1_557_611_200),
    }
    columns, dropped = "hidden ffn layers heads published_params", partial(_gpt, dropout=0.1, attention_dropout=0.1)
    # Korthikanti et al. 2022, table 3 (shapes); counts as stated there (22B) and, to one digit more, for the same
    # shapes in Narayanan et al. 2021, tables 1 and 2. Megatron-LM's dropout of 0.1 is part of their memory formulas.
    # MT-NLG: Smith et al. 2022, section 2.2. GPT-2's vocabulary, padded by Megatron-LM for tensor parallelism of 8.
    megatron = {
        "megatron-22b": (6144, 24576, 48, 64, 22e9),
        "megatron-175b": (12288, 49152, 96, 96, 174.6e9),
        "megatron-530b": (20480, 81920, 105, 128, 529.6e9),
        "megatron-1t": (25600, 102400, 128, 160, 1008.0e9),
        "mt-nlg-530b": (20480, 81920, 105, 128, 530e9),
    }
    return [
        *_series(partial(dropped, vocab=50257, max_positions=1024), columns, sizes),
        # Brown et al. 2020, table 2.1. The paper states no dropout.
        _gpt("gpt3-175b", 50257, 12288, 96, 96, 49152, 2048, published_params=175.0e9),
        *_series(partial(dropped, vocab=51200, max_positions=2048), columns, megatron),
        # Black et al. 2022, section 2 and huggingface.co/EleutherAI/gpt-neox-20b, config.json.
        _gpt(
            "gpt-neox-20b", 50432, 6144, 44, 64, 24576, 2048, published_params=20_554_567_680,
            positions="rope", rotary_fraction=0.25, parallel_residual=True, tied=False,
        ),
        # Le Scao et al. 2022, table 3; the count is of huggingface.co/bigscience/bloom.
        _gpt(
            "bloom-176b", 250880, 14336, 70, 112, 57344, 2048, published_params=176_247_271_424,
            positions="alibi", embedding_norm=True,
        ),
    ]  # fmt: skip


def _llamas() -> list[ModelConfig]:
    # huggingface.co/meta-llama, config.json of the base models; counts are of the weights.
    columns = "hidden layers heads kv_heads ffn published_params"
    llama2 = {
        "llama-2-7b": (4096, 32, 32, 32, 11008, 6_738_415_616),
        "llama-2-13b": (5120, 40, 40, 40, 13824, 13_015_864_320),
        "llama-2-70b": (8192, 80, 64, 8, 28672, 68_976_648_192),
    }
    llama3 = {
        "llama-3-8b": (4096, 32, 32, 8, 14336, 8_030_261_248),
        "llama-3-70b": (8192, 80, 64, 8, 28672, 70_553_706_496),
    }
    # The 405B came with release 3.1, which stretched the rotary angles; 3.2 ties its embedding as well.
    llama31 = {
        "llama-3-405b": (16384, 126, 128, 8, 53248, 405_853_388_800),
        "llama-3.1-8b": (4096, 32, 32, 8, 14336, 8_030_261_248),
        "llama-3.1-70b": (8192, 80, 64, 8, 28672, 70_553_706_496),
    }
    llama32 = {
        "llama-3.2-1b": (2048, 16, 32, 8, 8192, 1_235_814_400),
        "llama-3.2-3b": (3072, 28, 24, 8, 8192, 3_212_749_824),
    }
    third = partial(ModelConfig, vocab=128256, rope_theta=500000.0)
    stretched = partial(third, max_positions=131072, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192))
    small = partial(stretched, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192), tied=True)
    return [
        *_series(partial(ModelConfig, vocab=32000, max_positions=4096), columns, llama2),
        *_series(partial(third, max_positions=8192), columns, llama3),
        *_series(stretched, columns, llama31),
        *_series(small, columns, llama32),
    ]


def _mistrals() -> list[ModelConfig]:
    # huggingface.co/mistralai: Mistral-7B-v0.3 (v0.1 has a sliding window, which no decoder here computes) and
    # Mixtral-8x7B-v0.1, config.json; counts are of the weights.
    mistral = ModelConfig(
        "mistral-7b", 32768, 4096, 32, 32, 14336, 32768, kv_heads=8, rope_theta=1e6, published_params=7_248_023_552
    )
    mixtral = mistral.replace(
        name="mixtral-8x7b", vocab=32000, experts=Experts(count=8, active=2, ffn=14336, balance_loss=0.02),
        published_params=46_702_792_704,
    )  # fmt: skip
    return [mistral, mixtral]


def _qwens() -> list[ModelConfig]:
    # huggingface.co/Qwen, config.json of the base models; counts are of the weights, tied ones once (the hub's own
    # figures for Qwen3 0.6B and 1.7B count the tied head again).
    qwen25 = {
        "qwen2.5-0.5b": (151936, 896, 24, 14, 2, 4864, 32768, True, 1e-6, 494_032_768),
        "qwen2.5-1.5b": (151936, 1536, 28, 12, 2, 8960, 131072, True, 1e-6, 1_543_714_304),
        "qwen2.5-3b": (151936, 2048, 36, 16, 2, 11008, 32768, True, 1e-6, 3_085_938_688),
        "qwen2.5-7b": (152064, 3584, 28, 28, 4, 18944, 131072, False, 1e-6, 7_615_616_512),
        "qwen2.5-14b": (152064, 5120, 48, 40, 8, 13824, 131072, False, 1e-5, 14_770_033_664),
        "qwen2.5-32b": (152064, 5120, 64, 40, 8, 27648, 131072, False, 1e-5, 32_763_876_352),
        "qwen2.5-72b": (152064, 8192, 80, 64, 8, 29568, 131072, False, 1e-5, 72_706_203_648),
    }
    qwen3 = {
        "qwen3-0.6b": (1024, 28, 16, 3072, True, 596_049_920),
        "qwen3-1.7b": (2048, 28, 16, 6144, True, 1_720_574_976),
        "qwen3-4b": (2560, 36, 32, 9728, True, 4_022_468_096),
        "qwen3-8b": (4096, 36, 32, 12288, False, 8_190_735_360),
        "qwen3-14b": (5120, 40, 40, 17408, False, 14_768_307_200),
        "qwen3-32b": (5120, 64, 64, 25600, False, 32_762_123_264),
    }
    third = partial(
        ModelConfig, vocab=151936, max_positions=40960, kv_heads=8, head_dim=128, norm_eps=1e-6, rope_theta=1e6,
        qk_norm=True,
    )  # fmt: skip
    return [
        *_series(
            partial(ModelConfig, rope_theta=1e6, bias="qkv"),
            "vocab hidden layers heads kv_heads ffn max_positions tied norm_eps published_params",
            qwen25,
        ),
        *_series(third, "hidden layers heads ffn tied published_params", qwen3),
    ]


def _qwen_mixtures() -> list[ModelConfig]:
    # huggingface.co/Qwen/Qwen3-30B-A3B and -235B-A22B, config.json; counts are of the weights.
    experts = partial(Experts, 128, 8, balance_loss=0.001)
    sizes = {
        "qwen3-30b-a3b": (2048, 48, 32, 6144, experts(768), 30_532_122_624),
        "qwen3-235b-a22b": (4096, 94, 64, 12288, experts(1536), 235_093_634_560),
    }
    third = partial(
        ModelConfig, vocab=151936, max_positions=40960, kv_heads=4, head_dim=128, norm_eps=1e-6, rope_theta=1e6,
        qk_norm=True,
    )  # fmt: skip
    return _series(third, "hidden layers heads ffn experts published_params", sizes)


def _olmos() -> list[ModelConfig]:
    # huggingface.co/allenai/OLMo-2-0425-1B, -1124-7B, -1124-13B, -0325-32B, config.json; counts are of the weights.
    sizes = {
        "olmo-2-7b": (4096, 32, 32, 32, 11008, 7_298_617_344),
        "olmo-2-13b": (5120, 40, 40, 40, 13824, 13_716_198_400),
        "olmo-2-32b": (5120, 64, 40, 8, 27648, 32_234_279_936),
    }
    larger = partial(_OLMO2.replace, head_dim=128)
    return [_OLMO2, *_series(larger, "hidden layers heads kv_heads ffn published_params", sizes)]


def _gemmas() -> list[ModelConfig]:
    # huggingface.co/google/gemma-2-2b, -9b, -27b, config.json; counts are of the weights, tied ones once.
    sizes = {
        "gemma-2-9b": (3584, 42, 16, 8, 256, 14336, 256.0, 9_241_705_984),
        "gemma-2-27b": (4608, 46, 32, 16, 128, 36864, 144.0, 27_227_128_320),
    }
    columns = "hidden layers heads kv_heads head_dim ffn score_scale published_params"
    return [_GEMMA2, *_series(_GEMMA2.replace, columns, sizes)]


def _deepseeks() -> list[ModelConfig]:
    # huggingface.co/deepseek-ai/DeepSeek-V2, -V2-Lite and -V3, config.json; counts are of the weights, of V3 without
    # the multi-token-prediction module.
    latent = partial(LatentAttention, kv_rank=512, nope_head_dim=128, rope_head_dim=64, v_head_dim=128)
    stretched = partial(YarnScaling, 40.0, 4096)
    second = partial(Experts, active=6, shared=2, dense_layers=1, normalized=False, balance_loss=0.001)
    limited = partial(second, 160, ffn=1536, groups=8, active_groups=3, group_score="max", scale=16.0)
    third = Experts(
        256, 8, 2048, shared=1, dense_layers=3, groups=8, active_groups=4, scale=2.5, balance_loss=0.001, **_LOSS_FREE
    )
    make = partial(ModelConfig, max_positions=163840, norm_eps=1e-6)
    return _series(
        make,
        "vocab hidden layers heads ffn rope_scaling latent_attention experts published_params",
        {
            "deepseek-v2-lite": (
                102400, 2048, 27, 16, 10944, stretched(mscale=0.707), latent(0), second(64, ffn=1408), 15_706_484_224,
            ),
            "deepseek-v2": (
                102400, 5120, 60, 128, 12288, stretched(mscale=0.707), latent(1536), limited(), 235_741_434_880,
            ),
            "deepseek-v3": (
                129280, 7168, 61, 128, 18432, stretched(mscale=1.0), latent(1536), third, 671_026_419_200,
            ),
        },
    )  # fmt: skip
