"""Call hooks. Overridden hooks are found once per run, so that others cost nothing in a step.

A bound hook is one callable for all who override it, callbacks first; it tells the module which hook is running
(`self.log` depends on it) and returns the module's answer. Where nobody overrides a hook, it is None.
"""

from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch import Callback as LightningCallback
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, Timer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from equipoise.callbacks.callback import Callback
from equipoise.interop.lightning.callbacks import cannot_fire
from equipoise.interop.lightning.classes import base_of, is_a
from equipoise.interop.lightning.self_log import CURRENT_HOOK

__all__ = ["Hooks", "overrides", "state_key_of"]

Hook = Callable[..., Any]
_DECIDERS = (Checkpoint, Timer)

# Modules whose callbacks read no more than the loss of a step's outputs.
_LOOK_AT_THE_LOSS_ALONE = ("lightning.pytorch.", "equipoise.callbacks.", "equipoise.report.")


def overrides(owner: object, name: str, base: type) -> bool:
    """Whether `owner` has a callable `name` other than that of `base`.

    Attributes set on the instance count, and so do mocks and wrapped functions.
    """
    own = getattr(owner, name, None)
    return callable(own) and getattr(own, "__func__", own) is not getattr(base_of(owner, base), name, None)


def state_key_of(callback: Any) -> str:
    """Return the name of a callback's state in a checkpoint; an object that only looks like a callback has its class.

    Args:
        callback: A Callback, or an object with the hooks of one.
    """
    return getattr(callback, "state_key", type(callback).__qualname__)


def _may_use_outputs(callback: LightningCallback, name: str) -> bool:
    """What `uses_outputs` says of a hook; a class that overrides the hook of another is not meant by what that says."""
    if name in vars(callback):
        return True
    for kind in type(callback).__mro__:
        if "uses_outputs" in vars(kind):
            return bool(vars(kind)["uses_outputs"])
        if name in vars(kind):
            return True
    return True


class Hooks:
    """The hooks of one run.

    Args:
        trainer: What callbacks receive first; its list of callbacks may change in the course of a run.
        module: The user's module.
        datamodule: The user's data module, if there is one.
        profiler: Times every hook, unless it is one that does nothing.
    """

    def __init__(
        self,
        *,
        trainer: Any,
        module: LightningModule,
        datamodule: LightningDataModule | None,
        profiler: Profiler,
    ) -> None:
        self.trainer = trainer
        self.module = module
        self.datamodule = datamodule
        self.profiler = profiler
        self._name = type(module).__name__
        self.is_profiled = not is_a(profiler, PassThroughProfiler)

    @property
    def callbacks(self) -> list[LightningCallback]:
        """All callbacks, in order."""
        return self.trainer.callbacks  # type: ignore[no-any-return]

    # Bound once, called often.

    def bind(self, name: str) -> Hook | None:
        """The hook of the callbacks and the module; None if nobody overrides it."""
        return self._fire(name, self._of_callbacks(name, self.callbacks), self._of_module(name))

    def bind_callbacks(self, name: str, *, monitoring: bool | None = None) -> Hook | None:
        """The hook of the callbacks alone.

        Args:
            name: The hook's name.
            monitoring: True: only those that monitor a metric (early stopping, checkpoints). False: all others. None:
                all.
        """
        chosen = [c for c in self.callbacks if monitoring is None or monitoring == is_a(c, EarlyStopping, Checkpoint)]
        return self._fire(name, self._of_callbacks(name, chosen), None)

    def bind_checkpoints_after(self, name: str, state_key: str) -> Hook | None:
        """The hook of the checkpoint callbacks behind one of them, which was the last to come to its end.

        Args:
            name: The hook's name.
            state_key: The `state_key` of that callback.
        """
        keys = [state_key_of(callback) for callback in self.callbacks]
        behind = self.callbacks[keys.index(state_key) + 1 :] if state_key in keys else []
        return self._fire(name, self._of_callbacks(name, [c for c in behind if isinstance(c, Checkpoint)]), None)

    def bind_deciders(self, name: str) -> Hook | None:
        """The hook of the callbacks that act together with those of other processes: checkpoints, timers, and who asks.

        See `equipoise.Callback.fires_without_batch`.
        """
        chosen = [c for c in self.callbacks if is_a(c, *_DECIDERS) or getattr(c, "fires_without_batch", False)]
        return self._fire(name, self._of_callbacks(name, chosen), None)

    def bind_module(self, name: str) -> Hook | None:
        """The hook of the module alone; None if it does not override it."""
        return self._fire(name, [], self._of_module(name))

    def bind_data(self, name: str) -> Hook | None:
        """A transfer hook: the data module's if it overrides it, else the module's."""
        if self.datamodule is not None and overrides(self.datamodule, name, LightningDataModule):
            own = self.profiled(
                getattr(self.datamodule, name), f"[LightningDataModule]{type(self.datamodule).__name__}.{name}"
            )
            return self._fire(name, [], own)
        return self.bind_module(name)

    def bind_step(self, name: str, module: LightningModule | None = None) -> Hook:
        """The user's `training_step` or one of its siblings, which may take a batch alone.

        Args:
            name: The method's name.
            module: A copy of the module, whose method is meant. Default: the module itself.
        """
        own = getattr(self.module if module is None else module, name)
        if not is_param_in_hook_signature(own, "batch_idx", min_args=2):
            step = own

            def own(batch: Any, batch_idx: int, *rest: int) -> Any:
                return step(batch, *rest)

        if module is None or module is self.module:  # copies run in other threads, and a profiler knows one
            own = self.profiled(own, self.action_of_strategy(name))
        state, current, run = vars(self.module if module is None else module), CURRENT_HOOK, own

        def fire_step(batch: Any, batch_idx: int, *rest: int) -> Any:
            outer, state[current] = state[current], name
            answer = run(batch, batch_idx, *rest) if rest else run(batch, batch_idx)
            state[current] = outer
            return answer

        return fire_step

    def action_of_strategy(self, name: str) -> str:
        """The name that a profile gives to something the strategy does."""
        return f"[Strategy]{self.trainer.strategy.__class__.__name__}.{name}"

    # Called at once: for hooks that fire once or a few times in a run.

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the hook of the callbacks and the module and returns the module's answer."""
        fire = self.bind(name)
        return fire(*args, **kwargs) if fire else None

    def call_callbacks(self, name: str, *args: Any, monitoring: bool | None = None, **kwargs: Any) -> None:
        """Calls the hook of the callbacks alone."""
        if fire := self.bind_callbacks(name, monitoring=monitoring):
            fire(*args, **kwargs)

    def call_module(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's method, overridden or not, and returns its answer."""
        method = getattr(self.module, name)
        if not callable(method):
            return None
        fire = self._fire(name, [], self.profiled(method, f"[LightningModule]{self._name}.{name}"))
        return fire(*args, **kwargs) if fire else None

    def call_datamodule(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the data module's method, if there is a data module, and returns its answer."""
        method = getattr(self.datamodule, name, None)
        if not callable(method):
            return None
        return self.profiled(method, f"[LightningDataModule]{type(self.datamodule).__name__}.{name}")(*args, **kwargs)

    def reads_outputs(self, name: str) -> bool:
        """Whether somebody may look at what the step returned beside its loss, which may lie on many devices.

        Args:
            name: The hook that receives it. Those of Lightning's callbacks and of ours look at no more than the loss.
        """
        if overrides(self.module, name, LightningModule):
            return True
        hooks = [getattr(callback, name) for callback in self.callbacks if overrides(callback, name, Callback)]
        return not all(str(hook.__module__).startswith(_LOOK_AT_THE_LOSS_ALONE) for hook in hooks)

    def uses_outputs(self) -> bool:
        """Whether somebody may look at the outputs that `on_train_batch_end` receives, which take some time to make."""
        name = "on_train_batch_end"
        return overrides(self.module, name, LightningModule) or any(
            overrides(callback, name, Callback) and _may_use_outputs(callback, name)
            for callback in self.callbacks
            if not cannot_fire(callback, name)
        )

    # How they are made.

    def _of_callbacks(self, name: str, callbacks: Iterable[LightningCallback]) -> list[Hook]:
        chosen = (c for c in callbacks if overrides(c, name, Callback) and not cannot_fire(c, name))
        return [self.profiled(getattr(c, name), f"[Callback]{state_key_of(c)}.{name}") for c in chosen]

    def _of_module(self, name: str) -> Hook | None:
        if not overrides(self.module, name, LightningModule):
            return None
        return self.profiled(getattr(self.module, name), f"[LightningModule]{self._name}.{name}")

    def profiled(self, method: Hook, action: str) -> Hook:
        """The same function, timed if somebody asked for a profile.

        Args:
            method: The function.
            action: The name that the profile gives it.
        """
        if not self.is_profiled:
            return method
        profile = self.profiler.profile

        def profiled(*args: Any, **kwargs: Any) -> Any:
            with profile(action):
                return method(*args, **kwargs)

        return profiled

    def _fire(self, name: str, callbacks: list[Hook], module: Hook | None) -> Hook | None:
        state, current = vars(self.module), CURRENT_HOOK
        if not callbacks:
            if module is None:
                return None

            def fire_module(*args: Any, **kwargs: Any) -> Any:
                outer, state[current] = state[current], name
                answer = module(*args, **kwargs)
                state[current] = outer
                return answer

            return fire_module

        trainer, pl_module = self.trainer, self.module
        if len(callbacks) == 1 and module is None:
            only = callbacks[0]

            def fire_one(*args: Any, **kwargs: Any) -> None:
                outer, state[current] = state[current], name
                only(trainer, pl_module, *args, **kwargs)
                state[current] = outer

            return fire_one

        def fire(*args: Any, **kwargs: Any) -> Any:
            outer, state[current] = state[current], name
            for callback in callbacks:
                callback(trainer, pl_module, *args, **kwargs)
            answer = None if module is None else module(*args, **kwargs)
            state[current] = outer
            return answer

        return fire
