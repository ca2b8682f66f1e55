"""The command torchrun, with programs that import everything anew and end as programs do.

What they do is tested where torchrun is called in this process: tests of data parallelism and of the pipeline.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extensions.pipeline.processes import programs as pipeline_programs
from tests.strategies.ddp import test_joins as test_ddp_joins

ONE_AFTER_THE_OTHER = """
import json, runpy, sys
for script, *arguments in json.loads(sys.argv[1]):
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.slow
def test_two_strategies_in_one_program(tmp_path: Path) -> None:
    ddp, pipeline, script = tmp_path / "ddp", tmp_path / "pipeline", tmp_path / "script.py"
    script.write_text(ONE_AFTER_THE_OTHER)
    for folder in (ddp, pipeline):
        folder.mkdir()
    first = [test_ddp_joins.script_in(ddp), ddp, "{}"]
    second = [pipeline_programs.script_in(pipeline), pipeline, "2", "1", "processes"]
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-W", "ignore", *run, str(script), json.dumps([first, second], default=str)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    test_ddp_joins.check(ddp)
    pipeline_programs.check_joined(pipeline, 2)
