"""Mutations change what their text says, and the campaign reports which of them a test catches."""

from pathlib import Path
from types import ModuleType

import pytest

from tests.support.benchmarks import Scripts

SOURCE = '''"""Docstring: 1 < 2."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import nothing
def f(x: "list[1]", ready=True):
    while x < 3 and not ready:
        x += 1
        print(f"{x + 1}")
    return x
'''


@pytest.fixture
def campaign(scripts: Scripts) -> ModuleType:
    """The benchmark's script."""
    return scripts("mutations", "main", "operators")["main"]


def test_mutations_of_a_file(campaign: ModuleType) -> None:
    changes = [(mutation.line, mutation.before, mutation.after) for mutation in campaign.mutations_of(SOURCE)]
    assert changes == [
        (5, "True", "False"),
        (6, "x < 3 and (not ready)", "(x < 3 or not ready)"),
        (6, "x < 3", "(x <= 3)"),
        (6, "3", "4"),
        (6, "not ready", "bool(ready)"),
        (7, "x += 1", "pass"),
        (7, "1", "2"),
        (8, "print(f'{x + 1}')", "pass"),
        (9, "return x", "return None"),
    ]


def test_a_mutation_replaces_its_own_text_alone(campaign: ModuleType) -> None:
    source = 'text = "größer"; number = 1  # 1\n'
    (mutation,) = campaign.mutations_of(source)
    assert mutation.apply(source) == 'text = "größer"; number = 2  # 1\n'


def test_the_draw_follows_from_the_seed(campaign: ModuleType) -> None:
    package = campaign.ROOT / "equipoise"
    first = campaign.draw(package, ["trainer/loops"], 5, 1)
    assert first == campaign.draw(package, ["trainer/loops"], 5, 1)
    assert first != campaign.draw(package, ["trainer/loops"], 5, 2)
    assert all(str(sample.path).startswith("trainer/loops") for sample in first)


@pytest.mark.slow
def test_a_test_catches_a_mutation(campaign: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "equipoise/__init__.py": "",
        "equipoise/trainer/__init__.py": "",
        "equipoise/trainer/sums.py": "def one_more(number):\n    return number + 1\n",
        "tests/trainer/test_sums.py": (
            "from equipoise.trainer.sums import one_more\n\ndef test_sum():\n    assert one_more(0) > 0\n"
        ),
    }
    for name, source in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    table = tmp_path / "table.md"
    options = ["--root", str(tmp_path), "--folders", "trainer", "--marks", "", "--markdown", str(table)]
    assert campaign.main([*options, "--at-least", "3"]) == 1
    # `0 + 2` is positive as well, so no test catches it.
    assert "2 of 3 mutations were caught" in capsys.readouterr().out
    assert "| trainer/sums.py | 2 | 1 | 2 | nothing |" in table.read_text()
    assert (tmp_path / "equipoise/trainer/sums.py").read_text() == files["equipoise/trainer/sums.py"]
