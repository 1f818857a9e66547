"""Every module and every name of the reference is imported by its documented path, in each form of `import`."""

import importlib
import inspect

import pytest

from tests.support import project_files


@pytest.fixture(scope="module")
def reference():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(project_files.ROOT / "docs"))
        yield importlib.import_module("site_pages.reference")


def test_the_modules_and_names_of_the_reference_are_imported_as_documented(reference):
    listed = reference.public_names()
    assert len(listed) > 15 and "trainer.data.augmentation" in listed
    for module, names in listed.items():
        scope = {}
        exec(f"import {module}\nimport {module} as found", scope)
        assert inspect.ismodule(scope["found"]) and scope["found"] is reference.named(module), module
        exec(f"from {module} import {', '.join(names)}", scope)
        for name in names:
            assert scope[name] is reference.named(f"{module}.{name}"), (module, name)


def test_modules_are_imported_from_their_packages(reference):
    for module in reference.public_names():
        package, _, name = module.rpartition(".")
        if package:
            scope = {}
            exec(f"from {package} import {name}", scope)
            assert scope[name] is importlib.import_module(module), module
