"""Step times that other predictors give for the published rows, beside the time model's.

    python benchmarks/peer_predictors.py TABLE.json... --calculon FOLDER [--json FILE]

Calculon is a clone of calculon-ai/calculon (FOLDER), with its own description of the devices. llm-analysis is the
package (pip install llm-analysis). Each is asked for the rows that it can express: dense models, trained in 16 bits, on
devices that it has; Calculon has no ZeRO-3. llm-analysis has no efficiency of its own: it gets the one that is best for
each source, which is in its favor. A peer's mean error stands beside the time model's on the same rows.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.validation import scoreboard
from shardwise.validation.scoreboard import Prediction

Seconds = Callable[[Prediction], float | None]

CALCULON_SYSTEMS = {"A100-80GB-SXM": "a100_80g", "A100-40GB-SXM": "a100_80g", "H100-80GB-SXM": "h100_80g_nvl8"}
ANALYSIS_GPUS = {
    "A100-80GB-SXM": "a100-sxm-80gb", "A100-40GB-SXM": "a100-sxm-40gb", "H100-80GB-SXM": "h100-sxm-80gb"
}  # fmt: skip
EFFICIENCIES = tuple(round(0.3 + 0.025 * i, 3) for i in range(25))
"""FLOPs efficiencies that llm-analysis is tried with."""


def calculon(folder: Path) -> Seconds:
    """Seconds of a step by a clone of Calculon; None for what it cannot express."""
    sys.path.insert(0, str(folder))
    from calculon.llm import Llm  # type: ignore[import-not-found]
    from calculon.system import System  # type: ignore[import-not-found]

    log = logging.getLogger("calculon")
    systems = {
        name: System(json.loads((folder / "systems" / f"{file}.json").read_text()))
        for name, file in CALCULON_SYSTEMS.items()
    }

    def seconds(one: Prediction) -> float | None:
        case, split = one.case, one.case.split
        if split is None or case.cluster.device.name not in systems or split.zero == 3 or split.cp > 1:
            return None
        model, network = case.model, int(case.cluster.nodes > 1)
        application = Llm.Application({
            "hidden": model.hidden, "feedforward": model.ffn, "seq_size": split.seq, "attn_heads": model.heads,
            "attn_size": model.head_dim, "num_blocks": model.layers,
        })  # fmt: skip
        try:
            execution = Llm.Execution.from_json({
                "num_procs": split.tp * split.pp * split.dp, "tensor_par": split.tp, "pipeline_par": split.pp,
                "data_par": split.dp, "tensor_par_net": 0, "pipeline_par_net": network, "data_par_net": network,
                "batch_size": split.micro * split.micro_batches * split.dp, "microbatch_size": split.micro,
                "datatype": "float16", "fused_activation": False, "attention_type": "multihead",
                "activation_recompute": {"selective": "attn_only"}.get(split.recompute, split.recompute),
                "pipeline_interleaving": split.virtual, "optimizer_sharding": bool(split.zero) and split.dp > 1,
                "tensor_par_comm_type": "rs_ag" if split.sp else "ar", "tensor_par_overlap": "none",
                "seq_par_ag_redo": split.sp and split.recompute != "full",
                "data_par_overlap": case.software.grad_overlap and split.dp > 1,
                "weight_offload": False, "activations_offload": False, "optimizer_offload": False, "training": True,
            })  # fmt: skip
            asked = Llm(application, log)
            asked.compile(systems[case.cluster.device.name], execution)
            asked.run(systems[case.cluster.device.name])
        except (AssertionError, Llm.Error):
            return None
        return float(asked.get_total_time())

    return seconds


def llm_analysis(efficiency: float) -> Seconds:
    """Seconds of a step by llm-analysis at one FLOPs efficiency; None for what it cannot express."""
    from llm_analysis import analysis, config  # type: ignore[import-not-found]

    logging.disable(logging.WARNING)

    def seconds(one: Prediction) -> float | None:
        case, split = one.case, one.case.split
        name = ANALYSIS_GPUS.get(case.cluster.device.name)
        if split is None or name is None or split.cp > 1 or case.model.ffn % case.model.hidden:
            return None
        model = case.model
        try:
            asked = analysis.LLMAnalysis(
                config.ModelConfig(
                    model.name, model.layers, model.heads, model.hidden, model.vocab, split.seq, model.kv_heads,
                    ffn_embed_dim=model.ffn,
                ),
                config.get_gpu_config_by_name(name),
                parallelism_config=config.ParallelismConfig(split.tp, split.pp, split.dp, sp_size=split.tp),
                flops_efficiency=efficiency,
            )  # fmt: skip
            summary = asked.training(
                batch_size_per_gpu=split.micro, gradient_accumulation_steps=split.micro_batches, seq_len=split.seq,
                activation_recomputation=analysis.ActivationRecomputation[split.recompute.upper()],
                ds_zero=analysis.DSZeRO(split.zero), mlp_gated_linear_units=model.gated,
            )  # fmt: skip
        except (AssertionError, ValueError, ZeroDivisionError):
            return None
        return float(summary["latency_per_iter"])

    return seconds


def expressible(one: Prediction) -> bool:
    """Whether a row trains a dense model in 16 bits."""
    return one.case.kind == "train" and not one.case.model.experts and one.case.split.dtype == "bfloat16"  # type: ignore[union-attr]


def compared(rows: Iterable[Prediction], seconds: Seconds) -> dict[str, Any]:
    """Mean absolute errors of a peer and of the time model on the rows that the peer expresses."""
    theirs, ours = [], []
    for one in rows:
        if (value := seconds(one)) is not None:
            theirs.append(abs(value / one.measured - 1))
            ours.append(abs(one.error))
    mean = {"peer": float(np.mean(theirs)), "shardwise": float(np.mean(ours))} if theirs else {}
    return {"rows": len(theirs), **mean}


def best_efficiency(rows: list[Prediction]) -> dict[str, Any]:
    """`compared` of llm-analysis at the efficiency with the least mean error."""
    tried = [compared(rows, llm_analysis(efficiency)) | {"efficiency": efficiency} for efficiency in EFFICIENCIES]
    return min(tried, key=lambda result: result.get("peer", float("inf")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="*", help="tables of rows (the published runs without any)")
    parser.add_argument("--calculon", type=Path, metavar="FOLDER", help="a clone of calculon-ai/calculon")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows = [row for table in args.tables or [scoreboard.RUNS] for row in scoreboard.read(table)]
    predictions = [one for one in scoreboard.predict(scoreboard.cases(rows)[0])[0] if expressible(one)]
    results: dict[str, dict[str, Any]] = {}
    for source in dict.fromkeys(one.case.source for one in predictions):
        mine = [one for one in predictions if one.case.source == source]
        results[source] = {}
        if args.calculon:
            results[source]["calculon"] = compared(mine, calculon(args.calculon))
        results[source]["llm-analysis"] = best_efficiency(mine)
        for peer, found in results[source].items():
            if found["rows"]:
                shown = f"{100 * found['peer']:.1f}%, shardwise {100 * found['shardwise']:.1f}%"
                at = f" at efficiency {found['efficiency']}" if "efficiency" in found else ""
                print(f"{source}, {found['rows']} rows: {peer} {shown}{at}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
