"""`run.json`, which records the settings, the environment and the course of a run; and tables and curves of histories.

Owns that file, tables and curves. The model describes itself and its data.
"""

from trainer.callbacks.record.run_record import RunRecord

__all__ = ["RunRecord"]
