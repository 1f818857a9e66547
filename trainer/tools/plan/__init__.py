"""`trainer.plan`: what a compiled step would take on devices that need not be there: memory, communication, time.

Owns the arithmetic and the reports, `Strategy.explain`'s too. It trains nothing, and leaves a model as it is.
"""

from trainer.tools.plan.model_plan import explain, plan
from trainer.tools.plan.report import Alternative, DeviceMemory, Plan
from trainer.tools.plan.state_report import StateReport

__all__ = ["Alternative", "DeviceMemory", "Plan", "StateReport", "explain", "plan"]
