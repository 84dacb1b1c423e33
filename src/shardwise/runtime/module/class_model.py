"""Models by the classes of transformers: from the contents of a config.json to a module, its inputs and its split.

Nothing is written by hand for a class: its plans of tensor, expert and pipeline parallelism are those that it
publishes, else what `suggest` and a forward pass find.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import LayoutError, UserError, brief
from shardwise.layout import Layout
from shardwise.layout.context import SequenceCut, cuts_sequences
from shardwise.layout.modules import fewest_micro_batches
from shardwise.model import ModelConfig
from shardwise.model.huggingface import read_fields, to_huggingface
from shardwise.model.lora import Lora
from shardwise.runtime.job.losses import by_class

if TYPE_CHECKING:
    from torch import nn

    from shardwise.runtime.module.describe import DescribedModule

AUTO = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText", "AutoModel")
"""Classes by configuration, for a config.json that names no class."""
_CHANGES = ("name", "layers", "vocab", "counted", "published_params", "lora")
"""Fields of a model that may differ from those of its config.json."""
EXACT, ROUNDED = 1e-9, 1e-6
"""Largest error of a verification in float64: of a class, and of one whose code computes in fp32."""
PACKED = 1e-4
"""Largest relative difference, in fp32, of a document in a packed row from the document alone."""


@dataclass(frozen=True)
class ClassModel:
    """A model of a class that transformers has, picklable; calling it builds the module with random weights."""

    data: Mapping[str, Any]
    """Contents of a config.json."""
    name: str
    lora: Lora | None = None
    """Adapters of its maps and experts, all else being frozen."""

    @classmethod
    def of(cls, model: ModelConfig) -> ClassModel:
        """The class of a configuration, with its number of layers and of tokens. Raises `UserError` for what was
        changed besides, and where transformers is missing or has no such class."""
        if find_spec("transformers") is None:
            raise UserError(f"{model.name} is built by its class of transformers: pip install transformers")
        if model.counted is None:
            return cls(to_huggingface(model), model.name, model.lora)
        before = by_class(read_fields(dict(model.counted.source), model.name))
        for field in fields(model):
            if field.name not in _CHANGES and getattr(model, field.name) != getattr(before, field.name):
                raise UserError(
                    f"--set {field.name}: of a model by its class of transformers layers and vocab alone can be set: "
                    "change its config.json"
                )
        made = cls(model.counted.source, model.name, model.lora)
        text, changed = made._text, {}
        if text.vocab_size != model.vocab:
            changed["vocab_size"] = model.vocab
        if text.num_hidden_layers != model.layers:
            changed |= made._cut(list(range(model.layers)))
        return made._with_text(changed) if changed else made

    @cached_property
    def config(self) -> Any:
        """The configuration as its class reads it. Raises `UserError`."""
        from shardwise.model.shapes.recording import config_class

        kind = str(self.data.get("model_type"))
        try:
            made = config_class(kind)
        except KeyError:
            import transformers

            remote = ", whose repository has it as code (auto_map), which is not run" if "auto_map" in self.data else ""
            raise UserError(
                f"{self.name}: transformers {transformers.__version__} has no class for model_type {kind[:60]!r}"
                f"{remote}: install a version that has it, or write a function (FILE.py:NAME) that builds the model"
            ) from None
        given = {k: v for k, v in self.data.items() if k not in ("quantization_config", "auto_map", "model_type")}
        try:
            return made.from_dict(given)
        except Exception as error:
            raise UserError(f"{self.name}: transformers cannot read its configuration: {brief(error)}") from None

    @cached_property
    def kind(self) -> type[nn.Module]:
        """The class that the configuration names, else the one for the next token. Raises `UserError`."""
        import transformers

        for name in self.data.get("architectures") or ():
            if isinstance(kind := getattr(transformers, str(name), None), type):
                return kind
        for auto in AUTO:
            if (kind := getattr(transformers, auto)._model_mapping.get(type(self.config), None)) is not None:
                return kind[0] if isinstance(kind, (tuple, list)) else kind
        raise UserError(f"{self.name}: transformers has no class for {type(self.config).__name__}: name one in "
                        "architectures")  # fmt: skip

    def __call__(self, **options: Any) -> nn.Module:
        """Build the module, with weights by torch's generator. Raises `UserError`."""
        from shardwise.model.shapes.recording import transformers

        transformers()  # without its warnings
        config = self.config
        try:
            module: nn.Module = self.kind._from_config(config, **options)  # type: ignore[attr-defined]
        except Exception as error:
            raise UserError(f"{self.name}: {self.kind.__name__} cannot be built: {brief(error)}") from None
        module.tie_weights()  # type: ignore[operator]
        return self._adapted(module)

    def _adapted(self, module: nn.Module) -> nn.Module:
        """With its adapters. Raises `UserError` for targets that the class has not."""
        if self.lora is not None:
            from shardwise.runtime.module.adapters import add_adapters
            from shardwise.runtime.module.describe import find_blocks

            add_adapters(module, self.lora, find_blocks(module, None))
        return module

    def blank(self, **options: Any) -> nn.Module:
        """Build the module on the meta device."""
        import torch

        with torch.device("meta"):
            return self(**options)

    def pretrained(self, folder: Path) -> nn.Module:
        """The module with the weights of a folder, in their dtype. Raises `UserError` for what is not all of them."""
        from shardwise.model.shapes.recording import transformers

        transformers()  # without its warnings
        try:
            module, about = self.kind.from_pretrained(  # type: ignore[attr-defined]
                folder, config=self.config, dtype="auto", output_loading_info=True, local_files_only=True
            )
        except Exception as error:
            raise UserError(f"{folder}: {self.kind.__name__} cannot read its weights: {brief(error)}") from None
        for what in ("missing", "mismatched", "unexpected"):
            if names := sorted(map(str, about.get(f"{what}_keys", ()))):
                raise UserError(f"{folder}: {what} in its weights for {self.kind.__name__}: {names[0]}"
                                + f" and {len(names) - 1} more" * (len(names) > 1))  # fmt: skip
        return self._adapted(module)

    def inputs(self, rows: int, seq: int) -> dict[str, Any]:
        """Random tokens as the arguments of a forward pass. Raises `UserError` for a class that takes others."""
        import torch

        main = getattr(self.kind, "main_input_name", "input_ids")
        if main != "input_ids":
            raise UserError(f"{self.name}: {self.kind.__name__} takes {main}, not tokens: write a function that builds "
                            "it, and an example (FILE.py:NAME)")  # fmt: skip
        vocab = self.config.get_text_config().vocab_size
        ids = torch.randint(1, vocab, (rows, seq), generator=torch.Generator().manual_seed(0))
        names = inspect.signature(self.kind.forward).parameters
        more: dict[str, Any] = {"use_cache": False} if "use_cache" in names else {}
        if self.config.is_encoder_decoder:
            more["decoder_input_ids"] = ids.roll(1, 1)
        return {"input_ids": ids, **more}

    @property
    def tolerance(self) -> float:
        """Largest error of a verification."""
        return ROUNDED if re.search(r"float32|\.float\(\)", self._source) else EXACT

    def attends_to_later_tokens(self, module: nn.Module) -> bool:
        """Whether its class is causal only where a configuration says so, as BERT's, and this one does not."""
        config: Any = module.config
        return bool(re.search(r"^(?!\s*>>>).*config\.is_decoder", self._source, re.M)) and not getattr(
            config, "is_decoder", True
        )

    def isolates_documents(self, layout: Layout) -> bool:
        """Whether a document does not see the one before it in its row where positions restart with it: tried with a
        small model of the class."""
        import torch

        if cuts_sequences(layout) or "position_ids" not in inspect.signature(self.kind.forward).parameters:
            return False
        small = replace(self, lora=None).small(replace(layout, ep=1, etp=0))
        ids, first = small.inputs(1, 12)["input_ids"], 5
        positions = torch.cat([torch.arange(first), torch.arange(12 - first)])[None]
        with torch.random.fork_rng([]), torch.no_grad():
            torch.manual_seed(0)
            module = small().eval()
            packed = getattr(module(input_ids=ids, position_ids=positions, use_cache=False), "logits", None)
            if packed is None or packed.shape[:2] != ids.shape:  # none of the next token
                return False
            alone = module(input_ids=ids[:, first:], use_cache=False).logits
        return bool((packed[:, first:] - alone).norm() < PACKED * alone.norm())

    @property
    def _source(self) -> str:
        return inspect.getsource(inspect.getmodule(self.kind))  # type: ignore[arg-type]

    def verification(self, layout: Layout) -> dict[str, Any]:
        """The arguments of `verify`. Raises `UserError` as `split`."""
        rows, seq = 2 * layout.dp * fewest_micro_batches(layout), SequenceCut.of(layout, 8 * layout.tp).padded
        split = self.split(layout, seq)
        return {
            "model": self, "layout": layout, "example": partial(self.inputs, rows, seq), "plan": split.plan,
            "parts": split.parts, "tolerance": self.tolerance,
        }  # fmt: skip

    def small(self, layout: Layout) -> ClassModel:
        """A model of the same kind with few layers that the layout divides, all kinds of layers among them, and narrow
        where its class accepts small sizes together."""
        scale = max(1, layout.tp // 2 if layout.tp % 2 == 0 else layout.tp)
        kinds = list(zip(*(map(str, values) for values in self._layer_lists.values()), strict=True))
        kept = {kinds.index(kind) for kind in kinds}
        others = [layer for layer in range(self._text.num_hidden_layers) if layer not in kept]
        kept |= set(others[: max(0, max(2, layout.stage_count) - len(kept))])
        data = self._with_text(self._cut(sorted(kept))).config.to_dict()
        made = self._with(data | _small(data, scale, max(4, 2 * layout.ep)))
        with suppress(UserError):
            if made.config:
                return made
        return self._with(data)

    @property
    def _text(self) -> Any:
        return self.config.get_text_config()

    @property
    def _layer_lists(self) -> dict[str, list[Any]]:
        layers = self._text.num_hidden_layers
        return {name: value for name, value in self._text.to_dict().items()
                if isinstance(value, list) and len(value) == layers and name != "architectures"}  # fmt: skip

    def _cut(self, kept: list[int]) -> dict[str, Any]:
        """Fields of its language model that leave it some of its layers."""
        text = self._text
        number = (text.attribute_map or {}).get("num_hidden_layers", "num_hidden_layers")
        lists = self._layer_lists
        changed: dict[str, Any] = {name: [values[layer] for layer in kept] for name, values in lists.items()}
        if single := text.to_dict().get("per_layer_config"):
            by_layer = {int(layer): fields for layer, fields in single.items()}
            changed["per_layer_config"] = {str(new): by_layer[old] for new, old in enumerate(kept) if old in by_layer}
        return changed | {number: len(kept)}

    def _with_text(self, fields: Mapping[str, Any]) -> ClassModel:
        data = self.config.to_dict()
        inside = next((name for name in self.config.sub_configs if getattr(self.config, name) is self._text), "")
        return self._with({**data, inside: {**data[inside], **fields}} if inside else {**data, **fields})

    def _with(self, data: Mapping[str, Any]) -> ClassModel:
        return replace(self, data={**data, "architectures": self.data.get("architectures")})

    def split(self, layout: Layout, seq: int) -> ClassSplit:
        """How the layout cuts it: by the plans that its class publishes, else by what `suggest` finds, and the order of
        a forward pass. Raises `UserError` for a layout that it cannot have, and inside a job."""
        from shardwise.runtime.module.describe import find_blocks

        plain = replace(self, lora=None)
        module = plain.blank()
        blocks = find_blocks(module, None)
        if not blocks:
            raise UserError(f"{self.name}: {self.kind.__name__} has no list of blocks")
        if cuts_sequences(layout):
            plain._check_tokens(layout, seq)
        parts = plain._order(blocks, self.inputs(2, seq)) if layout.pp > 1 else None
        return self.divided(layout, plain._plan(module, layout) if layout.tp > 1 else None, parts)

    def widest(self, cuts: Sequence[str], degrees: Sequence[int] | None, seq: int) -> ClassSplit:
        """How the largest of some tensor-parallel degrees (None: those that suit) cuts it, under these values of
        `traced_cut`, as stages where its parts can be. Raises `UserError` as `split`."""
        from shardwise.runtime.module.trace import most_cut

        tried = [(tp, pp) for tp in ([max(degrees)] if degrees else [2, 1]) for pp in (2, 1)]
        for place, (tp, pp) in enumerate(tried):
            try:
                return self.split(replace(most_cut(cuts, tp), pp=pp), seq)
            except UserError:
                if place + 1 == len(tried):
                    raise
        raise AssertionError("there is a last one")

    def _check_tokens(self, layout: Layout, seq: int) -> None:
        """Raise `LayoutError` where its tokens do not meet in causal attention alone, as a small model of its kind
        shows, or within a window."""
        import torch

        from shardwise.runtime.module.context import check_tokens
        from shardwise.runtime.module.experts import use_exact_products

        text = self._text
        if set(getattr(text, "layer_types", None) or ["any"]) != {"full_attention"}:
            for field, value in text.to_dict().items():
                if _WINDOW.fullmatch(field) and type(value) is int and value < seq:
                    raise LayoutError(
                        f"cp: {self.name} attends within {field} = {value} tokens, and cp does not cut windows of a "
                        f"user's module: leave cp out, or choose --seq {value} or less"
                    )
        rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
        for angles in (rope, *(value for value in rope.values() if isinstance(value, dict))):
            most = angles.get("original_max_position_embeddings") or text.max_position_embeddings
            if angles.get("rope_type") in ("longrope", "dynamic") and seq > most:
                raise LayoutError(
                    f"cp: rotations of {self.name} depend on the length beyond {most} tokens: leave cp out"
                )
        small = self.small(replace(layout, ep=1, etp=0))
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            module = small().double()
            use_exact_products(module)
            check_tokens(module, small.inputs(2, 8))

    def divided(self, layout: Layout, plan: Mapping[str, str] | None, parts: Sequence[str] | None) -> ClassSplit:
        """The model under a layout by the plan and parts of `split`. Raises `UserError`."""
        from shardwise.runtime.module.chain import find_chain
        from shardwise.runtime.module.describe import describe, find_blocks

        module = self.blank()
        blocks = find_blocks(module, None)
        chain = find_chain(module, parts, blocks) if layout.pp > 1 else None
        return ClassSplit(module, describe(module, layout, plan, blocks, chain), plan, parts)

    def _order(self, blocks: Sequence[str], example: Any) -> tuple[str, ...] | None:
        """Modules with parameters in the order of a forward pass; None where it cannot be followed, for the published
        one. Raises `UserError` for blocks that return no tensor."""
        from shardwise.runtime.module.describe import run_order
        from shardwise.runtime.module.inputs import usual_masks
        from shardwise.runtime.module.stages import check_output

        module, inside = self.blank(dtype=_traced_dtype()), tuple(f"{block}." for block in blocks)
        held = [n for n, child in module.named_modules() if child._parameters and not n.startswith(inside)]
        try:
            with usual_masks(example):
                for path in blocks:
                    module.get_submodule(path).register_forward_hook(lambda _, args, y, at=path: check_output(at, y))
                return _patterns(run_order(module, [*blocks, *(name for name in held if name not in blocks)], example))
        except UserError:
            raise
        except Exception:
            return None

    def _plan(self, module: nn.Module, layout: Layout) -> Mapping[str, str] | None:
        """A plan of tensor parallelism: None for the published one, where a small model runs with it, else a suggested
        one."""
        from shardwise.runtime.module.expert_plan import published_plan
        from shardwise.runtime.module.suggest import matching, suggest, unsummed, why_not

        small = self.small(replace(layout, ep=1, etp=0))
        # Of odd length: heads that are fixed in a class's code must not pass for other tokens.
        blank, example = small.blank(dtype=_traced_dtype()), small.inputs(2, 8 * layout.tp + 1)
        experts = getattr(module, "_ep_plan", None) or {}
        try:
            plan = published_plan(module, layout)
            if (reason := why_not(blank, None, example, layout.tp)) is None:
                sums = unsummed(blank, plan, example)
                return {**matching(module, plan), **sums} if sums else None
        except UserError as error:
            reason = error
        if layout.ep > 1 and not experts:
            raise reason
        try:
            suggested = suggest(self.blank(dtype=_traced_dtype()), example)
            plan = {**(matching(module, experts) if layout.ep > 1 else {}), **suggested}
            if (other := why_not(blank, plan, example, layout.tp)) is not None:
                raise other
            return plan
        except UserError as other:
            raise (reason if isinstance(reason, LayoutError) else other) from None


@dataclass(frozen=True)
class ClassSplit:
    """A model under a layout."""

    module: nn.Module
    """On the meta device."""
    described: DescribedModule
    plan: Mapping[str, str] | None
    """Its plan of tensor parallelism; None for the one that the class publishes."""
    parts: Sequence[str] | None
    """The order of its parts under a pipeline; None for the one that the class publishes."""

    @property
    def chosen(self) -> dict[str, Any]:
        """Fields of a job, whose ranks cannot look for a plan."""
        return {"class_plan": self.plan and dict(self.plan), "class_parts": self.parts and tuple(self.parts)}


def _patterns(paths: Sequence[str]) -> tuple[str, ...]:
    """Modules in order, with one pattern for lists whose elements come one after the other."""
    lists: dict[str, list[str]] = {}
    for path in paths:
        lists.setdefault(re.sub(r"\.\d+$", ".*", path), []).append(path)
    numbered = [pattern.replace("*", str(n)) for pattern, inside in lists.items() for n in range(len(inside))]
    return tuple(lists) if numbered == list(paths) else tuple(paths)


def _traced_dtype() -> Any:
    """The dtype of modules that are traced: grouped products of experts have no other."""
    import torch

    return torch.bfloat16


_WINDOW = re.compile(r".*(sliding_window|window_size|local_attention|chunk_size)")
_SIZES = [
    (re.compile(pattern), size)
    for pattern, size in (
        (r"n_groups?|topk_group|.*n_groups|num_expert_group", 1),
        (r".*vocab_size.*", 128),
        (r".*(position_embeddings|positions|n_ctx|seq_len\w*|sequence_length|seq_length)", 128),
        (_WINDOW.pattern, 16),
        (r"first_k_dense_replace|.*dense_layers", 1),
        (r".*(experts_per_tok\w*|top_?k\w*|selected_experts)|moe_k", 2),
        (r"n_shared_experts|.*num_shared_experts?|.*shared_expert_num", 1),
    )
]
"""Names of sizes -> the size of a small model."""
_WIDTHS = [
    (re.compile(pattern), size)
    for pattern, size in (
        (r".*(kv_heads|key_value_heads|n_head_kv|multi_query_group_num)", 2),
        (r"mamba_(n|num)_heads", 8),
        (r".*(num|n|attention|key|value)_heads?|n_head", 4),
        (r".*(intermediate_size\w*|ffn\w*|n_inner|d_ff|d_ssm|width|ff_dim|shared_expert\w*size)", 128),
        (r".*(hidden_size\w*|d_model|n_embd?|embed_dim|embedding_size|embed_proj_dim)|dim", 64),
    )
]
"""The same of what tensor parallelism divides."""
_HEADS = re.compile(
    r"(?!qk_head_dim).*(head_dim\w*|rope_dim|rotary_dim|d_head|d_kv|kv_channels|lora_\w*rank|_rank|state_size|d_state)"
)
_EXPERTS = re.compile(r".*experts")


def _small(config: Mapping[str, Any], scale: int, experts: int) -> dict[str, Any]:
    """The fields that change in a small configuration, those inside of others too. scale: factor of widths; experts:
    their number."""
    changed: dict[str, Any] = {}
    rows = [*_SIZES, *((pattern, size * scale) for pattern, size in _WIDTHS), (_HEADS, 16), (_EXPERTS, experts)]
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config"):
            changed[name] = {**value, **_small(value, scale, experts)}
        elif name.endswith("token_id") and type(value) is int and value >= 128:
            changed[name] = 1
        elif name.endswith(("token_id", "token_ids")) and isinstance(value, list):
            changed[name] = [1]
        elif type(value) is int and value > (
            size := next((n for pattern, n in rows if pattern.fullmatch(name)), value)
        ):
            changed[name] = size
    heads = config.get("num_attention_heads")
    for name in changed.keys() & {"num_key_value_heads"} if config.get("num_key_value_heads") == heads else ():
        changed[name] = changed.get("num_attention_heads", heads)  # latent attention has as many
    if "expand" in config and "num_heads" in changed:
        changed["num_heads"] *= 2  # Mamba's inner width is twice the stream's
    return changed
