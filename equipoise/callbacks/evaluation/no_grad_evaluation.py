"""NoGradEvaluation: evaluate any loader with any metrics during training, without a trace."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import Metric, MetricCollection

from equipoise.callbacks.callback import Callback
from equipoise.callbacks.evaluation.evaluation_pass import EvaluationPass, EvaluationResult
from equipoise.callbacks.evaluation.host import EvaluationHost, find_loader
from equipoise.errors import ConfigurationError, StepError
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.torch.loaders import with_own_iterator
from equipoise.parallel.batches.gathering import gather
from equipoise.parallel.batches.splitting import infer_batch_size
from equipoise.parallel.snapshot.preserve_state import preserve_state

__all__ = ["NoGradEvaluation"]


class NoGradEvaluation(Callback):
    """Evaluates a loader without gradients at an interval, or at the end of training.

    Training goes on as if it had not happened, to the bit: the mode of every submodule, buffers, random generators and
    gradients are as they were. Several processes take whole batches in turn, none twice; values are those of all of
    them. That no graph is built is checked.

    Values stand in `results`, go to the loggers as `name/metric`, with `name/memory_MiB`, the memory that the
    evaluation held beyond what was held before, and to `trainer.callback_metrics`, so that checkpoints and early
    stopping can monitor them; at the end of training to the first two alone.

    Args:
        dataloader: A DataLoader or another iterable of batches, a function that returns one (called once in a run), or
            the name of a method of the data module or the module, such as "test_dataloader".
        metrics: A torchmetrics Metric or MetricCollection, of which a copy is used. Default: None.
        name: Stands before the names of values. Default: "eval".
        forward: `forward(module, batch)` returns what the metrics are updated with, (preds, target) or a mapping of
            arguments by name; without metrics anything. Default: batches are (inputs, target), and it returns
            `module(inputs), target`; without metrics `module(inputs)`, and a batch may be the inputs alone.
        every_n_steps: Evaluate when so many optimiser steps were done since the last time. Default: None, never.
        every_n_epochs: Evaluate at the end of every so many epochs. Default: None, which means 1 where neither
            `every_n_steps` nor `at_end` is given, else never.
        at_end: Evaluate at the end of training, unless that was just done. Default: False.
        limit_batches: The number of batches, of all processes together. Default: None, all of them.
        inference_mode: Under `torch.inference_mode` rather than `torch.no_grad`: a little less overhead, but what
            forward keeps in lists and caches cannot be used in training afterwards. Default: False.
        collect: Keep the outputs of `forward` in `outputs`, on the CPU. Default: False.
        shard: Whether each process takes its part of the batches; False if the loader gives it its own part already.
            Default: True.

    Attributes:
        results: An `EvaluationResult` for each evaluation: step, epoch, values, memory, seconds.
        outputs: With `collect`, those of the latest evaluation, one for each batch, in the order of the data, in every
            process.

    Raises:
        ConfigurationError: If an argument cannot be right.

    Example:
        >>> import torch
        >>> from torchmetrics import MeanSquaredError
        >>> from equipoise import NoGradEvaluation
        >>> batches = [(torch.ones(4, 2), torch.zeros(4, 1))]
        >>> evaluation = NoGradEvaluation(batches, MeanSquaredError(), every_n_steps=100)  # Trainer(callbacks=[...])
        >>> evaluation.run(torch.nn.Linear(2, 1)).batches  # or now, without a trainer
        1
    """

    uses_outputs = False

    fires_without_batch = True

    def __init__(
        self,
        dataloader: Iterable[Any] | Callable[[], Iterable[Any]] | str,
        metrics: Metric | MetricCollection | None = None,
        *,
        name: str = "eval",
        forward: Callable[[Any, Any], Any] | None = None,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        at_end: bool = False,
        limit_batches: int | None = None,
        inference_mode: bool = False,
        collect: bool = False,
        shard: bool = True,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"name stands before the names of values, so it is a text, not {name!r}.")
        _check_counts(every_n_steps=every_n_steps, every_n_epochs=every_n_epochs, limit_batches=limit_batches)
        if not isinstance(metrics, (Metric, MetricCollection)) and metrics is not None:
            raise ConfigurationError(
                f"metrics is a torchmetrics Metric or MetricCollection, not a {type(metrics).__name__}. Give"
                " MetricCollection([...]) for several."
            )
        if metrics is None and not collect:
            raise ConfigurationError("There is nothing to evaluate: give metrics, or collect=True to keep the outputs.")
        if forward is not None and not callable(forward):
            raise ConfigurationError(f"forward is a function of module and batch, not {forward!r}.")
        if not (callable(dataloader) or isinstance(dataloader, str)):
            find_loader(dataloader, nn.Identity(), None)  # only to check it
        if every_n_steps is None and every_n_epochs is None and not at_end:
            every_n_epochs = 1
        self.dataloader, self.metrics, self.name, self.forward = dataloader, metrics, name, forward
        self.every_n_steps, self.every_n_epochs, self.at_end = every_n_steps, every_n_epochs, at_end
        self.limit_batches, self.inference_mode, self.collect, self.shard = (
            limit_batches,
            inference_mode,
            collect,
            shard,
        )
        self.results: list[EvaluationResult] = []
        self.outputs: list[Any] = []
        self._forget_run()

    def _forget_run(self) -> None:
        self._loader: Any = None
        self._part: Any = None
        self._own_metrics: Metric | MetricCollection | None = None
        self._steps = 0  # optimiser steps at the last look
        self._evaluated: int | None = None  # optimiser steps at the last evaluation of this run

    # When.

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begins to count where training begins."""
        self._forget_run()
        self._steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Evaluates after every so many optimiser steps."""
        before, self._steps = self._steps, trainer.global_step
        every = self.every_n_steps
        if every is not None and self._steps // every > before // every:
            result = self._evaluate(trainer, pl_module)
            self._log(trainer, pl_module, result, on_step=True, on_epoch=False)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Evaluates at the end of every so many epochs."""
        every = self.every_n_epochs
        if every is not None and (trainer.current_epoch + 1) % every == 0 and self._evaluated != trainer.global_step:
            result = self._evaluate(trainer, pl_module)
            self._log(trainer, pl_module, result, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Evaluates at the end."""
        if self.at_end and self._evaluated != trainer.global_step:
            self._log(trainer, None, self._evaluate(trainer, pl_module))

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Lets go of loader and metrics."""
        self._forget_run()

    # What.

    def run(self, module: nn.Module) -> EvaluationResult:
        """Evaluates now, without a trainer, where the module lies; every process of a group must call it.

        Args:
            module: Any module.

        Returns:
            The result, which `results` holds as well.

        Raises:
            ConfigurationError: If `dataloader` names a method that the module does not have.
            StepError: If the loader gives no batch, or a graph is built.
        """
        try:
            return self._evaluate(None, module)
        finally:
            self._forget_run()

    def concatenated(self) -> Any:
        """The collected outputs of all batches as one, put together along the first dimension.

        Raises:
            StepError: If there are none, or batches differ in structure.
        """
        if not self.outputs:
            raise StepError(f"{self.name} has collected nothing: say collect=True, and evaluate first.")
        sizes = [infer_batch_size(output) or 1 for output in self.outputs]
        return gather(self.outputs, sizes, torch.device("cpu"))

    def _evaluate(self, trainer: Any, module: nn.Module) -> EvaluationResult:
        around = EvaluationHost.of(trainer, module)
        if self._loader is None:
            self._loader = find_loader(self.dataloader, module, trainer)
            shares = self.shard and getattr(trainer, "use_distributed_sampler", True)
            read = self._loader
            if isinstance(read, DataLoader):  # training may be in the midst of it
                read = with_own_iterator(read)
            self._part = around.share(read) if shares else read
            self._own_metrics = deepcopy(self.metrics)
        if (metrics := self._own_metrics) is not None:
            metrics.to(around.device)
            metrics.reset()
        single = int(getattr(trainer, "fast_dev_run", False)) or None
        limits = [limit for limit in (self.limit_batches, single) if limit is not None]
        evaluation = EvaluationPass(
            name=f"NoGradEvaluation {self.name!r}",
            around=around,
            metrics=metrics,
            forward=self.forward,
            inference_mode=self.inference_mode,
            limit=around.part_of(min(limits, default=None), self._part),
            collect=self.collect,
        )
        with preserve_state(module, self._loader):
            _silence(module)
            around.share_buffers(module)
            module.eval()
            evaluation.run(module, self._part)
            step, epoch = (trainer.global_step, trainer.current_epoch) if trainer is not None else (0, 0)
            result = evaluation.finish(step=step, epoch=epoch)
            if metrics is not None:
                metrics.reset()  # lists of all predictions, say
        self.outputs, self._evaluated = evaluation.outputs, step
        self.results.append(result)
        return result

    def _log(self, trainer: Any, module: LightningModule | None, result: EvaluationResult, **options: Any) -> None:
        """Hands the numbers on.

        Args:
            trainer: The trainer.
            module: Logs for the callbacks; None where nothing may be logged.
            result: What came out.
            options: Of `self.log`.
        """
        numbers = {f"{self.name}/{name}": value for name, value in result.values.items() if _is_number(value)}
        if module is not None:
            for name, value in numbers.items():
                module.log(name, float(value), logger=False, batch_size=1, **options)
        numbers |= {f"{self.name}/memory_MiB": result.memory / 2**20, "epoch": result.epoch}
        for logger in trainer.loggers:
            logger.log_metrics(metrics=numbers, step=result.step)

    # State.

    @property
    def state_key(self) -> str:
        """Tells evaluations with other names apart."""
        return f"NoGradEvaluation({self.name!r})"

    def state_dict(self) -> dict[str, Any]:
        """The results so far."""
        return {"results": [result.state_dict() for result in self.results]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with the results of an earlier process."""
        self.results = [EvaluationResult(**values) for values in state_dict["results"]]

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what belongs to a run, and the methods that a trainer lends to callbacks."""
        left_out = ("log", "log_dict", "_loader", "_part", "_own_metrics")
        kept = {name: value for name, value in vars(self).items() if name not in left_out}
        return {**kept, "_loader": None, "_part": None, "_own_metrics": None}


def _check_counts(**counts: Any) -> None:
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigurationError(f"{name} is a whole number from 1, or None, not {value!r}.")


def _silence(module: nn.Module) -> None:
    """Lets `self.log` in forward do nothing, until attributes are put back: training would log what was evaluated."""
    for part in module.modules():
        if is_a(part, LightningModule):
            vars(part).update(log=_log_nothing, log_dict=_log_nothing)


def _log_nothing(*args: Any, **options: Any) -> None:
    pass


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))
