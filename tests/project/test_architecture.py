"""The project's structure: which module may import which, and who alone may use what.

Each rule is a function from source text to violations, so that each has two tests: the project keeps it, and a small
source that breaks it is caught.
"""

import ast
import dataclasses
import graphlib
import importlib
import inspect
import re
import sys

import pytest

from tests.support import project_files

# Lowest first: a module imports only from entries before its own, and from its own package.
LAYERS = ("errors", "timing", "interrupts", "compilation_cache", "side_effects", "paths",
          "weights_file", "replica", "rng", "state",
          "compiled_step", "convolutions", "flops", "modules", "precision",
          "losses", "metrics", "optimizers", "data", "distribute", "logs", "outputs", "compiled_loss",
          "compiled_metrics", "checks", "compile_guard", "alike", "compile_options", "update_rules", "step", "phase",
          "attached_optimizer",
          "microbatches", "built_model", "compiled_model", "checkpoint", "file_kinds", "export", "saved_model",
          "model_files", "training_run", "feed", "loop", "model", "sidecar_evaluator", "estimator", "launcher_lifeline",
          "launcher_output", "launcher_job", "launcher_supervisor", "launch", "testing")
# They import nothing of the trainer, so any layer may build on them.
STANDALONE = {"callbacks": None, "models": {"flax", "jax", "numpy"}}  # -> the only third-party packages, if restricted
STANDARD_LIBRARY = sys.stdlib_module_names

COLLECTIVES = {"psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter", "ppermute", "all_to_all", "pshuffle"}
COMPILERS = {"jit", "pjit", "pmap", "shard_map", "donate_argnums", "donate_argnames"}
PICKLERS = {"pickle", "cloudpickle", "dill", "shelve", "joblib", "marshal"}
MAX_LINES = 450

MODULES = project_files.modules()


@dataclasses.dataclass(frozen=True)
class Import:
    """`from module import name`, or `import module` with no name."""

    module: str
    name: str | None = None

    @property
    def root(self) -> str:
        return self.module.partition(".")[0]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def nodes_that_run(tree: ast.AST):
    """Yields all nodes, functions' included, but for what only type checkers see."""
    yield tree
    for child in tree.orelse if is_type_checking(tree) else ast.iter_child_nodes(tree):
        yield from nodes_that_run(child)


def imports_of(source: str) -> list[Import]:
    found = []
    for node in nodes_that_run(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # A relative import would hide its target; ruff bans them, and "." is in no layer.
            module = node.module if node.level == 0 else "trainer" + "." * node.level + (node.module or "")
            found += [Import(module, alias.name) for alias in node.names]
    return found


def layer_of(module: str) -> str:
    """Returns "errors" for "trainer.core.errors" and "losses" for "trainer.losses.base"; "" for "trainer" itself."""
    return module.removeprefix("trainer").removeprefix(".").partition(".")[0]


def upward_imports(module: str, source: str) -> list[str]:
    """Returns the imports of `trainer` that do not point to a lower layer."""
    own = layer_of(module)
    if own == "":  # the package's façade re-exports from every layer
        return []
    allowed = {own, *STANDALONE, *LAYERS[:LAYERS.index(own)]} if own in LAYERS else {own}
    targets = []
    for found in imports_of(source):
        if found.root == "trainer":
            targets.append(f"{found.module}.{found.name}" if found.module == "trainer" and found.name else found.module)
    return [f"{module} imports {target}" for target in targets if layer_of(target) not in allowed]


def import_cycle(sources: dict[str, str]) -> list[str] | None:
    """Returns the modules of one import cycle, or None. An import inside a function counts: it hides a cycle."""
    graph = {}
    for module, source in sources.items():
        targets = {f"{found.module}.{found.name}" if f"{found.module}.{found.name}" in sources else found.module
                   for found in imports_of(source)}
        graph[module] = targets & sources.keys()
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def third_party_imports(source: str) -> set[str]:
    return {found.root for found in imports_of(source)} - STANDARD_LIBRARY - {"trainer"}


def imports_among(source: str, banned: set[str]) -> list[str]:
    return [found.module for found in imports_of(source) if found.root in banned]


def collectives_named(source: str) -> list[str]:
    """Returns the `lax` collectives that a source uses or imports; methods of the same name are something else."""
    found = [f"{imported.module}.{imported.name}" for imported in imports_of(source)
             if imported.root == "jax" and imported.name in COLLECTIVES]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
            base = ast.unparse(node.value)
            if base == "lax" or base.endswith(".lax"):
                found.append(f"{base}.{node.attr}")
    return found


def compilers_named(source: str) -> list[str]:
    """Returns the transformations that compile, or donate to, a function, as a source uses or imports them."""
    found = [f"{imported.module}.{imported.name}" for imported in imports_of(source)
             if imported.root in ("jax", "flax") and imported.name in COMPILERS]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in COMPILERS:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.keyword) and node.arg in COMPILERS:
            found.append(node.arg)
    return found


def undocumented(names: dict[str, object]) -> list[str]:
    """Returns the names of the classes and functions without a docstring of their own."""
    bare = []
    for name, value in names.items():
        doc = value.__doc__ or ""
        generated = inspect.isclass(value) and doc.startswith(f"{value.__name__}(")  # what @dataclass writes
        if (inspect.isclass(value) or inspect.isroutine(value)) and (not doc.strip() or generated):
            bare.append(name)
    return bare


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_module_belongs_to_a_layer(module):
    assert layer_of(module) in ("", *LAYERS, *STANDALONE)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_to_lower_layers_only(module):
    assert upward_imports(module, MODULES[module].read_text()) == []


@pytest.mark.parametrize(("module", "source"), [
    ("trainer.core.errors", "from trainer import model"),
    ("trainer.losses.base", "def late():\n    from trainer.loop.loop import Loop"),
    ("trainer.loop", "import trainer"),
    ("trainer.loop", "from . import model"),
    ("trainer.loop", "from trainer import Model"),
    ("trainer.callbacks.base", "from trainer.core.errors import unknown_name"),
    ("trainer.models.mlp", "import trainer.losses"),
])
def test_an_upward_import_is_caught(module, source):
    assert len(upward_imports(module, source)) == 1


@pytest.mark.parametrize("source", [
    "from trainer.core.errors import unknown_name",
    "from trainer.callbacks import History",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from trainer.model.model import Model",
])
def test_a_downward_import_and_one_for_type_checkers_are_allowed(source):
    assert upward_imports("trainer.loop", source) == []


def test_the_design_document_lists_the_layers_in_their_order():
    first_cells = re.findall(r"^\| (`[^|]+) \|", (project_files.ROOT / "docs" / "design.md").read_text(), re.MULTILINE)
    assert tuple(re.findall(r"`(\w+)`", " ".join(first_cells))) == LAYERS


def test_no_imports_form_a_cycle():
    assert import_cycle({module: path.read_text() for module, path in MODULES.items()}) is None


def test_a_cycle_is_caught():
    sources = {"trainer.a": "from trainer import b", "trainer.b": "def late():\n    import trainer.a"}
    assert set(import_cycle(sources)) == {"trainer.a", "trainer.b"}


@pytest.mark.parametrize("module", sorted(name for name in MODULES if STANDALONE.get(layer_of(name))))
def test_models_import_only_flax_jax_and_numpy(module):
    assert third_party_imports(MODULES[module].read_text()) <= STANDALONE[layer_of(module)]


def test_another_dependency_of_a_model_is_caught():
    assert third_party_imports("import math\nimport optax\nfrom flax import linen") == {"optax", "flax"}


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"trainer.distribute.replica.collectives"}))
def test_only_the_collectives_file_names_collectives(module):
    assert collectives_named(MODULES[module].read_text()) == []


@pytest.mark.parametrize("source", ["jax.lax.psum(x, 'replica')", "lax.all_gather(x, 'replica')",
                                    "from jax.lax import pmean", "reduce = jax.lax.pmax"])
def test_a_collective_is_caught(source):
    assert len(collectives_named(source)) == 1


def test_a_method_named_like_a_collective_is_not_one():
    assert collectives_named("get_replica_context().all_gather(value)") == []


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"trainer.compile.jit"}))
def test_only_the_compiled_step_compiles(module):
    assert compilers_named(MODULES[module].read_text()) == []


@pytest.mark.parametrize("source", ["@jax.jit\ndef f(x): pass", "functools.partial(jax.jit)", "from jax import jit",
                                    "from jax.experimental.shard_map import shard_map", "jax.shard_map(f)",
                                    "nnx.jit(f)", "compile_step(f, donate_argnums=0)"])
def test_a_compilation_is_caught(source):
    assert len(compilers_named(source)) == 1


@pytest.mark.parametrize("module", sorted(MODULES))
def test_nothing_is_unpickled(module):
    assert imports_among(MODULES[module].read_text(), PICKLERS) == []


@pytest.mark.parametrize("source", ["import pickle", "def late():\n    from cloudpickle import dumps"])
def test_pickling_is_caught(source):
    assert len(imports_among(source, PICKLERS)) == 1


@pytest.mark.parametrize("path", project_files.python_files())
def test_files_are_short(path):
    assert len((project_files.ROOT / path).read_text().splitlines()) < MAX_LINES


@pytest.mark.parametrize("module", sorted(name for name, path in MODULES.items() if path.name == "__init__.py"))
def test_everything_exported_has_a_docstring(module):
    package = importlib.import_module(module)
    assert undocumented({name: getattr(package, name) for name in getattr(package, "__all__", ())}) == []


def test_a_missing_docstring_is_caught():
    def bare(): ...

    @dataclasses.dataclass
    class Bare:
        field: int

    def documented():
        """Does nothing."""

    assert undocumented({"bare": bare, "Bare": Bare, "documented": documented, "number": 3}) == ["bare", "Bare"]
