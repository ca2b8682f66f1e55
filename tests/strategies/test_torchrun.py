"""The command torchrun, with programs that import everything anew and end as programs do.

What they do is tested where torchrun is called in this process: tests of data parallelism and of the pipeline.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.strategies.ddp.launched.joining import check, script_in

ONE_AFTER_THE_OTHER = """
import json, runpy, sys
for script, *arguments in json.loads(sys.argv[1]):
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.slow
def test_two_strategies_in_one_program(tmp_path: Path) -> None:
    script, programs = tmp_path / "script.py", []
    script.write_text(ONE_AFTER_THE_OTHER)
    for name in ("ddp", "pipeline"):
        (folder := tmp_path / name).mkdir()
        programs.append([str(script_in(folder)), str(folder), json.dumps({"strategy": name, "devices": 2})])
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-W", "ignore", *run, str(script), json.dumps(programs)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    check(tmp_path / "ddp")
    check(tmp_path / "pipeline", strategy="PipelineStrategy")
