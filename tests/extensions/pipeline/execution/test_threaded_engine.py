"""Threads in which stages compute: where there are some by default."""

import torch

from equipoise.extensions.pipeline.execution.threaded_engine import Pipeline
from equipoise.extensions.pipeline.graph.stages import StageProgram

CPU = torch.device("cpu")


def test_threads_by_default_only_where_all_devices_differ():
    programs = [StageProgram(lambda given: given, ())] * 2
    assert not Pipeline(programs, [CPU, CPU], "1f1b").threads
    assert Pipeline(programs, [CPU, torch.device("cuda:0")], "1f1b").threads
    assert not Pipeline(programs[:1], [CPU], "1f1b").threads
    for devices, threads in (([CPU, torch.device("cuda:0")], True), ([CPU], False), ([CPU, CPU], False)):
        made = Pipeline(programs * len(devices), devices * 2, "looped_bfs", stages_per_device=2)
        assert made.threads is threads
