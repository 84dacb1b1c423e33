"""No plan is faster than what its blocks reach: model FLOPs over the peak of the products' own type.

A block alone, without a collective, a bubble or an optimizer, bounds every plan with it. On an H100 blocks were
measured at 57 to 67% of the peak in bf16 (causal attention counted once).
"""

import pytest

from harness.today import some_of
from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Workload
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.model.parameters import blueprint, count_parts
from shardwise.planner import plan
from shardwise.predict.time import ENGINES, Pricing, engine
from shardwise.predict.time.block import Shape, tally_part
from shardwise.predict.time.constants import known_devices

EVERYWHERE, PRODUCTS = 0.75, 0.775
"""Shares of the peak that no plan exceeds, and no block: without an optimizer, the most that products sustain."""
CEILINGS = {"H100-80GB-SXM": 0.67, "H20": 0.85}
"""Device -> share of the peak that its fastest block reaches: measured; and where power never lowers the clock, which
makes products sustain the peak itself (`devices.json`)."""
MODELS = ("llama-3-8b", "llama-3-70b", "llama-3-405b")
TRAINING = [
    name
    for name, one in ENGINES.items()
    if not one.facts["optimizer_bytes"].startswith("not used") and "cpu" not in name
]
DEVICES = known_devices()


def block_share(model: ModelConfig, seq: int, micro: int, name: str, pricing: Pricing) -> float:
    part = blueprint(model).of_kind("block")[0]
    shape = Shape(micro, seq, 1, micro * seq, seq)
    tally = tally_part(part, model, shape, engine(name), pricing.kernels)
    seconds = float(sum(tally.forward.values()) + sum(tally.backward.values()))
    flops = 6 * count_parts(model)[1] / model.layers + 6 * model.q_width * seq
    return flops * micro * seq / seconds / pricing.constants.peak("bfloat16")


@pytest.mark.parametrize("device", some_of(DEVICES, 6, "devices whose blocks are held to a ceiling"))
def test_no_block_exceeds_what_blocks_reach(device):
    pricing = Pricing(Cluster.parse(f"1x{device}"))
    for name in TRAINING:
        for model in map(get, MODELS):
            for seq, micro in ((2048, 4), (8192, 1), (32768, 1)):
                assert block_share(model, seq, micro, name, pricing) < CEILINGS.get(device, PRODUCTS), (
                    name,
                    model.name,
                    seq,
                )


CASES = [(device, name, MODELS[(i + j) % 2]) for i, device in enumerate(DEVICES) for j, name in enumerate(TRAINING)]


@pytest.mark.parametrize(("device", "name", "model"), some_of(CASES, 3, "plans that are held to a ceiling"))
def test_no_plan_exceeds_what_blocks_reach(device, name, model):
    known = Cluster.parse(f"2x8x{device}")
    cluster = "8x8x" if known.inter.bandwidth else "8x" if known.intra.bandwidth else "1x"
    try:
        found = plan(model, f"{cluster}{device}", Workload(4096, 512), engine=name, top=1, explain=False)
    except UserError as error:
        assert "fit" in str(error) or "no layout" in str(error)
        return
    assert found.utilisation(found.ranked[0]) < CEILINGS.get(device, EVERYWHERE)
