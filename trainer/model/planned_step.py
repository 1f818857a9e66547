"""placeholder"""
from __future__ import annotations
import copy
import functools
from typing import Any, TYPE_CHECKING
from trainer.model.configuration import Configuration
from trainer.model.current_run import CurrentRun
from trainer.model.state_holder import StateHolder, first_rows
from trainer.loop.run_context import RunContext
from trainer.step.compiled_phase import CompiledPhase


def planned_copy(model, strategy, changes):
    made = object.__new__(type(model))
    vars(made).update(vars(model))
    made.strategy = strategy
    made._configuration, made._run_context = Configuration(), RunContext()
    made._state_holder = StateHolder(made._functional, strategy, model._state_holder.seed, made._configuration, made._run_context)
    made.current_run = CurrentRun(made._state_holder, made._configuration, strategy, made._run_context)
    made.compile(**{**model._configuration.given, **changes})
    return made


def lowered_phase(model, kind, batch):
    holder = model._state_holder
    state = holder.shapes(model.sample_inputs(first_rows(batch)))
    step = {"train": model.train_step, "test": model.test_step, "predict": model.predict_step}[kind]
    options = model._configuration.options
    phase = CompiledPhase(kind, step, model.strategy, options.steps_per_execution, False, "off")
    phase.prepare(state, batch)
    return phase, phase.lowered(state, batch, phase.steps_per_execution)
