"""Classes of transformers built on the meta device: the attributes of a configuration, and its model's tensors.

Needs torch and transformers. `make families` records many sizes of each class and fits formulas to them
(`fitting.py`); a configuration of a family that is not in the data is recorded itself.
"""

import importlib
import inspect
import logging
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOWERS = re.compile("vision|visual|audio|image|multi_modal|mm_")
"""Parameters of other parts than the language model, by a word in their name."""

Attributes = dict[str, Any]


@dataclass(frozen=True)
class RecordedModel:
    """A configuration after its class has read it, and every parameter of the model of that configuration."""

    attributes: Attributes
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    cuts: Mapping[str, str]
    """The class's own plan of tensor parallelism: pattern of names -> kind."""
    kind: str
    """Name of the class."""
    names: Mapping[str, str]
    """Common names of attributes -> the class's own."""
    windowed: bool
    """Whether the class's attention has windows."""


Layered = tuple[str, int | None, tuple[int, ...]]
"""Name with `{}` for the layer, the layer, shape with the number of equal tensors in front."""


def layered(tensors: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[list[Layered], dict[str, int]]:
    """Tensors by layer, and the layers of each stack. Equal ones of one layer are one, with their number."""
    ranges: dict[str, set[int]] = defaultdict(set)
    for name, _ in tensors:
        if match := re.match(r"(.*?)\.(\d+)\.", name):
            ranges[match[1]].add(int(match[2]))
    stacks = {p: len(found) for p, found in ranges.items() if found == set(range(len(found)))}
    groups: dict[tuple[str, int | None], list[tuple[int, ...]]] = defaultdict(list)
    for name, shape in tensors:
        match = re.match(r"(.*?)\.(\d+)\.(.*)", name)
        if match and match[1] in stacks:
            groups[f"{match[1]}.{{}}.{re.sub(r'[.]([0-9]+)(?=[.]|$)', '.*', match[3])}", int(match[2])].append(shape)
        else:
            groups[re.sub(r"\.(\d+)(?=\.|$)", ".*", name), None].append(shape)
    if any(len(set(shapes)) > 1 for shapes in groups.values()):
        raise ValueError("unequal tensors of one name")
    return [(name, layer, (len(shapes), *shapes[0])) for (name, layer), shapes in groups.items()], stacks


def transformers() -> Any:
    """The package, without its warnings. Raises `ImportError` where it is not installed."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore")
    import torch  # noqa: F401
    import transformers as package

    logging.getLogger("transformers").setLevel(logging.ERROR)
    package.utils.logging.disable_progress_bar()
    return package


def config_class(model_type: str) -> Any:
    """The class of configurations of a model_type. Raises `KeyError` where transformers has none."""
    transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def record(data: Mapping[str, Any]) -> RecordedModel:
    """Build the class that a `config.json` names. Raises whatever the class does for what it cannot build."""
    given = {k: v for k, v in data.items() if k not in ("model_type", "auto_map", "quantization_config")}
    kind = config_class(data["model_type"])
    return record_config(kind.from_dict(given) if hasattr(kind, "from_dict") else kind(**given))


def record_config(config: Any) -> RecordedModel:
    """Build the model of a configuration."""
    model = _build(config)
    text = config.get_text_config()
    seen: dict[int, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        seen.setdefault(id(tensor), (name, tuple(tensor.shape)))
    kept = tuple((name, shape) for name, shape in seen.values() if not TOWERS.search(name))
    if not any(name.endswith("lm_head.weight") for name, _ in kept) and not hasattr(model, "lm_head"):
        kept += (("lm_head.weight", (text.vocab_size, text.hidden_size)),) * (
            not getattr(config, "tie_word_embeddings", None)
        )
    windowed = "sliding_window_causal_mask" in inspect.getsource(inspect.getmodule(type(model)))  # type: ignore[arg-type]
    plans = (getattr(m.config, "base_model_tp_plan", None) for m in model.modules() if hasattr(m, "config"))
    cuts = dict(next(filter(None, plans), {}))
    return RecordedModel(
        attributes_of(text), kept, cuts, type(model).__name__, dict(text.attribute_map or {}), windowed
    )


def _build(config: Any) -> Any:
    """The model of a configuration: with a head for the next token where there is one."""
    package = transformers()
    import torch
    from transformers.initialization import no_init_weights

    errors = []
    for auto in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModel"):
        try:
            with torch.device("meta"), no_init_weights():
                model = getattr(package, auto).from_config(config)
            model.tie_weights()
            return model
        except Exception as error:
            errors.append(error)
    if "Unrecognized" not in str(errors[0]):
        raise errors[0]
    with torch.device("meta"), no_init_weights():
        model = _own_class(config)(config)
    model.tie_weights()
    return model


def _own_class(config: Any) -> Any:
    """The class that says that a configuration is its own, best with a head for the next token."""
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    kinds = [k for k in vars(module).values() if (isinstance(k, type) and vars(k).get("config_class") is type(config))
             or (isinstance(k, type) and getattr(k, "config", None) is type(config))]  # fmt: skip
    annotated = [k for k in vars(module).values() if isinstance(k, type)
                 and vars(k).get("__annotations__", {}).get("config") in (type(config), type(config).__name__)
                 ]  # fmt: skip
    found = [k for k in (*kinds, *annotated) if k.__module__ == module.__name__ and hasattr(k, "tie_weights")]
    return min(found, key=lambda k: (not k.__name__.endswith("CausalLM"), not k.__name__.endswith("Model"), k.__name__))


def attributes_of(config: Any) -> Attributes:
    """The attributes of a configuration, those of nested ones with their name before a dot."""
    data = config.to_dict()
    data.setdefault("num_hidden_layers", getattr(config, "num_hidden_layers", None))
    return flat(data)


def flat(data: Mapping[str, Any]) -> Attributes:
    """Attributes: of nested objects after a dot, of single layers as lists."""
    result = _flat({k: v for k, v in data.items() if k != "quantization_config"})
    each = {int(k): v for k, v in (data.get("per_layer_config") or {}).items() if str(k).isdigit()}
    for name in {name for values in each.values() for name in values}:
        layers = data.get("num_hidden_layers") or 0
        result[f"{name}/layers"] = [each.get(i, {}).get(name, data.get(name)) for i in range(layers)]
    return result


def _flat(data: Mapping[str, Any], prefix: str = "") -> Attributes:
    result: Attributes = {}
    for key, value in data.items():
        if isinstance(value, dict) and not key.startswith(("id2label", "label2id", "rope", "per_layer_config")):
            result |= _flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result
