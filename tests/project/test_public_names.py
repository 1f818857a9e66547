"""What users see of each public package: its public names, and nothing of how it is built."""

import ast
import enum
import importlib
import inspect
import pkgutil
import re

import pytest

import trainer
from tests.support import project_files

MODULES = project_files.modules()
WITH_STUB = sorted(name for name, path in MODULES.items() if path.with_suffix(".pyi").is_file())


def with_submodules(name):
    """Returns a package, of which all modules are imported: Python sets each of them on it."""
    module = importlib.import_module(name)
    for found in pkgutil.iter_modules(getattr(module, "__path__", ())):
        if found.name != "__main__":
            importlib.import_module(f"{name}.{found.name}")
    return module


@pytest.mark.parametrize("name", WITH_STUB)
def test_a_listing_has_the_public_names_alone(name):
    module = with_submodules(name)
    assert [listed for listed in dir(module) if not listed.startswith("__")] == module.__all__
    assert "__doc__" in dir(module)


@pytest.mark.parametrize("name", sorted(
    f"{home}.{public}" for home in WITH_STUB if "core" not in home for public in importlib.import_module(home).__all__
    if f"{home}.{public}" in MODULES and f"{home}.{public}" not in WITH_STUB))
def test_a_module_lists_what_it_defines(name):
    module = importlib.import_module(name)
    assert dir(module) == module.__all__
    assert {getattr(module, public).__module__ for public in module.__all__} == {name}


@pytest.mark.parametrize("name", WITH_STUB)
def test_a_public_name_is_what_its_stub_says(name):
    # A function with the name of a module of its package would be hidden as soon as that is imported.
    module = with_submodules(name)
    homes = {alias.name: f"{node.module}.{alias.name}" for node in ast.parse(project_files.source(MODULES[name])).body
             if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {public for public in module.__all__ if inspect.ismodule(getattr(module, public))} == {
        public for public in module.__all__ if homes[public] in MODULES}


def test_every_public_module_of_the_trainer_has_a_stub():
    assert {f"trainer.{name}" for name in trainer.__all__ if inspect.ismodule(getattr(trainer, name))} <= {*WITH_STUB}


def test_names_that_need_an_optional_library_are_not_listed():
    assert "TrainerClassifier" not in dir(trainer) and trainer.TrainerClassifier.__name__ == "TrainerClassifier"


def test_the_error_for_a_name_of_keras_says_where_its_like_is():
    with pytest.raises(AttributeError, match=r"no attribute 'layers'\. Layers are Flax's: `from flax import linen"):
        _ = trainer.layers


def test_an_unknown_name_is_an_error_which_knows_the_near_names():
    with pytest.raises(AttributeError, match=r"module 'trainer.losses' has no attribute 'Hubert'") as raised:
        _ = trainer.losses.Hubert
    assert (raised.value.name, raised.value.obj) == ("Hubert", trainer.losses)


@pytest.mark.parametrize(("statement", "message"), [
    ("from trainer.metrics import AUROC", r"import name 'AUROC' from 'trainer\.metrics'\. Instead: `AUC\(\)`"),
    ("from trainer import MirroredStrategy", r"It is `trainer\.distribute\.MirroredStrategy`"),
    ("from trainer.data import RandomFlip", r"It is `trainer\.data\.augmentation\.RandomFlip`"),
    ("from trainer.optimizers import CosineDecay", r"It is `trainer\.optimizers\.schedules\.CosineDecay`"),
    ("from trainer.optimizers.schedules import StepLR", r"Instead: `PiecewiseConstantDecay\("),
    ("from trainer.callbacks import EarlyStop", "Did you mean 'EarlyStopping'"),
    ("from trainer import Foo", r"All names: https://.*/genindex\.html"),
])
def test_an_import_of_an_unknown_name_says_what_to_import(statement, message):
    with pytest.raises(ImportError, match=message):
        exec(statement, {})


def test_a_module_can_be_asked_for_a_name_that_it_lacks():
    assert not hasattr(trainer, "Foo") and getattr(trainer.metrics, "AUROC", 3) == 3


@pytest.mark.parametrize("name", [
    name for name in MODULES if name.count(".") < 3 and any(
        hasattr(importlib.import_module(name), table) for table in ("_MISSING", "_FOREIGN_NAMES"))])
def test_what_a_sentence_about_a_foreign_name_recommends_is_there(name):
    module = importlib.import_module(name)
    table = getattr(module, "_MISSING", None) or module._FOREIGN_NAMES
    for foreign, sentence in table.items():
        assert foreign not in module.__all__
        for path in re.findall(r"`(trainer(?:\.\w+)+)", sentence):
            package, public = path.rsplit(".", 1)
            assert hasattr(importlib.import_module(package), public), path
        for public in re.findall(r"Instead: `([A-Z]\w+)", sentence):
            assert hasattr(module, public) or hasattr(trainer.optimizers, public), public


GIVEN = {"EmbeddingTable", "RemoteValue"}  # by other objects: nobody constructs them
CLASSES = sorted(f"{home}.{public}" for home in WITH_STUB if home.count(".") < 2 and ".core" not in home
                 for public in importlib.import_module(home).__all__
                 if inspect.isclass(getattr(importlib.import_module(home), public)))


@pytest.mark.parametrize("name", CLASSES)
def test_the_error_of_a_class_for_a_missing_argument_says_what_it_is(name):
    package, public = name.rsplit(".", 1)
    made = getattr(importlib.import_module(package), public)
    if public in GIVEN or issubclass(made, (enum.Enum, tuple, BaseException)) or (
            made.__init__ is object.__init__):
        return
    required = [parameter for parameter in inspect.signature(made.__init__).parameters.values()
                if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    is_private = any(name.startswith("_") for name in inspect.signature(made.__init__).parameters)
    if len(required) > 1 and not is_private:  # beside `self`
        with pytest.raises(TypeError, match=rf"^`{made.__name__}` missing .*'{required[1].name}'.*\. [A-Z`].*\.$"):
            made()
