"""CONTRIBUTING's recipes: a callback is exported, documented with an example, and tested."""

import importlib
import inspect

import pytest

import trainer
from tests.support import project_files

# Bases of others, which users do not list.
BASES = {"KerasCallback", "LateLogsCallback", "TrainBatchCallback", "PeriodicSaves"}


def callbacks_of(module):
    return [value for name, value in vars(importlib.import_module(module)).items()
            if inspect.isclass(value) and issubclass(value, trainer.callbacks.Callback)
            and value.__module__ == module and not name.startswith("_") and name not in BASES]


CALLBACKS = {callback.__name__: callback for module in project_files.modules()
             if module.startswith("trainer.callbacks.") for callback in callbacks_of(module)}
TESTS = "\n".join(path.read_text() for path in (project_files.ROOT / "tests" / "callbacks").rglob("test_*.py"))


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_is_exported_documented_and_tested(name):
    assert getattr(trainer.callbacks, name, None) is CALLBACKS[name], "add it to callbacks/__init__.pyi"
    assert name in TESTS, "test it in tests/callbacks"
    assert "Example" in (CALLBACKS[name].__doc__ or ""), "give its docstring an example"


def test_callbacks_are_found():
    assert {"EarlyStopping", "ModelCheckpoint", "LogTo", "TensorBoard"} <= CALLBACKS.keys()
