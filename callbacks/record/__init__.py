"""`run.json`, which tells what a run was started with, where it ran and how it went; and how a history looks.

Owns that file, and the tables and curves of histories. What there is to tell of a model and its data, the model tells.
"""

from trainer.callbacks.record.run_record import RunRecord

__all__ = ["RunRecord"]
