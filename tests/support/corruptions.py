"""Random damage to the files of checkpoints, and disks that cannot be written.

Owns the damage, and the list of files that then differ. Knows nothing of their meaning, nor of the trainer.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator

Path = pathlib.Path
Contents = dict[str, bytes]  # of the files of a folder, by path below it

NOBODY = 65534  # a user whom modes of files keep out, unlike root


def contents_of(folder: Path) -> Contents:
    """Returns the bytes of all files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def differing(present: Contents, original: Contents) -> set[str]:
    """Returns which files of the original are missing or have other bytes."""
    return {name for name, content in original.items() if present.get(name) != content}


# --- one checkpoint: each changes at least one file -------------------------------------------------------------------


def _a_file(rng: random.Random, folder: Path) -> Path:
    return folder / rng.choice(sorted(name for name, content in contents_of(folder).items() if content))


def _cut_short(rng: random.Random, folder: Path) -> None:
    path = _a_file(rng, folder)
    os.truncate(path, rng.randrange(path.stat().st_size))


def _change(rng: random.Random, folder: Path, change: Callable[[bytearray, int], None]) -> None:
    path = _a_file(rng, folder)
    content = bytearray(path.read_bytes())
    change(content, rng.randrange(len(content)))
    path.write_bytes(content)


def _flip_a_bit(rng: random.Random, folder: Path) -> None:
    def flip(content: bytearray, position: int) -> None:
        content[position] ^= 1 << rng.randrange(8)

    _change(rng, folder, flip)


def _change_a_byte(rng: random.Random, folder: Path) -> None:
    def change(content: bytearray, position: int) -> None:
        content[position] = (content[position] + rng.randrange(1, 256)) % 256

    _change(rng, folder, change)


def _zero_the_end(rng: random.Random, folder: Path) -> None:
    """As after a power failure: the length is on the disk, the bytes are not."""
    path = folder / rng.choice(sorted(name for name, content in contents_of(folder).items() if content.strip(b"\0")))
    content = path.read_bytes()
    kept = rng.randrange(len(content.rstrip(b"\0")))
    path.write_bytes(content[:kept] + bytes(len(content) - kept))


def _append(rng: random.Random, folder: Path) -> None:
    with open(_a_file(rng, folder), "ab") as file:
        file.write(rng.randbytes(rng.choice((1, 7, 4096))))


def _delete_a_file(rng: random.Random, folder: Path) -> None:
    _a_file(rng, folder).unlink()


def _empty_a_file(rng: random.Random, folder: Path) -> None:
    os.truncate(_a_file(rng, folder), 0)


def _replace_a_file_by_a_folder(rng: random.Random, folder: Path) -> None:
    path = _a_file(rng, folder)
    path.unlink()
    path.mkdir()


def _folders_with_files(folder: Path) -> list[Path]:
    return sorted({parent for name in contents_of(folder) for parent in (folder / name).parents
                   if parent.is_relative_to(folder)})


def _empty_a_folder(rng: random.Random, folder: Path) -> None:
    emptied = rng.choice(_folders_with_files(folder))
    shutil.rmtree(emptied)
    emptied.mkdir()


def _delete_a_sub_folder(rng: random.Random, folder: Path) -> None:
    shutil.rmtree(rng.choice([found for found in _folders_with_files(folder) if found != folder]))


def _swap_two_files(rng: random.Random, folder: Path) -> None:
    contents = contents_of(folder)
    names = sorted(contents)
    first, second = rng.choice([(one, other) for one in names for other in names if contents[one] != contents[other]])
    (folder / first).write_bytes(contents[second])
    (folder / second).write_bytes(contents[first])


# --- two checkpoints --------------------------------------------------------------------------------------------------


def _common(first: Path, second: Path) -> list[str]:
    """Returns the files and folders that both checkpoints have with different bytes."""
    one, other = contents_of(first), contents_of(second)
    files = [name for name in one.keys() & other.keys() if one[name] != other[name]]
    folders = {str(parent) for name in files for parent in pathlib.PurePath(name).parents if str(parent) != "."}
    return sorted([*files, *folders])


def _take_from_the_other(rng: random.Random, newest: Path, older: Path) -> None:
    source, target = rng.choice(((newest, older), (older, newest)))
    name = rng.choice(_common(newest, older))
    if (source / name).is_dir():
        shutil.rmtree(target / name)
        shutil.copytree(source / name, target / name)
    else:
        shutil.copyfile(source / name, target / name)


def _swap_between(rng: random.Random, newest: Path, older: Path) -> None:
    name = rng.choice(_common(newest, older))
    _exchange(newest / name, older / name)


def _exchange_names(rng: random.Random, newest: Path, older: Path) -> None:
    _exchange(newest, older)


def _remove_one(rng: random.Random, newest: Path, older: Path) -> None:
    shutil.rmtree(rng.choice((newest, older)))


def _exchange(first: Path, second: Path) -> None:
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


OF_ONE: dict[str, Callable[[random.Random, Path], None]] = {
    "a file cut short": _cut_short, "a bit flipped": _flip_a_bit, "a byte changed": _change_a_byte,
    "a file's end zeroed": _zero_the_end, "bytes appended": _append, "a file deleted": _delete_a_file,
    "a file emptied": _empty_a_file, "a file replaced by a folder": _replace_a_file_by_a_folder,
    "a folder emptied": _empty_a_folder, "a sub-folder deleted": _delete_a_sub_folder,
    "two files swapped": _swap_two_files}
OF_TWO: dict[str, Callable[[random.Random, Path, Path], None]] = {
    "a part taken from the other checkpoint": _take_from_the_other, "a part swapped between checkpoints": _swap_between,
    "names of the checkpoints exchanged": _exchange_names, "a checkpoint removed": _remove_one}
KINDS = (*OF_ONE, *OF_TWO)


def damage(kind: str, rng: random.Random, newest: Path, older: Path) -> str:
    """Damages the newest of two checkpoints, the older, or both; returns which.

    Args:
      kind: element of `KINDS`.
      rng: decides where.
      newest: a checkpoint's folder.
      older: the other checkpoint's folder.
    """
    if kind in OF_TWO:
        OF_TWO[kind](rng, newest, older)
        return "between both"
    where = rng.choice(("newest", "newest", "older", "both"))
    for name, folder in (("newest", newest), ("older", older)):
        if where in (name, "both"):
            OF_ONE[kind](rng, folder)
    return where


# --- disks ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_long_files(folder: Path, size: int) -> Iterator[Path]:
    """Lets every write of this process beyond so many bytes of a file fail; yields the folder."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield folder
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """Keeps this process, also root's, from writing into a folder or one below it; yields the folder."""
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(0o555)
    as_root = os.geteuid() == 0
    if as_root:
        os.seteuid(NOBODY)
    try:
        yield folder
    finally:
        if as_root:
            os.seteuid(0)
        for path in folders:
            if path.exists():
                path.chmod(0o755)


@contextlib.contextmanager
def on_a_small_disk(folder: Path, spare_bytes: int) -> Iterator[Path]:
    """Moves a folder to a file system that has so many bytes left, and back at the end; yields where it is. For root.

    Raises:
      PermissionError: if this process may not mount.
    """
    disk = folder.with_name("disk")
    disk.mkdir()
    pages = sum(len(content) // 4096 + 1 for content in contents_of(folder).values())
    command = ["mount", "-t", "tmpfs", "-o", f"size={4096 * pages + spare_bytes}", "tmpfs", disk]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        raise PermissionError(mounted.stderr)
    try:
        shutil.copytree(folder, disk / folder.name)
        try:
            yield disk / folder.name
        finally:
            shutil.rmtree(folder)
            if (disk / folder.name).exists():
                shutil.copytree(disk / folder.name, folder)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
