"""The floors of the package: who imports whom, in one direction, without circles, and how large folders are."""

import re
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.imports import imports
from tests.support.sources import FILES, PACKAGE, module_name, relative

# The floors, from the ground up. A module imports what stands on lower lines, and what its own line names.
FLOORS = [
    ["errors", "notices", "formats", "interleave", "to_device", "tree"],
    ["interop", "validation", "names"],
    ["precision"],
    ["memory", "safe_loading", "tables"],
    ["parallel"],
    ["callbacks"],
    ["strategies"],
    ["trainer"],
    ["conf", "app"],
    ["__main__"],
    ["extensions"],
]
DESIGN = (Path(__file__).parents[1] / "docs" / "design.md").read_text(encoding="utf-8")
MOST_FILES = 9  # in a folder, `__init__.py` left out
MOST_SUBFOLDERS = 14
FEWEST_ENTRIES = 2
# The files that name the Trainer: those that offer it.
NAMING_THE_TRAINER = {
    "__init__.py",
    "trainer/__init__.py",
    "trainer/cli_trainer.py",
}


# Comparisons for extensions, beside those of the core.
FOR_EXTENSIONS_ALONE = {"parallel/equality.py"}

# Which extension imports which others. All of them import the core.
EDGES_BETWEEN_EXTENSIONS: dict[str, set[str]] = {
    "common": set(),
    "comparison": {"common", "pipeline", "planning", "report"},
    "compiled": {"common"},
    "efficiency": {"report"},
    "ensemble": set(),
    "equality": set(),
    "export": set(),
    "fsdp": {"common", "report"},
    "hogwild": set(),
    "leaks": set(),
    "logged_samples": {"report"},
    "pipeline": {"common"},
    "planning": {"common", "leaks", "quantization"},
    "pool": set(),
    "quantization": {"common"},
    "ray": set(),
    "report": {"common"},
    "runs": {"common", "report"},
    "savers": set(),
    "timing": {"common", "report"},
    "tokens": set(),
    "tuning": {"common", "fsdp", "pipeline", "planning"},
    "verification": {"common", "tuning"},
    "virtual": set(),
}


MODULES = {module_name(path): path for path in FILES}


def is_facade(path: Path) -> bool:
    """Tell whether a file only offers the names of others."""
    return path.name == "__init__.py"


def floor_of(path: Path) -> int:
    """Return the floor of a file; the package as a whole stands on that of its highest public names."""
    if path == PACKAGE / "__init__.py":
        return next(number for number, names in enumerate(FLOORS) if "trainer" in names)
    top = path.relative_to(PACKAGE).with_suffix("").parts[0]
    return next(number for number, names in enumerate(FLOORS) if top in names)


def folder_of(path: Path) -> str:
    """Return the folder of a file; of a file beside the folders, the file itself."""
    folder = path.parent.relative_to(PACKAGE).as_posix()
    return path.stem if folder == "." else folder


def extension_of(path: Path) -> str | None:
    """Return the name of the extension to which a file belongs; None for the core."""
    parts = path.relative_to(PACKAGE).parts
    return parts[1] if parts[0] == "extensions" and len(parts) > 2 else None


@cache
def imported_files(path: Path, *, typing: bool) -> set[Path]:
    """Return the files of ours that a file imports.

    Args:
        path: The file.
        typing: Whether imports for type checkers count. Default: they do not.
    """
    found = ((module, f"{module}.{name}") for module, name, _ in imports(path, typing=typing))
    files = (MODULES.get(whole) or MODULES.get(module) for module, whole in found)
    return {file for file in files if file is not None}


def arrows(*, typing: bool) -> dict[Path, set[Path]]:
    """Return the imports of each file but facades, which import from above by nature."""
    return {path: imported_files(path, typing=typing) for path in FILES if not is_facade(path)}


@pytest.mark.whole_package
def test_every_file_stands_on_a_floor() -> None:
    named = {name for names in FLOORS for name in names}
    assert {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in FILES} == {*named, "__init__"}


@pytest.mark.parametrize("typing", [False, True])
def test_imports_point_down(typing: bool) -> None:
    """Also those for type checkers: what must be named from below belongs below."""
    wrong = []
    for path, targets in arrows(typing=typing).items():
        for target in targets:
            same_wing = path.relative_to(PACKAGE).parts[0] == target.relative_to(PACKAGE).parts[0]
            if not same_wing and floor_of(target) >= floor_of(path):
                wrong.append(f"{relative(path)} imports {relative(target)}")
    assert not wrong, "\n".join(wrong)


def test_no_part_of_a_run_names_the_trainer() -> None:
    """The parts share the state of a run, so each can be read and tested without the trainer."""
    trainer = PACKAGE / "trainer" / "trainer.py"
    naming = {relative(path) for path in FILES if trainer in imported_files(path, typing=True)}
    assert naming <= NAMING_THE_TRAINER


@pytest.mark.parametrize(
    ("of", "typing"),
    [(relative, False), (relative, True), (folder_of, False)],
    ids=["files", "files for type checkers", "folders"],
)
def test_imports_have_no_circles(of: Callable[[Path], str], typing: bool) -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for path, targets in arrows(typing=typing).items():
        graph[of(path)] |= {of(target) for target in targets}
        if of is folder_of:
            graph[of(path)].discard(of(path))
    # Its error names the nodes of a circle.
    TopologicalSorter(graph).prepare()


def test_a_folder_can_be_taken_in_at_a_glance() -> None:
    files: dict[str, int] = defaultdict(int)
    subfolders: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        folder = path.parent
        files[folder.relative_to(PACKAGE).as_posix()] += not is_facade(path)
        if folder != PACKAGE:
            subfolders[folder.parent.relative_to(PACKAGE).as_posix()].add(folder.name)
    assert not {folder: count for folder, count in files.items() if count > MOST_FILES}
    # There may be any number of extensions: the table in docs/design.md lists them.
    subfolders_elsewhere = {folder: names for folder, names in subfolders.items() if folder != "extensions"}
    assert not {folder: names for folder, names in subfolders_elsewhere.items() if len(names) > MOST_SUBFOLDERS}
    alone = {folder for folder, count in files.items() if count + len(subfolders[folder]) < FEWEST_ENTRIES}
    assert alone == {"conf"}  # its other files are YAML


@pytest.mark.whole_package
def test_extensions_import_each_other_only_as_listed_and_without_circles() -> None:
    edges: dict[str, set[str]] = {name: set() for name in EDGES_BETWEEN_EXTENSIONS}
    for path, targets in arrows(typing=True).items():
        name = extension_of(path)
        if name is not None:
            others = {extension_of(target) for target in targets} - {name, None}
            edges.setdefault(name, set()).update(str(other) for other in others)
    assert edges == EDGES_BETWEEN_EXTENSIONS
    TopologicalSorter(edges).prepare()


@pytest.mark.whole_package
def test_the_core_has_what_it_uses() -> None:
    """The core holds no file that extensions alone use."""
    used_by: dict[bool, set[Path]] = {True: set(), False: set()}
    for path in FILES:
        used_by[extension_of(path) is None] |= imported_files(path, typing=True)
    for_extensions = used_by[False] - used_by[True]
    assert {relative(path) for path in for_extensions if extension_of(path) is None} <= FOR_EXTENSIONS_ALONE


def test_the_design_shows_the_same_edges() -> None:
    rows = [
        line.split("|")[1:-1] for line in DESIGN.partition("| Extension |")[2].partition("\n\n")[0].splitlines()[2:]
    ]
    shown = {row[0].strip(" `"): set(row[-1].strip().replace("none", "").split(", ")) - {""} for row in rows}
    assert shown == EDGES_BETWEEN_EXTENSIONS


def test_the_design_draws_the_same_house() -> None:
    floors: dict[int, set[str]] = defaultdict(set)
    folders = set()
    wing = ""
    drawing = DESIGN.partition("```text\n")[2].partition("```")[0]
    for floor, names in re.findall(r"^ *(\d*) +(\S+(?:, \S+)*)  ", drawing, re.MULTILINE):
        for name in names.split(", "):
            if floor:
                wing = name
                floors[int(floor)].add(name.rstrip("/").removesuffix(".py"))
            else:
                folders.add(f"{wing}{name}".rstrip("/"))
    assert [floors[number] for number in sorted(floors)] == [set(names) for names in FLOORS]
    core = (path.parent.relative_to(PACKAGE) for path in FILES if path.name == "__init__.py")
    assert folders == {
        folder.as_posix() for folder in core if len(folder.parts) == 2 and folder.parts[0] != "extensions"
    }
