"""The step that validation, test and prediction share, without gradients."""

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from equipoise.errors import ConfigurationRuntimeError
from equipoise.parallel.step_protocols import PartialOutputs, StepResult
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.optimization.steps.module_step import ModuleStep
from equipoise.trainer.optimization.steps.step_extension import Context

__all__ = ["EvaluationStep", "Modes", "check_dataloader_idx", "without_gradients"]


class EvaluationStep(ModuleStep):
    """Runs `validation_step`, `test_step` or `predict_step` on a batch, or on a part of it.

    Args:
        module: The user's module.
        hooks: The hooks.
        logs: The logged values.
        name: The method's name.
        forward_context: The context of the precision in which the method runs; None if it needs none.
        wanted: Whether the outputs are read. Only then those of all parts are gathered, which costs memory.
    """

    def __init__(
        self,
        module: LightningModule,
        hooks: Hooks,
        logs: Logs,
        name: str,
        forward_context: Context | None,
        *,
        wanted: bool = True,
    ) -> None:
        super().__init__(module, hooks, logs, name, forward_context)
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
