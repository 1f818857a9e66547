"""The installed packages, and whether their versions are compatible.

The requirements of a distribution are read from its metadata, without importing it.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from importlib import metadata

from trainer.tools.command_line.findings import Finding, Status
from trainer.tools.command_line.known_failures import KNOWN_FAILURES

PACKAGE = "trainer-jax"
# The packages whose requirements are compared: the trainer, and the packages that compile and compute for it.
_COMPARED = (PACKAGE, "jax", "flax", "optax", "grain")
# Parts of JAX for accelerators; each works with one version of jaxlib.
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-rocm7-plugin",
            "jax-rocm7-pjrt")
_NAME = re.compile(r"[A-Za-z0-9._-]+(\[[A-Za-z0-9._, -]+\])?")
_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")
_NOT_SHOWN = ("dev", "bench")  # extras for work on the trainer itself


def versions() -> Iterator[Finding]:
    """Yields the versions of Python, the trainer and its requirements, and incompatibilities."""
    yield Finding("versions", "python", "ok", f"{platform.python_version()} on {platform.platform()}")
    required_by_trainer = [name.partition("[")[0] for name, _, extra in _requirements(PACKAGE) if extra is None]
    for name in dict.fromkeys([PACKAGE, *required_by_trainer, "jaxlib"]):
        complaints = list(_complaints(name))
        yield Finding("versions", name, "problem" if complaints else "ok",
                      ". ".join([_version(name) or "not installed", *complaints]))
    jaxlib = _version("jaxlib")
    for name in _PLUGINS:
        version = _version(name)
        if version is not None:
            fits = version == jaxlib
            yield Finding("versions", name, "ok" if fits else "problem", version if fits else (
                f"{version}, but jaxlib is {jaxlib}: JAX leaves out a plugin of another version. Install both "
                f"together: pip install -U 'trainer-jax[{'cuda13' if '13' in name else 'cuda12'}]'"))
    for each in KNOWN_FAILURES:
        first, second = _version(each.package), _version(each.beside)
        if _is_in(first, each.versions) and _is_in(second, each.other_versions):
            fix = " ".join(f"'{requirement}'" for requirement in each.fix)
            yield Finding("versions", f"{each.package} with {each.beside}", each.status,
                          f"{each.package} {first} fails with {each.beside} {second}: {each.consequence}. "
                          f"pip install {fix}")


def extras() -> Iterator[Finding]:
    """Yields, for each extra of the trainer, whether its packages are installed."""
    by_extra: dict[str, list[tuple[str, str]]] = {}
    for name, specifier, extra in _requirements(PACKAGE):
        if extra is None or extra in _NOT_SHOWN:
            continue
        needed = by_extra.setdefault(extra, [])
        needed += (each for each in _with_extras(name, specifier) if each not in needed)
    for extra, needed in sorted(by_extra.items()):
        names = list(dict.fromkeys(name for name, _ in needed))
        missing = [name for name in names if _version(name) is None]
        wrong = [f"{name} is {_version(name)}, and {specifier} is needed" for name, specifier in needed
                 if not _fits(name, specifier)]
        there = ", ".join(f"{name} {_version(name)}" for name in names if name not in missing)
        status: Status = "note" if missing else "warning" if wrong else "ok"
        install = f"pip install 'trainer-jax[{extra}]'"
        yield Finding("optional packages", extra, status, "; ".join(filter(None, [
            there, *wrong, f"not installed: {', '.join(missing)} ({install})" if missing else ""])))


def _with_extras(requirement: str, specifier: str, seen: frozenset[str] = frozenset()) -> Iterator[tuple[str, str]]:
    """Yields the name and the version of a requirement, such as "jax[cuda12]", and of all that its extras need."""
    name, _, extras = requirement.partition("[")
    yield name, specifier
    wanted = set(map(_normal, extras.rstrip("]").replace(" ", "").split(",")))
    for inner, inner_specifier, extra in _requirements(name) if extras and requirement not in seen else ():
        if extra is not None and _normal(extra) in wanted:
            yield from _with_extras(inner, inner_specifier, seen | {requirement})


def _complaints(name: str) -> Iterator[str]:
    """Yields the requirements of distributions that the installed version of a package does not meet."""
    for owner in _COMPARED:
        for required, specifier, extra in _requirements(owner):
            required = required.partition("[")[0]
            if extra is None and _normal(required) == _normal(name) and not _fits(name, specifier, missing=False):
                yield f"{owner} needs {name}{specifier}: pip install '{name}{specifier}'"


def _requirements(name: str) -> list[tuple[str, str, str | None]]:
    """Returns the name, such as "jax" or "jax[cuda12]", the version and the extra of a distribution's requirements."""
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []
    found = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        named = _NAME.match(requirement.strip())
        extra = _EXTRA.search(marker)
        if named is None or not _applies(marker, extra[1] if extra else ""):
            continue
        specifier = requirement.strip()[named.end():].strip(" ()")
        found.append((named[0], specifier.replace(" ", ""), extra[1] if extra else None))
    return found


def _applies(marker: str, extra: str) -> bool:
    if not marker.strip():
        return True
    try:
        from packaging.markers import Marker
    except ImportError:  # then only requirements whose sole condition is an extra are known to apply
        return not re.sub(_EXTRA, "", marker).strip(" ()")
    return Marker(marker).evaluate({"extra": extra})


def _fits(name: str, specifier: str, missing: bool = True) -> bool:
    """Returns whether the installed version is within a specifier; returns `missing` for a missing package."""
    version = _version(name)
    return missing if version is None else _is_in(version, specifier, unknown=True)


def _is_in(version: str | None, specifier: str, unknown: bool = False) -> bool:
    """Returns whether a version is within a specifier; returns `unknown` if that cannot be told."""
    if version is None:
        return unknown
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return unknown
    return SpecifierSet(specifier).contains(version, prereleases=True)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
