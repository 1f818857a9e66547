"""The project's structure: which room may import which, and who alone may use what.

A room is a folder of modules. Each rule is a function from sources to violations, so that each has two tests: the
project keeps it, and a small source that breaks it is caught.
"""

import ast
import collections
import dataclasses
import fnmatch
import functools
import graphlib
import importlib
import inspect
import re
import sys

import pytest

from tests.support import project_files

# Lowest first: a module imports only from its own room and from rooms before it. The table in docs/design.md is
# compared with this list.
ROOMS = ("core/ambient", "core/updates", "core", "core/calls", "core/files", "core/categories", "core/compile",
         "core/compile/traces", "core/modules/calling", "core/modules/summary", "core/modules", "losses",
         "regularizers", "metrics", "optimizers/transforms", "optimizers",
         "data/sources", "data/sharding", "data/files", "data/preprocessing", "data",
         "distribute/cluster/description", "distribute/cluster/rendezvous", "distribute/cluster/liveness",
         "distribute/cluster",
         "distribute/placement", "distribute/replica", "distribute/strategies",
         "distribute/parameter_server/processes", "distribute/parameter_server/rows", "distribute/parameter_server",
         "distribute/experimental",
         "distribute",
         "engine/step", "engine/step/on_workers", "engine/saving/arrays", "engine/saving/checkpoint", "engine/saving",
         "callbacks/base", "callbacks/progress", "callbacks/tensorboard", "callbacks/record", "callbacks/loggers",
         "callbacks/checkpoints", "callbacks",
         "models/layers", "models/vision", "models/text", "models/generative", "models/weights", "models",
         "engine/model/core", "engine/loop", "engine/model/views", "engine/model", "engine",
         "utils/files", "utils", "datasets",
         "estimator/feature_columns/values", "estimator/feature_columns", "estimator/training",
         "estimator/heads", "estimator/canned", "estimator", "launch", "tools/report", "tools/plan",
         "tools/command_line", "tools", "testing")
FACADE = "trainer"  # re-exports from every room, each name when it is first used
# What a room may import of the trainer, where that is less than all rooms before it.
NARROW = {"callbacks": ("core", "core/ambient", "core/calls", "core/files", "core/updates", "callbacks*"),
          "models/weights": ("core", "core/calls", "core/files", "models*"),
          "models": ("core/ambient", "core/calls", "losses", "models*"), "launch": ("launch",),
          "estimator/feature_columns": ("core", "core/ambient", "core/calls", "core/categories", "core/files",
                                        "estimator/feature_columns*")}
MODELS_MAY_IMPORT = {"flax", "jax", "numpy", "h5py", "safetensors"}
# Rooms that others use through what their package exports, and not by its modules.
CLOSED = ("distribute/cluster",)
# Imports that point up, when a name is first used.
ALLOWED = {
    ("trainer.distribute", "trainer.engine.model.sidecar_evaluator"),  # `tf.distribute` has this name in this place
    ("trainer.distribute.strategies.strategy", "trainer.tools.plan"),  # `Strategy.plan` and `explain` call the tool
}
STANDARD_LIBRARY = sys.stdlib_module_names

COLLECTIVES = {"psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter", "ppermute", "all_to_all", "pshuffle",
               "pcast", "pvary"}
COMPILERS = {"jit", "pjit", "pmap", "shard_map"}
DONATIONS = {"donate_argnums", "donate_argnames"}
PICKLERS = {"pickle", "cloudpickle", "dill", "shelve", "joblib", "marshal"}
MAX_LINES = 600
MAX_FILES = 20  # of a room, its `__init__.py` apart

# With their stubs, which say what packages import when it is first used.
SOURCES = {module: project_files.source(path) for module, path in project_files.modules().items()}
PACKAGES = {module for module, path in project_files.modules().items() if path.name == "__init__.py"}


@dataclasses.dataclass(frozen=True)
class Import:
    """`from module import name`, or `import module` with no name."""

    module: str
    name: str | None = None

    @property
    def root(self) -> str:
        return self.module.partition(".")[0]

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING",
                                                                   "_typing.TYPE_CHECKING")


def nodes_that_run(tree: ast.AST):
    """Yields all nodes, functions' included, but for what only type checkers see."""
    yield tree
    for child in tree.orelse if is_type_checking(tree) else ast.iter_child_nodes(tree):
        yield from nodes_that_run(child)


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def imports_of(source: str, that_run: bool = False) -> list[Import]:
    """Returns the imports of a source; those for type checkers, too, unless only those that run are asked for."""
    found = []
    for node in nodes_that_run(parsed(source)) if that_run else ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # A relative import would hide its target; ruff bans them, and "." is in no room.
            module = node.module if node.level == 0 else "trainer" + "." * node.level + (node.module or "")
            found += [Import(module, alias.name) for alias in node.names]
    return found


def docstrings_of(tree: ast.AST) -> set[int]:
    """Returns the ids of the nodes that are docstrings."""
    return {id(node.body[0].value) for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body
            and isinstance(node.body[0], ast.Expr)}


@functools.cache
def strings_of(source: str) -> set[str]:
    """Returns the strings of a source, docstrings apart: modules that `import_module` imports are among them."""
    tree = parsed(source)
    skipped = docstrings_of(tree)
    return {node.value for node in nodes_that_run(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped}


def imported_modules(module: str, source: str, known: set[str], that_run: bool = False) -> set[str]:
    """Returns the project's modules that a source imports, now or later, by statement or by string."""
    found = {target.path if target.path in known else target.module for target in imports_of(source, that_run)
             if target.root == FACADE}
    return found | (strings_of(source) & known) - {module, FACADE}


def room_of(module: str, packages: set[str]) -> str:
    """Returns "core" for "trainer.core.errors", "data/sources" for that package itself, and "" for the façade."""
    package = module if module in packages else module.rpartition(".")[0]
    return package.removeprefix(FACADE).removeprefix(".").replace(".", "/")


def may_import(room: str, other: str) -> bool:
    if room == "" or room == other:
        return True
    if other == "" or room not in ROOMS or other not in ROOMS or ROOMS.index(other) > ROOMS.index(room):
        return False
    narrow = next((names for name, names in NARROW.items() if is_within(room, name)), None)
    return narrow is None or any(fnmatch.fnmatchcase(other, name) for name in narrow)


def is_within(room: str, outer: str) -> bool:
    return f"{room}/".startswith(f"{outer}/")


def forbidden_imports(sources: dict[str, str], packages: set[str]) -> list[str]:
    """Returns the imports that do not point to a lower room."""
    found = []
    for module, source in sources.items():
        for target in sorted(imported_modules(module, source, set(sources)) - {module}):
            if (module, target) in ALLOWED:
                continue
            # What is no module is a name of the façade, or a relative import.
            other = room_of(target, packages) if target in sources and target != FACADE else ""
            if not may_import(room_of(module, packages), other):
                found.append(f"{module} imports {target}")
    return found


def imports_past_the_door(sources: dict[str, str], packages: set[str]) -> list[str]:
    """Returns the imports of modules in closed rooms by modules of other rooms."""
    found = []
    for module, source in sources.items():
        for target in sorted(imported_modules(module, source, set(sources))):
            room = room_of(target, packages) if target in sources else ""
            closed = next((name for name in CLOSED if is_within(room, name)), None)
            door = f"{FACADE}.{closed}".replace("/", ".")
            if closed and target != door and not is_within(room_of(module, packages), closed):
                found.append(f"{module} imports {target}")
    return found


def import_cycle(sources: dict[str, str]) -> list[str] | None:
    """Returns the modules of one import cycle, or None. An import inside a function or by a string counts.

    Modules of one room may name each other's types.
    """
    graph = {module: imported_modules(module, source, set(sources), that_run=True) & sources.keys() - {module}
             for module, source in sources.items()}
    for module, target in ALLOWED:
        graph.get(module, set()).discard(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def first_imports(source: str) -> set[str]:
    """Returns the names that a source imports while it is imported itself: not in functions, nor for type checkers."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if is_type_checking(node) or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(parsed(source))
    return found


def first_import_cycle(sources: dict[str, str]) -> list[str] | None:
    """Returns a cycle of modules by what runs when one is imported, packages around it included; None without one."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        targets = set()
        for name in first_imports(source):
            parts = name.split(".")
            targets |= {known for end in range(1, len(parts) + 1) if (known := ".".join(parts[:end])) in sources}
        # What is around the module has begun before it.
        graph[module] = {target for target in targets if target != module and not module.startswith(f"{target}.")}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def third_party_imports(source: str) -> set[str]:
    return {found.root for found in imports_of(source)} - STANDARD_LIBRARY - {FACADE}


def paths_used(source: str) -> list[str]:
    """Returns the full names of all that a source uses of imported packages: "jax.lax.psum" for `l.psum` too.

    Followed are the names of imports, assignments of them to other names, and `getattr` with a constant.
    """
    tree = parsed(source)
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else (
                    alias.name.partition(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def path_of(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return bound.get(node.id)
        if isinstance(node, ast.Attribute):
            base = path_of(node.value)
            return base and f"{base}.{node.attr}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
            base, name = path_of(node.args[0]), node.args[1]
            return f"{base}.{name.value}" if base and isinstance(name, ast.Constant) else None
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and (path := path_of(node.value)):
            bound |= {target.id: path for target in node.targets if isinstance(target, ast.Name)}
    found = [path for node in ast.walk(tree) if (path := path_of(node))]
    return [*found, *(target.path for target in imports_of(source)), *(target.module for target in imports_of(source))]


def collectives_named(source: str) -> set[str]:
    """Returns what a source uses of collectives, and of `multihost_utils`, which runs them in disguise."""
    return {path for path in paths_used(source) if path.partition(".")[0] == "jax"
            and (path.rpartition(".")[2] in COLLECTIVES or "multihost_utils" in path.split("."))}


def compilers_named(source: str) -> set[str]:
    """Returns the transformations that compile, or donate to, a function, as a source uses them."""
    donations = {node.arg for node in ast.walk(parsed(source))
                 if isinstance(node, ast.keyword) and node.arg in DONATIONS}
    return donations | {path for path in paths_used(source)
                        if path.partition(".")[0] in ("jax", "flax") and path.rpartition(".")[2] in COMPILERS}


def offenders(rule, allowed: set[str] = frozenset()) -> dict[str, object]:
    """Returns what a rule finds in the project's modules, by module."""
    return {module: found for module, source in SOURCES.items() if module not in allowed and (found := rule(source))}


def undocumented(names: dict[str, object]) -> list[str]:
    """Returns the names of the classes and functions without a docstring of their own."""
    bare = []
    for name, value in names.items():
        doc = value.__doc__ or ""
        generated = inspect.isclass(value) and doc.startswith(f"{value.__name__}(")  # what @dataclass writes
        if (inspect.isclass(value) or inspect.isroutine(value)) and (not doc.strip() or generated):
            bare.append(name)
    return bare


def test_every_module_is_in_a_room():
    assert {room_of(module, PACKAGES) for module in SOURCES} == {"", *ROOMS}, "give the room its place in ROOMS"


@pytest.mark.exhaustive  # here; `make lint` runs all of this file
def test_imports_point_to_lower_rooms_only():
    assert forbidden_imports(SOURCES, PACKAGES) == []


@pytest.mark.sampled
@pytest.mark.parametrize(("module", "source"), [
    ("trainer.core.errors", "from trainer.engine.loop import loop"),
    ("trainer.losses.base", "def late():\n    from trainer.engine.loop.loop import fit"),
    ("trainer.losses.base", "import importlib\nimportlib.import_module('trainer.engine.loop.loop')"),
    ("trainer.losses", "_HOMES = {'fit': 'trainer.engine.loop.loop'}"),
    ("trainer.losses.base", "import typing\nif typing.TYPE_CHECKING:\n    from trainer.engine.loop.loop import fit"),
    ("trainer.engine.loop.loop", "import trainer"),
    ("trainer.engine.loop.loop", "from . import other"),
    ("trainer.engine.loop.loop", "from trainer import Model"),
    ("trainer.callbacks.csv_logger", "from trainer.losses import base"),
    ("trainer.callbacks.csv_logger", "from trainer.core.compile import jit"),
    ("trainer.core.errors", "from trainer.core.compile import jit"),
    ("trainer.models.mlp", "import trainer.core.errors"),
    ("trainer.launch.command", "from trainer.core import errors"),
    ("trainer.estimator.feature_columns.numeric", "from trainer.losses import base"),
])
def test_an_upward_import_is_caught(module, source):
    assert len(forbidden_imports({**SOURCES, module: source}, PACKAGES)) == 1


@pytest.mark.parametrize("source", [
    "from trainer.core.errors import unknown_name",
    "from trainer.callbacks import History",
    '"""As `trainer.engine.model.model` does."""',
])
def test_a_downward_import_is_allowed(source):
    assert forbidden_imports({**SOURCES, "trainer.engine.loop.loop": source}, PACKAGES) == []


def test_a_closed_room_is_used_through_what_it_exports():
    assert imports_past_the_door(SOURCES, PACKAGES) == []


@pytest.mark.parametrize("source", ["from trainer.distribute.cluster.membership import join_cluster",
                                    "from trainer.distribute.cluster import membership",
                                    "def late():\n    import trainer.distribute.cluster.liveness.watchdog"])
def test_an_import_past_the_door_of_a_closed_room_is_caught(source):
    assert len(imports_past_the_door({**SOURCES, "trainer.engine.loop.loop": source}, PACKAGES)) == 1


def test_what_a_package_imports_when_it_is_first_used_is_followed():
    followed = imported_modules("trainer.distribute", SOURCES["trainer.distribute"], set(SOURCES))
    assert {"trainer.distribute.strategies.mirrored", "trainer.engine.model.sidecar_evaluator"} <= followed


def test_the_design_document_lists_the_rooms_in_their_order():
    first_cells = re.findall(r"^\| (`[^|]+) \|", (project_files.ROOT / "docs" / "design.md").read_text(), re.MULTILINE)
    listed = tuple(re.findall(r"`([\w/]+)`", " ".join(first_cells)))
    assert listed == ROOMS, "give the room the same place in the table of docs/design.md as in ROOMS"


@pytest.mark.slow
def test_no_imports_form_a_cycle():
    assert import_cycle(SOURCES) is None


@pytest.mark.parametrize("late", ["def late():\n    import trainer.a", "load('trainer.a')"])
def test_a_cycle_is_caught(late):
    assert set(import_cycle({"trainer.a": "from trainer import b", "trainer.b": late})) == {"trainer.a", "trainer.b"}


def test_any_module_can_be_imported_first():
    assert first_import_cycle({module: path.read_text() for module, path in project_files.modules().items()}) is None


def test_a_cycle_through_a_package_is_caught():
    sources = {"trainer.a": "from trainer.b.core import x", "trainer.b": "from trainer.b.model import Model",
               "trainer.b.model": "from trainer import a", "trainer.b.core": ""}
    assert first_import_cycle(sources) is not None
    assert first_import_cycle({**sources, "trainer.b": "def late():\n    from trainer.b.model import Model"}) is None


def test_rooms_are_small_and_say_what_they_own():
    files = collections.Counter(room_of(module, PACKAGES) for module in SOURCES if module not in PACKAGES)
    assert {room: count for room, count in files.items() if count > MAX_FILES} == {}
    silent = [package for package in PACKAGES if not ast.get_docstring(ast.parse(SOURCES[package]))]
    assert silent == [], "say in the docstring of `__init__.py` what the room owns"


def test_the_packages_listing_explains_itself():
    entries = [path.name for path in (project_files.ROOT / "trainer").iterdir() if path.name != "__pycache__"]
    assert len(entries) <= 20, f"put the room into a folder of {sorted(entries)}"


def test_models_import_only_flax_jax_numpy_and_what_reads_files():
    assert offenders(lambda source: third_party_imports(source) - MODELS_MAY_IMPORT,
                     {module for module in SOURCES if room_of(module, PACKAGES).partition("/")[0] != "models"}) == {}


def test_another_dependency_of_a_model_is_caught():
    assert third_party_imports("import math\nimport optax\nfrom flax import linen") == {"optax", "flax"}


@pytest.mark.slow
def test_only_the_collectives_file_names_collectives():
    found = offenders(collectives_named, {"trainer.distribute.replica.collectives"})
    # It asks JAX's coordination service, and runs nothing on the devices.
    sync_point = "jax.experimental.multihost_utils.reached_preemption_sync_point"
    found_there = found.pop("trainer.distribute.cluster.preemption")
    assert {path for path in found_there if not sync_point.startswith(path)} == set()
    assert found == {}


@pytest.mark.parametrize("source", [
    "import jax\njax.lax.psum(x, 'replica')", "from jax import lax\nlax.all_gather(x, 'replica')",
    "from jax.lax import pmean", "import jax\nreduce = jax.lax.pmax", "from jax import lax as l\nl.psum(x, 'replica')",
    "import jax\nl = jax.lax\nl.psum(x, 'replica')", "import jax.lax as l\ngetattr(l, 'psum')(x, 'replica')",
    "from jax.experimental import multihost_utils", "import jax\njax.experimental.multihost_utils.sync_global_devices",
])
def test_a_collective_is_caught(source):
    assert collectives_named(source)


def test_a_method_named_like_a_collective_is_not_one():
    assert collectives_named("get_replica_context().all_gather(value)") == set()


@pytest.mark.slow
def test_only_one_file_of_the_trainer_compiles():
    # Models know nothing of the trainer, and work without it.
    assert offenders(compilers_named, {"trainer.core.compile.jit", "trainer.models.text.generation"}) == {}


@pytest.mark.parametrize("source", [
    "import jax\n@jax.jit\ndef f(x): pass", "import functools, jax\nfunctools.partial(jax.jit)", "from jax import jit",
    "from jax.experimental.shard_map import shard_map", "import jax as j\nj.shard_map(f)",
    "from flax import nnx\nnnx.jit(f)", "compile_step(f, donate_argnums=0)"])
def test_a_compilation_is_caught(source):
    assert compilers_named(source)


@pytest.mark.slow
def test_nothing_is_unpickled_but_what_processes_of_one_cluster_send_and_plain_data():
    # The second reads arrays of Keras's data sets, by an `Unpickler` that imports and calls nothing of a stream's.
    allowed = {"trainer.distribute.parameter_server.processes.wire", "trainer.utils.files.object_stream"}
    assert offenders(lambda source: {found.module for found in imports_of(source)} & PICKLERS, allowed) == {}


@pytest.mark.parametrize("source", ["import pickle", "def late():\n    from cloudpickle import dumps"])
def test_pickling_is_caught(source):
    assert {found.root for found in imports_of(source)} & PICKLERS


def test_files_are_short():
    lengths = {path: len((project_files.ROOT / path).read_text().splitlines()) for path in project_files.python_files()}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def test_everything_exported_has_a_docstring():
    found = {}
    for module in PACKAGES:
        package = importlib.import_module(module)
        found[module] = undocumented({name: getattr(package, name) for name in getattr(package, "__all__", ())})
    assert {module: names for module, names in found.items() if names} == {}


def test_a_missing_docstring_is_caught():
    def bare(): ...

    @dataclasses.dataclass
    class Bare:
        field: int

    def documented():
        """Does nothing."""

    assert undocumented({"bare": bare, "Bare": Bare, "documented": documented, "number": 3}) == ["bare", "Bare"]
