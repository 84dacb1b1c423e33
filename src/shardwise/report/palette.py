"""Colours, letters and hatches of what the figures show: told apart by any eye, on light and dark, and without colour.

The colours are Okabe and Ito's (jfly.uni-koeln.de/color, 2008), lightened for dark backgrounds.
"""

from collections.abc import Iterable

from shardwise.records import dataclass
from shardwise.report.step_report import Bytes


@dataclass(frozen=True)
class Kind:
    """Look of one kind of bar segment or event. hatch: an SVG path in an 8x8 tile, empty for a plain area."""

    label: str
    letter: str
    light: str
    dark: str
    hatch: str = ""
    white_letter: bool = False


BYTE_CLASSES = {
    "parameters": Kind("parameters", "P", "#0072b2", "#56a8e0", white_letter=True),
    "gradients": Kind("gradients", "G", "#e69f00", "#efb13a", "M-2,2 L2,-2 M0,8 L8,0 M6,10 L10,6"),
    "optimizer": Kind("optimizer state", "O", "#009e73", "#2fbd94", "M2,2 h1.6 M6,6 h1.6"),
    "saved": Kind("saved activations", "S", "#cc79a7", "#dd93bb", "M0,4 H8"),
    "comm": Kind("communication buffers", "C", "#d55e00", "#f08445", "M0,0 L8,8 M0,8 L8,0"),
    "other": Kind("rest of the peak", "R", "#9aa0a8", "#868c95", "M-2,6 L2,10 M0,0 L8,8 M6,-2 L10,2"),
}
"""The classes of `Bytes` in a training step, in its order."""

CACHE = {"cache": Kind("keys and values", "K", "#56b4e9", "#56b4e9", "M4,0 V8 M0,4 H8")}
"""The one that only generation has."""

KINDS = {
    **BYTE_CLASSES,
    **CACHE,
    "waited": Kind("stood still for it", "W", "#d55e00", "#f08445", "M0,0 L8,8 M0,8 L8,0"),
    "hidden": Kind("hidden behind computation", "H", "#56b4e9", "#56b4e9", "M0,4 H8"),
    "forward": Kind("forward", "F", "#0072b2", "#56a8e0", white_letter=True),
    "backward": Kind("backward", "B", "#e69f00", "#efb13a", "M-2,2 L2,-2 M0,8 L8,0 M6,10 L10,6"),
    "recompute": Kind("forward again", "A", "#cc79a7", "#dd93bb", "M4,0 V8"),
    "update": Kind("optimizer", "U", "#009e73", "#2fbd94", "M2,2 h1.6 M6,6 h1.6"),
    "rest": Kind("loss and the rest", "L", "#9aa0a8", "#868c95", "M-2,6 L2,10 M0,0 L8,8 M6,-2 L10,2"),
    "input": Kind("input gradient", "I", "#e69f00", "#efb13a", "M-2,2 L2,-2 M0,8 L8,0 M6,10 L10,6"),
    "weight": Kind("weight gradient", "W", "#009e73", "#2fbd94", "M2,2 h1.6 M6,6 h1.6"),
    "fresh": Kind("gradient, no update behind", "0", "#0072b2", "#56a8e0", white_letter=True),
    "stale": Kind("gradient, updates behind", "S", "#e69f00", "#efb13a", "M-2,2 L2,-2 M0,8 L8,0 M6,10 L10,6"),
    "dropped": Kind("dropped gradient", "D", "#cc79a7", "#dd93bb", "M4,0 V8"),
    "computing": Kind("computing", "C", "#0072b2", "#56a8e0", white_letter=True),
    "idle": Kind("waits for another one", "W", "#9aa0a8", "#868c95", "M-2,6 L2,10 M0,0 L8,8 M6,-2 L10,2"),
    "core": Kind("ready, without a core", "N", "#cc79a7", "#dd93bb", "M4,0 V8"),
    "disk": Kind("waiting for the disk", "D", "#e69f00", "#efb13a", "M2,2 h1.6 M6,6 h1.6"),
    "loading": Kind("loading text", "L", "#009e73", "#2fbd94", "M0,4 H8"),
    "transfer": Kind("transfers that nothing hides", "T", "#a98bd0", "#c3abe6", "M0,4 H8"),
    "spare": Kind("other time", "R", "#9aa0a8", "#868c95"),
    "injected": Kind("injected waiting", "I", "#d55e00", "#f08445", "M-2,2 L2,-2 M0,8 L8,0 M6,10 L10,6"),
    "overlap": Kind("forward and backward at once", "O", "#8c6bb1", "#b296d6", "M0,0 L8,8"),
    "message": Kind("message", "M", "#9aa0a8", "#868c95"),
    "communication": Kind("communication", "C", "#a98bd0", "#c3abe6", "M0,4 H8"),
    "span": Kind("event", "E", "#9aa0a8", "#868c95"),
    "collective": Kind("collective", "C", "#d55e00", "#f08445", "M0,0 L8,8 M0,8 L8,0"),
}


def classes_of(every: Iterable[Bytes]) -> dict[str, Kind]:
    """Classes to show: those of training, and the cache where some rank has one."""
    return BYTE_CLASSES | CACHE if any(held.cache for held in every) else BYTE_CLASSES


THEMES = {
    "light": {
        "page": "#f6f6f3",
        "surface": "#ffffff",
        "raised": "#f3f3ef",
        "ink": "#1c1d20",
        "muted": "#5b5f66",
        "line": "#dfe0db",
        "grid": "#ecece8",
        "good": "#0a6b45",
        "bad": "#b3261e",
        "accent": "#005f96",
    },
    "dark": {
        "page": "#121316",
        "surface": "#1b1d20",
        "raised": "#24272b",
        "ink": "#ececea",
        "muted": "#a6abb2",
        "line": "#363a40",
        "grid": "#2a2d32",
        "good": "#55cb9a",
        "bad": "#ff8f85",
        "accent": "#7cc0f0",
    },
}
