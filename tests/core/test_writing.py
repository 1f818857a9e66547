"""Files that cannot be written whole are errors."""

import resource

import pytest

from trainer.core.files import new_file


def test_a_file_that_is_written_in_part_is_an_error(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="too large"), new_file(str(tmp_path / "file")) as file:
            file.write(bytes(1500))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
