"""Everything that has a name: models, devices, links, engines, schedules, algorithms of collectives, layout keys."""

from typing import Any

from shardwise.cli.declare import CommandOptions, Run, arg, summary_of, word
from shardwise.cli.models import OfflineOptions
from shardwise.cli.output import print_result
from shardwise.cluster.catalog import accelerators
from shardwise.cluster.device import KINDS
from shardwise.layout.keys import CHOICES, KEYS
from shardwise.layout.model_size import size_json
from shardwise.model import ModelConfig
from shardwise.model.caches import cache_json
from shardwise.model.catalog import catalog, resolve
from shardwise.model.families import family_of
from shardwise.model.hub import hub_models
from shardwise.records import dataclass
from shardwise.report.table import Column, FittedTable
from shardwise.report.units import format_bytes, format_count, format_time

BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
"""Bits of a weight by format."""


@dataclass
class ListModels(OfflineOptions):
    """Models of the catalog, or those named."""

    models: tuple[str, ...] = word("names, or config.json files (the whole catalog)", "MODEL", ())
    hub: bool = arg("add the popular models of the hub that are known offline")
    weights: bool = arg("bytes of the weights in fp32, bf16, int8 and int4")

    def run(self) -> int:
        named = [resolve(text) for text in self.models] or list(catalog().values())
        named += [resolve(name) for name in hub_models()] if self.hub else []
        groups: dict[str, list[ModelConfig]] = {}
        for model in named:
            groups.setdefault(model.counted.family if model.counted else family_of(model).model_type, []).append(model)
        more = map(Column, BITS) if self.weights else (
            Column("active"), Column("cache/token", drop=2), Column("layers", drop=4), Column("experts", drop=3),
            Column("positions", drop=5), Column("here", left=True, drop=1),
        )  # fmt: skip
        table, data = FittedTable((Column("model", left=True), Column("parameters"), *more)), []
        for number, (family, members) in enumerate(groups.items()):
            if len(named) > 1:
                table.add_row(f"{family}:", *[""] * (len(table.columns) - 1))
            for model in members:
                # Commands that a model can be given to: train and generate where a decoder computes it.
                row = {
                    "name": model.name,
                    "family": family,
                    **size_json(model),
                    **cache_json(model),
                    "here": ["count", "plan", *(() if model.why_not_runnable() else ("train", "generate"))],
                }
                row |= {"weight_bytes": {name: row["parameters"] * bits // 8 for name, bits in BITS.items()}}
                row |= {key: value for key, value in model.to_json().items() if key not in ("counted", "name")}
                row["runs"] = "train" in row["here"]
                data.append(row)
                last = model is members[-1] and number < len(groups) - 1
                cells = map(format_bytes, row["weight_bytes"].values()) if self.weights else _cells(row)
                name = f"{'  ' * (len(named) > 1)}{model.name}"
                table.add_row(name, format_count(row["parameters"]), *cells, end_section=last)
        return print_result(self, data, [table, *_model_notes(self)])


def run(args: CommandOptions) -> int:
    """Without an action: what there is to list."""
    kinds = {name: summary_of(action) for name, action in ACTIONS.items()}
    return print_result(args, kinds, (f"shardwise list {name:<13}{summary}" for name, summary in kinds.items()))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    active = format_count(row["active_parameters"]) if row["active_parameters"] != row["parameters"] else ""
    experts = str(row["experts"]["count"]) if row["experts"] else ""
    nbytes = row["cache_bytes_per_token"]
    cache = f"{format_bytes(nbytes)}{' + state' * bool(row['state_bytes_per_sequence'])}"
    here = "all" if row["runs"] else "plan"
    return active, cache, str(row["layers"]), experts, str(row["max_positions"]), here


def _model_notes(args: ListModels) -> list[str]:
    if args.weights:
        return ["weights alone, without the scales that quantized ones have beside them"]
    notes = [
        "active: parameters that one token uses; cache/token: bytes in 16 bits, of all layers, windowed ones included",
        "here: plan is count and plan; all is train and generate, too",
    ]
    more = f"{len(hub_models())} more by their ids on the hub: list models --hub; --json has the cache by kind of layer"
    return [*notes, *([more] if not args.hub and not args.models else [])]


def _devices(args: CommandOptions) -> int:
    aliases: dict[str, list[str]] = {}
    for alias, name in accelerators().aliases.items():
        aliases.setdefault(name, []).append(alias)
    table = FittedTable(
        [
            Column("device", left=True), Column("memory"), Column("bf16 FLOP/s"), Column("link, one way"),
            Column("also", left=True, drop=1, wraps=True),
        ]
    )  # fmt: skip
    data: list[dict[str, Any]] = []
    for name, accelerator in accelerators().devices.items():
        device, link = accelerator.device, accelerator.intra
        flops, bandwidth = device.peak_flops.get("bfloat16"), link.bandwidth
        data.append(
            {
                "name": name, "aliases": aliases.get(name, []), "memory_bytes": device.memory_bytes,
                "bf16_flops": flops, "intra_bandwidth": bandwidth, "inter_bandwidth": accelerator.inter.bandwidth,
            }
        )  # fmt: skip
        table.add_row(
            name,
            format_bytes(device.memory_bytes) if device.memory_bytes else "unknown",
            format_count(flops) if flops else "unknown",
            f"{format_bytes(bandwidth)}/s" if bandwidth else "unknown",
            ", ".join(aliases.get(name, [])),
        )
    return print_result(args, data, [table, "any other device is described in a TOML file (calibrate writes one)"])


def _links(args: CommandOptions) -> int:
    columns = (
        Column("link", left=True), Column("kind", left=True, drop=1), Column("one way"), Column("latency"),
        Column("1 GB takes"), Column("devices", left=True, drop=2, wraps=True),
    )  # fmt: skip
    table, data = FittedTable(columns), []
    for name, link in accelerators().links.items():
        if not link.bandwidth:
            continue
        uses, kind = accelerators().uses[name], KINDS[link.kind].words if link.kind else ""
        data.append({"name": name, "kind": link.kind, "bandwidth": link.bandwidth, "alpha": link.alpha,
                     "devices": uses, "source": link.source})  # fmt: skip
        speed, latency = f"{format_bytes(link.bandwidth)}/s", format_time(link.alpha) if link.alpha else "its kind's"
        table.add_row(name, kind, speed, latency, format_time(1e9 / link.bandwidth), ", ".join(uses))
    kinds = (f"{kind.words} {format_time(kind.alpha)}" for kind in KINDS.values())
    return print_result(args, data, [table, f"latency is per step of a collective; of a kind: {', '.join(kinds)}"])


def _engines(args: CommandOptions) -> int:
    from shardwise.predict.time.profiles import ENGINES

    data = [{"name": name, "attention": engine.attention} for name, engine in ENGINES.items()]
    return print_result(args, data, [", ".join(ENGINES)])


def _keys(args: CommandOptions) -> int:
    columns = (Column("key", left=True), Column("default", left=True), Column("meaning", left=True, wraps=True))
    table, data = FittedTable(columns), []
    for key in KEYS.values():
        choices = CHOICES.get(key.name, ())
        data.append({"key": key.name, "default": key.default, "choices": list(choices), "meaning": key.help})
        default = "off" if key.kind == "flag" else "" if key.default == () else str(key.default)
        table.add_row(key.name, default, f"{key.help}: {', '.join(choices)}" if choices else key.help)
    return print_result(args, data, [table])


def _schedules(args: CommandOptions) -> int:
    from shardwise.schedule.pipeline import generators
    from shardwise.schedule.pipeline.closed_forms import FORMS

    fields = ("name", "summary", "source", "shape", "train", "virtual", "options")
    data = [
        {name: getattr(g, name) for name in fields} | {"bubble": FORMS[g.name].text, "holds": FORMS[g.name].note}
        for g in generators()
    ]
    table = FittedTable(
        [
            Column("schedule", left=True), Column("V", left=True, drop=1), Column("options", left=True, drop=3),
            Column("bubble", left=True), Column("what it does", left=True, wraps=True),
            Column("source", left=True, drop=2, wraps=True),
        ]
    )  # fmt: skip
    for g in generators():
        virtual = "1" if g.virtual == 1 else "2" if g.shape == "vee" else "2 or more"
        table.add_row(g.name, virtual, ", ".join(g.options), FORMS[g.name].text, g.summary, g.source)
    notes = (f"{g.name}: {FORMS[g.name].note}" for g in generators() if FORMS[g.name].note)
    where = "\nwhere the bubbles of the table hold, while messages take no time:"
    return print_result(args, data, [table, where, *notes])


def _algorithms(args: CommandOptions) -> int:
    from shardwise.schedule import algorithms
    from shardwise.schedule.comm import COLLECTIVES

    fields = ("collective", "name", "summary", "natural", "source", "reads", "options")
    data = [{name: getattr(algorithm, name) for name in fields} for algorithm in algorithms()]
    table = FittedTable(
        [
            Column("algorithm", left=True), Column("made for", left=True, drop=2),
            Column("options", left=True, drop=3), Column("what it does", left=True, wraps=True),
            Column("source", left=True, drop=1, wraps=True),
        ]
    )  # fmt: skip
    for collective, meaning in COLLECTIVES.items():
        table.add_row(collective, "", "", meaning, "")
        for a in algorithms(collective):
            table.add_row(f"  {a.name}", a.natural, ", ".join(a.options), a.summary, a.source)
    return print_result(args, data, [table])


def _listing(summary: str, run: Run) -> type[CommandOptions]:
    """An action without options."""
    return type("Listing", (CommandOptions,), {"__doc__": summary, "run": run})


ACTIONS = {
    "models": ListModels,
    "devices": _listing("devices for --cluster", _devices),
    "links": _listing("links inside nodes and between them", _links),
    "engines": _listing("software that plan and estimate price (--engine)", _engines),
    "schedules": _listing("pipeline schedules (schedule=)", _schedules),
    "algorithms": _listing("algorithms of collectives (algorithm=)", _algorithms),
    "layout-keys": _listing("keys of a layout, with defaults", _keys),
}
