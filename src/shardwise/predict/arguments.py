"""Arguments of the public functions, where a name or a text may stand for an object."""

from typing import TypeAlias, TypeVar

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.legality import suited
from shardwise.layout.usual_workload import usual_workload
from shardwise.model import ModelConfig
from shardwise.model.blueprint import Blueprint
from shardwise.model.blueprint_file import read_blueprint
from shardwise.model.catalog import resolve
from shardwise.model.parameters import Model
from shardwise.options import length_in

T = TypeVar("T")
Length: TypeAlias = int | str | None
"""A number of tokens, sequences or clients: 8192 or "8k"; None for the usual one."""


def as_config(model: ModelConfig | str, stored: bool = False) -> ModelConfig:
    """A model that has a configuration, or the one of this name or path. stored: in the precision of its files, as
    `resolve`. Raises `UserError`."""
    if isinstance(model, str):
        return resolve(model, stored=stored)
    return _checked(model, ModelConfig, "model", "a name such as llama-3-8b")


def as_model(model: Model | str) -> Model:
    """A model, or the one of this name or path, such as the file of a traced module. Raises `UserError`."""
    if isinstance(model, Blueprint):
        return model
    if isinstance(model, str) and (blueprint := read_blueprint(model)):
        return blueprint
    return as_config(model)


def as_cluster(cluster: object) -> Cluster:
    """A cluster, or the one of this text. Raises `UserError`."""
    if isinstance(cluster, str):
        return Cluster.parse(cluster)
    return _checked(cluster, Cluster, "cluster", "a text such as 8xH100")


def as_workload(
    model: Model, workload: object, seq: Length = None, batch: Length = None, multiple: int = 1
) -> tuple[Workload, tuple[str, ...]]:
    """A workload, or the one of `seq` tokens and `batch` sequences; and notes on numbers that are usual for the
    model because they are None. multiple: a usual batch is a multiple of it. Raises `UserError`."""
    if workload is None:
        usual = usual_workload(model, as_length("seq", seq), as_length("batch", batch), multiple)
        return usual.workload, usual.notes
    if seq is not None or batch is not None:
        raise UserError("give either a Workload, or seq and batch")
    return _checked(workload, Workload, "workload", "made by Workload(seq=..., batch=...)"), ()


def as_step(
    model: Model | str, layout: object, workload: object, cluster: object, seq: Length, batch: Length
) -> tuple[Model, Layout, Workload, Cluster | None, tuple[str, ...]]:
    """The objects of a step, workload and cluster in either order, with the attention that the model needs; and a note
    on what was assumed. Raises `UserError`."""
    if isinstance(workload, (Cluster, str)) and not isinstance(cluster, (Cluster, str)):
        workload, cluster = cluster, workload
    model = as_model(model)
    split, chosen = suited(Layout.of(layout), model)
    step, assumed = as_workload(model, workload, seq, batch, split.dp * split.micro)
    notes = tuple(f"assumed: {note}" for note in (*assumed, *chosen))
    return model, split, step, None if cluster is None else as_cluster(cluster), notes


def as_length(name: str, value: Length) -> int | None:
    """A number of tokens, sequences or clients, or the one of a text such as 4k. Raises `UserError`."""
    if not isinstance(value, str):
        return value
    if (length := length_in(value)) is None:
        raise UserError(f"{name}={value!r}: give a whole number, such as 8192 or '8k'")
    return length


def _checked(given: object, kind: type[T], what: str, example: str) -> T:
    if not isinstance(given, kind):
        raise UserError(f"{what} must be a {kind.__name__}, {example}; not {given!r}")
    return given
