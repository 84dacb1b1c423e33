"""Everything that has a name: models, devices, links, engines, schedules, algorithms of collectives, layout keys."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from shardwise.cli import collective
from shardwise.cli.actions import actions
from shardwise.cli.output import print_result
from shardwise.cli.pipeline import listing
from shardwise.cluster.accelerators import accelerators
from shardwise.cluster.device import KINDS
from shardwise.layout.layout import CHOICES, FLAGS, Layout
from shardwise.model.catalog import catalog, resolve
from shardwise.model.parameters import count, count_parts
from shardwise.report.terminal import Column, FittedTable
from shardwise.report.units import format_bytes, format_count, format_time

BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
"""Bits of a weight by format."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = actions(parser)
    models = action("models", "models of the catalog, or those named", _models)
    models.add_argument("models", nargs="*", metavar="MODEL", help="names, or config.json files (the whole catalog)")
    models.add_argument("--weights", action="store_true", help="bytes of the weights in fp32, bf16, int8 and int4")
    action("devices", "devices for --cluster", _devices)
    action("links", "links inside nodes and between them", _links)
    action("engines", "software that plan and estimate can price (plan --engine)", _engines)
    action("schedules", "pipeline schedules (schedule=)", listing.run)
    action("algorithms", "algorithms of collectives (algorithm=)", collective.list_all)
    action("layout-keys", "keys of a layout, with defaults", _keys)


def _models(args: argparse.Namespace) -> int:
    named = [resolve(text) for text in args.models] or list(catalog().values())
    sizes = (Column("layers"), Column("hidden"), Column("vocabulary", drop=2), Column("positions", drop=3),
             Column("experts", drop=1))  # fmt: skip
    more = tuple(map(Column, BITS)) if args.weights else sizes
    table, data = FittedTable((Column("model", left=True), Column("parameters"), *more)), []
    for model in named:
        number, experts = count(model), model.experts.count if model.experts else 0
        weights = {name: number * bits // 8 for name, bits in BITS.items()}
        fields_of = {key: value for key, value in model.to_json().items() if key != "counted"}
        data.append({"name": model.name, "parameters": number, "active_parameters": count_parts(model)[2],
                     "weight_bytes": weights, "runs": not model.why_not_runnable(), **fields_of})  # fmt: skip
        plain = (*map(str, (model.layers, model.hidden, model.vocab, model.max_positions)), str(experts or ""))
        table.add_row(
            model.name, format_count(number), *(map(format_bytes, weights.values()) if args.weights else plain)
        )
    note = ["weights alone, without the scales that quantized ones have beside them"] if args.weights else []
    return print_result(args, data, [table, *note])


def _devices(args: argparse.Namespace) -> int:
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


def _links(args: argparse.Namespace) -> int:
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
        bandwidth = (
            (f"{format_bytes(link.bandwidth)}/s", format_time(1e9 / link.bandwidth)) if link.bandwidth else ("", "")
        )
        latency = format_time(link.alpha) if link.alpha else "its kind's"
        table.add_row(name, kind, bandwidth[0], latency, bandwidth[1], ", ".join(uses))
    kinds = (f"{kind.words} {format_time(kind.alpha)}" for kind in KINDS.values())
    return print_result(args, data, [table, f"latency is per step of a collective; of a kind: {', '.join(kinds)}"])


def _engines(args: argparse.Namespace) -> int:
    from shardwise.predict.time.profiles import ENGINES

    data = [{"name": name, "attention": engine.attention} for name, engine in ENGINES.items()]
    return print_result(args, data, [", ".join(ENGINES)])


def _keys(args: argparse.Namespace) -> int:
    columns = (Column("key", left=True), Column("default", left=True), Column("meaning", left=True, wraps=True))
    table, data = FittedTable(columns), []
    for field in fields(Layout):
        choices = CHOICES.get(field.name, ())
        meaning = field.metadata["option"].help
        data.append({"key": field.name, "default": field.default, "choices": list(choices), "meaning": meaning})
        default = "off" if field.name in FLAGS else "" if field.default == () else str(field.default)
        table.add_row(field.name, default, f"{meaning}: {', '.join(choices)}" if choices else meaning)
    return print_result(args, data, [table])
