"""The step that validation, test and prediction share, without gradients."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from equipoise.errors import ConfigurationRuntimeError
from equipoise.parallel.step_protocols import PartialOutputs, StepResult
from equipoise.trainer.optimization.steps.module_step import ModuleStep

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["EvaluationStep", "Modes", "check_dataloader_idx", "evaluator", "without_gradients"]


class EvaluationStep(ModuleStep):
    """Runs `validation_step`, `test_step` or `predict_step` on a batch, or on a part of it.

    Args:
        context: The run.
        name: The method's name.
        wanted: Whether the outputs are read. Only then those of all parts are gathered, which costs memory.
    """

    def __init__(self, context: "RunContext", name: str, *, wanted: bool = True) -> None:
        super().__init__(context, name)
        self.wanted = wanted

    def merge(self, *args: Any, **kwargs: Any) -> StepResult:
        """Merge the results of all parts; see `ModuleStep`."""
        result = super().merge(*args, **kwargs)
        # Outputs of micro-batches are gathered once, after the last of them.
        if self.in_micro_batches:
            return result
        return result._replace(outputs=self.finished(result.outputs))

    def finished(self, outputs: PartialOutputs) -> Any:
        """Return the gathered outputs of a batch; None if they are not read."""
        if not self.wanted:
            return None
        return outputs.gathered()

    # The same function, without a call between.
    __call__ = ModuleStep.run


class Modes:
    """Training mode of each submodule, to be restored after an evaluation, or when that is interrupted.

    After an error the modes stay as the error left them, as under Lightning. After an interrupt they are restored,
    since the user may continue.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._modes = {name: child.training for name, child in module.named_modules()}

    def __enter__(self) -> "Modes":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # KeyboardInterrupt is no Exception.
        if kind is not None and not issubclass(kind, Exception):
            self.restore(self._module)

    def restore(self, module: nn.Module) -> None:
        """Restore the mode of each submodule. A submodule that was added since keeps its mode."""
        for name, child in module.named_modules():
            child.training = self._modes.get(name, child.training)


def evaluator(context: "RunContext", name: str) -> Callable[[Any, Sequence[Any]], Any]:
    """Return the function that evaluates a batch: the strategy's, with recovery if a callback decides about that."""
    if context.recovers:
        from equipoise.trainer.recovery.evaluation_recovery import EvaluationRecovery

        return EvaluationRecovery(context, name)
    return context.strategy.evaluate


def without_gradients(*, inference_mode: bool) -> AbstractContextManager[Any]:
    """Return `torch.inference_mode` or `torch.no_grad`."""
    if inference_mode:
        return torch.inference_mode()
    return torch.no_grad()


def check_dataloader_idx(module: nn.Module, word: str, *, several: bool) -> None:
    """Check that hooks take the index of the loader if there are several, and do not require it if there is one.

    Raises:
        ConfigurationRuntimeError: Naming the hook and the change of its signature.
    """
    for name in (f"{word}_step", f"on_{word}_batch_start", f"on_{word}_batch_end"):
        method = getattr(module, name)
        owner = f"{type(module).__name__}.{name}"
        if several and not is_param_in_hook_signature(method, "dataloader_idx"):
            raise ConfigurationRuntimeError(
                f"There are several loaders, but `{owner}` does not take their index. Add `dataloader_idx=0` to its"
                " arguments."
            )
        parameter = inspect.signature(method).parameters.get("dataloader_idx")
        if not several and parameter is not None and parameter.default is parameter.empty:
            raise ConfigurationRuntimeError(
                f"There is one loader, but `{owner}` asks for `dataloader_idx`. Leave it out or give it a default:"
                " `dataloader_idx=0`."
            )
