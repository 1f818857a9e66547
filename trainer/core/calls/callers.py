"""The instruction of the script that made a call: what it does with a name or a result.

Python runs the same functions for a name that is looked up and for one that is imported, and for a result that is kept
and one that is unpacked, but a message that helps differs.
"""

from __future__ import annotations

import dis
import os
import sys
from types import FrameType

_HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")  # of this room, which has the entry points
_LOOKED_AT = 32  # bytes, two for each instruction: a call and its caches


def imports_the_name() -> bool:
    """Whether `from module import name` asks a module for a name. Python drops the message of an `AttributeError` then.

    Called by the `__getattr__` of a module, or by this room on its behalf.
    """
    return _instructions(_asking())[:1] == ["IMPORT_FROM"]


def is_import_of_a_module() -> bool:
    """Whether `from package import name` asks a package for a name before it looks for a module of that name.

    Called as `imports_the_name`. Python asks again if there is no such module.
    """
    return _asking().f_code.co_name == "_handle_fromlist"


def unpacks_the_result() -> bool:
    """Whether the caller unpacks the result of the running function, as in `loss, accuracy = model.evaluate(x, y)`.

    Called by the function. Entry points between it and its caller do not count.
    """
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    # The running instruction is the call, or its cache.
    following = (name for name in _instructions(frame)[1:] if name not in ("CACHE", "EXTENDED_ARG"))
    return next(following, None) in ("UNPACK_SEQUENCE", "UNPACK_EX")


def _asking() -> FrameType:
    """Returns the frame that asks a module for a name."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename.startswith(_HERE) or frame.f_code.co_name == "__getattr__"):
        frame = frame.f_back
    return frame


def _instructions(frame: FrameType) -> list[str]:
    """Returns the names of some instructions of a frame, from the running one on."""
    start = max(frame.f_lasti, 0)
    return [dis.opname[code] for code in frame.f_code.co_code[start:start + _LOOKED_AT:2]]
