"""QLoRA's base in 4 bits, as `estimate` counts it."""

import pytest

from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model.catalog import get
from shardwise.model.lora import Lora
from shardwise.model.parameters import blueprint, count
from shardwise.predict import estimate


def test_a_base_in_4_bits_is_counted_and_not_trained() -> None:
    """torchtune measured 7.9 GB for QLoRA of the 8B on a 24 GB card."""
    model = get("llama-3-8b").replace(lora=Lora.parse("rank=16,base=nf4"))
    maps = [p for p in blueprint(model).parameters() if p.dtype]
    assert {p.dtype for p in maps} == {"nf4"} and count(model) == count(get("llama-3-8b").replace(lora=Lora(16)))
    workload = Workload(seq=2048, batch=1)
    report = estimate(model, Layout.parse("recompute=full"), workload, "1xRTX-4090")
    (role,) = report.roles
    numel = sum(p.numel for p in maps)
    others = count(model) - numel
    assert role.bytes.parameters == pytest.approx(numel * (0.5 + 1 / 64 + 4 / 64 / 256) + 2 * others, rel=1e-3)
    assert role.bytes.total == pytest.approx(7.9e9, rel=0.1)
    ranks = unit_plan(model, Layout.parse("dp=4,tp=2,zero=3"), Workload(seq=2048, batch=4)).units
    narrow = [unit for unit in ranks if unit.frozen and unit.dtype]
    assert sum(unit.padded for unit in narrow) == pytest.approx(numel * 0.515869 / 2, rel=1e-3)
    with pytest.raises(UserError, match="base=nf4 is counted by estimate and plan, and not trained here yet"):
        Lora.parse("rank=16,base=nf4").check_trains()
