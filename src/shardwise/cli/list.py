"""What shardwise has by name: models, devices, engines, pipeline schedules, algorithms of collectives, layout keys."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from shardwise.cli import collective
from shardwise.cli.actions import actions
from shardwise.cli.output import print_result
from shardwise.cli.pipeline import listing
from shardwise.cluster.accelerators import accelerators
from shardwise.layout.layout import CHOICES, FLAGS, Layout
from shardwise.model.catalog import catalog
from shardwise.model.parameters import count
from shardwise.report.terminal import Column, FittedTable
from shardwise.report.units import format_bytes, format_count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = actions(parser)
    action("models", "models of the catalog", _models)
    action("devices", "devices for --cluster", _devices)
    action("engines", "software that plan and estimate can price (plan --engine)", _engines)
    action("schedules", "pipeline schedules (schedule=)", listing.run)
    action("algorithms", "algorithms of collectives (algorithm=)", collective.list_all)
    action("layout-keys", "keys of a layout, with defaults", _keys)


def _models(args: argparse.Namespace) -> int:
    table = FittedTable(
        [
            Column("model", left=True), Column("parameters"), Column("layers"), Column("hidden"),
            Column("vocabulary", drop=2), Column("positions", drop=3), Column("experts", drop=1),
        ]
    )  # fmt: skip
    data = []
    for name, model in catalog().items():
        experts = model.experts.count if model.experts else 0
        data.append({"name": name, "parameters": count(model), "runs": not model.why_not_runnable(), **model.to_json()})
        sizes = (model.layers, model.hidden, model.vocab, model.max_positions)
        table.add_row(name, format_count(count(model)), *map(str, sizes), str(experts or ""))
    return print_result(args, data, [table])


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
