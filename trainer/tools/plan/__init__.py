"""`trainer.plan`: memory, communication and time of a compiled step on devices that may be absent.

Owns the arithmetic and the reports, including the report of `Strategy.explain`. It trains nothing, and does not change
the model.
"""

from trainer.tools.plan.model_plan import explain, plan
from trainer.tools.plan.report import Alternative, DeviceMemory, Plan
from trainer.tools.plan.state_report import StateReport

__all__ = ["Alternative", "DeviceMemory", "Plan", "StateReport", "explain", "plan"]
