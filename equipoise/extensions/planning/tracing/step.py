"""One step of a module as the trainer computes it on one device, without a trainer.

    training_step → zero_grad (first batch of the window) → backward        for every batch of the window
    optimizer.step                                                          at its end

So the gradients of the last window live until the first backward of the next one.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.device_loads import PlannedPart
from equipoise.extensions.planning.description.settings import StepSettings, changes_layers
from equipoise.extensions.planning.tracing.empty_tensors import convert_without_memory, has_fake_tensors
from equipoise.extensions.planning.tracing.stand_in import TrainerStandIn, attach, ignore
from equipoise.interop.lightning.classes import with_index
from equipoise.parallel.activation_checkpointing import checkpoint_activations
from equipoise.precision import make_precision
from equipoise.tree import leaves_of

__all__ = ["BuildOptimizer", "PlannedStep"]

# Returns an optimiser of the parameters that it receives.
BuildOptimizer = Callable[[Any], Optimizer]


class PlannedStep:
    """A module that is ready for steps.

    Args:
        module: The user's module. It is changed and must not be used for anything else.
        settings: The settings of the step.
        build_optimizer: Returns the optimiser of the parameters. Default: that of `configure_optimizers`.

    Attributes:
        module: The module.
        optimizers: Its optimisers.
        weight_copies: Number of copies of the weights that callbacks keep.

    Raises:
        ConfigurationError: If the module has no optimiser, or a setting does not fit it.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: StepSettings,
        build_optimizer: BuildOptimizer | None = None,
    ) -> None:
        self.module = module
        self.weight_copies = settings.weight_copies
        self._settings = settings
        self._precision = make_precision(settings.precision, "cpu")
        self._begin: Callable[[str], None] = ignore
        self._part: PlannedPart | None = None
        self._trainer = TrainerStandIn(settings)
        attach(module, self._trainer, self._manual_backward)

        # 1. The parts of the module that it builds itself.
        self._call_hook("setup", "fit")
        with self._precision.init_context():
            self._call_hook("configure_model")
        for callback in filter(changes_layers, settings.callbacks):
            callback.on_configure_model_end(self._trainer, module)
        if has_fake_tensors(module):
            convert_without_memory(module, self._precision.convert_module)
        else:
            self._precision.convert_module(module)
        if settings.activation_checkpointing:
            checkpoint_activations(module, settings.activation_checkpointing)
        module.train()
        if settings.part is not None:
            self._part = settings.part(module)

        # 2. The optimisers.
        self.optimizers = self._build_optimizers(build_optimizer)
        if settings.device == "cuda":
            for optimizer in self.optimizers:
                _step_together(optimizer)
        self._trainer.optimizers = self.optimizers
        self._is_automatic = bool(getattr(module, "automatic_optimization", True))
        if not self._is_automatic:
            for optimizer in self.optimizers:
                self._announce_steps(optimizer)

    def _call_hook(self, name: str, *args: Any) -> None:
        """Call a hook of the module, if it has it."""
        hook = getattr(self.module, name, None)
        if hook is not None:
            hook(*args)

    def _build_optimizers(self, build_optimizer: BuildOptimizer | None) -> list[Optimizer]:
        if build_optimizer is not None:
            return [build_optimizer(self.module.parameters())]
        configured: Any = self.module.configure_optimizers()  # type: ignore[operator]
        optimizers = [value for value in leaves_of(configured) if isinstance(value, Optimizer)]
        if not optimizers:
            raise ConfigurationError(
                f"`configure_optimizers` of {type(self.module).__name__} returned no optimiser, without which nothing"
                " is trained. Give one: optimizer=torch.optim.AdamW."
            )
        return optimizers

    def run(self, batches: Iterable[Any], count: int, begin: Callable[[str], None]) -> None:
        """Run the batches of a window and the optimiser's step.

        Args:
            batches: The batches, in order.
            count: Their number.
            begin: Called with the name of each phase when it begins.
        """
        self._begin = begin
        # What a step returns lives until the next one returns.
        output: Any = None
        for index, batch in enumerate(batches):
            begin("forward")
            output = self._forward(batch, index)
            if self._is_automatic:
                self._backward(output, is_first=index == 0, parts=count)
        if self._is_automatic:
            begin("optimizer step")
            for optimizer in self.optimizers:
                optimizer.step()
        self._begin = ignore

    def convert(self, batch: Any) -> Any:
        """Return a batch in the precision of the step."""
        if self._precision.convert_input is None:
            return batch
        return self._precision.convert_input(batch)

    def _forward(self, batch: Any, index: int) -> Any:
        context: AbstractContextManager[Any] = nullcontext()
        if self._precision.forward_context is not None:
            context = self._precision.forward_context()
        if self._part is not None:
            batch = self._part.of_batch(batch)
        with context, self._mode():
            step: Any = self.module.training_step
            return with_index(step)(batch, index)

    def _mode(self) -> AbstractContextManager[Any]:
        """Return the context of a forward and of a backward."""
        if self._part is None:
            return nullcontext()
        return self._part.mode()

    def _backward(self, output: Any, *, is_first: bool, parts: int) -> None:
        """Run the backward of what `training_step` returned."""
        if is_first:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        self._begin("backward")
        loss = output
        if isinstance(output, Mapping):
            loss = output.get("loss")
        if loss is None:
            return
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise ConfigurationError(
                "`training_step` must return the loss as a tensor that depends on trainable parameters."
            )
        # The share of the batch in its window, as the trainer hands it on.
        share = torch.full_like(loss, 1 / parts, requires_grad=False)
        with self._mode():
            loss.backward(share)  # type: ignore[no-untyped-call]

    # Optimisation by hand.

    def _manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._begin("backward")
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _announce_steps(self, optimizer: Optimizer) -> None:
        """Announce the phase of an optimiser's step wherever the module makes one."""

        def before(*args: Any) -> None:
            self._begin("optimizer step")

        def after(*args: Any) -> None:
            self._begin("forward")

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)


def _step_together(optimizer: Optimizer) -> None:
    """Let an optimiser step all parameters together, as it does on a GPU unless the user has chosen another way."""
    for group in optimizer.param_groups:
        # The optimisers of torch have the key, and None for the choice of torch.
        has_no_choice = "foreach" in group and group["foreach"] is None
        if has_no_choice and not group.get("fused"):
            group["foreach"] = True
