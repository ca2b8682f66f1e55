"""State that hooks and steps have given to the objects of a training, beside what these save themselves.

A checkpoint holds what has changed since training began: plain attributes of the module and its parts, the data module,
callbacks, data sets, samplers and a few settings of the trainer. A resumed run calls the hooks of the start, and then
gets these changes back. What such a hook sets, and nothing changes later, is that of the present process.

A file holds no objects. An owner whose objects lack within a resumed epoch gets `on_train_epoch_start` a second time,
before the changes come back.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch.utils.data import DataLoader
from torchmetrics import Metric

from equipoise.interop.torch.modules import uncompiled_name
from equipoise.notices import is_of_library
from equipoise.parallel.snapshot import random_state
from equipoise.parallel.snapshot.generators import linked
from equipoise.parallel.snapshot.plain.paths import Root
from equipoise.parallel.snapshot.plain.state import PlainState, State
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.checkpointing.file import OUR_KEY
from equipoise.trainer.hooks.hooks import Hooks, state_key_of

if TYPE_CHECKING:
    from equipoise.trainer.data.training_data import TrainingData
    from equipoise.trainer.evaluation.evaluation_loop import EvaluationLoop
    from equipoise.trainer.state.run_state import RunState

__all__ = ["HookState"]

# Settings that hooks change. Those that end a run are the resumed run's own.
_SETTINGS = {
    "accumulate_grad_batches",
    "check_val_every_n_epoch",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "limit_val_batches",
    "log_every_n_steps",
}
# What a run binds to the module and to callbacks.
_BOUND = frozenset({"log", "log_dict"})
# Bytes of a value in data and data modules that is still state, and no data.
_LARGEST_OF_DATA = 1 << 20


class HookState:
    """Collects and restores the state that hooks have set in one run.

    Args:
        state: The settings, callbacks and optimisers.
        strategy: The strategy.
        hooks: The hooks of the module and the data module.
        data: The training loaders.
        val_loop: The loop that validates inside the fit, with its loaders.

    Attributes:
        before_order: What had changed in the training data when the order of the present epoch was drawn.
        before_request: What had changed when the training loaders were requested, with the state of every generator;
            empty if they are requested once.
    """

    def __init__(
        self, state: "RunState", strategy: Strategy, hooks: Hooks, data: "TrainingData", val_loop: "EvaluationLoop"
    ) -> None:
        self._run_state = state
        self._strategy = strategy
        self._hooks = hooks
        self._data = data
        self._val_loop = val_loop
        self._state = PlainState()
        self._has_begun = False
        self.before_order: State = {}
        self.before_request: dict[str, Any] = {}
        # The state before the first request.
        self._before_requests: PlainState | None = None
        # The changes of the run that this one resumes.
        self._earlier: State = {}
        self._is_reported = True
        self._in_epoch = False
        # Paths of what the sanity check has changed, as texts.
        self._of_sanity_check: set[str] = set()
        # Named places where the present run is constructed otherwise.
        self._conflicts: set[str] = set()

    # In a run.

    def begin_hooks(self) -> None:
        """Note the state before the hooks of the start."""
        self._state.mark(self._objects())

    def begin_request(self) -> None:
        """Note the state before the training loaders are requested, if that is repeated: they may depend on it."""
        if self._run_state.reload_dataloaders_every_n_epochs:
            changes = self._first_request().changes(self._objects())
            self.before_request = {"random_state": random_state.capture().state_dict(), "hook_state": changes}

    def _first_request(self) -> PlainState:
        if self._before_requests is None:
            self._before_requests = PlainState()
            self._before_requests.mark(self._objects())
        return self._before_requests

    def restore_request(self) -> None:
        """Bring the objects, and every generator, to their state before the training loaders were requested."""
        self._first_request()
        random_state.RandomState.from_state_dict(self.before_request["random_state"]).restore()
        self._restore(self._objects(), self.before_request["hook_state"])

    def begin_data(self) -> None:
        """Note the state of the training data before the first order is drawn from them."""
        self._mark_data("train")

    @contextmanager
    def sanity_check(self) -> Iterator[None]:
        """Follow the sanity check: a run that is resumed within an epoch has none, so what it changes comes back."""
        state = PlainState()
        state.mark(self._objects())
        yield
        self._of_sanity_check = state.changed_paths(self._objects())

    def begin(self) -> None:
        """Note the state after the hooks of the start. Tensors and arrays of theirs may come from the weights."""
        self._state.mark_but_tensors(self._objects(), changed=self._of_sanity_check)
        self._mark_data("val")
        self._has_begun = True

    def _mark_data(self, stage: str) -> None:
        # Data that are requested anew may depend on the epoch.
        is_constant = not self._run_state.reload_dataloaders_every_n_epochs
        self._state.mark(self._data_roots(stage), with_starts=is_constant)

    def changes(self) -> State:
        """Return what has changed since then; in a run that has not begun, what it resumes from."""
        if not self._has_begun:
            return self._earlier
        changes = self._state.changes(self._roots())
        if self._run_state.status.stage is None:
            # What hooks of the end delete, a longer run would have kept.
            changes["deleted"] = []
        return changes

    def note_order(self) -> None:
        """Note what has changed in the training data, before the order of an epoch is drawn from them."""
        if self._has_begun:
            self.before_order = self._state.changes(self._data_roots("train"))

    # In a resumed run.

    def resume(self, changes: State, before_order: State, before_request: dict[str, Any]) -> None:
        """Take the changes of the run that is resumed."""
        self._earlier = changes
        self.before_order = before_order
        self.before_request = before_request

    def bring_back(self, *, in_epoch: bool) -> None:
        """Bring the changes back, after the hooks of the start.

        Args:
            in_epoch: Whether an epoch is resumed whose `on_train_epoch_start` is not called.
        """
        self._is_reported = not self._earlier
        self._in_epoch = in_epoch
        if in_epoch:
            from equipoise.trainer.state.lacking_objects import begin_again

            begin_again(self._run_state, self._hooks, self._roots(), self._earlier, self._state)
        # Data come back when the order of the epoch has been drawn.
        self._restore(self._objects(), self._earlier)

    def restore_order(self) -> None:
        """Bring the training data to their state before the order of the epoch was drawn."""
        self.restore(self.before_order)

    def restore(self, changes: State | None = None) -> None:
        """Bring changes back. Default: None, those of the run that is resumed."""
        self._restore(self._roots(), self._earlier if changes is None else changes)

    def _restore(self, roots: dict[str, Root], changes: State) -> None:
        from equipoise.parallel.snapshot.plain.merging import bring_back
        from equipoise.trainer.checkpointing.entry_checks import loading

        with loading(OUR_KEY):
            bring_back(roots, changes, self._state, self._strategy.root_device, self._conflicts)

    def report(self) -> None:
        """Warn once of what could not be brought back, after `on_train_epoch_start`."""
        if not self._is_reported:
            from equipoise.trainer.state.lacking_objects import warn_of_hidden, warn_of_lacking

            self._is_reported = True
            warn_of_lacking(self._roots(), self._earlier, self._state)
            # Data are read again, and with them their iterators.
            roots = {name: root for name, root in self._objects().items() if root.value is not self._hooks.datamodule}
            warn_of_hidden(self._run_state, roots, None if self._in_epoch else self._state)

    # The objects.

    def _roots(self) -> dict[str, Root]:
        # Data come first, so that what is in them is known as theirs: it is no state if it is large.
        return {**self._data_roots("train"), **self._data_roots("val"), **self._objects()}

    def _objects(self) -> dict[str, Root]:
        """Return settings, data module, module and callbacks."""
        state = self._run_state
        module = self._hooks.module
        datamodule = self._hooks.datamodule
        roots = {"trainer": Root(state, frozenset(vars(state)) - _SETTINGS)}
        kind: Any
        if datamodule is not None:
            kind = type(datamodule)
            left_out = _own_names(LightningDataModule) | _loaded_names(kind)
            roots[kind.__name__] = Root(datamodule, left_out, largest=_LARGEST_OF_DATA)
        module_name = type(module).__name__
        for path, part in module.named_modules():
            name = f"{module_name}.{uncompiled_name(path)}" if path else module_name
            kind = type(part)
            left_out = _own_names(LightningModule) | _private_names(part) | _loaded_names(kind)
            if isinstance(part, Metric):
                # The states of metrics are saved by themselves.
                left_out |= _names_in(Metric) | set(part.metric_state)
            roots[name] = Root(part, left_out)
        for callback in state.callbacks:
            kind = type(callback)
            # Mocks are of Python's own library, and record calls.
            package = kind.__module__.split(".")[0]
            if package != "equipoise" and package not in sys.stdlib_module_names:
                left_out = _names_of_lightning(kind) | _loaded_names(kind) | _BOUND
                name = _free_name(state_key_of(callback), roots)
                roots[name] = Root(callback, left_out, objects_only=_is_of_lightning(kind))
        return roots

    def _data_roots(self, stage: str) -> dict[str, Root]:
        loaders = self._data.loaders if stage == "train" else self._val_loop.loaders
        roots: dict[str, Root] = {}
        for index, loader in enumerate([] if loaders is None else loaders.flat):
            for value in linked([loader]):
                if not hasattr(value, "__dict__") or type(value).__module__.startswith("equipoise."):
                    continue
                left_out: frozenset[str] = frozenset()
                if isinstance(value, DataLoader):
                    left_out = frozenset(vars(value)) - {"collate_fn"}
                name = _free_name(f"{stage} loader {index}: {type(value).__name__}", roots)
                roots[name] = Root(value, left_out, largest=_LARGEST_OF_DATA)
        return roots


def _free_name(name: str, roots: dict[str, Root]) -> str:
    """Return a name, or the first numbered one that no object of the same class has."""
    names = (name, *(f"{name} {number}" for number in range(2, len(roots) + 2)))
    return next(free for free in names if free not in roots)


@cache
def _own_names(kind: type) -> frozenset[str]:
    """Return the attributes that every module, or data module, has."""
    return frozenset(vars(kind())) | {"training", "trainer"} | _BOUND


def _private_names(part: Any) -> frozenset[str]:
    """Return the private attributes of a layer of torch."""
    if not type(part).__module__.startswith("torch."):
        return frozenset()
    return frozenset(name for name in vars(part) if name.startswith("_"))


def _is_of_lightning(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("lightning", "pytorch_lightning")


@cache
def _names_of_lightning(kind: type) -> frozenset[str]:
    """Return the names that the classes of Lightning use from which a class of the user is derived."""
    names: set[str] = set()
    if _is_of_lightning(kind):
        return frozenset()
    for base in kind.__mro__:
        if _is_of_lightning(base) and base is not Callback:
            names |= _names_in(base)
    return frozenset(names)


@cache
def _names_in(kind: type) -> frozenset[str]:
    """Return the names that the methods of a class use."""
    methods = [method for method in vars(kind).values() if isinstance(method, FunctionType)]
    return frozenset(name for method in methods for name in method.__code__.co_names)


@cache
def _loaded_names(kind: type) -> frozenset[str]:
    """Return the names in a class's own hooks for loading: what these restore is theirs."""
    names: set[str] = set()
    for base in kind.__mro__:
        for hook in ("on_load_checkpoint", "load_state_dict", "set_extra_state"):
            method = vars(base).get(hook)
            if isinstance(method, FunctionType) and not is_of_library(method.__code__.co_filename):
                names.update(method.__code__.co_names)
    return frozenset(names)
