"""Pickles by others, without running what they name.

`load` is torch's own `weights_only` reader, which makes tensors and containers; what else a file may name is listed by
its caller and becomes an `Inert`. `load_metadata` reads the pickle that is not a torch file, the `.metadata` of
`torch.distributed.checkpoint`, under the same rule.
"""

import io
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.checkpoint.foreign.state import dtype_name, quoted
from shardwise.data.extras import require
from shardwise.errors import UserError, os_errors

LONGEST_METADATA = 1 << 30
"""Bytes of the longest .metadata that is read."""


class Inert:
    """Stands in for an object: `state` is what it was made of. Nothing of its class runs."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """A field of the object, None where it has no such field."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def load(source: Path | bytes, where: str, names: Mapping[str, Any] | None = None) -> Any:
    """A torch file by `weights_only`, the elements of its tensors left on the disk where `source` is a path.

    names: what else it may name -> what stands in for that. Raises `UserError` when it names anything more, is
    damaged, or torch is not installed.
    """
    torch = _torch()
    stand_ins = [(stand_in, name) for name, stand_in in (names or {}).items()]
    try:
        with torch.serialization.safe_globals(stand_ins), warnings.catch_warnings():
            # A damaged file makes torch warn before it fails; one line is enough.
            warnings.simplefilter("ignore")
            if isinstance(source, bytes):
                return torch.load(io.BytesIO(source), map_location="cpu", weights_only=True)
            return torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise UserError(f"cannot read {where}: {error.strerror or 'it is no file'}") from None
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        if named:
            raise UserError(refusal(where, named[1])) from None
        raise UserError(f"{where} is damaged, or not a file of tensors") from None
    except Exception:
        # A damaged file may fail anywhere inside torch's reader, with any exception.
        raise UserError(f"{where} is damaged, or not a file of tensors") from None


def refusal(where: str, name: str) -> str:
    """Why a file is not read."""
    return f"{where} names {quoted(name)[1:-1]}, which no file of its kind needs: such a pickle is not loaded"


def _torch() -> Any:
    return require("torch", "train", "reading other trainers' checkpoints")


def elements(tensor: Any, where: str) -> np.ndarray:
    """A tensor's elements as a vector (`uint16` for bfloat16). Raises `UserError` for those that checkpoints do not
    store, and for a tensor that is more than its elements."""
    torch = _torch()
    dtype = dtype_name(tensor.dtype, where)
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_neg():
        raise UserError(f"{where} is not a plain tensor")
    flat = tensor.detach().contiguous().reshape(-1)
    array: np.ndarray = (flat.view(torch.uint16) if dtype == "bfloat16" else flat).numpy()
    return array


_DCP = "torch.distributed.checkpoint.metadata"
_DTYPES = [
    *("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
]

_METADATA_NAMES: dict[tuple[str, str], Any] = {
    **{
        (_DCP, name): type(name, (Inert,), {})
        for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
                     "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING")
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): type("_StorageInfo", (Inert,), {}),
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): Inert,
    ("torch", "strided"): "strided",
    # Where the folder was when it was written.
    ("pathlib", "PosixPath"): Inert,
    ("pathlib", "WindowsPath"): Inert,
    ("pathlib._local", "PosixPath"): Inert,
    **{("torch", name): f"torch.{name}" for name in _DTYPES},
}  # fmt: skip


class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined,misc]
    """In Python, since the one in C makes room for as many objects as a damaged file says there are."""

    names: Mapping[tuple[str, str], Any]

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.names[module, name]
        except (KeyError, TypeError):
            raise _Refused(f"{module}.{name}") from None

    def get_extension(self, code: int) -> Any:
        raise _Refused(f"extension {code}")


class _Refused(Exception):
    pass


def load_plain(data: bytes, where: object, kind: str, names: Mapping[tuple[str, str], Any] | None = None) -> Any:
    """Numbers, texts and containers of a pickle; names: (module, name) that it may name -> what stands in for that.
    kind: of file, for messages. Raises `UserError` when it is damaged or names anything more."""
    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.names = names or {}
    try:
        return unpickler.load()
    except _Refused as error:
        raise UserError(refusal(str(where), str(error))) from None
    except Exception:
        # What a damaged pickle raises depends on the byte.
        raise UserError(f"{where} is damaged, or not {kind}") from None


def load_metadata(path: Path) -> Inert:
    """The `.metadata` of a `torch.distributed.checkpoint` folder. dtypes come as their names, sizes as tuples.

    Raises `UserError` when it is damaged, or names any class but those of such a file.
    """
    with os_errors(f"read {path}"):
        if path.stat().st_size > LONGEST_METADATA:
            raise UserError(f"{path} is longer than any checkpoint's metadata")
        data = path.read_bytes()
    metadata = load_plain(data, path, "a checkpoint's metadata", _METADATA_NAMES)
    if not isinstance(metadata, _METADATA_NAMES[_DCP, "Metadata"]):
        raise UserError(f"{path} is not the metadata of a checkpoint")
    return metadata
