"""Other people's private names, and what every module declares."""

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import equipoise
from tests.support.imports import imports, is_for_typing
from tests.support.sources import FILES, PACKAGE, holds_private_names, module_name, nodes_of, relative, tree_of

FOREIGN = ("torch", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics")

OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}  # public; the underscore keeps them apart from fields


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


APP = {"__main__", "app", "conf"}
# Extensions of the command.
COMMANDS = ("extensions/pool/", "extensions/ray/", "extensions/comparison/", "extensions/planning/command/")


def test_only_the_application_knows_hydra() -> None:
    for path in FILES:
        if layer_of(path) in APP or relative(path).startswith(COMMANDS):
            continue
        for module, _, in_function in imports(path, typing=True):
            package = module.partition(".")[0]
            assert package != "hydra", relative(path)
            if package == "omegaconf":
                assert relative(path) == "safe_loading/allowed_names.py", relative(path)
                assert in_function, f"{relative(path)} imports {module} before it is needed."


# Private names


def is_private(name: str) -> bool:
    dunder = name.startswith("__") and name.endswith("__")
    return name.startswith("_") and name != "_" and not dunder and name not in OF_NAMED_TUPLES


def bound_by_foreign_imports(path: Path) -> set[str]:
    """The names that stand for something of torch, Lightning or torchmetrics."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            chosen = [alias for alias in node.names if alias.name.partition(".")[0] in FOREIGN]
            found |= {alias.asname or alias.name.partition(".")[0] for alias in chosen}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in FOREIGN:
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def root_of(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


@cache
def defined_in(path: Path) -> set[str]:
    """The names that a file gives to something of its own."""
    found = set()
    for child in nodes_of(path):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(child.name)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            found.add(child.id)
        elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store) and root_of(child) == "self":
            found.add(child.attr)
        elif isinstance(child, ast.Assign) and any("__slots__" in ast.unparse(target) for target in child.targets):
            found |= {str(part.value) for part in ast.walk(child.value) if isinstance(part, ast.Constant)}
    return found


def accessed_private_names(path: Path) -> Iterator[tuple[int, str, str | None]]:
    """Line, name, and what it is taken from, for `x._name` and for `getattr(x, "_name")` and its like."""
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.lineno, node.attr, root_of(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            if isinstance(name, str) and is_private(name):
                yield node.lineno, name, root_of(node.args[0])


def test_private_names_are_not_imported() -> None:
    for path in FILES:
        if holds_private_names(path):
            continue
        for module, name, _ in imports(path, typing=True):
            parts = [*module.split("."), name or ""]
            if parts[0] in FOREIGN:
                assert not any(map(is_private, parts)), f"{relative(path)} imports {'.'.join(parts)}"


def test_private_names_of_others_are_not_used() -> None:
    ours = set().union(*(defined_in(path) for path in FILES))
    found = []
    for path in FILES:
        if holds_private_names(path):
            continue
        foreign = bound_by_foreign_imports(path)
        for line, name, taken_from in accessed_private_names(path):
            if (taken_from, name) == ("os", "_exit"):  # documented under that name
                continue
            if taken_from in foreign:
                found.append(f"{relative(path)}:{line} takes {name} of {taken_from}")
            elif name not in ours and not name.startswith("_LightningNames__"):  # our own, mangled
                found.append(f"{relative(path)}:{line} uses {name}, which nobody here defines")
    assert not found, "\n".join(found)


# What every module declares


def test_every_module_says_why_it_exists_and_what_it_exports() -> None:
    assert not [complaint for path in FILES for complaint in complaints_about(path)]


def complaints_about(path: Path) -> Iterator[str]:
    tree = tree_of(path)
    if not ast.get_docstring(tree):
        yield f"{relative(path)} has no docstring."
    if path.name == "__init__.py" and len(tree.body) == 1:
        return  # the docstring alone
    module = importlib.import_module(module_name(path))
    exported_names = getattr(module, "__all__", None)
    if not isinstance(exported_names, list):
        yield f"{relative(path)} has no __all__."
    elif len(set(exported_names)) < len(exported_names):
        yield f"{relative(path)} exports a name twice."
    elif missing := [name for name in exported_names if not hasattr(module, name)]:
        yield f"{relative(path)} exports {missing}, which it does not have."


PACKAGES_WITH_NAMES = ("equipoise", "equipoise.callbacks", "equipoise.strategies", "equipoise.trainer")


@pytest.mark.parametrize("package", PACKAGES_WITH_NAMES)
def test_every_public_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        assert value is getattr(equipoise, name)
        assert value.__name__ == name
        assert value.__doc__ or value.__module__.startswith("lightning."), name
        assert name in dir(module)
        assert vars(module)[name] is value, f"The second access of {name} finds it without a call."


@pytest.mark.whole_package
@pytest.mark.parametrize("package", PACKAGES_WITH_NAMES)
def test_type_checkers_see_the_names_that_are_there(package: str) -> None:
    path = Path(str(importlib.import_module(package).__file__))
    blocks = [node for node in tree_of(path).body if is_for_typing(node)]
    assert len(blocks) == 1
    declared = [node for node in blocks[0].body if isinstance(node, ast.ImportFrom)]
    for node in declared:
        for alias in node.names:
            assert alias.asname == alias.name, f"{alias.name} is not exported to type checkers"
            # Its first use decorates a function, also where it is defined.
            used = getattr(equipoise, alias.name)
            assert getattr(importlib.import_module(node.module), alias.name) is used
    names = [alias.name for node in declared for alias in node.names]
    assert sorted(names) == importlib.import_module(package).__all__


@pytest.mark.parametrize("package", PACKAGES_WITH_NAMES)
def test_a_public_name_that_does_not_exist_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Trainr'"):
        _ = importlib.import_module(package).Trainr


# Tests


def test_no_test_imports_from_another_one() -> None:
    """Parts that several files share lie in `tests/support`, or in a module of their folder that is no test."""
    root = Path(__file__).parents[1]
    pattern = re.compile(r"^\s*(?:from|import) (tests(?:\.\w+)*\.(?:test_\w+|conftest))\b", re.MULTILINE)
    for path in root.joinpath("tests").rglob("*.py"):
        own = ".".join(path.relative_to(root).with_suffix("").parts)
        assert set(pattern.findall(path.read_text(encoding="utf-8"))) <= {own}, own
