"""Known mistakes of parallel training, as one replacement in one file each, and the tests that must notice them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """trap: its number in the list of traps. file: below src/shardwise. tests: a `-k` expression on `TESTS`."""

    trap: int
    what: str
    file: str
    old: str
    new: str
    tests: str


TESTS = "tests/runtime/test_traps.py"

ENGINE, UNITS, STEP, LOSS = "runtime/engine.py", "layout/units.py", "runtime/step.py", "runtime/loss.py"
OPTIMIZER, LINEAR, PLACEMENT = "runtime/optimizer.py", "runtime/linear.py", "layout/placement.py"
GRADIENTS = "runtime/gradients.py"
COMMS, ATTENTION, MODULES, SETUP = "runtime/comms.py", "decoder/attention.py", "decoder/modules.py", "runtime/setup.py"
CHECKPOINTING = "runtime/checkpointing.py"

MISTAKES = (
    Mistake(2, "a tied weight is reduced before the embedding's share is in", UNITS,
            'if self.model.tied and part == "embedding":', 'if self.model.tied and part == "head":', "trap_02"),
    Mistake(2, "the head's share of a tied gradient is wiped out", ENGINE,
            'if unit.name == "tied" and part == "embedding":', "if False:", "trap_02"),
    Mistake(2, "the embedding's rows overwrite the head's share", GRADIENTS,
            "if self.empty:\n            self.view.zero_()", "if True:\n            self.view.zero_()", "trap_02"),
    Mistake(2, "rows beyond the last whole shard are left out", UNITS,
            "return -(-self.numel // self.shard_ranks)", "return self.numel // self.shard_ranks", "trap_02"),
    Mistake(3, "the norm counts replicas as often as they are held", OPTIMIZER,
            "total += part * part / span.replicas", "total += part * part", "trap_03"),
    Mistake(3, "the norm is summed over the shard group alone", OPTIMIZER,
            'self.comms.all_reduce(total, "shard_tp", "gradient norm")',
            'self.comms.all_reduce(total, "shard", "gradient norm")', "trap_03"),
    Mistake(3, "clipping never binds", OPTIMIZER, "if coefficient < 1.0:", "if coefficient > 1.0:", "trap_03"),
    Mistake(4, "each data rank divides by its own valid tokens", STEP,
            'self.comms.all_reduce(count, "data", "valid tokens")', "pass", "trap_04"),
    Mistake(4, "each micro-batch divides by its own valid tokens", STEP,
            "(loss / max(1, tokens)).backward()",
            "(loss / max(1, int((targets != IGNORED).sum()))).backward()", "trap_04"),
    Mistake(5, "each data rank logs its own loss", STEP,
            'self.comms.all_reduce(total, "data", "loss")', "pass", "trap_05"),
    Mistake(5, "the loss is summed over tp, where it is replicated", STEP,
            'self.comms.all_reduce(total, "data", "loss")', 'self.comms.all_reduce(total, "tp", "loss")', "trap_05"),
    Mistake(9, "each vocabulary shard subtracts its own maximum", LOSS,
            'comms.all_reduce(top, "tp", "cross-entropy", maximum=True)', "pass", "trap_09"),
    Mistake(9, "the maximum is a sum", LOSS,
            'comms.all_reduce(top, "tp", "cross-entropy", maximum=True)',
            'comms.all_reduce(top, "tp", "cross-entropy")', "trap_09"),
    Mistake(9, "a target on a shard's edge belongs to two shards", LOSS,
            "(targets < stop)", "(targets <= stop)", "trap_09"),
    Mistake(9, "columns that pad the vocabulary take part", LOSS,
            "rows[:, stop - start :] = torch.finfo(logits.dtype).min", "pass", "trap_09"),
    Mistake(10, "a row-parallel output stays a partial sum", LINEAR,
            'self.comms.all_reduce(x, "tp", self.unit)\n', "pass\n", "trap_10"),
    Mistake(10, "a column-parallel input's gradient stays a partial sum", LINEAR,
            'return x, self.comms.all_reduce(x, "tp", self.unit, later=True)', "return x, DONE", "trap_10"),
    Mistake(11, "norm weights under sequence parallelism keep their own gradients", PLACEMENT,
            "partial = layout.sp or any(", "partial = any(", "trap_11"),
    Mistake(11, "norms of heads keep the gradients of their own heads", PLACEMENT,
            "layout.sp or any(name in parameter.name for name in USED_BY_SHARDED_HEADS)", "layout.sp", "trap_11"),
    Mistake(11, "partial gradients are not summed over tp", ENGINE,
            'for axis in ("kv", "tp"):', 'for axis in ("kv",):', "trap_11"),
    Mistake(12, "a row-parallel bias is added on every rank", LINEAR,
            "y = site.reduce(F.linear(x, weight))\n        return y if module.bias is None else y.add_(module.bias)",
            "return site.reduce(F.linear(x, weight, module.bias))", "trap_12"),
    Mistake(13, "every tp rank drops as if it held the first heads", ATTENTION,
            "torch.arange(self.first_head, self.first_head + h", "torch.arange(0, h", "trap_13"),
    Mistake(13, "every slice of a sequence drops like the first", SETUP,
            "stream_index=mine(batch.index)", "stream_index=batch.index.chunk(layout.tp, 1)[0].clone()", "trap_13"),
    Mistake(13, "masks come from a generator with a state", MODULES,
            "random.keep_mask(key, firsts[a : a + step, None] + columns, drop)",
            "(torch.rand(rows[a : a + step].shape) >= drop)", "trap_13"),
    Mistake(14, "weights cut by columns are keyed by their local index", ENGINE,
            "row * global_columns + column", "row * columns + column", "trap_14"),
    Mistake(14, "weights cut by rows are keyed by their local index", ENGINE,
            "row = row + placed.start", "row = row + 0", "trap_14"),
    Mistake(15, "stages 0 and 1 synchronise every micro-batch", ENGINE,
            "if self._last_micro_batch:", "if True:", "trap_15"),
    Mistake(15, "a micro-batch's gradient replaces the ones before", ENGINE,
            "self.grads.tensor.add_(piece)", "self.grads.tensor.copy_(piece)", "trap_15"),
    Mistake(15, "gradients of the step before stay in", OPTIMIZER, "state.flat.grads.free()", "pass", "trap_15"),
    Mistake(15, "a later product overwrites what a place holds", GRADIENTS,
            "self.view.addmm_(a, b)", "torch.mm(a, b, out=self.view)", "trap_15"),
    Mistake(16, "bf16 micro-batches are summed in bf16", UNITS,
            ' and self.micro_batches == 1:\n            return "bfloat16"', ':\n            return "bfloat16"',
            "trap_16"),
    Mistake(16, "pieces of ranks are summed in bf16", COMMS,
            "wide = torch.float32 if full.dtype == torch.bfloat16 else full.dtype", "wide = full.dtype", "trap_16"),
    Mistake(19, "a gathered weight is used before it has come", ENGINE,
            "self._gathers.pop(name).wait()", "self._gathers.pop(name)", "trap_19"),
    Mistake(19, "a weight is prefetched over one in use", ENGINE,
            "if not in_use & {", "if not set() & {", "trap_19"),
    Mistake(19, "two reductions share the scratch buffer", ENGINE,
            "pending.wait()  # one scratch buffer", "pass  # one scratch buffer", "trap_19"),
    Mistake(19, "gradients are written over some that are being sent", ENGINE,
            "if flat.staging is not None and unit.name in self._reductions:", "if False:", "trap_19"),
    Mistake(19, "the optimizer does not wait for the reductions", ENGINE,
            "pending.wait()\n        self._reductions.clear()", "pass\n        self._reductions.clear()", "trap_19"),
    Mistake(20, "a shard's end lies beyond the tensor's", PLACEMENT,
            "min((index + 1) * width, size)", "(index + 1) * width", "trap_20"),
    Mistake(20, "the rest of a division is dropped", PLACEMENT,
            "return -(-width // tp)", "return max(1, width // tp)", "trap_20"),
    Mistake(21, "padding shifts what comes after it", "checkpoint/geometry.py",
            "return Piece(box, _before(self.box, self.first, box), _before(self.box, self.last, box))",
            "return Piece(box, self.first, min(self.last, volume(box)))", "trap_21"),
    Mistake(21, "a weight cut by columns is taken for one cut by rows", "checkpoint/geometry.py",
            "[:, c - left : d - left]", "[:, : d - c]", "trap_21"),
    Mistake(21, "every tp rank saves its rows as the first ones", "checkpoint/pieces.py",
            "box[placed.dim] = (placed.start, placed.stop)", "box[placed.dim] = (0, placed.stop - placed.start)",
            "trap_21"),
    Mistake(21, "each weight is loaded from the start of its unit", CHECKPOINTING,
            "target[held.start - state.flat.start : held.stop - state.flat.start].copy_",
            "target[: held.stop - held.start].copy_", "trap_21"),
    Mistake(22, "a resumed run begins its text again", CHECKPOINTING,
            "return Position(manifest.step, manifest.samples,", "return Position(manifest.step, 0,", "trap_22"),
    Mistake(22, "samples are dealt out in turn", "runtime/batches.py",
            "for at in range(start, start + share, micro)]",
            "for at in range(first + self.data_rank, first + count, micro * self.plan.layout.dp)]", "trap_22"),
    Mistake(22, "a resumed optimizer counts its updates from zero", CHECKPOINTING,
            "program.optimizer.steps = manifest.optimizer_steps", "program.optimizer.steps = 0", "trap_22"),
    Mistake(22, "a resumed run has lost its second moments", CHECKPOINTING,
            '"second": state.second}\n        for kind in kinds:',
            '"second": state.second.clone()}\n        for kind in kinds:', "trap_22"),
    Mistake(23, "replicated heads keep the gradients of their own queries", PLACEMENT,
            '"kv" if replicas > 1 else "none"', '"none"', "trap_23"),
    Mistake(23, "replicas of a head are not neighbours", PLACEMENT,
            "pieces, index = model.kv_heads, tp_rank // replicas",
            "pieces, index = model.kv_heads, tp_rank % model.kv_heads", "trap_23"),
    Mistake(23, "replicated heads count twice in the norm", OPTIMIZER,
            "total += part * part / span.replicas", "total += part * part", "trap_23"),
    Mistake(24, "a backward uses whatever lies in the slot", UNITS,
            '[] if (use.kind, use.part) == ("backward", "embedding") else', '[] if use.kind == "backward" else',
            "trap_24"),
    Mistake(24, "a unit passes for resident when another has taken its slot", UNITS,
            "resident[unit.slot] = unit.name", "resident.setdefault(unit.slot, unit.name)", "trap_24"),
    Mistake(24, "gradients are added to whatever lies in their memory", ENGINE,
            "place.empty = True", "pass", "trap_24"),
)  # fmt: skip
