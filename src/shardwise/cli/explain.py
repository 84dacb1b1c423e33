"""A configuration of another engine explained: its layout, memory, traffic and time.

CONFIG is a file (a table in JSON, TOML or YAML; a script with an engine's command; a Kubernetes, compose or Ray Serve
file around one; a Python program that calls one), or the arguments as one text: shardwise explain "vllm serve MODEL -tp
4". Files that it names are read, too. With a model and a cluster it says what every GPU holds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwise.cli.clusters import NetworkOptions, cluster_of
from shardwise.cli.declare import arg, word
from shardwise.cli.models import OfflineOptions
from shardwise.cli.output import print_result
from shardwise.cli.show import explain_table
from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.interop import ENGINES, Reading, ServerSettings, read
from shardwise.interop.engines.serving import is_format
from shardwise.interop.words import in_words
from shardwise.layout.keys import KEYS
from shardwise.model import ModelConfig
from shardwise.model.catalog import catalog, resolve
from shardwise.model.changes import change
from shardwise.model.formats import weight_format
from shardwise.model.precision import bits_in_name
from shardwise.predict.cluster_links import link_lines, with_links
from shardwise.records import dataclass
from shardwise.report.terminal import Renderable

Outlook = explain_table.Training | explain_table.CacheRoom | None


@dataclass
class ExplainOptions(NetworkOptions, OfflineOptions):
    config: tuple[str, ...] = word("a file, or arguments as one text (or after --)", "CONFIG")
    cluster: str | None = arg("[NODESx]GPUSxDEVICE, such as 8x8xH100, or a TOML file", "TEXT")
    engine: str | None = arg(f"the engine, where it is not recognized: {', '.join(ENGINES)}", "NAME")
    ranks: int | None = arg("processes, where neither it nor --cluster says", "N", positive=True)
    precision: str | None = arg("what DeepSpeed's file leaves to a trainer", choices=("bf16", "fp16", "fp32"))
    strict: bool = arg("exit 2 where a key is unknown or the layout is in doubt")
    model: str | None = arg("a name of the catalog, a config.json, or its folder", "MODEL")
    set: tuple[str, ...] = arg("change the model", "FIELD=VALUE,...", ())
    seq: int | None = arg("tokens per sequence, where it does not say", "N", positive=True, tokens=True)
    batch: int | None = arg("sequences a step, where it does not say", "N", positive=True)
    micro: int | None = arg("sequences a micro-batch, where it does not say", "N", positive=True)
    recompute: str | None = arg("what is recomputed, where it does not say", choices=KEYS["recompute"].choices)


def run(args: ExplainOptions) -> int:
    if args.network is not None and not args.cluster:
        raise UserError("--network is between the nodes of a cluster: add --cluster, such as 2x8xH100")
    cluster = cluster_of(args) if args.cluster else None
    reading = read(args.config, args.ranks or (cluster.devices if cluster else None), args.engine, args.precision)
    keys = {key: value for key in explain_table.CODE_KEYS if (value := getattr(args, key))}
    layout = replace(reading.layout, **keys)
    reading = replace(reading, layout=layout, seq=args.seq or reading.seq, batch=args.batch or reading.batch)
    model = _model(reading, args)
    stored = model and model.counted and model.counted.stored
    if args.model and reading.served and not stored and not _has_bits(reading.served, reading.model or ""):
        doubt = f"{reading.model} names a quantizer, but --model's weights are counted: say --quantization"
        reading = replace(reading, unsettled=(*reading.unsettled, doubt))
    if args.strict and (doubts := (*reading.unsettled, *(f"{key} is not known here" for key in reading.unknown))):
        raise UserError(f"--strict: {'; '.join(doubts)}")
    outlook = _outlook(reading, model, cluster)
    words = in_words(reading.layout, cluster, serves=reading.served is not None)
    data = with_links(reading.to_json(), cluster) | {"words": words, "outlook": outlook.to_json() if outlook else None}
    return print_result(args, data, _lines(reading, words, model, outlook, cluster))


def _lines(
    reading: Reading, words: list[str], model: ModelConfig | None, outlook: Outlook, cluster: Cluster | None
) -> Iterator[Renderable]:
    ranks = reading.layout.ranks
    doubts = f"; in doubt: {'; '.join(reading.unsettled)}" if reading.unsettled else ""
    yield f"{reading.engine} on {ranks} GPU{'s' * (ranks > 1)}: {reading.layout}{doubts}"
    yield from _section("What it is:", words)
    yield from _section("It says besides:", reading.facts)
    yield from _section("Worth knowing:", reading.notes)
    yield from ("", *(outlook.lines(cluster) if outlook else [_missing(reading, model)]), *link_lines(cluster))
    ignored = [", ".join(reading.ignored)] if reading.ignored else []
    yield from _section("Changes neither the split nor the memory:", ignored)
    yield from _section("Not known here:", reading.unknown)


def _model(reading: Reading, args: ExplainOptions) -> ModelConfig | None:
    """The model of --model, else the one that the configuration describes, or names as the catalog does.

    Raises `UserError` for a --model that there is not.
    """
    if args.model:
        match = resolve(args.model, stored=bool(reading.served))
    elif reading.described:
        match = reading.described
    elif found := _named(reading.model or "", bool(reading.served)):
        match = found
    else:
        if reading.served and not _has_bits(reading.served, reading.model or ""):
            return None
        name = (reading.model or "").lower().rsplit("/", 1)[-1].removeprefix("meta-")
        # Release 3.1 of the largest Llama 3 was its first.
        names = (name, name.replace("llama-3.1-405b", "llama-3-405b"))
        known = [model for model in catalog().values() if any(f"{n}-".startswith(f"{model.name}-") for n in names)]
        if not known:
            return None
        match = max(known, key=lambda model: len(model.name))
    # Engines drop attention's probabilities inside their fused kernels, which saves nothing.
    return change(match, ",".join(args.set)).replace(attention_dropout=0.0)


def _has_bits(served: ServerSettings, name: str) -> bool:
    """Whether the flags of a server say weights as wide as the name of its model does, or that says nothing."""
    bits = bits_in_name(name)
    if bits is None or not is_format(served.weights):  # the error says it
        return True
    stored = weight_format(served.weights)
    return stored.lossy and bits in (0, 8 * stored.each)


def _named(text: str, stored: bool) -> ModelConfig | None:
    """The model of a folder or of an id of the hub that is known here; what explains a file fetches nothing."""
    try:
        return resolve(text, fetch=False, stored=stored) if text else None
    except UserError:
        return None


def _outlook(reading: Reading, model: ModelConfig | None, cluster: Cluster | None) -> Outlook:
    if model is None:
        return None
    if reading.served:
        return explain_table.serving(reading, model, cluster)
    return explain_table.training(reading, model, cluster) if reading.seq and reading.batch else None


def _missing(reading: Reading, model: ModelConfig | None) -> str:
    flags = [] if model else ["--model"]
    if not reading.served:
        flags += [option for option, value in (("--seq", reading.seq), ("--batch", reading.batch)) if not value]
    why = "which is not in the catalog"
    if reading.served and not _has_bits(reading.served, reading.model or ""):
        why = "whose files say in how many bits its weights are: give their folder"
    named = f" (it names {reading.model}, {why})" if reading.model and not model else ""
    return f"What it will do, {' and '.join(flags)} would tell{named}."


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines)] if lines else []
