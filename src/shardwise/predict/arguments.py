"""Arguments of the public functions, where a name or a text may stand for an object."""

from typing import TypeVar

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.usual_workload import usual_workload
from shardwise.model import ModelConfig
from shardwise.model.blueprint import Blueprint
from shardwise.model.blueprint_file import read_blueprint
from shardwise.model.catalog import resolve
from shardwise.model.parameters import Model

T = TypeVar("T")


def as_config(model: ModelConfig | str) -> ModelConfig:
    """A model that has a configuration, or the one of this name or path. Raises `UserError`."""
    if isinstance(model, str):
        return resolve(model)
    return _checked(model, ModelConfig, "model", "a name such as llama-3-8b")


def as_model(model: Model | str) -> Model:
    """A model, or the one of this name or path, such as the file of a traced module. Raises `UserError`."""
    if isinstance(model, Blueprint):
        return model
    if isinstance(model, str) and (blueprint := read_blueprint(model)):
        return blueprint
    return as_config(model)


def as_layout(layout: Layout | str) -> Layout:
    """A layout, or the one of this text. Raises `UserError`."""
    if isinstance(layout, str):
        return Layout.parse(layout)
    return _checked(layout, Layout, "layout", "a text such as tp=2,dp=4")


def as_cluster(cluster: Cluster | str) -> Cluster:
    """A cluster, or the one of this text. Raises `UserError`."""
    if isinstance(cluster, str):
        return Cluster.parse(cluster)
    return _checked(cluster, Cluster, "cluster", "a text such as 8xH100")


def as_workload(
    model: Model, workload: Workload | None, seq: int | None = None, batch: int | None = None, multiple: int = 1
) -> tuple[Workload, tuple[str, ...]]:
    """A workload, or the one of `seq` tokens and `batch` sequences; and a note for each number that is usual for the
    model because it is None. multiple: a usual batch is a multiple of it. Raises `UserError`."""
    if workload is None:
        usual = usual_workload(model, seq, batch, multiple)
        return usual.workload, usual.notes
    if seq is not None or batch is not None:
        raise UserError("give either a Workload, or seq and batch")
    return _checked(workload, Workload, "workload", "made by Workload(seq=..., batch=...)"), ()


def _checked(given: object, kind: type[T], what: str, example: str) -> T:
    if not isinstance(given, kind):
        raise UserError(f"{what} must be a {kind.__name__}, {example}; not {given!r}")
    return given
