"""The tree of tests mirrors the rooms of the code, and the two test commands together run every case."""

import re

import pytest

from tests.support import project_files

FOLDERS = {path.name for path in (project_files.ROOT / "tests").iterdir() if path.is_dir() and path.name[0] not in "._"}
# What XLA compiles for GPUs, the project as a whole, numbers to compare with, and helpers.
OTHERS = {"gpu_programs", "project", "reference", "support"}


def test_the_folders_of_tests_are_those_of_rooms_and_every_room_has_one():
    package = project_files.ROOT / "trainer"
    rooms = {path.parent.relative_to(package).parts for path in package.rglob("*/__init__.py")} - {()}
    misnamed = FOLDERS - OTHERS - {room[-1] for room in rooms}
    assert misnamed == set(), "name a folder of tests after a room of trainer/"

    def is_tested(room):
        inner = [other for other in rooms if other[:-1] == room]
        return bool(FOLDERS & set(room)) or (bool(inner) and all(map(is_tested, inner)))

    untested = sorted(room for room in rooms if not is_tested(room))
    assert untested == [], "put the room's tests into tests/, in a folder with its name"


def test_every_test_file_lies_in_a_folder_and_is_found_by_its_name():
    tests = project_files.ROOT / "tests"
    with_tests = {str(path.relative_to(tests)) for path in tests.rglob("*.py")
                  if re.search(r"^def test_", path.read_text(), re.MULTILINE)}
    assert [name for name in with_tests if not re.fullmatch(r"\w+/test_\w+\.py", name)] == []


@pytest.mark.parametrize("command", ["test", "test-rest"])
def test_the_commands_divide_the_cases_by_one_expression(command):
    makefile = (project_files.ROOT / "Makefile").read_text()
    assert re.search(r"^rest := \(slow or processes\) and not smoke and not exhaustive$", makefile, re.MULTILINE)
    arguments = {"test": '-m "not exhaustive and not ($(rest))"',
                 "test-rest": '-m "$(rest)" $(if $(PART),--part $(PART))'}[command]
    assert f'{command}: $(VENV)/.dev\n\t@$(pytest) {arguments} $(TESTS)' in makefile
