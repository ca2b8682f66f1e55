"""The inner workings of torch that replicas rely on are still there, and do what is relied upon."""

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.compile import from_compiled
from torch import nn

from equipoise.interop.torch.modules import (
    References,
    has_gradient_hooks,
    hook_registries_of,
    is_compiled,
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


# Loaders
