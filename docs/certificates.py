"""Write docs/certificates/: `python docs/certificates.py [ENGINE ...]` certifies engines, `clean [ENGINE ...]`
generated layouts of sound ones, `reports` what others have reported."""

import sys
from collections.abc import Sequence
from pathlib import Path

from shardwise.certify.adapter import Adapter
from shardwise.certify.job import certify

FOLDER = Path(__file__).parent / "certificates"
RUNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ddp": (("dp=2", "dp=2,views=1", "dp=3,bucket=small", "dp=4,bucket=small,views=1"), ()),
    "fsdp2": (
        ("dp_shard=2", "dp_shard=2,reshard=0", "dp_shard=3", "dp_shard=4,units=model",
         "dp_replicate=2,dp_shard=2", "dp_replicate=2,dp_shard=2,reshard=0"),
        (),
    ),
    "tensor_parallel": (("tp=2", "tp=2,sp=1", "tp=4", "dp=2,tp=2", "dp=2,tp=2,sp=1"), ()),
    "pipelining": (
        ("pp=2", "pp=2,schedule=GPipe,micro=6", "pp=2,schedule=Interleaved1F1B", "pp=2,schedule=LoopedBFS",
         "pp=2,schedule=InterleavedZeroBubble", "pp=2,schedule=ZBVZeroBubble", "pp=2,schedule=DualPipeV",
         "pp=4", "pp=4,schedule=GPipe", "pp=4,schedule=ZBVZeroBubble"),
        (),
    ),
    "shardwise": (
        ("dp=2", "dp=2,zero=3", "dp=3,zero=2", "tp=2,sp=1", "pp=2", "pp=2,schedule=gpipe",
         "dp=4,zero=3,shard=2", "dp=2,tp=2,zero=1", "pp=2,dp=2,zero=1", "pp=2,tp=2"),
        (),
    ),
    "accelerate": (
        ("dp_replicate=2", "dp_shard=2", "dp_shard=2,reshard=0", "tp=2", "dp_shard=3", "dp_replicate=2,dp_shard=2",
         "dp_shard=2,tp=2"),
        (),
    ),
    "deepspeed": (
        ("dp=2", "dp=2,zero=2", "dp=2,zero=2,accumulate=2", "dp=3,zero=3", "dp=3,zero=3,accumulate=2", "dp=2,tp=2",
         "dp=2,tp=2,zero=2"),
        (),
    ),
    "megatron": (("dp=2", "tp=2", "tp=2,sp=1", "tp=4", "dp=2,tp=2"), ()),
    "torchtitan": (("dp_shard=2", "dp_replicate=2", "tp=2", "tp=2,sp=0", "dp_shard=2,tp=2"), ()),
    "transformers": (
        ("tp=2", "fsdp=2", "tp=2,ep=2", "fsdp=2,ep=2", "fsdp=2,tp=2", "fsdp=2,tp=2,ep=4", "dp_replicate=2,fsdp=2"),
        ("tiny-llama", "tiny-mixtral", "tiny-qwen3-moe"),
    ),
}  # fmt: skip
"""Engine -> layouts and models."""
REPORTS = (
    ("NVIDIA/Megatron-LM#7452, finding 1 (#737)", "label smoothing", "label_smoothing.py", "tp=2", ()),
    ("NVIDIA/Megatron-LM#7452, finding 2", "loss of gathered logits", "megatron", "tp=2,gather=1", ()),
    ("NVIDIA/Megatron-LM#7452, finding 3", "multi-token prediction, uneven labels", "next_tokens.py", "dp=2", ()),
    ("NVIDIA/Megatron-LM#7452, finding 8", "attention sinks in the norm", "attention_sinks.py", "tp=2", ()),
    ("NVIDIA/Megatron-LM#5916, etp below tp", "gradients of experts", "experts.py", "tp=2,sp=1,ep=1,etp=1", ()),
    ("NVIDIA/Megatron-LM#5916, ep and tp", "norm, without grouped GEMM", "experts.py", "tp=2,sp=1,ep=2,etp=1", ()),
    ("NVIDIA/Megatron-LM#6660", "Megatron-FSDP, groups of one rank", "megatron_fsdp.py", "copies=2,accumulate=2", ()),
    ("the same, groups of two", "Megatron-FSDP", "megatron_fsdp.py", "dp=2,accumulate=2", ()),
    ("found here", "biases of experts", "experts.py", "tp=2,sp=1,ep=2,etp=1", ("tiny with biased experts",)),
    ("huggingface/transformers#48687", "router's gradient with batched_mm", "transformers",
     "tp=2,ep=2,exchange=all_reduce,experts=batched_mm", ("tiny-mixtral",)),
    ("huggingface/transformers#48569", "optimizer state of the Trainer", "trainer_checkpoints.py", "tp=2", ()),
    ("the same without the error", "optimizer state of the Trainer", "trainer_checkpoints.py", "tp=2,guard=0", ()),
    ("NVIDIA-NeMo/Automodel#3817", "norm of experts", "expert_norms.py", "ep=2", ()),
    ("the same without the fix", "norm of experts", "expert_norms.py", "ep=2,mesh=0", ()),
    ("NVIDIA-NeMo/Automodel#2995", "router's gradient", "expert_router.py", "ep=2", ()),
    ("the same without the fix", "router's gradient", "expert_router.py", "ep=2,weights=detached", ()),
)  # fmt: skip
"""Report, what it is about, engine or a file of docs/certificates/reports/, layout, models."""
UNTRIED = (
    "Not tried: NVIDIA/Megatron-LM#3959 and #7498, whose text was not found. Of #7452, findings 4 to 7 need process "
    "groups other than the global ones, 11 Transformer Engine, 12 pipelines of Megatron-FSDP; 9 and 10 were not read."
)
CLEAN = {"ddp": 12, "fsdp2": 22, "tensor_parallel": 6, "pipelining": 18, "shardwise": 20}
"""Engine -> generated layouts."""
TRUE = {("tensor_parallel", "tied"), ("tensor_parallel", "frozen"), ("pipelining", "frozen")}
"""Where torch is wrong (docs/certify.md)."""


def clean(engines: Sequence[str] = (), seed: int = 1) -> None:
    """A table of generated cases, a layout and a variant each, and of false findings. engines: those to run again; the
    page keeps the rows of the others. Written after each engine, so that a stopped run continues with the rest."""
    page = FOLDER / "clean.md"
    if wrong := [name for name in engines if name not in CLEAN]:
        sys.exit(f"certificates.py clean: no engine {wrong[0]}; there are {', '.join(CLEAN)}")
    lines = page.read_text().splitlines() if page.exists() else []
    rows = [line.split(" | ") for line in lines if line.endswith(" |")]
    table = {row[0].lstrip("| "): [int(item.rstrip(" |")) for item in row[1:]] for row in rows if row[0][2:] in CLEAN}
    for engine in engines or CLEAN:
        variants = [name for name in Adapter.load_from(engine).variants if (engine, name) not in TRUE]
        certificate = certify(engine, count=CLEAN[engine], seed=seed, say=lambda line: print(line, flush=True))
        ran = [row for row in certificate.rows if row.cells["gradients"].state != "refused"]
        bad = [item.cell.text for item in certificate.findings if (engine, item.column) not in TRUE]
        bad += [c.note for row in ran for name, c in row.cells.items()
                if c.state == "failed" and (engine, name) not in TRUE]  # fmt: skip
        table[engine] = [len(ran), len(ran) * len(variants), len(bad), round(certificate.seconds)]
        print(engine, table[engine], *bad, sep="\n", flush=True)
        head = (
            f"`python docs/certificates.py clean`, seed {seed}: {sum(row[1] for row in table.values())} cases, "
            f"{sum(row[2] for row in table.values())} false findings. A case is a layout with one variant. Refused "
            "layouts are not counted. Left out are variants in which torch itself is wrong (tied and frozen under "
            "DTensor, frozen under pipelining). Seconds are of two cores that other jobs used, too."
        )
        lines = ["| engine | layouts | cases | false findings | seconds |", "|---|---|---|---|---|"]
        lines += [f"| {name} | {' | '.join(map(str, table[name]))} |" for name in CLEAN if name in table]
        page.write_text("\n".join(["# Generated clean cases", "", head, "", *lines]) + "\n")


def reports() -> None:
    """A table of reports: what is wrong in the version that is installed, or that nothing is."""
    lines = ["# Public reports", "", "`python docs/certificates.py reports`, on CPU ranks. Bounds differ by "
             "cell: 16 times the plain model's own error in its precision.", "",
             "| report | about | layout | versions | here |", "|---|---|---|---|---|"]  # fmt: skip
    for report, about, engine, layout, models in REPORTS:
        file = FOLDER / "reports" / engine
        where = str(file) if file.exists() else engine
        found = certify(where, layouts=[layout], models=models, say=lambda line: print(line, flush=True))
        versions = ", ".join(f"{name} {number}" for name, number in found.versions.items() if name != "python")
        first: dict[str, str] = {}
        for item in found.findings:
            first.setdefault(item.cell.note, item.cell.text)
        words = "; ".join(first.values())
        if not words:
            proven = [cell.error or 0.0 for row in found.rows for cell in row.cells.values() if cell.state == "proven"]
            words = f"right: {found.counts['proven']} cells, largest error {max(proven):.1e}" if proven else ""
            words = words or f"refused: {found.rows[0].cells['gradients'].note}"
        lines.append(f"| {report} | {about} | `{layout}` | {versions} | {words} |")
        print(lines[-1], flush=True)
    (FOLDER / "reports.md").write_text("\n".join([*lines, "", UNTRIED]) + "\n")


def main(engines: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    if engines[:1] == ["clean"]:
        return clean(engines[1:])
    if engines == ["reports"]:
        return reports()
    for engine in engines or RUNS:
        layouts, models = RUNS[engine]
        certificate = certify(engine, layouts=layouts, models=models, say=lambda line: print(line, flush=True))
        print(certificate.summary, f"{certificate.seconds:.0f} s", flush=True)
        (FOLDER / f"{engine}.md").write_text(certificate.markdown())


if __name__ == "__main__":
    main(sys.argv[1:])
