"""Public names that stand for values elsewhere: fields of a RunState (`StateField`), or what is read (`Reads`)."""

from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, get_args, overload

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.trainer.states import TrainerState
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim import Optimizer

from equipoise.errors import ConfigurationError
from equipoise.trainer.settings.step_choices import PrefetchChoice
from equipoise.trainer.state.progress import FitProgress
from equipoise.trainer.state.run_state import MetricListener, RunState

__all__ = ["Reads", "StateField", "StateFields"]

T = TypeVar("T")


class Reads(property, Generic[T]):
    """A property that reads an attribute of an object below its owner, and cannot be written.

    Args:
        path: The names from the owner to the value.
        text: A description of the value, for users; empty for names that only Lightning's objects read. Default: empty.

    Example:
        >>> class Owner:
        ...     run_state = RunState()
        ...     stops = Reads[bool]("run_state.should_stop", "Whether training ends.")
        >>> Owner().stops
        False
    """

    def __init__(self, path: str, text: str = "") -> None:
        names = path.split(".")

        # Torch's compiler cannot follow `operator.attrgetter` in a training step.
        def read(owner: Any) -> Any:
            for name in names:
                owner = getattr(owner, name)
            return owner

        super().__init__(read)
        self.__doc__ = text
        self._annotations = read.__annotations__

    def __set_name__(self, owner: type, name: str) -> None:
        # Pages about an owner show the type, which stands in the brackets.
        (self._annotations["return"],) = get_args(vars(self)["__orig_class__"])
        super().__set_name__(owner, name)  # type: ignore[misc]

    if TYPE_CHECKING:

        def __get__(self, instance: Any, owner: type | None = None, /) -> T: ...  # type: ignore[override]


class StateField(Generic[T]):
    """Reads and writes a field or a property of the RunState.

    Args:
        name: The name in the RunState. Default: the name of the attribute.

    Example:
        >>> class Owner:
        ...     should_stop = StateField[bool]()
        ...     def __init__(self):
        ...         self.run_state = RunState()
        >>> owner = Owner()
        >>> owner.should_stop = True
        >>> owner.run_state.should_stop
        True
    """

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = self.name or name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        return getattr(instance.run_state, self.name)

    def __set__(self, instance: Any, value: T) -> None:
        setattr(instance.run_state, self.name, value)


class _Loggers(StateField[list[Logger]]):
    """The list of loggers, which None empties, as in Lightning."""

    def __set__(self, instance: Any, value: list[Logger] | None) -> None:
        super().__set__(instance, value or [])


class StateFields:
    """The names of fields and properties of a RunState under which users and callbacks read and write them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check that a subclass hides no setting: runs would not read it, and writes to it would be lost.

        Raises:
            ConfigurationError: If it defines an attribute with the name of a setting.
        """
        super().__init_subclass__(**kwargs)
        settings = {declared.name for declared in fields(RunState)}
        for name in vars(cls):
            hidden = getattr(StateFields, name, None)
            if isinstance(hidden, StateField) and hidden.name in settings:
                raise ConfigurationError(
                    f"`{cls.__name__}.{name}` hides a setting of the Trainer, which runs read elsewhere. Pass it to"
                    f" `super().__init__`, or set `self.{name}` after that."
                )

    @cached_property
    def run_state(self) -> RunState:
        """The state. This one is replaced in `__init__`, before which a subclass may already write to its fields."""
        return RunState()

    # Limits.
    max_epochs = StateField[int | None]()
    min_epochs = StateField[int | None]()
    max_steps = StateField[int]()
    min_steps = StateField[int | None]()
    limit_train_batches = StateField[int | float]()
    limit_val_batches = StateField[int | float]()
    limit_test_batches = StateField[int | float]()
    limit_predict_batches = StateField[int | float]()
    overfit_batches = StateField[int | float]()
    val_check_interval = StateField[int | float]()
    val_check_seconds = StateField[float | None]()
    check_val_every_n_epoch = StateField[int | None]()
    num_sanity_val_steps = StateField[int | float]()
    fast_dev_run = StateField[int | bool]()

    # Other settings.
    accumulate_grad_batches = StateField[int]()
    gradient_clip_val = StateField[int | float | None]()
    gradient_clip_algorithm = StateField[str | None]()
    activation_checkpointing = StateField[list[str | type[nn.Module]] | None]()
    steps_in_backward = StateField[bool]()
    offload_least_bytes = StateField[int | None]()
    compiles_steps = StateField[Literal["auto"] | bool]()
    block_options = StateField[Mapping[str, Any] | None]()
    captures_steps = StateField[bool]()
    fuses_optimizers = StateField[bool]()
    sync_batchnorm = StateField[bool]()
    use_distributed_sampler = StateField[bool]()
    reload_dataloaders_every_n_epochs = StateField[int]()
    inference_mode = StateField[bool]()
    prefetch = StateField[PrefetchChoice]()
    log_every_n_steps = StateField[int]()
    enable_autolog_hparams = StateField[bool]()
    detect_anomaly = StateField[bool]()
    detect_nonfinite = StateField[bool | None]()
    barebones = StateField[bool]()
    num_nodes = StateField[int]()
    profiler = StateField[Profiler]()
    checkpoint_io = StateField[CheckpointIO | None]()
    default_root_dir = StateField[str]()

    # Stages.
    state = StateField[TrainerState]("status")
    training = StateField[bool]()
    validating = StateField[bool]()
    testing = StateField[bool]()
    predicting = StateField[bool]()
    sanity_checking = StateField[bool]()
    evaluating = StateField[bool]()
    interrupted = StateField[bool]()

    # Requests to end.
    should_stop = StateField[bool]()
    received_sigterm = StateField[bool]()
    requeues = StateField[bool]()
    requeues_on_signal = StateField[bool]()

    # Counters and checkpoints.
    progress = StateField[FitProgress]()
    current_epoch = StateField[int]()
    number_of_fit = StateField[int]()
    loaded_ckpt_path = StateField[Any]()
    managed_ckpt_path = StateField[Any]()
    objects_were_reported = StateField[bool]()

    # Objects that a run calls.
    datamodule = StateField[LightningDataModule | None]()
    callbacks = StateField[list[Callback]]()
    loggers = _Loggers()
    metric_listeners = StateField[list[MetricListener]]()
    summary_rows = StateField[dict[str, str]]()
    optimizers = StateField[list[Optimizer]]()
    lr_scheduler_configs = StateField[list[LRSchedulerConfig]]()
