"""Extensions, found by name through the entry points of Python packaging and loaded on first use.

A package offers one in its pyproject.toml. Those of Equipoise itself are offered in the same way:

    [project.entry-points."equipoise.strategies"]
    local_sgd = "my_package.strategy:LocalSGDStrategy"
"""

import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from equipoise.errors import ConfigurationError

__all__ = ["load_extension", "names_of_extensions"]

_PACKAGE = "equipoise"
_OWN_EXTENSIONS = "equipoise.extensions."
# The folder around the package: a checkout, or a folder of installed packages.
_CHECKOUT = Path(__file__).parents[2]


def names_of_extensions(kind: str, *, missing: bool = False) -> list[str]:
    """Return the names of all extensions of a kind: those of Equipoise in their order, then those of other packages.

    Args:
        kind: The end of the group's name, such as "strategies".
        missing: Count extensions of Equipoise that were removed from this installation. Default: False.

    Example:
        >>> names_of_extensions("strategies")[:3]
        ['single_device', 'dp', 'balanced']
    """
    points_by_name = _points(kind)
    if missing:
        return list(points_by_name)
    return [name for name, points in points_by_name.items() if not _is_missing(points[0])]


def load_extension(kind: str, name: str) -> Any:
    """Import an extension and return it.

    Args:
        kind: The end of the group's name, such as "strategies".
        name: Its name.

    Raises:
        ConfigurationError: If there is none, if it cannot be imported, or if packages offer different ones.

    Example:
        >>> load_extension("strategies", "dp").__name__
        'DataParallelStrategy'
    """
    point = _point_of(kind, name)
    try:
        return point.load()
    except Exception as error:
        raise ConfigurationError(
            f"{name!r} among the {kind} cannot be loaded: the package {package_of(point)} offers {point.value}, which"
            f" fails with {type(error).__name__}: {str(error).rstrip('.')}."
        ) from error


def _point_of(kind: str, name: str) -> EntryPoint:
    """Return the entry point of an extension; see `load_extension`."""
    points = _points(kind).get(name, [])
    if not points:
        present = ", ".join(map(repr, names_of_extensions(kind)))
        raise ConfigurationError(
            f"No installed package offers {name!r} among the {kind}: there are {present or 'none'}."
        )
    # One package may be installed twice, as a wheel and as a checkout.
    objects = {point.value for point in points}
    if len(objects) > 1:
        offers = " and ".join(f"{package_of(point)} ({point.value})" for point in points)
        raise ConfigurationError(
            f"{name!r} has two meanings among the {kind}: {offers} offer it. Uninstall one of the packages, or import"
            " the object that you mean."
        )
    point = points[0]
    if _is_missing(point):
        raise ConfigurationError(
            f"{name!r} among the {kind} belongs to an extension that is missing from this installation:"
            f" {_folder_of(point)}. Install the whole package of Equipoise."
        )
    return point


def package_of(point: EntryPoint) -> str:
    """Return the name of the package that offers an extension."""
    if point.dist is None:
        return _PACKAGE
    return point.dist.name


def _is_missing(point: EntryPoint) -> bool:
    """Return True for one of Equipoise's own extensions whose folder was removed."""
    if not point.module.startswith(_OWN_EXTENSIONS):
        return False
    return not (_CHECKOUT / _folder_of(point)).is_dir()


def _folder_of(point: EntryPoint) -> Path:
    """Return the folder of one of Equipoise's own extensions, relative to that of the package."""
    return Path(*point.module.split(".")[:3])


@cache
def _points(kind: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a kind by name. A name that packages offer twice has several."""
    group = f"{_PACKAGE}.{kind}"
    points = {point.name: [point] for point in _points_in_checkout(group)}
    has_own = bool(points)

    def own_first(point: EntryPoint) -> tuple[bool, str]:
        package = package_of(point)
        return package != _PACKAGE, package

    installed = sorted(entry_points(group=group), key=own_first)
    for point in installed:
        # The metadata of an editable installation may be older than the checkout.
        if not has_own or package_of(point) != _PACKAGE:
            points.setdefault(point.name, []).append(point)
    return points


def _points_in_checkout(group: str) -> Iterator[EntryPoint]:
    """Yield Equipoise's own entry points if it runs from a checkout, which need not be installed."""
    path = _CHECKOUT / "pyproject.toml"
    if not path.is_file():
        return
    project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
    # The project of a user may hold a copy of the package.
    if project.get("name") != _PACKAGE:
        return
    points_of_group = project.get("entry-points", {}).get(group, {})
    for name, value in points_of_group.items():
        yield EntryPoint(name, value, group)
