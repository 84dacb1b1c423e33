"""Time of offloading in closed form: what it moves and computes on the host, and how much of that nothing hides.

Per optimizer step and rank, with P updated parameters of which a fraction f is offloaded, g bytes of an accumulated
gradient, w bytes of a weight, and s bytes of fp32 master weight and moments, 12 with AdamW:

- gradients down: g f P once before the update; from stage 2 on w P after each micro-batch, as they are reduced, beside
  the rest of backward, and g (1 - f) P up again for what the device updates;
- the update on the host's cores, f P parameters; then w f P of weights up;
- on disk: s f P read and s f P written, beside the update: the slower of the disk and of update with copies binds.
  Reads and writes share one disk, so that their seconds add up: AdamW of 64M parameters took 1.21 s where reads alone
  would take 0.77 s and writes 0.55 s;
- offloaded parameters: w P up for each gather, beside computation without a pipeline, from disk at the slower of disk
  and link; updated weights go to their home in place of the device;
- offloaded activations: what blocks save, down in forward and up before backward, beside computation.

Copies beside computation slow it by 2% of their time. Copies up and down count one after the other. Sources: Ren et al.
2021, ZeRO-Offload; Rajbhandari et al. 2021, ZeRO-Infinity; the runtime's own order
(runtime/zero/optimizer.py, runtime/offload/file.py).
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from shardwise.arrays import Num
from shardwise.layout.optimizers import DEFAULT, states_of, update_bytes
from shardwise.predict.time.host_rates import HostShare
from shardwise.predict.time.split import StepShape
from shardwise.records import dataclass

ADAMW = float(update_bytes(DEFAULT))
"""Bytes that move through the host's memory per parameter that AdamW updates, whose rate is measured: fp32 weight,
moments and gradient read, all but the gradient written."""
ADDITION = 12.0
"""Bytes that move there per gradient that is added to an fp32 accumulator: two read, one written."""
WIDE = 4.0
"""Bytes of an element of optimizer state."""
SLOWDOWN = 0.0187
"""Share of a copy's seconds that computation beside it loses: matrix products beside pinned copies on one H100,
measured 2026-11-23."""

BOUNDS = ("link", "cores", "disk")
"""What can bind a step beside the device: the link to the host, the host's cores, the disk."""


class Sharded(NamedTuple):
    """Numbers of a rank's blocks and of its vocabulary's tables."""

    blocks: Num
    tables: Num

    @property
    def total(self) -> Num:
        return self.blocks + self.tables


@dataclass(frozen=True)
class OffloadSeconds:
    """Seconds per step of one rank. `exposed`: what nothing hides. busy: of each of `BOUNDS`, hidden or not."""

    exposed: Num
    busy: Mapping[str, Num]


def offloads(split: StepShape) -> bool:
    """Whether any candidate of a split offloads anything."""
    return bool(np.any(np.asarray(split.offload) != "none") or np.any(np.asarray(split.saved_bytes) > 0))


def offload_seconds(
    split: StepShape, host: HostShare, elements: Sharded, gathers: Sharded, layers: Num, micro: Num
) -> OffloadSeconds:
    """Seconds of offloading in a step. elements: parameters that the rank updates. gathers: of each unit at stage 3 per
    micro-batch. layers: blocks of the rank. micro: seconds of a micro-batch on the rank without offloading."""
    gradient = _gradients(split, host, elements.total)
    update = _update(split, host, elements.total)
    parameters = _parameters(split, host, elements, gathers)
    saved = split.saved_bytes * layers / host.link  # one way
    beside = micro if host.overlaps else 0.0 * micro
    first = 1 / np.maximum(layers, 1)
    piped = np.asarray(split.pp) > 1  # a pipeline's stages are gathered as a whole, beside nothing
    ahead = np.where(piped, 0.0, parameters.seconds)
    forward = _exposed(ahead / 2 + saved, beside / 3, first)
    backward = _exposed(ahead / 2 + saved + gradient.seconds, beside * 2 / 3, first)
    count = split.micro_batches
    exposed = count * (forward + backward + parameters.seconds - ahead) + update.seconds
    link = count * (parameters.link + 2 * saved + gradient.link) + update.link
    disk = count * parameters.disk + update.disk
    return OffloadSeconds(exposed, {"link": link, "cores": count * gradient.cores + update.cores, "disk": disk})


class _Moved(NamedTuple):
    """Seconds per micro-batch, or of the optimizer's step, and of the link, the disk and the cores alone."""

    seconds: Num
    link: Num
    disk: Num
    cores: Num


def _exposed(copies: Num, beside: Num, first: Num) -> Num:
    """Seconds of copies that computation does not hide, with what they slow it. first: share with nothing beside it."""
    return copies - (1 - SLOWDOWN) * np.minimum(copies * (1 - first), beside)


def _accumulates(split: StepShape) -> Num:
    """Whether gradients are accumulated in the host's memory (`layout.homes.accumulates_on_host`)."""
    return (np.asarray(split.offload) != "none") & (np.asarray(split.zero) >= 2)


def _gradients(split: StepShape, host: HostShare, updated: Num) -> _Moved:
    """Gradients of one micro-batch into the host's accumulators; all but the first micro-batch's are added."""
    accumulated = np.where(_accumulates(split), updated, 0.0)
    link = accumulated * split.width / host.link
    added = 1 - 1 / np.asarray(split.micro_batches)
    cores = accumulated * added * ADDITION / ADAMW / host.cores
    return _Moved(np.maximum(link, cores), link, 0.0 * link, cores)


def _update(split: StepShape, host: HostShare, updated: Num) -> _Moved:
    """The optimizer's step: gradients down, update, weights up, and state from and to the disk."""
    fraction = np.where(np.asarray(split.offload) == "none", 0.0, split.offloaded)
    nbytes, there = split.gradient_width, _accumulates(split)
    away, here = updated * fraction, updated * np.where(fraction > 0, 1 - fraction, 0.0)
    homed = np.asarray(split.offload_params) != "none"
    down = np.where(there, 0.0, away * nbytes) + np.where(homed, here * split.width, 0.0)
    up = np.where(there, here * nbytes, 0.0) + np.where(homed, 0.0, away * split.width)
    link = (down + up) / host.link
    norm = np.where(there, updated * nbytes / ADAMW, 0.0)
    cores = (away * update_bytes(split.optimizer) / ADAMW + norm) / host.cores
    on_disk = np.asarray(split.offload) == "nvme"
    state = np.where(on_disk, away * WIDE * len(states_of(split.optimizer)) * (1 / host.read + 1 / host.write), 0.0)
    weights = np.where(np.asarray(split.offload_params) == "nvme", updated * split.width / host.write, 0.0)
    worked = link + cores + weights
    return _Moved(np.maximum(worked, state + weights), link, state + weights, cores)


def _parameters(split: StepShape, host: HostShare, elements: Sharded, gathers: Sharded) -> _Moved:
    """Parameters for the gathers of one micro-batch. They come once a step where later gathers read what
    stays on the device."""
    homes = np.asarray(split.offload_params)
    each = 1 / np.asarray(split.micro_batches)
    counts = Sharded(*(np.where(split.gathers_once, np.minimum(count, each), count) for count in gathers))
    nbytes = (elements.blocks * counts.blocks + elements.tables * counts.tables) * split.width
    nbytes = np.where(homes == "none", 0.0, nbytes)
    link, disk = nbytes / host.link, np.where(homes == "nvme", nbytes / host.read, 0.0)
    return _Moved(np.maximum(link, disk), link, disk, 0.0 * link)
