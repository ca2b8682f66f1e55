"""The trial of a variant: the program and the eager step, computed from the same state, and compared."""

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from equipoise.extensions.compiled.comparison.failures import ran_out_of_memory, reason_of
from equipoise.extensions.compiled.comparison.outcome import Outcome, Result, results_of
from equipoise.extensions.compiled.interop.compiling import CompilerError
from equipoise.extensions.compiled.speed_comparison import SpeedComparison
from equipoise.extensions.compiled.step_program import ProgramResult
from equipoise.extensions.compiled.variants import Variant, Variants, shape_of
from equipoise.parallel.snapshot.preserve_state import preserve_state

__all__ = ["Trial", "end_comparison", "why_compiled_again"]

# Counters of the trainer in a condition, and the names by which a step reads them.
_COUNTERS = {".progress.optimizer_step.": "self.global_step", ".progress.epoch.": "self.current_epoch"}


class Trial:
    """One trial of a variant. The eager step is computed after it, and its results count.

    Args:
        variants: All variants of the step.
        variant: The variant.
        module: The user's module.
        batch: The batch.
    """

    def __init__(self, variants: Variants, variant: Variant, module: LightningModule, batch: Any) -> None:
        self._variants = variants
        self._variant = variant
        self._done = variants.way.done
        self._module = module
        self._batch = batch
        self._outcome: Outcome | None = None
        # Tensors that the program changes in place, and those that receive a gradient and are no parameters.
        self._changed: list[Tensor] = []
        self._further_leaves: list[Tensor] = []
        self._seconds = 0.0

    def run(self, compute: Callable[[], ProgramResult], zeroed: Iterable[Tensor]) -> None:
        """Compile and compute the program, and restore everything that it changes.

        Args:
            compute: Compiles and computes the program.
            zeroed: Parameters whose gradients are still those of the last window. They are zeroed for this batch.
        """
        begin = time.perf_counter()
        is_full = False
        gradients = [(parameter, parameter.grad) for parameter in self._module.parameters()]
        try:
            with preserve_state(self._module, containers=True):
                self._let_add(gradients, zeroed)
                with self._variants.costs.measured():
                    result = compute()
                self._seconds = time.perf_counter() - begin
                self._note(result)
                self._variant.function.restore()
        except CompilerError as error:
            self._refuse(_readable(str(error)))
        except Exception as error:
            # The eager step follows. What is wrong with the step itself is raised there.
            self._outcome = None
            is_full = ran_out_of_memory(error)
            self._refuse(reason_of(error, self._done))
        finally:
            # After an error, tensors are still as the program has left them.
            self._variant.function.restore()
            for parameter, gradient in gradients:
                parameter.grad = gradient
        # Outside of `except`, whose traceback keeps what the trial has allocated. The eager step needs the memory.
        if is_full:
            gc.collect()

    def _note(self, result: ProgramResult) -> None:
        if result.loss is None:
            self._refuse("it returns no loss")
        elif isinstance(result.outputs, dict) and "loss_weight" in result.outputs:
            self._refuse("it returns 'loss_weight', on which the gradients depend")
        else:
            # 1. Tensors that the program has changed, and that have received a gradient.
            function = self._variant.function
            parameters = {id(parameter) for parameter in self._module.parameters()}
            self._further_leaves = [tensor for tensor in function.leaves() if id(tensor) not in parameters]
            gradients = {id(parameter.grad) for parameter in self._module.parameters()}
            self._changed = [tensor for tensor in function.changed() if id(tensor) not in gradients]
            # 2. All results.
            logged = [(call.name, call.value) for call in result.logged]
            self._outcome = self._outcome_of(result.loss, result.outputs, logged)

    def _outcome_of(self, loss: Tensor, outputs: Any, logged: Sequence[tuple[str, Any]]) -> Outcome:
        """Return what a step has computed, by the program or by itself."""
        results = [Result("the loss", loss)]
        for name, parameter in self._module.named_parameters():
            results.append(Result(f"the gradient of {name}", parameter.grad, is_gradient=True))
        for tensor in self._further_leaves:
            results.append(Result("the gradient of a tensor that is no parameter", tensor.grad))
        results += results_of(self._module, outputs)
        for name, value in logged:
            results.append(Result(f"the logged value {name!r}", value))
        for tensor in self._changed:
            results.append(Result("a tensor that it changes", tensor))
        return Outcome(results)

    def _let_add(self, gradients: Sequence[tuple[nn.Parameter, Tensor | None]], zeroed: Iterable[Tensor]) -> None:
        """Let the program add to copies of the gradients, or to none where they are zeroed."""
        are_zeroed = set(map(id, zeroed))
        for parameter, gradient in gradients:
            if gradient is None or id(parameter) in are_zeroed:
                parameter.grad = None
            else:
                parameter.grad = gradient.clone()

    def judge(
        self, loss: Tensor | None, outputs: Any, logged: Sequence[tuple[str, Any]], dtype: torch.dtype | None
    ) -> None:
        """Compare the program with the eager step, after whose backward this is called.

        Args:
            loss: The loss of the eager step.
            outputs: The return value of the eager step.
            logged: Names and values of what it logged.
            dtype: The dtype of a mixed precision. None: that of the loss.
        """
        if self._outcome is None:
            return
        if loss is None:
            self._refuse("it returns no loss")
            return
        tolerance = self._variants.way.tolerance(dtype or loss.dtype)
        difference = self._outcome_of(loss, outputs, logged).first_difference(self._outcome, tolerance)
        if difference is not None:
            self._refuse(f"a {self._done} one differs: {difference}")
            return
        self._variant.approve()
        self._variants.costs.report()
        if self._variants.way.only_if_faster:
            self._variant.comparison = SpeedComparison(loss.device)
        rank_zero_info(
            f"The training step is {self._done} for batches of {_describe(shape_of(self._batch))}, in"
            f" {self._seconds:.1f} s. It computes the same as the eager step."
        )

    def _refuse(self, reason: str) -> None:
        self._variants.refuse(self._variant, reason)


def end_comparison(variant: Variant, comparison: SpeedComparison, batch: Any) -> None:
    """Decide whether the program of a variant is fast enough."""
    variant.comparison = None
    of_program, eager = comparison.seconds()
    shapes = _describe(shape_of(batch))
    if comparison.is_program_faster():
        rank_zero_info(
            f"Compiled steps on batches of {shapes} take {1000 * of_program:.3g} ms, eager ones {1000 * eager:.3g} ms."
        )
        return
    variant.refuse()
    rank_zero_info(
        f"The training step stays eager on batches of {shapes}. It takes {1000 * eager:.3g} ms, and a compiled one"
        f" {1000 * of_program:.3g} ms."
    )


def why_compiled_again(conditions: Sequence[str]) -> str:
    """Return the reason for which a variant stays eager that was compiled again and again.

    Args:
        conditions: Conditions on which the programs depend, and that do not hold any more.
    """
    reason = "its Python code does something else again and again"
    if not conditions:
        return reason
    condition = conditions[0]
    for counter, name in _COUNTERS.items():
        if counter in condition:
            return f"{reason}: it reads `{name}`, whose value is a constant of a compiled step"
    return f"{reason}, now because {_readable(condition)} does not hold any more"


def _readable(name: str) -> str:
    """Return a text of the compiler with `self` for the module."""
    for module in ("L['self']._step.__self__", "self._step.__self__"):
        name = name.replace(module, "self")
    return name.replace("L['batch']", "the batch")


def _describe(shape: Any) -> str:
    texts = []
    for entry in shape:
        size = entry if isinstance(entry, torch.Size) else entry[1]
        texts.append(str(list(size)))
    return ", ".join(texts) or "no tensor"
