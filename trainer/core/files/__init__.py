"""Files that strangers may have made, files that a kill must not tear, and objects in stores such as S3.

Owns the ways to open, write, list and remove files and objects by path. Knows nothing of formats and their meaning.
"""

from trainer.core.calls.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
