"""The parts of a user's module while they compute: their forward and backward passes tell the engine where they are.

A part's tensors pass through an identity on their way in and out. The backward of the one at the outputs comes before
all else of the part, that of the one at the inputs after all else, since autograd runs ready nodes latest-created
first. Arguments and results may be nested in tuples, lists and dictionaries.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree

from shardwise.errors import UserError
from shardwise.layout.axes import DATA
from shardwise.layout.context import cuts_sequences
from shardwise.layout.gathers import Use
from shardwise.layout.gradients import finished_after
from shardwise.layout.units import UnitPlan
from shardwise.ops.gradients import GradSlot, WeightGradients, grad_slot
from shardwise.runtime.module.chain import ENTRY, EXIT
from shardwise.runtime.module.context import CutRows
from shardwise.runtime.module.describe import ROOT, DescribedModule
from shardwise.runtime.module.inputs import opened, tensors_in
from shardwise.runtime.module.maps import lower_maps, outside
from shardwise.runtime.module.recompute import BlockRecomputation
from shardwise.runtime.module.sequence import cut_stream, gather_inputs
from shardwise.runtime.module.stages import ModuleStages, free_others
from shardwise.runtime.offload.activations import SavedTensors, storages
from shardwise.runtime.offload.file import OffloadFile
from shardwise.runtime.pipeline.program import PartBoundary, Runner
from shardwise.runtime.transport.comms import Comms


def _through(reached: Callable[[], None], tree: Any) -> tuple[Any, bool]:
    """(the tree with its differentiable tensors passed through a boundary, whether there are any)."""
    leaves, made = opened(tree)
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if at:
        tensors = tuple({id(leaves[i]): leaves[i] for i in at}.values())  # some may come twice
        with _unsafe_preserve_version_counter(tensors):  # nothing is written
            passed = PartBoundary.apply(reached, *tensors)  # type: ignore[no-untyped-call]
        after = {id(before): tensor for before, tensor in zip(tensors, passed, strict=True)}
        for i in at:
            leaves[i] = after[id(leaves[i])]
    return made(leaves), bool(at)


def _differentiable(tree: Any) -> Any:
    """A block's inputs with gradients: so each block has a backward pass, whatever is frozen before it."""
    leaves, made = opened(tree)
    return made([
        x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() and not x.requires_grad else x
        for x in leaves
    ])  # fmt: skip


class PartRunner(Runner):
    """A user's module bound to its buffers. After `Engine.begin_micro_batch` comes one forward pass by `run`, then a
    backward pass between `begin_backward` and `end_backward`."""

    def __init__(
        self,
        module: nn.Module,
        described: DescribedModule,
        plan: UnitPlan,
        comms: Comms,
        device: torch.device,
        file: OffloadFile | None = None,
    ) -> None:
        """file: of what is offloaded to disk."""
        weights = WeightGradients(at_once=plan.of_kind("exit"))
        writing, self.experts = lower_maps(module, plan, comms, described, weights)
        gather_inputs(module, described.sequence, comms, partial(outside, compiled=plan.layout.compile == "block"))
        super().__init__(module, plan, comms, device, weights, writing, file)
        self._saved: dict[tuple[str, int], SavedTensors] = {}
        """(block, forward pass) -> its offloaded tensors of this micro-batch, in the order of the forward passes."""
        self.weights.outside = True
        self._inside = False
        """Whether the module's forward pass is running."""
        self.evaluating = False
        """Whether a block was called since the last step, by a method or as a submodule."""
        self._entered = False
        """Whether the root computes outside of it in this micro-batch."""
        self._whole_stream = bool(described.sequence.blocks)
        """Whether the blocks have shards of sequences, from the first one to the last."""
        self.freezes = plan.blueprint.freezes
        """Whether a parameter on this rank has no gradient, by `requires_grad`, before the split or since."""
        self._unfinished: list[tuple[str, int]] = []
        """(part, forward pass) whose inputs have no gradient: such a backward pass is over when the next one begins."""
        self._latest = ""
        """The tensors of a block that the forward pass has met last, in words."""
        self._open: set[str] = {ROOT}
        """The root, and the block whose backward pass has begun last; under a pipeline the parts of that stage."""
        for unit in plan.units:
            for placed in unit.placed:
                if placed.parameter.frozen or not plan.trains:
                    continue
                parameter = module.get_parameter(placed.name)
                parameter.register_hook(partial(self._arrives, placed.parameter.part, grad_slot(parameter)))
        self.rows = CutRows(plan, comms, device) if cuts_sequences(plan.layout) else None
        """What this rank has of rows, where sequences are cut."""
        if plan.layout.stage == 3 and described.chain is None:
            owners = {p.name.rpartition(".")[0] for unit in plan.units_of(ROOT) for p in unit.placed}
            for owner in owners - {""}:
                module.get_submodule(owner).register_forward_pre_hook(self._root_computes)
        self._names = {module.get_submodule(p.name): p.name for p in plan.blueprint.parts if p.kind == "block"}
        self.recomputation, self._compiler = BlockRecomputation(plan.layout.recompute), None
        if plan.layout.compile == "block":
            from shardwise.runtime.compiling import ModuleBlocks  # brings in the compiler

            self._compiler = ModuleBlocks(device)
        self.stages: ModuleStages | None = None
        if described.chain is not None:
            free_others(module, [placed.name for unit in plan.units for placed in unit.placed])
            self.stages = ModuleStages(module, described.chain, plan, self._wrapped)
            return
        for name in plan.of_kind("block"):
            block = module.get_submodule(name)
            block.forward = partial(self._part, name, self._wrapped(block, block.forward))  # type: ignore[method-assign]
        cut_stream(module, described.sequence, comms)

    def _wrapped(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward pass as the layout has it."""
        if self._compiler is not None:
            forward = self._compiler.compiled(block, forward)
        if self.rows is not None:
            forward = self.rows.wrap(self._names[block], forward)
        return self.recomputation.wrap(block, forward)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, with floating-point inputs in the layout's precision. Raises `UserError` where its
        code reads a weight that is in fewer bits."""
        args, kwargs = _pytree.tree_map(self._prepared, (args, kwargs))
        before, self._inside = self._inside, True
        try:
            forward: Callable[..., Any] = self.module if self.rows is None else partial(self.rows.run, self.module)
            return forward(*args, **kwargs) if self.stages is not None else self._part(ROOT, forward, *args, **kwargs)
        except RuntimeError as error:
            if "PartBoundary is a view and is being modified inplace" in str(error):
                raise UserError(
                    f"{self._latest}, or of a block before it, is changed in place (as by x += 1): write x = x + 1, "
                    "or leave these out of blocks="
                ) from error
            if self.stages is not None and "a leaf Variable that requires grad" in str(error):
                raise UserError(
                    "what a stage of the pipeline takes is changed in place (as by x += 1): write x = x + 1, or leave "
                    "pp out"
                ) from error
            base = next((p.dtype for p in self.plan.blueprint.parameters() if p.dtype), "")
            # torch's name of int8, or a shape that is that of bytes
            if base and re.search("char|mat1 and mat2", str(error).lower()):
                raise UserError(
                    f"lora: base={base}: the module's own code reads a linear map's weight, which is in fewer bits: "
                    "call the map, or leave base out"
                ) from error
            raise
        finally:
            self._inside = before

    def of_rows(self, batch: Any) -> Any:
        """What this rank has of the rows of a batch: all of it, where sequences are not cut."""
        return batch if self.rows is None else self.rows.of(batch)

    def run_stage(self, stage: int, x: Tensor | None, forward: Callable[[], Any]) -> Any:
        """A stage, as of `ModuleStages.run`; the whole module where there are none. Without gradients a stage's
        parameters are gathered for it."""
        if self.stages is None:
            return forward()
        gathers = self.plan.layout.stage == 3 and not torch.is_grad_enabled()
        if gathers:
            self.engine.unshard(stage)
        for part in self.plan.stages[stage]:
            self.engine.use_unit("forward", part)
        result = self.stages.run(stage, x, forward)
        if gathers:
            self.engine.reshard(stage)
        return result

    def over_data(self, count: Tensor) -> float:
        """The sum of a number of tokens over the data ranks. Raises `UserError` on all of them for one that is none."""
        with self.comms.in_phase("loss"):
            self.comms.all_reduce(count, DATA, "valid tokens")
        total = self.comms.read(count)
        if self.comms.moves_data and not math.isfinite(total):
            raise UserError(
                "loss_fn returned a number of tokens that is negative or not finite: count what the sum has"
            )
        return total

    def _prepared(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        dtype = getattr(torch, self.plan.layout.dtype) if value.is_floating_point() else value.dtype
        return value.to(self.device, dtype)

    def begin_backward(self, stage: int) -> None:
        """As of `Runner`."""
        if self.stages is None:
            self._open, self._entered = {ROOT}, False
            self._skip(lambda use: use.kind == "forward")
            self._use("backward", ROOT)
            return
        parts = self.plan.stages[stage]
        self._open = set(parts) | ({ENTRY} if EXIT in parts else set())  # they may share a table
        for part in reversed(parts):
            self.engine.use_unit("backward", part)

    @contextmanager
    def backward_errors(self) -> Iterator[None]:
        """Around a backward pass. Raises `UserError` for a tensor that it needs and that was changed in place."""
        self.weights.outside = False
        try:
            yield
        except RuntimeError as error:
            if self.stages is not None or "modified by an inplace operation" not in str(error):
                raise
            where = next((name for name in self._open if name != ROOT), "what comes after the blocks")
            raise UserError(
                f"the backward pass of {where} needs a tensor that was changed in place after it was saved (as by "
                "x += 1): write x = x + 1"
            ) from error
        finally:
            self.weights.outside = True

    def end_backward(self, stage: int) -> None:
        """As of `Runner`: that of blocks which the loss does not depend on is over, too."""
        if self.plan.local.blocks(stage):
            self.recomputation.check()
        if self.stages is not None:
            for part in reversed(self.plan.stages[stage]):
                self.finish_part(part)
            return
        self._finish_rest()
        self._skip(lambda use: True)
        for saved in self._saved.values():
            saved.drop()
        self.finish_part(ROOT)

    def _part(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._use("forward", name)
        if self.evaluating or not torch.is_grad_enabled():
            return self._whole(forward, args, kwargs) if name == ROOT else forward(*args, **kwargs)
        number = self.engine.passes
        if name == ROOT:
            if number == 1:
                self._saved.clear()
            return self._whole(forward, args, kwargs)
        if self.freezes:
            args, kwargs = _differentiable((args, kwargs))
        (args, kwargs), entered = _through(partial(self.finish_part, name, number), (args, kwargs))
        self._latest = f"an input of {name}"
        with self._saving(name, number, (args, kwargs)):
            out = forward(*args, **kwargs)
        out, leaves = _through(partial(self._begin, name, number, entered), out)
        if not leaves:
            raise UserError(
                f"{name} returns a {type(out).__name__} without a tensor that has a gradient: return tensors, or "
                f"tuples, lists, dictionaries or dataclasses of them, or leave {name} out of blocks="
            )
        self._latest = f"an output of {name}"
        return out

    def _whole(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The root's forward pass, and the blocks after the last one that it has run: other ranks may run them."""
        out = forward(*args, **kwargs)
        self._skip(lambda use: use.kind == "forward")
        return out

    @contextmanager
    def _saving(self, name: str, number: int, inputs: Any) -> Iterator[None]:
        """Offload what a block saves, but for inputs without a gradient, such as masks, which blocks share."""
        if self.offloaded is None:
            yield
            return
        shared = storages(x for x in tensors_in(inputs) if not x.requires_grad)
        before = next(reversed(self._saved.values()), None)
        saved = self._saved[name, number] = self.offloaded.block(name, lambda: shared, before)
        with saved.saving():
            yield
        saved.saved()

    def _begin(self, name: str, number: int, finishes: bool) -> None:
        """A block's backward pass begins. number: of its forward pass; finishes: whether its end will be seen."""
        self._finish_rest()
        self._use("backward", name)
        if (name, number) in self._saved:
            self._saved[name, number].restore(self.device)
        self._open = {ROOT, name}
        if not finishes:
            self._unfinished.append((name, number))

    def _arrives(self, name: str, place: GradSlot, grad: Tensor | None) -> None:
        """Autograd is about to add a gradient to its place, which no map may have written yet. There is memory for a
        block's gradients during its backward pass alone."""
        if grad is None:
            return
        if name not in self._open:
            raise UserError(
                f"a parameter of {name} was used outside of its forward pass: leave {name} out of blocks=, since the "
                "root's parameters may be used anywhere"
            )
        place.add_nothing()
        place.arrived = True

    def finish_part(self, part: str, number: int = 0) -> None:
        """As of `Runner`: where nothing has come, the gradient is zero. number: of its forward pass; 0 for none."""
        if (part, number) in self._saved:
            self._saved[part, number].drop()
        for unit in finished_after(self.plan, part):
            self.engine.units[unit.name].empty_rest()
        super().finish_part(part)

    def _finish_rest(self) -> None:
        for name, number in self._unfinished:
            self.finish_part(name, number)
        self._unfinished.clear()

    def _use(self, kind: str, name: str) -> None:
        """A part is about to compute: the plan's next use, a later one of the same pass, whose earlier ones are left
        out, or a further forward pass. Raises `UserError` for another."""
        if kind == "backward" and name != ROOT:
            self.weights.check()
        if kind == "forward" and not self.weights.outside:
            raise UserError(
                f"{name} runs again in the backward pass, as with torch.utils.checkpoint around it: leave that out, "
                "and choose recompute=full"
            )
        if kind == "forward" and name != ROOT and not self._inside:
            self._enter(name)
        if (kind, name) == ("forward", ROOT) and self._entered and (latest := self.engine.latest):
            self._entered = False
            if (latest.kind, latest.part) == ("forward", ROOT):
                return
            self._skip(lambda use: use.kind == "forward")
        use = self.engine.following
        if (kind, name) == ("forward", ROOT) and use and (use.kind, use.part) == ("backward", ROOT):
            self.engine.another_pass()
        elif any((use.kind, use.part) == (kind, name) for use in self.engine.to_come()):
            self._skip(lambda use: (use.kind, use.part) != (kind, name))
        use = self.engine.following
        if use is None or (use.kind, use.part) != (kind, name):
            expected = f"the {use.kind} pass of {use.part}" if use else "the end of the micro-batch"
            raise UserError(
                f"the {kind} pass of {name} came where the plan has {expected}: every block runs once per pass, in "
                "one order; give example= to have the order found, or blocks= to name other blocks"
            )
        self.engine.use_unit(kind, name)

    def attribute(self, name: str) -> Any:
        """Something of the module that a loss uses, such as another method than forward, or a submodule. Methods have
        their inputs in the layout's precision, too."""
        if self.stages is None:
            self._enter()
        value = getattr(self.module, name)
        if getattr(value, "__self__", None) is not self.module:
            return value

        def method(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _pytree.tree_map(self._prepared, (args, kwargs))
            return value(*args, **kwargs)

        return method

    def _root_computes(self, *_: Any) -> None:
        """A module of the root is called, maybe past the module's forward pass."""
        if self.weights.outside and not self._inside:
            self._check_evaluates()
            self._enter()

    def _check_evaluates(self) -> None:
        """Raise `UserError` outside of a step where a rank has a part of the weights alone."""
        if self.engine.following is None and self.plan.layout.stage == 3:
            raise UserError(
                f"layout {self.plan.layout}: a rank has a part of the weights, gathered for steps and for calls "
                "of the split module: outside of a step call that, not its methods or submodules"
            )

    def _enter(self, name: str = "") -> None:
        """The root computes from here on, outside of the module's forward pass. name: a block that runs, in another
        pass where this one has had it."""
        use = self.engine.following
        if name and use and use.part != ROOT and not any(u.part == name for u in self.engine.to_come()):
            self._skip(lambda use: use.kind == "forward")
            use = self.engine.following
        if use is None and name:
            self._check_evaluates()
            self.engine.begin_evaluation()
            self.evaluating = True
        elif use and use.kind == "backward" and name:
            self.engine.another_pass()
        begins = self.engine.following
        if begins and (begins.kind, begins.part) == ("forward", ROOT):
            self.engine.use_unit("forward", ROOT)
            self._entered = use is not None

    def _skip(self, leaves_out: Callable[[Use], bool]) -> None:
        """Leave out the plan's next uses: ranks that do not still find this one in their collectives. Raises
        `UserError` where blocks have shards of sequences."""
        while (use := self.engine.following) is not None and leaves_out(use):
            if self._whole_stream and use.kind == "forward":
                raise UserError(f"{use.part} was left out of a forward pass; under sp every block runs: leave sp out")
            self.engine.use_unit(use.kind, use.part)
            if use.kind == "backward":
                self.finish_part(use.part)
