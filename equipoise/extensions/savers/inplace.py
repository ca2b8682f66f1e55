"""Activation functions that overwrite their input, where nothing else needs it.

`nn.LeakyReLU(inplace=True)` needs no memory for its output. It is right only if no other operation reads the input
afterwards. Three checks show this: no later operation of the forward receives the input's memory, nothing keeps the
input after the step, and one step has the same loss and gradients, bit for bit. Torch itself checks the tensors that
earlier operations have saved for the backward.

LeakyReLU, ReLU6 and Hardtanh then compute their backward from the output, so each of them keeps one tensor less. ReLU
always does so: overwriting saves the second tensor only while it computes. SiLU and Mish copy their input. ELU and
similar functions round differently, so they are not changed.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import ConfigurationError
from equipoise.interop.distributed.backward_calls import gradients_here
from equipoise.interop.torch.dispatch import OperationWatch, tensors_in
from equipoise.parallel.equality import gap_of
from equipoise.parallel.snapshot.preserve_state import preserve_state

__all__ = ["InplaceChoice", "keep_inputs", "use_inplace_activations"]

# Runs the training step on one batch, with a graph, and returns what it returned: the loss, or a mapping with "loss".
Step = Callable[[], Any]

# Torch's own modules of this package whose option `inplace` means what is checked here.
_PACKAGE = "torch.nn.modules.activation"


@dataclass(frozen=True)
class InplaceChoice:
    """The activation functions of a module that overwrite their input, and those that do not.

    Attributes:
        changed: Names of the submodules that overwrite their input now.
        unchanged: The reasons, by name, why others still do not.
    """

    changed: tuple[str, ...] = ()
    unchanged: Mapping[str, str] = field(default_factory=dict)


def use_inplace_activations(module: nn.Module, step: Step) -> InplaceChoice:
    """Let activation functions overwrite their input (`inplace=True`) where nothing else needs it.

    The step is computed three times, and once more for each activation function if one of them changes its result.
    Random generators, buffers and attributes are restored after each, and no gradient is written.

    The checks hold for the operations of this step. A forward that does other things for other batches may need an
    input there.

    Args:
        module: The module.
        step: Computes one training step and returns its loss, or a mapping with it under "loss".

    Returns:
        The names of the changed submodules, and the reasons why others were not changed.

    Raises:
        ConfigurationError: If the step has no loss with a graph.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> use_inplace_activations(model, lambda: model(torch.ones(3, 2)).sum()).changed
        ('1',)
        >>> model[1].inplace
        True
    """
    candidates = _candidates(module)
    if not candidates:
        return InplaceChoice()

    # 1. The usual step: its result, and who needs which input.
    uses = _InputUses(candidates)
    with uses:
        expected = _compute(module, step, uses)
    unchanged = uses.reasons()
    repeated = _compute(module, step)
    if any(map(gap_of, expected, repeated)):
        reasons = dict.fromkeys(candidates, "the step computes other numbers when it is repeated")
        return InplaceChoice((), reasons)

    # 2. All others together, or else one after the other.
    chosen = [name for name in candidates if name not in unchanged]
    parts = [candidates[name] for name in chosen]
    if _why_wrong(module, step, expected, parts) is None:
        return InplaceChoice(tuple(chosen), unchanged)
    for name in chosen:
        reason = _why_wrong(module, step, expected, [candidates[name]])
        if reason is not None:
            unchanged[name] = reason
    return InplaceChoice(tuple(name for name in chosen if name not in unchanged), unchanged)


def keep_inputs(module: nn.Module, names: Iterable[str]) -> None:
    """Undo `use_inplace_activations`.

    Args:
        module: The module.
        names: The names of the changed submodules.
    """
    for name in names:
        _set_inplace([module.get_submodule(name)], False)


def _candidates(module: nn.Module) -> dict[str, nn.Module]:
    """Return the activation functions that have the option and do not use it."""
    candidates = {}
    for name, part in module.named_modules():
        is_of_torch = type(part).__module__ == _PACKAGE
        if is_of_torch and getattr(part, "inplace", None) is False:
            candidates[name] = part
    return candidates


def _set_inplace(parts: Iterable[nn.Module], inplace: bool) -> None:
    for part in parts:
        vars(part)["inplace"] = inplace


# One step.


def _compute(module: nn.Module, step: Step, uses: "_InputUses | None" = None) -> list[Tensor | None]:
    """Return the loss and the gradients of a step, and restore all state."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with preserve_state(module, containers=True):
        output = step()
        if uses is not None:
            uses.end_forward()
        loss = output
        if isinstance(output, Mapping):
            loss = output.get("loss")
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise ConfigurationError(
                "In-place activations are checked by a step that returns its loss with a graph, or a dictionary with"
                f" it under 'loss', but the step returned {type(output).__name__}."
            )
        gradients = gradients_here(loss, parameters, torch.ones_like(loss), allow_unused=True)
        # Attributes and outputs are still there, and the graph is gone.
        if uses is not None:
            uses.note_kept()
        return [loss.detach(), *gradients]


def _why_wrong(module: nn.Module, step: Step, expected: list[Tensor | None], parts: Iterable[nn.Module]) -> str | None:
    """Let submodules overwrite their inputs; return the reason if that is wrong, and undo it."""
    parts = list(parts)
    _set_inplace(parts, True)
    try:
        results = _compute(module, step)
        if not any(map(gap_of, expected, results)):
            return None
        reason = "the loss or a gradient differs"
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    _set_inplace(parts, False)
    return reason


# Who needs an input.


class _InputUses:
    """Context manager that finds the activation functions whose input something else needs in a step.

    Args:
        candidates: The activation functions by name.
    """

    def __init__(self, candidates: Mapping[str, nn.Module]) -> None:
        self._candidates = candidates
        # The storages of inputs, with the names of the functions that have computed from them.
        self._inputs: list[tuple[weakref.ref[Any], str]] = []
        self._names_by_storage: dict[int, set[str]] = {}
        self._reasons: dict[str, str] = {}
        self._watch = OperationWatch(self._on_operation)
        self._handles: list[Any] = []

    def __enter__(self) -> "_InputUses":
        for name, part in self._candidates.items():
            self._handles.append(part.register_forward_hook(self._hook(name)))
        self._watch.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.end_forward()
        for handle in self._handles:
            handle.remove()

    def end_forward(self) -> None:
        """Stop watching: in the backward, torch itself checks what was changed."""
        self._watch.stop()

    def note_kept(self) -> None:
        """Note which inputs are still there after the backward."""
        # A cycle may keep a tensor that nothing else refers to.
        gc.collect()
        for reference, name in self._inputs:
            if reference() is not None:
                self._reasons.setdefault(name, "its input is kept after the step")

    def reasons(self) -> dict[str, str]:
        """Return why functions must keep their input, by name."""
        called = {name for _, name in self._inputs}
        for name in self._candidates:
            if name not in called:
                self._reasons.setdefault(name, "it was not called in this step")
        return dict(self._reasons)

    def _hook(self, name: str) -> Callable[..., None]:
        def note(part: nn.Module, args: Any, output: Any) -> None:
            for tensor in tensors_in(args):
                self._note(name, tensor)

        return note

    def _note(self, name: str, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        # The id may belong to another storage later.
        reference = weakref.ref(storage, lambda _: self._names_by_storage.pop(key, None))
        self._inputs.append((reference, name))
        self._names_by_storage.setdefault(key, set()).add(name)

    def _on_operation(self, operation: str, result: Any, args: Any) -> None:
        for tensor in tensors_in(args):
            for name in self._names_of(tensor):
                self._reasons.setdefault(name, f"its input is used afterwards, by {operation}")

    def _names_of(self, tensor: Tensor) -> set[str]:
        """Return the functions that have computed from the storage of a tensor."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            # The tensor is sparse, or of a class from another library.
            return set()
        return self._names_by_storage.get(id(storage), set())
