"""Recorder of one rank: every call of c10d and the bytes after optimizer steps, as lines of a file.

It is loaded into programs of others (`injected/sitecustomize.py`), in whatever environment they have: it imports the
standard library alone, and torch only as the program has imported it. A Python kernel in front of every c10d operation
sees every call: DDP's reducer in C++, functional collectives, DTensor, FSDP, pipelines, DeepSpeed.

Each line is a JSON list. Its first item is one of:

- "rank": rank, world, process id, host, begin (seconds of the clock), torch's version, backend, program
- "group": number, name, global ranks
- "place": number, file:line
- "call": order, op, group, dtype, shape, input bytes, output bytes, peer, place, phase, engine, step, begin, passes
- "end": order, seconds of the clock
- "step": steps, seconds of the clock, bytes by class, backward passes until then
- "model": class, parameters of this rank, Hugging Face's configuration or null, [name, shape, dtype,
  trained, shape on this rank] of each
- "stale": parameters that the optimizer has from before they were sharded
- "zero": stage of DeepSpeed's engine
- "pipeline": class of torch's schedule, micro-batches, stages of this rank
- "exit" or "error": seconds of the clock; the error's text and its place
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib.abc
import importlib.machinery
import itertools
import json
import os
import socket
import sys
import sysconfig
import threading
import time
import weakref
from typing import Any

VARIABLE = "SHARDWISE_AUDIT"
"""Environment variable with the folder of the recording."""
BEAT = 0.5
"""Seconds between two looks of the background thread: at works that end unseen, and at where the program is."""
MEASURED_STEPS = 3
"""Steps whose bytes are counted: the state exists from the first one on."""
END = 2.0
"""Seconds that the recorder's thread, and then torch's, have to end."""
SAMPLE = 0.001
"""Seconds between two looks at the allocator in these steps, on CPUs."""

OPS = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into", "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather_into", "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast", "reduce_": "reduce", "gather_": "gather", "scatter_": "scatter",
    "alltoall_": "all_to_all", "alltoall_base_": "all_to_all", "barrier": "barrier", "monitored_barrier_": "barrier",
    "send": "send", "recv_": "recv", "recv_any_source_": "recv",
}  # fmt: skip
"""c10d's operation -> `Call.op`."""
_PEERED = {"broadcast_", "reduce_", "gather_", "scatter_", "send", "recv_"}
"""Operations whose first number is a rank of the group."""

ENGINES = (
    ("torch/nn/parallel/distributed.py", "ddp"),
    ("torch/distributed/algorithms/", "ddp"),
    ("torch/distributed/fsdp/", "fsdp"),
    ("torch/distributed/_composable/", "fsdp"),
    ("torch/distributed/tensor/", "dtensor"),
    ("torch/distributed/pipelining/", "pipelining"),
    ("torch/distributed/optim/zero_redundancy", "zero-redundancy"),
    ("torch/distributed/checkpoint/", "checkpoint"),
    ("deepspeed/", "deepspeed"),
    ("megatron/", "megatron"),
)
"""Path of a source file -> the engine that it belongs to."""


def wait_for_torch() -> None:
    """Install the recorder when the program first calls `init_process_group`, and never import torch before."""
    name = "torch.distributed.distributed_c10d"

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
            if fullname != name:
                return None
            sys.meta_path.remove(self)
            spec = importlib.machinery.PathFinder.find_spec(fullname, path)
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def exec_module(module: Any) -> None:
                    execute(module)
                    _wrap(module)

                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder())


def _wrap(c10d: Any) -> None:
    init = c10d.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        global _active
        result = init(*args, **kwargs)
        if _active is None and os.environ.get(VARIABLE):
            try:
                _active = Recorder(sys.modules["torch"], c10d, os.environ[VARIABLE])
                _active.install()
            except Exception as error:  # the program must run whether or not it can be recorded
                print(f"shardwise audit: this rank is not recorded: {error!r}", file=sys.stderr)
        return result

    init_process_group.__doc__ = init.__doc__
    c10d.init_process_group = init_process_group


_active: Recorder | None = None


class Recorder:
    """What one process records."""

    def __init__(self, torch: Any, c10d: Any, folder: str) -> None:
        self.torch, self.c10d, self.pid = torch, c10d, os.getpid()
        self.rank = c10d.get_rank()
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103
        self.name = f"{folder}/{self.rank}-{self.pid}"
        self.file = os.open(f"{self.name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.orders = itertools.count()
        self.groups: dict[str, tuple[int, list[int]]] = {}
        self.places: dict[str, int] = {}
        self.kinds: dict[Any, tuple[str, str]] = {}
        self.pending: dict[int, tuple[Any, int]] = {}
        self.callbacks: set[Any] = set()
        """Weak references to callbacks of futures."""
        self.library: Any = None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="shardwise-audit", daemon=True)
        self.main = threading.main_thread().ident
        self.step, self.passes, self.last, self.saved = 0, 0, time.time(), 0
        self.optimizer: int | None = None
        self.inside: list[Any] = []
        """Optimizers that are in a step, as None, and those within them that have ended theirs."""
        self.roots: Any = ()
        """Modules that no other contains."""
        importlib.import_module("torch._dynamo")  # as the first optimizer step does, but before bytes are counted
        tensors = [_local(entry) for entry in gc.get_objects() if _is(entry, torch.Tensor)]
        dense = [entry for entry in tensors if entry.device.type == "cpu" and entry.layout == torch.strided]
        held = {_storage(entry): entry.untyped_storage().nbytes() for entry in dense}
        self.base, self.peak = _allocated() - sum(held.values()), 0
        """Bytes that the process has without its tensors, and the most of these."""
        about = (self.pid, socket.gethostname(), time.time(), torch.__version__, c10d.get_backend())
        self.write("rank", self.rank, c10d.get_world_size(), *about, sys.argv[:1])

    def write(self, *items: Any) -> None:
        """One line; it is in the kernel's hands at once, and so outlives a killed process."""
        os.write(self.file, (json.dumps(items, separators=(",", ":")) + "\n").encode())

    def install(self) -> None:
        self.intercept()
        self._wrap_wait()
        steps = sys.modules["torch.optim.optimizer"]  # `torch.optim` removes it from its names
        steps.register_optimizer_step_pre_hook(lambda *_: self.inside.append(None))
        steps.register_optimizer_step_post_hook(self.stepped)
        self._wrap_backward()
        hook = sys.excepthook

        def failed(kind: Any, error: BaseException, trace: Any) -> None:
            self.failed(error)
            hook(kind, error, trace)

        sys.excepthook = failed
        leave = sys.exit

        def exit(status: Any = None, /) -> None:
            """Of programs that catch their errors, as hydra and `torch.multiprocessing.spawn` do."""
            if status:
                self.failed(sys.exc_info()[1] or SystemExit(status))
            leave(status)

        sys.exit = exit  # type: ignore[assignment]
        atexit.register(self.left)
        self.thread.start()

    # -- Calls

    def intercept(self) -> None:
        """Put a kernel in front of every operation. Its key is above those of devices and below autograd's, and is
        there in inference mode, too."""
        torch, key = self.torch, "BackendSelect"
        self.library = torch.library.Library("c10d", "IMPL")
        below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))
        for name in OPS:
            op = getattr(torch.ops.c10d, name, None)
            if op is not None:
                self.library.impl(name, self.kernel(name, op.default, below), key, with_keyset=True)

    def kernel(self, name: str, op: Any, below: Any) -> Any:
        """What runs in front of an operation."""

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            order = -1
            try:
                order = self.began(name, args)
            except Exception as error:
                self.write("lost", repr(error))
            result = op.redispatch(keys & below, *args, **kwargs)
            work = result[-1] if isinstance(result, tuple) else result
            if order >= 0:
                self.ended(order) if work is None else self._follow(order, work)
            return result

        return run

    def began(self, name: str, args: tuple[Any, ...]) -> int:
        """Write the line of a call. Returns its order."""
        self.last = begin = time.time()
        at = next(index for index, arg in enumerate(args) if type(arg).__name__ == "ScriptObject")
        group, ranks = self._group(args[at])
        first, sent = args[0], args[at - 1]
        tensors = _flat(sent) or _flat(first)  # a rank that is not the root of a scatter gives nothing
        size, received = _size(_flat(sent)), _size(_flat(first))
        op = OPS[name]
        inputs, outputs = (size, 0) if op == "send" else (0, size) if op == "recv" else (size, received)
        peer = next((arg for arg in args[at + 1 :] if type(arg) is int), None) if name in _PEERED else None
        peer = ranks[peer] if peer is not None and ranks else peer
        shape, dtype = (list(tensors[0].shape), str(tensors[0].dtype)[6:]) if tensors else ([], "")
        where, phase, engine = self._place(name)
        if where not in self.places:
            self.places[where] = len(self.places)
            self.write("place", self.places[where], where)
        order = next(self.orders)
        place = self.places[where]
        call = (order, op, group, dtype, shape, inputs, outputs, peer, place, phase, engine, self.step, begin)
        self.write("call", *call, self.passes)
        return order

    def _follow(self, order: int, work: Any) -> None:
        """Have the end of a call written: by its future where that says it, else by a look now and then."""
        work = self.c10d.Work.unbox(work)
        try:
            if self.torch.cuda.is_initialized():
                raise RuntimeError("its future is complete when the kernel is queued")
            done = functools.partial(self._done, order)
            self.callbacks.add(weakref.ref(done, self.callbacks.discard))
            work.get_future().add_done_callback(done)
        except RuntimeError:
            self.pending[id(work)] = work, order

    def _done(self, order: int, future: Any) -> None:
        try:
            future.wait()
        except Exception:
            return
        self.ended(order)

    def ended(self, order: int) -> None:
        self.last = time.time()
        self.write("end", order, self.last)

    def _wrap_wait(self) -> None:
        wait = self.c10d.Work.wait

        def waited(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = wait(work, *args, **kwargs)
            if id(work) in self.pending and not self.torch.cuda.is_initialized():
                self.ended(self.pending.pop(id(work))[1])
            return result

        self.c10d.Work.wait = waited

    def _group(self, boxed: Any) -> tuple[int, list[int]]:
        """(number, global ranks) of a process group."""
        group = self.c10d.ProcessGroup.unbox(boxed)
        name = group.group_name
        if name not in self.groups:
            try:
                ranks = list(self.c10d.get_process_group_ranks(group))
            except Exception:  # a group that torch.distributed does not know
                ranks = []
            self.groups[name] = len(self.groups), ranks
            self.write("group", self.groups[name][0], name, ranks)
        return self.groups[name]

    def _place(self, name: str) -> tuple[str, str, str]:
        """(file:line of the program, phase, engine) of the call that is being made."""
        where, engine, phase, nearest = "", "", "", ""
        frame: Any = sys._getframe(3)
        while frame is not None:
            kind, text = self._kind(frame)
            if kind:
                nearest = nearest or kind
                if kind == "user":
                    where = where or f"{text}:{frame.f_lineno}"
                elif kind == "engine":
                    engine = engine or text
                elif phase != "backward":
                    phase = kind
            frame = frame.f_back
        if phase != "backward" and self.torch._C._current_autograd_node() is not None:
            phase = "backward"
        if not where:
            where = self._position()[0]  # autograd's threads have no frame of the program
        if name == "allreduce_" and phase == "backward" and nearest in ("", "backward"):
            engine = "ddp"  # its reducer calls from C++
        return where, phase, engine

    def _kind(self, frame: Any) -> tuple[str, str]:
        """What a frame says: ("user", file), ("engine", name), ("backward", ""), ("forward", ""), or nothing."""
        code = frame.f_code
        if code not in self.kinds:
            self.kinds[code] = _kind_of(code, frame.f_globals.get("__name__", ""))
        return self.kinds[code]

    # -- Bytes

    def stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Behind every step of every optimizer; the first one that no other wraps counts the steps."""
        within = self.inside.index(None) if None in self.inside else 0
        self.inside[within:] = [*self.inside[within + 1 :], optimizer]
        if None in self.inside:
            return  # an optimizer within another's step, as ZeroRedundancyOptimizer has
        wrapped, self.inside = self.inside, []
        if self.optimizer is None:
            self.optimizer = id(optimizer)
        if self.optimizer != id(optimizer):
            return
        self.step += 1
        if self.step == 1:
            self._model(optimizer)
        sizes = None
        if self.step <= MEASURED_STEPS:
            try:
                sizes = self._bytes(optimizer, wrapped)
            except Exception as error:
                self.write("lost", repr(error))
        self.write("step", self.step, time.time(), sizes, self.passes)
        self.saved = 0

    def _look(self) -> int:
        """Bytes of all tensors on CPUs now; keeps the most."""
        total = _allocated() - self.base
        self.peak = max(self.peak, total)
        return total

    def _bytes(self, optimizer: Any, wrapped: list[Any]) -> dict[str, int]:
        updated = {id(entry): entry for group in optimizer.param_groups for entry in group["params"]}
        modules = {id(entry): entry for root in self.roots for entry in root.parameters()} or updated
        parameters = [_local(entry) for entry in modules.values()]
        summed = {id(one): one for entry in (modules | updated).values() if (one := entry.grad) is not None}
        gradients = [_local(entry) for entry in summed.values()]
        # Copies that are updated in place of the modules' parameters, as DeepSpeed's.
        copies = [_local(entry) for name, entry in updated.items() if name not in modules]
        tensor = self.torch.Tensor
        values = [
            entry for one in wrapped for some in one.state.values() for entry in _flat(some) if _is(entry, tensor)
        ]
        state = [*copies, *{id(entry): _local(entry) for entry in values}.values()]
        cuda = self.torch.cuda
        if cuda.is_initialized():
            total, peak = cuda.memory_allocated(), cuda.max_memory_allocated()
        else:
            total, peak = self._look(), self.peak
        held = {"parameters": parameters, "gradients": gradients, "optimizer": state}
        sizes = {name: _size(some) for name, some in held.items()}
        total = max(total, sum(sizes.values()))  # a small program's is less than what the process frees of its start
        return {**sizes, "saved": self.saved, "total": total, "peak": max(peak, total)}

    def _wrap_backward(self) -> None:
        """Count backward passes and, in the steps that are measured, the tensors that the graph has saved for one."""
        autograd = self.torch.autograd
        run = autograd._engine_run_backward

        def counted(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self.passes += 1
            if 0 < self.step < MEASURED_STEPS:
                try:
                    weights = {_storage(_local(p)) for root in self.roots for p in root.parameters()}
                    self.saved = max(self.saved, _saved(tensors, weights))
                except Exception as error:
                    self.write("lost", repr(error))
            return run(tensors, *args, **kwargs)

        autograd._engine_run_backward = counted

    def _model(self, optimizer: Any) -> None:
        """The largest module that no other contains, and the pipeline's schedule, by a look at all objects."""
        module, objects = self.torch.nn.Module, gc.get_objects()
        for entry in objects:
            if type(entry).__module__ == "torch.distributed.pipelining.schedules" and hasattr(entry, "_n_microbatches"):
                stages = len(getattr(entry, "_stages", [0]))
                self.write("pipeline", type(entry).__name__, entry._n_microbatches, stages)
                break
        modules = [entry for entry in objects if _is(entry, module)]
        inner = {id(child) for entry in modules for child in entry._modules.values()}
        self.roots = weakref.WeakSet(entry for entry in modules if id(entry) not in inner)
        roots = [(sum(p.numel() for p in entry.parameters()), entry) for entry in self.roots]
        if roots:
            count, root = max(roots, key=lambda item: item[0])
            while isinstance(getattr(root, "module", None), module):  # DDP and engines
                if hasattr(root, "zero_optimization_stage"):
                    self.write("zero", root.zero_optimization_stage())
                root = root.module
            configs: list[Any] = [getattr(entry, "config", None) for entry in root.modules()]
            texts = [entry.to_json_string(use_diff=False) for entry in configs if hasattr(entry, "to_json_string")]
            names = [
                (name, list(getattr(p, "ds_shape", p.shape)), str(p.dtype)[6:], p.requires_grad, list(_local(p).shape))
                for name, p in root.named_parameters()  # DeepSpeed leaves them empty at stage 3
            ]
            held = {id(p) for entry in modules for p in entry._parameters.values()}
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if not held & mine and any(hasattr(p, "_local_tensor") for p in root.parameters()):
                self.write("stale", len(mine))  # fully_shard has put others in their place
            config = json.loads(texts[0]) if texts else None
            self.write("model", type(root).__name__.removeprefix("FSDP"), count, config, names)

    # -- The rank itself

    def _beat(self) -> None:
        beat = 0.0
        while not self.over.is_set():
            sampled = 0 < self.step < MEASURED_STEPS and not self.torch.cuda.is_initialized()
            self.over.wait(SAMPLE if sampled else BEAT)
            if sampled:
                self._look()
                if time.time() - beat < BEAT:
                    continue
            beat = time.time()
            for key, (work, order) in list(self.pending.items()):
                if work.is_completed() and self.pending.pop(key, None):
                    self.ended(order)
            if time.time() - self.last > 2 * BEAT:
                where, inner = self._position()
                with open(f"{self.name}.now", "w") as file:
                    file.write(json.dumps([time.time(), where, inner]))

    def _position(self) -> tuple[str, str]:
        """(file:line of the program, innermost function) at which the main thread is."""
        frame: Any = sys._current_frames().get(self.main or 0)
        inner = frame.f_code.co_name if frame is not None else ""
        while frame is not None:
            kind, text = self._kind(frame)
            if kind == "user":
                return f"{text}:{frame.f_lineno}", inner
            frame = frame.f_back
        return "", inner

    def failed(self, error: BaseException) -> None:
        if os.getpid() != self.pid:  # a forked child's
            return
        trace, where = error.__traceback__, ""
        while trace is not None:
            kind, text = self._kind(trace.tb_frame)
            where = f"{text}:{trace.tb_lineno}" if kind == "user" else where
            trace = trace.tb_next
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
        self.write("error", time.time(), text, where or self._position()[0])

    def left(self) -> None:
        """At the end of Python. A thread that wants to run later would take the process with it: SIGABRT, since the
        frames of C++ in which it waits for the interpreter's lock do not unwind. torch's threads want it to call a
        future's callback, and again to release it."""
        if os.getpid() == self.pid:
            self.write("exit", time.time())
            self.over.set()
            self.thread.join(END)
            limit = time.monotonic() + END
            while self.callbacks and time.monotonic() < limit:
                time.sleep(SAMPLE)


_LIBRARIES = tuple(
    {sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {os.path.dirname(os.__file__) + "/"}  # noqa: PTH120
)


def _kind_of(code: Any, module: str) -> tuple[str, str]:
    """What frames of this code say."""
    file = code.co_filename
    for path, engine in ENGINES:
        if path in file and "site-packages" in file:
            return "engine", engine
    if code.co_name == "_engine_run_backward":
        return "backward", ""
    if code.co_name == "_call_impl" and file.endswith("torch/nn/modules/module.py"):
        return "forward", ""
    library = "site-packages" in file or "dist-packages" in file or file.startswith((*_LIBRARIES, "<frozen"))
    if file == __file__ or file.endswith("/sitecustomize.py") or (library and module != "__main__"):
        return "", ""
    short = os.path.relpath(file) if file.startswith(os.getcwd() + "/") else os.path.basename(file)  # noqa: PTH109, PTH119
    return "user", short


def _is(entry: Any, kind: type) -> bool:
    """Whether an object is one of a class; a proxy may raise at isinstance."""
    return issubclass(type(entry), kind)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [entry for item in value for entry in _flat(item)]
    return [] if value is None else [value]


def _local(tensor: Any) -> Any:
    """This rank's part of a DTensor, also of one whose collective is not waited for, or of a parameter of DeepSpeed's
    stage 3; any other tensor as it is."""
    tensor = getattr(tensor, "_local_tensor", getattr(tensor, "ds_tensor", tensor))
    return getattr(tensor, "elem", tensor)


def _size(tensors: list[Any]) -> int:
    return sum(entry.numel() * entry.element_size() for entry in tensors)


class _Mallinfo(ctypes.Structure):
    _fields_ = (("values", ctypes.c_size_t * 10),)


def _allocated() -> int:
    """Bytes that glibc's malloc has given out, by itself and by mmap; resident bytes without it."""
    try:
        look = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    look.restype = _Mallinfo
    values = look().values
    return int(values[4] + values[7])


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _saved(roots: Any, weights: set[int]) -> int:
    """Bytes that the graph behind these tensors has saved, every storage once, without weights. A tensor that a hook
    packs (activation checkpointing, offloading) is not unpacked for it, and counts if it is a tensor."""
    nodes = [node for entry in roots if (node := getattr(entry, "grad_fn", None)) is not None]
    seen, sizes, names = set(nodes), {}, {}
    while nodes:
        node = nodes.pop()
        kind = type(node)
        if kind not in names:
            names[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        for name in names[kind]:
            try:
                held = [getattr(entry, "data", None) for entry in _flat(getattr(node, name))]
            except RuntimeError:  # the graph has been freed
                continue
            for tensor in held:
                tensor = _local(tensor)
                if hasattr(tensor, "untyped_storage") and _storage(tensor) not in weights:
                    sizes[_storage(tensor)] = tensor.untyped_storage().nbytes()
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return sum(sizes.values())
