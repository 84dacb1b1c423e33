"""Other trainers' checkpoints, read into ours and written from ours: weights, AdamW's moments and number of updates.

`torch.distributed.checkpoint` folders (FSDP2), and DeepSpeed's ZeRO and universal checkpoints. Each reader gives a
`ForeignState`: tensors by the names that the other trainer has, read when they are asked for. `convert` finds our
parameters among them, by shardwise's names or Hugging Face's, and writes them one by one. `export_foreign` goes the
other way, to distributed and universal checkpoints.

Their files are pickles. None is unpickled in full: tensors are read with torch's `weights_only`, everything else with
classes that do nothing, for the few names that such a file needs; any other name is refused.
"""

from shardwise.checkpoint.foreign.convert import FORMATS, ResumeSettings, import_checkpoint, open_foreign
from shardwise.checkpoint.foreign.exporting import EXPORT_FORMATS, NAMES, ForeignExport, export_foreign
from shardwise.checkpoint.foreign.state import ForeignState, ForeignTensor

__all__ = [
    "EXPORT_FORMATS", "FORMATS", "NAMES", "ForeignExport", "ForeignState", "ForeignTensor", "ResumeSettings",
    "export_foreign", "import_checkpoint", "open_foreign",
]  # fmt: skip
