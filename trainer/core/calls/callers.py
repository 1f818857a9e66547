"""The instruction of the script that made a call: what it does with a name or a result.

Python runs the same functions for a name that is looked up and for one that is imported, and for a result that is kept
and one that is unpacked, but a message that helps differs.
"""

from __future__ import annotations

import dis
import os
import sys

_OURS = os.path.join(os.path.abspath(__file__).removesuffix(os.path.join("core", "calls", "callers.py")), "")
_LOOKED_AT = 32  # bytes, two for each instruction: a call and its caches


def imports_the_name() -> bool:
    """Whether `from module import name` asks a module for a name. Python drops the message of an `AttributeError` then.

    Called from the `__getattr__` of a module.
    """
    return _instructions()[:1] == ["IMPORT_FROM"]


def unpacks_the_result() -> bool:
    """Whether the script unpacks the result of the running call, as in `loss, accuracy = model.evaluate(x, y)`."""
    # The running instruction is the call, or its cache.
    following = (name for name in _instructions()[1:] if name not in ("CACHE", "EXTENDED_ARG"))
    return next(following, None) in ("UNPACK_SEQUENCE", "UNPACK_EX")


def _instructions() -> list[str]:
    """Returns the names of some instructions of the script, from the running one on."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    start = max(frame.f_lasti, 0)
    return [dis.opname[code] for code in frame.f_code.co_code[start:start + _LOOKED_AT:2]]
