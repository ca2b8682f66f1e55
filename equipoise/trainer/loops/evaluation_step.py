"""The step that validation, test and prediction share, without gradients."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.parallel.batches.gathering import PartialOutputs
from equipoise.parallel.step_protocols import StepResult
from equipoise.trainer.optimization.module_step import ModuleStep
from equipoise.trainer.recovery.micro_batching import is_armed
from equipoise.trainer.recovery.recovery import EvaluationRecovery

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["EvaluationStep", "Modes", "check_dataloader_idx", "evaluator", "without_gradients"]


class EvaluationStep(ModuleStep):
    """Runs `validation_step`, `test_step` or `predict_step` on a batch, or on one part of it.

    Args:
        context: The run.
        name: The method's name.
        wanted: Whether somebody looks at what it returns. Parts are put together only then: that costs memory.
    """

    def __init__(self, context: "RunContext", name: str, *, wanted: bool = True) -> None:
        super().__init__(context, name)
        self.wanted = wanted

    def merge(self, *args: Any, **kwargs: Any) -> StepResult:
        """Puts the results of all parts together; see `ModuleStep`."""
        result = super().merge(*args, **kwargs)
        return result if self.in_micro_batches else result._replace(outputs=self.finished(result.outputs))

    def finished(self, outputs: PartialOutputs) -> Any:
        """The outputs of all parts of a batch, put together."""
        return outputs.gathered() if self.wanted else None

    def __call__(self, part: Any) -> Any:
        """Runs the step."""
        return self.run(part)


class Modes:
    """Whether each submodule trains or evaluates, to be restored after an evaluation, or when that is interrupted.

    After an error all is left as the error found it, as under Lightning; after an interrupt one may want to go on.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._modes = {name: child.training for name, child in module.named_modules()}

    def __enter__(self) -> "Modes":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self.restore(self._module)

    def restore(self, module: nn.Module) -> None:
        """Sets every submodule back; one that has come since stays as it is."""
        for name, child in module.named_modules():
            child.training = self._modes.get(name, child.training)


def evaluator(context: "RunContext", name: str) -> Callable[[Any, Sequence[Any]], Any]:
    """What evaluates a batch: the strategy, with recovery from errors of memory where somebody decides about them.

    Args:
        context: The run.
        name: The stage, such as "val".
    """
    return EvaluationRecovery(context, name) if is_armed(context) else context.strategy.evaluate


def without_gradients(*, inference_mode: bool) -> AbstractContextManager[Any]:
    """`torch.inference_mode` or `torch.no_grad`."""
    return torch.inference_mode() if inference_mode else torch.no_grad()


def check_dataloader_idx(module: nn.Module, names: tuple[str, ...], *, several: bool) -> None:
    """Checks that hooks take the index of the loader where there are several, and do not ask for it where there is one.

    Args:
        module: The user's module.
        names: The hooks.
        several: Whether there are several loaders.

    Raises:
        ConfigurationError: Naming the hook and what to change in its signature.
    """
    for name in names:
        method, owner = getattr(module, name), f"{type(module).__name__}.{name}"
        if several:
            if not is_param_in_hook_signature(method, "dataloader_idx"):
                raise ConfigurationError(
                    f"There are several loaders, but `{owner}` does not take their index. Add `dataloader_idx=0` to"
                    " its arguments."
                )
            continue
        parameter = inspect.signature(method).parameters.get("dataloader_idx")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            raise ConfigurationError(
                f"There is one loader, but `{owner}` asks for `dataloader_idx`. Leave it out or give it a default:"
                " `dataloader_idx=0`."
            )
