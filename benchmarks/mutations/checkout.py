"""A copy of a checkout in which files are mutated and tests run."""

import compileall
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from py_compile import PycInvalidationMode

from samples import Sample

__all__ = ["Checkout", "working_copy"]

HERE = Path(__file__).resolve().parent


class Checkout:
    """A copy of a checkout, and a process beside it that runs tests in forks.

    Args:
        folder: The copy.
        marks: An expression of marks that chooses among the tests.
        timeout: Time after which one test counts as hung, in seconds.
    """

    def __init__(self, folder: Path, marks: str, timeout: float) -> None:
        self.folder = folder
        self.options = ["-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed", "1", "--timeout", str(timeout)]
        self.options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that the server has imported
        if marks:
            self.options += ["-m", marks]
        # Files that change within a second must not be taken for each other.
        compileall.compile_dir(folder / "equipoise", quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        path = f"{folder}:{os.environ.get('PYTHONPATH', '')}:{HERE}"
        self.environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self.server = subprocess.Popen(
            [sys.executable, str(HERE / "server.py")],
            cwd=folder,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Checkout":
        return self

    def __exit__(self, *error: object) -> None:
        self.server.communicate()

    def test_files(self) -> list[str]:
        """Return the files from which pytest collects tests of its own accord."""
        command = [sys.executable, "-m", "pytest", *self.options, "--collect-only"]
        listed = subprocess.run(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, text=True
        ).stdout
        names = {line.partition("::")[0] for line in listed.splitlines() if "::" in line}
        return sorted(name for name in names if (self.folder / name).is_file())

    def failure(
        self, files: Sequence[str], seconds: float, tests: Sequence[str] = (), record: Path | None = None
    ) -> str:
        """Run tests until the first that fails, or all of them for a record.

        Args:
            files: Files that hold the tests.
            seconds: Time after which the run counts as hung.
            tests: Those that run, in this order. Default: all.
            record: A folder for the record. Default: none.

        Returns:
            The test that failed, or how pytest ended otherwise; nothing where all passed.
        """
        request = {
            "files": list(files),
            "tests": list(tests),
            "options": self.options if record else ["-x", *self.options],
            "seconds": seconds,
            "record": record and str(record),
            "log": f"{self.folder}.log",
        }
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        return str(json.loads(self.server.stdout.readline()))

    @contextmanager
    def mutated(self, sample: Sample) -> Iterator[None]:
        """Mutate a file, and restore it afterwards."""
        file = self.folder / "equipoise" / sample.path
        source = file.read_text()
        file.write_text(sample.mutation.apply(source))
        try:
            yield
        finally:
            file.write_text(source)


@contextmanager
def working_copy(root: Path) -> Iterator[Path]:
    """Copy a checkout without its environment and outputs, and remove the copy afterwards."""
    ignored = shutil.ignore_patterns(".git", ".venv", "outputs", "multirun", "__pycache__", ".*_cache", ".hypothesis")
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(root, copy, ignore=ignored, symlinks=True)
        yield copy
