"""A process that has imported what all tests wait for, and forks for each run of tests.

Reads requests from its standard input and answers them, each a line of JSON. The campaign starts it in a checkout.
"""

import contextlib
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from recorder import Recorder

IMPORTED = ("torch._dynamo", "torch.nn.parallel.distributed", "lightning.pytorch", "torchmetrics", "hydra")
WORKERS_SERVER = Path(__file__).parents[2] / "tests/support/server_of_workers.py"
NO_TESTS = 5  # pytest's exit code


class Choice:
    """A plugin of pytest that runs chosen tests in the given order and writes the name of each that fails.

    Args:
        tests: Their names. All if there are none.
        output: Descriptor that is written to.
    """

    def __init__(self, tests: list[str], output: int) -> None:
        self.position = {test: number for number, test in enumerate(tests)}
        self.output = output

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.position:
            chosen = [item for item in items if item.nodeid in self.position]
            items[:] = sorted(chosen, key=lambda item: self.position[item.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.pytest_runtest_logreport(report)

    def pytest_runtest_logreport(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.failed:
            os.write(self.output, f"{report.nodeid}\n".encode())


def run(request: dict[str, Any], output: int) -> NoReturn:
    """Run tests in this process, a fork, and end it."""
    os.setsid()
    log = os.open(request["log"], os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for stream in range(3):
        os.dup2(log, stream)
    # Workers are forks of this process too, before it imports anything of the checkout.
    spec = importlib.util.spec_from_file_location("server_of_workers", WORKERS_SERVER)
    assert spec is not None
    assert spec.loader is not None
    workers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(workers)
    workers.prepare()
    plugins: list[object] = [Choice(request["tests"], output)]
    if request["record"]:
        plugins.append(Recorder(str(Path.cwd() / "equipoise"), request["record"]))
    code = pytest.main([*request["options"], *request["files"]], plugins)
    sys.stdout.flush()
    os._exit(code)


def answer(request: dict[str, Any]) -> str:
    """Run tests in a fork; return the first that failed, how the run ended otherwise, or nothing if all passed."""
    failures, output = os.pipe()
    pid = os.fork()
    if pid == 0:
        run(request, output)
    os.close(output)
    process = psutil.Process(pid)
    try:
        code = process.wait(request["seconds"])
    except psutil.TimeoutExpired:
        for started in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                started.kill()
        code = "timeout"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if code == "timeout":
        process.wait()
    with os.fdopen(failures, errors="replace") as names:
        os.set_blocking(failures, False)  # a process that has left the group may hold the other end
        failed = (names.readline() or "").strip()
    return failed or ("" if code in (0, NO_TESTS) else f"pytest's end: {code}")


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
