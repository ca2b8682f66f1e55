"""Mutations change what their text says, and the campaign reports which of them a test catches."""

from pathlib import Path

import pytest

from tests.support.benchmarks import Modules, Scripts

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


MODULES = ("main", "by_folder", "record", "operators", "samples", "checkout", "choice")

FILES = {
    "equipoise/__init__.py": "",
    "equipoise/trainer/__init__.py": "",
    "equipoise/trainer/sums.py": (
        "def one_more(number):\n    return number + 1\n\ndef half(number):\n    return number / 2\n\n"
        "def negative(number):\n    return -number if number > 7 else None\n"
    ),
    "tests/__init__.py": "",
    "tests/test_all.py": (
        "from multiprocessing import get_context\n\nfrom equipoise.trainer.sums import half, one_more\n\n"
        "def test_sum():\n    assert one_more(0) > 0\n\n"
        "def send(connection):\n    connection.send(half(6))\n\n"
        "def test_worker():\n"
        "    here, there = get_context('forkserver').Pipe()\n"
        "    process = get_context('forkserver').Process(target=send, args=(there,))\n"
        "    process.start()\n    process.join()\n    assert here.poll()\n    assert here.recv() == 3\n"
    ),
    "tests/trainer/test_sums.py": (
        "from equipoise.trainer.sums import half\n\ndef test_half():\n    assert half(4) == 2\n"
    ),
}


@pytest.fixture
def modules(scripts: Scripts) -> Modules:
    """The benchmark's scripts."""
    return scripts("mutations", *MODULES)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of a small package with tests."""
    for name, source in FILES.items():
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path / "checkout"


def test_mutations_of_a_file(modules: Modules) -> None:
    changes = [
        (mutation.line, mutation.before, mutation.after) for mutation in modules["operators"].mutations_of(SOURCE)
    ]
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


@pytest.mark.slow
def test_tests_catch_mutations(modules: Modules, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mutation that runs in a worker alone is caught, too. The coverage follows from the same record."""
    main, by_folder, record, *_ = modules.values()
    output = checkout.parent / "output"
    options = ["--root", str(checkout), "--output", str(output), "--marks", "", "--count", "100", "--workers", "1"]
    assert main.main([*options, "--at-least", "6"]) == 1
    # `0 + 2` is positive as well, and nothing calls `negative`.
    assert "5 of 9 mutations were caught" in capsys.readouterr().out
    results = (output / "results.jsonl").read_text()
    assert '"before": "return number / 2", "after": "return None", "caught_by": "tests/trainer' in results
    assert (checkout / "equipoise/trainer/sums.py").read_text() == FILES["equipoise/trainer/sums.py"]

    # Nothing is examined twice.
    assert main.main([*options, "--at-least", "5"]) == 0
    assert (output / "results.jsonl").read_text() == results

    recorded = record.Record(output / "record", {"trainer/sums.py"})
    assert recorded.tests_of("trainer/sums.py", 5) == {
        "tests/test_all.py::test_worker",
        "tests/trainer/test_sums.py::test_half",
    }
    counts = by_folder.counts_by_folder(checkout / "equipoise", recorded.arcs)
    assert dict(counts["trainer"]) == {"lines": 6, "lines covered": 5, "branches": 0, "branches covered": 0}
