"""A stage that is described and made again computes what it did; its graphs hand gradients on."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.extensions.pipeline.execution.stage_graphs import StageGraphs, run_backward
from equipoise.extensions.pipeline.graph.call_structure import CallStructure
from equipoise.extensions.pipeline.graph.stage_spec import describe, rebuild, used_parts
from equipoise.extensions.pipeline.graph.stages import StageProgram, make_stages
from equipoise.extensions.pipeline.recording.tracing import trace
from equipoise.parallel.payload.shared_payload import dumps, loads


class Network(nn.Module):
    """Slices, dictionaries, numbers, a parameter and a buffer by itself, and functions of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("shift", torch.full((6,), 0.5))

    def forward(self, value: Tensor, *, both: dict[str, Any]) -> Any:
        hidden = torch.tanh(self.first(value) * self.scale + self.shift)
        pair = {"half": hidden[:, ::2], "other": (hidden[..., 0:3], 2)}
        joined = torch.cat([pair["half"], pair["other"][0]], dim=0) * pair["other"][1]
        return {"out": self.last(joined), "other": both["a"] + value.size(0)}


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_what_is_made_again_computes_the_same(stages: int) -> None:
    torch.manual_seed(0)
    network, value, other = Network().double(), torch.randn(4, 6, dtype=torch.float64), torch.ones(3)
    structure = CallStructure((value,), {"both": {"a": other}})
    traced = trace(network, network.forward, structure)
    calls = len(traced.calls)
    ends = [calls * (stage + 1) // stages for stage in range(stages)]
    tensors = [*network.parameters(), *network.buffers()]
    passing: Any = [tuple(structure.tensors)]
    for program in make_stages(traced, ends):
        recipe = loads(dumps(describe(program)))
        parts = loads(dumps(used_parts(program, traced.root), tensors), tensors)
        passing = rebuild(recipe, parts).run(*passing)
    expected = network(value, both={"a": other})
    # The process of the last stage builds the output from its tensors.
    found = traced.output.fill(passing)
    assert torch.equal(found["out"], expected["out"])
    assert torch.equal(found["other"], expected["other"])
    wanted = torch.autograd.grad(expected["out"].sum(), network.scale)
    assert torch.equal(torch.autograd.grad(found["out"].sum(), network.scale)[0], wanted[0])


def test_graphs_end_where_the_stage_begins() -> None:
    torch.manual_seed(0)
    layer, value = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    graphs = StageGraphs(torch.device("cpu"))
    program = StageProgram(lambda given, flag: [layer(given), given, flag], ["made", "given", "flag"])
    made = graphs.forward(0, program, [value * 1, "flag"], keep=True, last=False)
    (found,) = graphs.backward(0, [torch.ones(2, 3), None])
    assert made[2] == "flag"
    assert value.grad is None
    assert found is not None
    torch.testing.assert_close(found, layer.weight.sum(0).expand(2, 3))
    run_backward([value], [found])
    torch.testing.assert_close(value.grad, found)


def test_without_a_backward_nothing_is_held() -> None:
    graphs = StageGraphs(torch.device("cpu"))
    program = StageProgram(lambda given: [given * 2], ["made"])
    (made,) = graphs.forward(0, program, [torch.ones(1, requires_grad=True)], keep=False, last=False)
    assert not made.requires_grad
    graphs.forget(0)
