"""Call hooks. Overridden hooks are found once per run, so that others cost nothing in a step.

A bound hook is one callable for all callbacks and the module that override it, callbacks first. It sets the module's
current hook, which `self.log` reads, and returns the module's result. A hook that is not overridden is bound as None.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback as LightningCallback
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, Timer
from lightning.pytorch.profilers import PassThroughProfiler

from equipoise.callbacks.callback import Callback
from equipoise.interop.lightning.callbacks import (
    cannot_fire,
    copies_weights,
    with_average_begun,
    with_buffers_kept,
    with_latest_answer,
    without_skipped_steps,
)
from equipoise.interop.lightning.checkpoint_hooks import FitFacts, hook_of_checkpoint
from equipoise.interop.lightning.classes import base_of, is_a, with_index
from equipoise.interop.lightning.self_log import CURRENT_HOOK

if TYPE_CHECKING:
    from equipoise.trainer.state.run_state import RunState

__all__ = ["LIBRARIES", "Hooks", "overrides", "state_key_of"]

Hook = Callable[..., Any]

# Callbacks of these read only the loss of a step's outputs.
LIBRARIES = ("lightning.pytorch.", "pytorch_lightning.", "equipoise.")


def overrides(owner: object, name: str, base: type) -> bool:
    """Return True if `owner` has a callable `name` other than that of `base`.

    Attributes set on the instance count, and so do mocks and wrapped functions.
    """
    method = getattr(owner, name, None)
    if not callable(method):
        return False
    function = getattr(method, "__func__", method)
    return function is not getattr(base_of(owner, base), name, None)


def state_key_of(callback: Any) -> str:
    """Return the name of a callback's state in a checkpoint; an object that only looks like a callback has its class.

    Args:
        callback: A Callback, or an object with the hooks of one.
    """
    return getattr(callback, "state_key", type(callback).__qualname__)


def _may_use_outputs(callback: LightningCallback, name: str) -> bool:
    """Return the value of `uses_outputs` for a hook; True without a value.

    A class that overrides the hook does not inherit the value.
    """
    # A function on the instance has no value.
    if name in vars(callback):
        return True
    for kind in type(callback).__mro__:
        if "uses_outputs" in vars(kind):
            return bool(vars(kind)["uses_outputs"])
        if name in vars(kind):
            return True
    return True


def _within(enter: Callable[[], AbstractContextManager[None]], method: Hook) -> Hook:
    """Return a hook that runs within a context."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with enter():
            return method(*args, **kwargs)

    return run


class Hooks:
    """Hooks of one run.

    Args:
        trainer: First argument of the callbacks' hooks.
        state: Contains the callbacks, which may change during a run, and the profiler.
        module: The user's module.
        datamodule: The user's data module, or None.
        strategy_name: Name of the strategy's class, for the profile.
        fit: The fit, which callbacks of Lightning ask for validations and steps. Default: None, they act immediately.
        averaging: Returns a context for callbacks that copy the weights. Default: None, they need none.

    Attributes:
        awaited: The arguments of `on_train_batch_end`, as long as that of the module or of a user's callback follows.
    """

    def __init__(
        self,
        *,
        trainer: object,
        state: "RunState",
        module: LightningModule,
        datamodule: LightningDataModule | None,
        strategy_name: str,
        fit: FitFacts | None = None,
        averaging: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.trainer = trainer
        self.state = state
        self.module = module
        self.datamodule = datamodule
        self.fit = fit
        self._averaging = averaging
        self.awaited: tuple[Any, ...] = ()
        self.profiler = state.profiler
        self._module_name = type(module).__name__
        self._strategy_name = strategy_name
        self.is_profiled = not is_a(self.profiler, PassThroughProfiler)
        # Hooks read it before they write it; Lightning's modules have it from the beginning.
        vars(module).setdefault(CURRENT_HOOK, None)

    @property
    def callbacks(self) -> list[LightningCallback]:
        """All callbacks, in order."""
        return self.state.callbacks

    @property
    def copies_weights(self) -> bool:
        """True if a callback copies the weights, as averages of them do."""
        return any(map(copies_weights, self.callbacks))

    @property
    def recovers(self) -> bool:
        """True if a callback decides what happens when memory runs out."""
        return any(overrides(callback, "on_out_of_memory", Callback) for callback in self.callbacks)

    # Hooks that are bound once and called often

    def bind(self, name: str) -> Hook | None:
        """Bind the hook of the callbacks and the module; None if it is not overridden."""
        callbacks = self.callbacks
        module = self._of_module(name)
        followed = 0
        if name == "on_train_batch_end":
            # Callbacks that come before the module, or before the last one of the user, may save.
            users = [each for each in callbacks if not type(each).__module__.startswith(LIBRARIES)]
            places = [callbacks.index(each) for each in users if overrides(each, name, Callback)]
            followed = max(places, default=0) if module is None else len(callbacks)
        hooks = self._of_callbacks(name, callbacks[:followed])
        if hooks:
            hooks = [self._keep_arguments, *hooks, self._forget_arguments]
        return self._fire(name, hooks + self._of_callbacks(name, callbacks[followed:]), module)

    def _keep_arguments(self, trainer: Any, module: Any, *arguments: Any) -> None:
        self.awaited = arguments

    def _forget_arguments(self, trainer: Any, module: Any, *arguments: Any) -> None:
        self.awaited = ()

    def bind_callbacks(self, name: str, *, monitoring: bool | None = None, copying: bool | None = None) -> Hook | None:
        """Bind the hook of the callbacks alone.

        Args:
            name: The hook's name.
            monitoring: True: only callbacks that monitor a metric (early stopping, checkpoints). False: all others.
                Default: None, all callbacks.
            copying: True: only callbacks that copy the weights. False: all others. Default: None, all callbacks.
        """
        chosen = self.callbacks
        if copying is not None:
            chosen = [callback for callback in chosen if copying == copies_weights(callback)]
        if monitoring is not None:
            chosen = [callback for callback in chosen if monitoring == is_a(callback, EarlyStopping, Checkpoint)]
        return self._fire(name, self._of_callbacks(name, chosen), None)

    def bind_of(self, name: str, callbacks: Iterable[LightningCallback]) -> Hook | None:
        """Bind the hook of some callbacks alone.

        Args:
            name: The hook's name.
            callbacks: The callbacks.
        """
        return self._fire(name, self._of_callbacks(name, callbacks), None)

    def bind_deciders(self, name: str) -> Hook | None:
        """Bind the hook of the callbacks that act together with those of other processes.

        These are checkpoints, timers, averages of the weights, and callbacks that set
        `equipoise.Callback.fires_without_batch`.
        """
        chosen = []
        for callback in self.callbacks:
            decides = is_a(callback, Checkpoint, Timer) or copies_weights(callback)
            if decides or getattr(callback, "fires_without_batch", False):
                chosen.append(callback)
        return self._fire(name, self._of_callbacks(name, chosen), None)

    def bind_module(self, name: str) -> Hook | None:
        """Bind the hook of the module alone; None if the module does not override it."""
        return self._fire(name, [], self._of_module(name))

    def bind_data(self, name: str) -> Hook | None:
        """Bind a transfer hook: the data module's if it overrides the hook, else the module's."""
        datamodule = self.datamodule
        if datamodule is None or not overrides(datamodule, name, LightningDataModule):
            return self.bind_module(name)
        method = getattr(datamodule, name)
        return self._fire(name, [], self.profiled(method, self._action_of_datamodule(name)))

    def bind_step(self, name: str, module: LightningModule | None = None) -> Hook:
        """Bind the user's `training_step` or one of its siblings, which may take a batch alone.

        Args:
            name: The method's name.
            module: A copy of the module, whose method is bound. Default: the module itself.
        """
        # 1. Find the method. Profile it: copies run in other threads, while a profiler works in one only.
        if module is None:
            module = self.module
        run = self.plain_step(name, module)
        if module is self.module:
            run = self.profiled(run, self.action_of_strategy(name))
        # 2. Set the current hook around it. Local names are the quickest to read.
        state = vars(module)
        current = CURRENT_HOOK

        def fire_step(batch: Any, batch_idx: int, *rest: int) -> Any:
            """Run the step as the current hook; after an error this stays so, for messages, until the run has ended."""
            outer = state[current]
            state[current] = name
            result = run(batch, batch_idx, *rest) if rest else run(batch, batch_idx)
            state[current] = outer
            return result

        return fire_step

    def plain_step(self, name: str, module: LightningModule | None = None) -> Hook:
        """Return the user's `training_step` or one of its siblings, such that it accepts the index of the batch.

        Args:
            name: The method's name.
            module: A copy of the module, whose method is returned. Default: the module itself.
        """
        if module is None:
            module = self.module
        return with_index(getattr(module, name))

    def action_of_strategy(self, name: str) -> str:
        """Return the name of an action of the strategy in a profile."""
        return f"[Strategy]{self._strategy_name}.{name}"

    def _action_of_datamodule(self, name: str) -> str:
        return f"[LightningDataModule]{type(self.datamodule).__name__}.{name}"

    # Hooks that are called once or a few times in a run

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the hook of the callbacks and the module, and return the module's result."""
        fire = self.bind(name)
        if fire is None:
            return None
        return fire(*args, **kwargs)

    def call_callbacks(
        self, name: str, *args: Any, monitoring: bool | None = None, copying: bool | None = None, **kwargs: Any
    ) -> None:
        """Call the hook of the callbacks alone; see `bind_callbacks`."""
        fire = self.bind_callbacks(name, monitoring=monitoring, copying=copying)
        if fire is not None:
            fire(*args, **kwargs)

    def call_of(self, name: str, owner: Any) -> None:
        """Call the hook of one callback, or of the module."""
        is_module = owner is self.module
        fire = self._fire(
            name,
            [] if is_module else self._of_callbacks(name, [owner]),
            self._of_module(name) if is_module else None,
        )
        if fire is not None:
            fire()

    def call_module(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the module's method, overridden or not, and return its result."""
        method = getattr(self.module, name)
        if not callable(method):
            return None
        hook = self.profiled(method, f"[LightningModule]{self._module_name}.{name}")
        return self._fire(name, [], hook)(*args, **kwargs)  # type: ignore[misc]

    def call_datamodule(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the data module's method, if there is a data module, and return its result."""
        method = getattr(self.datamodule, name, None)
        if not callable(method):
            return None
        return self.profiled(method, self._action_of_datamodule(name))(*args, **kwargs)

    def reads_outputs(self, name: str) -> bool:
        """Return True if a hook may read outputs of the step beside its loss, which may be on many devices.

        Args:
            name: The hook that receives the outputs. Callbacks of Lightning and Equipoise read only the loss.
        """
        if overrides(self.module, name, LightningModule):
            return True
        hooks = [getattr(callback, name) for callback in self.callbacks if overrides(callback, name, Callback)]
        return not all(str(hook.__module__).startswith(LIBRARIES) for hook in hooks)

    def uses_outputs(self) -> bool:
        """Return True if a hook may read the outputs of `on_train_batch_end`, which take time to prepare."""
        name = "on_train_batch_end"
        if overrides(self.module, name, LightningModule):
            return True
        for callback in self.callbacks:
            if cannot_fire(callback, name):
                continue
            if overrides(callback, name, Callback) and _may_use_outputs(callback, name):
                return True
        return False

    # Construction of bound hooks

    def _of_callbacks(self, name: str, callbacks: Iterable[LightningCallback]) -> list[Hook]:
        """Return the hooks of the callbacks that override a hook and may act in it."""
        hooks = []
        for callback in callbacks:
            if not overrides(callback, name, Callback) or cannot_fire(callback, name):
                continue
            method = hook_of_checkpoint(callback, name, getattr(callback, name), self.fit)
            method = without_skipped_steps(callback, name, method, self.fit)
            method = with_average_begun(callback, name, method)
            method = with_buffers_kept(callback, name, method)
            method = with_latest_answer(callback, name, method, self.state.stop_requests)
            if self._averaging is not None and copies_weights(callback):
                method = _within(self._averaging, method)
            hooks.append(self.profiled(method, f"[Callback]{state_key_of(callback)}.{name}"))
        return hooks

    def _of_module(self, name: str) -> Hook | None:
        if not overrides(self.module, name, LightningModule):
            return None
        method = getattr(self.module, name)
        return self.profiled(method, f"[LightningModule]{self._module_name}.{name}")

    def profiled(self, method: Hook, action: str) -> Hook:
        """Return a function that measures a function; the function itself without a profiler.

        Args:
            method: The function.
            action: Its name in the profile.
        """
        if not self.is_profiled:
            return self.wrapped(method, action)
        profile = self.profiler.profile
        thread = get_ident()

        def profiled(*args: Any, **kwargs: Any) -> Any:
            # A profiler works in one thread, and the steps of a pipeline's micro-batches run in others.
            if get_ident() != thread:
                return method(*args, **kwargs)
            with profile(action):
                return method(*args, **kwargs)

        return self.wrapped(profiled, action)

    def profile(self, action: str) -> AbstractContextManager[Any]:
        """Measure a block, if there is a profiler.

        Args:
            action: The name of the block in the profile.
        """
        if self.is_profiled:
            return self.profiler.profile(action)
        return nullcontext()

    def wrapped(self, method: Hook, action: str) -> Hook:
        """Return a function as `Callback.wrap_call` of each callback wraps it, by its name in a profile."""
        for callback in self.callbacks:
            # An object that merely looks like a callback, such as a mock, would return anything.
            if isinstance(callback, Callback):
                method = callback.wrap_call(self.trainer, action, method)
        return method

    def _fire(self, name: str, callbacks: list[Hook], module: Hook | None) -> Hook | None:
        """Return one function that calls all hooks; None without hooks.

        The frequent cases have functions of their own, without a loop.
        """
        state = vars(self.module)
        current = CURRENT_HOOK
        # 1. The module alone.
        if not callbacks:
            if module is None:
                return None

            def fire_module(*args: Any, **kwargs: Any) -> Any:
                outer = state[current]
                state[current] = name
                result = module(*args, **kwargs)
                state[current] = outer
                return result

            return fire_module

        # 2. One callback alone.
        trainer = self.trainer
        pl_module = self.module
        if len(callbacks) == 1 and module is None:
            callback_hook = callbacks[0]

            def fire_one(*args: Any, **kwargs: Any) -> None:
                outer = state[current]
                state[current] = name
                callback_hook(trainer, pl_module, *args, **kwargs)
                state[current] = outer

            return fire_one

        # 3. Callbacks first, then the module.
        def fire(*args: Any, **kwargs: Any) -> Any:
            """Call all hooks as the current hook, and return the module's result."""
            outer = state[current]
            state[current] = name
            for callback in callbacks:
                callback(trainer, pl_module, *args, **kwargs)
            result = None
            if module is not None:
                result = module(*args, **kwargs)
            state[current] = outer
            return result

        return fire
