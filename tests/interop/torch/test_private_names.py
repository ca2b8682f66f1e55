"""The inner workings of torch that replicas rely on are still there, and do what is relied upon."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.compile import from_compiled
from torch import nn
from torch.utils.data import default_collate
from torch.utils.data._utils import collate

from equipoise.interop.distributed.processes import collective_count
from equipoise.interop.torch.loaders import collates_tensors_by_stacking
from equipoise.interop.torch.modules import (
    References,
    has_gradient_hooks,
    hook_registries_of,
    is_compiled,
    versions,
)

# Modules


def test_all_hooks_of_a_module_are_in_its_registries():
    module = nn.Linear(2, 2)
    assert [len(registry) for registry in hook_registries_of(module)] == [0] * 7
    module.register_forward_hook(lambda *args: None, with_kwargs=True, always_call=True)
    module.register_forward_pre_hook(lambda *args: None, with_kwargs=True)
    module.register_full_backward_hook(lambda *args: None)
    module.register_full_backward_pre_hook(lambda *args: None)
    registries = hook_registries_of(module)
    assert [len(registry) for registry in registries] == [1] * 7
    for registry in registries:
        registry.clear()
    assert torch.equal(module(torch.ones(2)), nn.functional.linear(torch.ones(2), module.weight, module.bias))


def test_versions_tell_changes_in_place() -> None:
    tensors = [nn.Parameter(torch.zeros(2)), torch.zeros(3)]
    seen = [versions(tensors)]
    with torch.no_grad():
        tensors[0].add_(1)
    seen.append(versions(tensors))
    tensors[1][0] = 1
    seen.append(versions(tensors))
    torch._foreach_copy_([tensors[1]], [torch.ones(3)])
    seen.append(versions(iter(tensors)))
    assert sorted(map(tuple, seen)) == list(map(tuple, seen))
    assert len(set(map(tuple, seen))) == 4
    tensors[0].sum().backward()
    assert versions(tensors) == seen[-1]
    tensors[0].data.add_(1)  # leaves no trace, which replicas rely upon as well
    assert versions(tensors) == seen[-1]
    assert versions([]) == []
    with torch.inference_mode():
        made = torch.zeros(2)
    assert versions([*tensors, made]) is None


@pytest.mark.parametrize("foreach", [False, True])
def test_steps_of_optimizers_leave_a_trace(foreach: bool) -> None:
    """Fused ones do not, for which there is `Replicas.distrust`."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0, foreach=foreach)
    parameter.grad = torch.ones(2)
    before = versions([parameter])
    optimizer.step()
    assert versions([parameter]) != before


def test_further_references_to_tensors_are_noticed() -> None:
    """Objects of Python and of C++, and views, are noticed."""
    tensors = [torch.ones(3), torch.ones(2)]
    references = References(tensors)
    assert not references.are_more()
    parameter = nn.Parameter(torch.zeros(2))
    for hold in (lambda: [tensors[0]], lambda: tensors[1][:1], lambda: setattr(parameter, "grad", tensors[1])):
        held = hold()
        assert references.are_more()
        del held
        parameter.grad = None
        assert not references.are_more()


def test_compiled_modules_are_recognised() -> None:
    plain = nn.Sequential(nn.Linear(1, 1))
    assert not is_compiled(plain)
    assert is_compiled(torch.compile(nn.Linear(1, 1), backend="eager"))
    plain[0].compile(backend="eager")
    assert is_compiled(plain[0])
    assert not is_compiled(plain)
    assert is_compiled(from_compiled(torch.compile(LightningModule(), backend="eager")))


def test_hooks_on_parameters_are_recognised() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    assert not has_gradient_hooks(parameter)
    for register in (parameter.register_hook, parameter.register_post_accumulate_grad_hook):
        handle = register(lambda *args: None)
        assert has_gradient_hooks(parameter)
        handle.remove()
        assert not has_gradient_hooks(parameter)


# Processes


def test_collective_operations_are_counted() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor, other = torch.ones(2), dist.new_group([0])
        for operation in (
            lambda: dist.all_reduce(tensor),
            lambda: dist.all_gather([torch.ones(2)], tensor),
            lambda: dist.broadcast(tensor, 0),
            lambda: dist.all_reduce(tensor, group=other),
            dist.barrier,
        ):
            before = collective_count()
            tensor.add_(1)
            assert collective_count() == before
            operation()
            assert collective_count() > before
    finally:
        dist.destroy_process_group()


# Loaders


def test_functions_that_collate_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collates_tensors_by_stacking()
    monkeypatch.setitem(collate.default_collate_fn_map, tuple, lambda batch, *, collate_fn_map=None: batch)
    assert default_collate([(1,), (2,)]) == [(1,), (2,)]
    assert not collates_tensors_by_stacking()
