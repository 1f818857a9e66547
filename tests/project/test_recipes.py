"""CONTRIBUTING's recipes: each loss, metric, callback, strategy and data source is exported, documented and tested."""

import ast
import importlib
import inspect

import pytest

from tests.support import pages, project_files
from tests.support.feeds import FEEDS
from tests.support.strategy_cases import SEVERAL_PROCESSES, STRATEGIES
from trainer import callbacks, distribute, losses, metrics
from trainer.data.sources.sources import Source
from trainer.losses import registry as loss_registry
from trainer.metrics import registry as metric_registry

# The base class and the package of each kind, and the classes that users do not list: bases of others, and adapters.
KINDS = {
    "loss": (losses.Loss, losses, {"FunctionLoss", "BuiltinLoss", "Crossentropy", "DenseCrossentropy", "Overlap"}),
    "metric": (metrics.Metric, metrics, {
        "OneHotAccuracy", "IndexAccuracy", "AdaptedMetric", "MergedMetric", "UpdatedMetric", "WelfordMetric",
        "ConfusionMetric", "CountMetric", "Correlation", "OperatingPointMetric", "WeightedMean"}),
    "callback": (callbacks.Callback, callbacks, {
        "KerasCallback", "LateLogsCallback", "TrainBatchCallback", "PeriodicSaves"}),
    "strategy": (distribute.Strategy, distribute, {"Strategy", "ShardedStrategy", "WorkerStrategy"}),
}
# Wrappers of losses and metrics, which are made of others.
UNREGISTERED = {"Loss", "Metric", "LossMetric", "MeanMetricWrapper"}
# Sources that several processes or files make, and a template of batches, have tests of their own.
SOURCES_ELSEWHERE = {"RowSource", "ShardedGrainSource", "JoinedSource", "SampleSource"}


def public_classes(package):
    """Returns the classes that the modules of a package define, but for private classes."""
    return {cls for module in project_files.modules() if module.startswith(f"{package}.")
            for name, cls in vars(importlib.import_module(module)).items()
            if inspect.isclass(cls) and cls.__module__ == module and not name.startswith("_")}


def sorted_by_name(classes):
    return sorted(classes, key=lambda cls: cls.__name__)


OF_KIND = {kind: sorted_by_name(cls for cls in public_classes(package.__name__)
                                if issubclass(cls, base) and cls.__name__ not in internal)
           for kind, (base, package, internal) in KINDS.items()}
METHODS = [name for name, value in vars(Source).items() if inspect.isfunction(value) and not name.startswith("_")]
SOURCES = sorted_by_name(cls for cls in public_classes("trainer.data") if cls is not Source
                         and all(hasattr(cls, method) for method in METHODS))


@pytest.mark.parametrize(("kind", "cls"), [(kind, cls) for kind, classes in OF_KIND.items() for cls in classes])
def test_each_is_exported_and_documented_with_an_example(kind, cls):
    package = KINDS[kind][1]
    stub = f"{package.__name__.replace('.', '/')}/__init__.pyi"
    assert getattr(package, cls.__name__, None) is cls, f"export it from {stub}"
    assert ">>>" in (cls.__doc__ or ""), "give its docstring an example"


@pytest.mark.parametrize(("kind", "registry"), [("loss", loss_registry), ("metric", metric_registry)])
def test_losses_and_metrics_have_names_for_compile(kind, registry):
    missing = {cls.__name__ for cls in OF_KIND[kind]} - UNREGISTERED - {cls.__name__ for cls in registry.CLASSES}
    assert not missing, f"add them to CLASSES of {registry.__name__}"


def test_the_function_of_a_loss_is_exported():
    missing = {cls.function.__name__ for cls in loss_registry.CLASSES} - set(losses.__all__)
    assert not missing, "export them from trainer/losses/__init__.pyi"


def test_callbacks_are_tested():
    used = {getattr(node, "id", getattr(node, "attr", None))  # an import is no use
            for path in (project_files.ROOT / "tests" / "callbacks").rglob("test_*.py")
            for node in ast.walk(ast.parse(path.read_text()))}
    assert [cls.__name__ for cls in OF_KIND["callback"] if cls.__name__ not in used] == [], "test it in tests/callbacks"


def test_strategies_are_compared_with_one_device_and_listed():
    tried = {type(make()).__name__ for make in STRATEGIES.values()} | {
        make.__name__ for make in SEVERAL_PROCESSES.values()} | {"ParameterServerStrategy"}  # has tests of its own
    missing = {cls.__name__ for cls in OF_KIND["strategy"]} - tried
    assert not missing, "add them to STRATEGIES of tests/support/strategy_cases.py"
    table = pages.read("docs/distributed.md")
    unlisted = [cls.__name__ for cls in OF_KIND["strategy"] if f"\n| `{cls.__name__}` |" not in table]
    assert unlisted == [], "add them to the table of docs/distributed.md"


def test_sources_are_read_and_resumed_by_the_tests_of_all_sources():
    missing = {cls.__name__ for cls in SOURCES} - {type(build()).__name__ for build, *_ in FEEDS.values()}
    assert missing == SOURCES_ELSEWHERE, "add them to FEEDS of tests/support/feeds.py"


def test_all_kinds_are_found():
    found = {cls.__name__ for classes in OF_KIND.values() for cls in classes} | {cls.__name__ for cls in SOURCES}
    assert found >= {"Huber", "CTC", "AUC", "R2Score", "EarlyStopping", "ModelCheckpoint", "LogTo", "TensorBoard",
                     "MirroredStrategy", "ParameterServerStrategy", "DatasetSource", "ParallelSource"}
