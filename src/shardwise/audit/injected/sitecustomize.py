"""Start-up of every Python process of an audited program: first the `sitecustomize` that this one hides, if any, then
the recorder. This folder is on PYTHONPATH, and leaves the process's module path at once, so that it hides nothing."""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != _here]  # noqa: PTH100
_hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if _hidden is not None and _hidden.loader is not None:
    _module = importlib.util.module_from_spec(_hidden)
    sys.modules["sitecustomize"] = _module
    _hidden.loader.exec_module(_module)
if "SHARDWISE_AUDIT" in os.environ:
    _file = os.path.join(os.path.dirname(_here), "recorder.py")  # noqa: PTH118, PTH120
    _spec = importlib.util.spec_from_file_location("shardwise_audit_recorder", _file)
    assert _spec is not None and _spec.loader is not None
    _recorder = importlib.util.module_from_spec(_spec)
    sys.modules["shardwise_audit_recorder"] = _recorder
    _spec.loader.exec_module(_recorder)
    _recorder.wait_for_torch()
