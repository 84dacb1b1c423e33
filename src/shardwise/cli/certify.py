"""Certify an engine: does it compute the plain model's gradients under its layouts?

Small local processes train the engine's tiny model on different rows, and compare loss, whole gradients, gradient
norm, clipped gradients, parameters after three steps and after a resume with the plain model on one device. The exit
code is 0 where all that ran is proven, 1 where something is wrong.

shardwise certify fsdp2 dp_shard=2 dp_replicate=2,dp_shard=2,reshard=0

ENGINE is one of ddp, fsdp2, tensor_parallel, pipelining, accelerate, transformers, deepspeed, megatron, torchtitan and
shardwise, or the path of your adapter (docs/certify.md).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from shardwise.certify.engines import check_engine
from shardwise.certify.result import Certificate
from shardwise.cli.declare import CommandOptions, arg, word
from shardwise.cli.output import print_result, working
from shardwise.errors import os_errors
from shardwise.records import dataclass
from shardwise.runtime.installed import require


@dataclass
class CertifyOptions(CommandOptions):
    engine: str = word("one of the engines, or the path of an adapter", "ENGINE|FILE.py")
    layouts: tuple[str, ...] = word("layouts of the engine, such as dp=2 (some of its)", "LAYOUT", ())
    count: int = arg("without LAYOUT: so many layouts", "N", 6, positive=True, flag="--layouts")
    model: tuple[str, ...] = arg("one of the adapter's models, may be given again (its first)", "NAME", ())
    seed: int = arg("of the choice of layouts", "N", 0, least=0)
    out: Path | None = arg("write certificate.md, certificate.json and scripts of wrong cells here", "FOLDER")


def run(args: CertifyOptions) -> int:
    check_engine(args.engine)
    require("certify", "torch")
    from shardwise.certify.job import certify

    with working("comparing") as say:
        certificate = certify(
            args.engine, layouts=args.layouts, count=args.count, models=args.model, seed=args.seed, say=say
        )
    if args.out is not None:
        certificate = _written(certificate, args.out)
    print_result(args, certificate.to_json, certificate.lines())
    return certificate.exit_code


def _written(certificate: Certificate, folder: Path) -> Certificate:
    """Write the certificate. Returns it with paths in place of scripts."""
    with os_errors(f"write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        findings = []
        for number, finding in enumerate(certificate.findings, 1):
            path = folder / f"wrong-{number}.py"
            if finding.script:
                path.write_text(finding.script)
            findings.append(replace(finding, script=path.name if finding.script else ""))
        certificate = replace(certificate, findings=tuple(findings))
        (folder / "certificate.md").write_text(certificate.markdown())
        (folder / "certificate.json").write_text(json.dumps(certificate.to_json(), indent=1))
    return certificate
