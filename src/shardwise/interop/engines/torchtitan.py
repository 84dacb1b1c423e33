"""torchtitan's arguments, its models, and files of older versions."""

from collections.abc import Mapping
from itertools import product
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.reading.arguments import launched_ranks, parse
from shardwise.interop.reading.engine_reader import read_as
from shardwise.interop.reading.fields import ConfigFields, renamed
from shardwise.interop.reading.settings import FileReader, Reading
from shardwise.interop.spec import spec
from shardwise.model.catalog import catalog

_POLICY = "activation-checkpoint:"
"""Word of arguments that chooses what is recomputed, since 0.3."""


def read(
    data: Mapping[str, Any] | list[str],
    ranks: int | None,
    other: FileReader | None = None,
    engine: str = "torchtitan",
    base: Mapping[str, Any] | None = None,
) -> Reading:
    """Layout of a file or of arguments. base: the file that the arguments name; theirs come first. Raises `UserError`
    where the degrees do not multiply to the number of processes, or leave one open that nothing tells."""
    preset = ""
    if isinstance(data, list):
        flags = parse([word for word in data if not word.startswith(_POLICY)], {}, frozenset()).flags
        ranks = ranks or launched_ranks(flags)
        policies = [word.removeprefix(_POLICY).replace("-", "_") for word in data if word.startswith(_POLICY)]
        preset = flags.get("config", "")
        data = _nested(flags) | ({"activation_checkpoint": {"mode": policies[-1]}} if policies else {})
        known = spec(engine).presets.get(str(preset), {})
        preset = "" if known else preset
        for section, table in (*(base or {}).items(), *known.items()):
            data[section] = {**table, **data.get(section, {})} if isinstance(table, Mapping) else table
    table, began, cut = _by_new_names(data)
    return read_as(spec(engine), table, ranks, preset=preset, began=began, cut=cut)


def cut_stages(
    model: str,
    pp: int,
    chunks: int,
    ends: tuple[int, int],
    each: int,
    parts: list[list[str]] | None,
    fields: ConfigFields,
) -> tuple[int, ...]:
    """Layers by stage as `generate_llm_fqn_per_model_part` cuts them, where the model is known, else none: the ends
    count as layers, and what is left over goes to the first stages. chunks: a rank's by the schedule; each: layers a
    stage, 0 for none; parts: modules by stage. Raises `UserError` as it does."""
    layers = catalog()[model].layers if model in catalog() else 0
    if parts:
        counts = [sum(str(name).startswith("layers.") for name in part) for part in parts]
    elif not layers:
        words = f"the embedding as {ends[0]} and the head as {ends[1]}"
        fields.say("facts", f"torchtitan counts {words} of the layers: without the model, stages are taken as even")
        return ()
    else:
        stages = -(-(layers + sum(ends)) // each) if each else pp * chunks
        counts = _between(layers, stages, ends)
        if not counts:
            raise UserError(f"{stages} stages of {layers} layers: the ends count as {ends[0]} and {ends[1]} of them")
    if len(counts) % pp or (len(counts) // pp > 1) != (chunks > 1):
        raise UserError(f"{len(counts)} stages do not suit {pp} ranks and the schedule: give it {pp * chunks}")
    return tuple(counts)


def _between(layers: int, stages: int, ends: tuple[int, int]) -> list[int]:
    """Layers by stage: even, the first ones with one more, less `ends` in the first and the last; none where there are
    too few."""
    least, rest = divmod(layers + sum(ends), stages)
    if least < max(1, *ends):
        return []
    counts = [least + (i < rest) for i in range(stages)]
    counts[0] -= ends[0]
    counts[-1] -= ends[1]
    return counts


def ends_of(counts: tuple[int, ...]) -> tuple[int, int] | None:
    """What the embedding and the head count as, few layers, where stages have so many; (0, 0) of even ones, which is
    none given, and None where no numbers of them do."""
    if not counts:
        return 0, 0
    first, last = (range(max(counts) - count + 2) for count in (counts[0], counts[-1]))
    fitting = (ends for ends in product(first, last) if _between(sum(counts), len(counts), ends) == [*counts])
    return min(fitting, key=sum, default=None)


def uneven(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Layers by stage, where they are not as even as can be with more in the first ones; else none."""
    least, rest = divmod(sum(counts), max(len(counts), 1))
    return () if all(count == least + (i < rest) for i, count in enumerate(counts)) else counts


def _by_new_names(data: Mapping[str, Any]) -> tuple[dict[str, Any], bool, bool]:
    """A file of 0.1 by the names since 0.2, whether it has a pipeline of 0.1, and whether its micro-batches are as many
    as its stages by default."""
    table = renamed(data, spec("torchtitan").renamed)
    parallel = table.setdefault("parallelism", {})
    for name in ("training", "experimental"):
        if isinstance(section := table.get(name), dict) and isinstance(parallel, dict):
            for key in [key for key in section if "_parallel_" in str(key)]:
                parallel.setdefault(key, section.pop(key))
            if not section:
                del table[name]
    began = data.get("experimental")
    if isinstance(began, Mapping) and "pipeline_parallel_degree" in began and isinstance(parallel, dict):
        cut = "num_pp_microbatches" not in parallel
        parallel.setdefault("num_pp_microbatches", began["pipeline_parallel_degree"])
        return table, True, cut
    return table, False, False


def _nested(flags: Mapping[str, Any]) -> dict[str, Any]:
    """--training.seq_len 8192 as {"training": {"seq_len": "8192"}}; flags without a section are torchrun's."""
    data: dict[str, Any] = {}
    for name, value in flags.items():
        section, dot, key = name.partition(".")
        if dot:
            data.setdefault(section, {})[key] = value
    return data


def schedule_of(name: str) -> str:
    """The schedule by its name here. Raises `UserError` for one that there is not."""
    # Brings numpy, which only a pipeline needs.
    from shardwise.schedule.pipeline import find

    return find("Interleaved1F1B" if name.lower() == "interleavedzerobubble" else name).name


def catalog_name(name: str, flavor: str) -> str:
    """The catalog's way of writing a model's name and flavor: llama3 and 70B are llama-3-70b."""
    family = "llama-3" if name == "llama3" else name
    return f"{family}-{flavor.lower()}" if name and flavor else family
