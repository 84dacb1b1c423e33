"""Other trainers' checkpoints, read into ours: weights, AdamW's moments and the number of updates.

`torch.distributed.checkpoint` folders (FSDP2), and DeepSpeed's ZeRO and universal checkpoints. Each reader gives a
`ForeignState`: tensors by the names that the other trainer has, read when they are asked for. `convert` finds our
parameters among them, by shardwise's names or Hugging Face's, and writes them one by one.

Their files are pickles. None is unpickled in full: tensors are read with torch's `weights_only`, everything else with
classes that do nothing, for the few names that such a file needs; any other name is refused.
"""

from shardwise.checkpoint.foreign.convert import ResumeSettings, import_checkpoint
from shardwise.checkpoint.foreign.detect import FORMATS, open_foreign
from shardwise.checkpoint.foreign.state import ForeignState, ForeignTensor

__all__ = ["FORMATS", "ForeignState", "ForeignTensor", "ResumeSettings", "import_checkpoint", "open_foreign"]
