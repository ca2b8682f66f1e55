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
from equipoise.callbacks.copied_state import copied_state
from equipoise.callbacks.evaluation.evaluation_pass import EvaluationPass, EvaluationResult
from equipoise.callbacks.evaluation.host import EvaluationHost
from equipoise.callbacks.evaluation.loader_argument import find_loader
from equipoise.errors import ConfigurationError, StepError
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.torch.loaders import with_own_iterator
from equipoise.parallel.batches.gathering import gather
from equipoise.parallel.batches.shard import Shard
from equipoise.parallel.batches.splitting import infer_batch_size
from equipoise.parallel.snapshot.preserve_state import preserve_state
from equipoise.validation import check_whole

__all__ = ["NoGradEvaluation"]


class NoGradEvaluation(Callback):
    """Evaluate a loader without gradients at an interval, or at the end of training.

    An evaluation does not change training in any bit: it restores the mode of every submodule, buffers, random
    generators and gradients. Several processes take whole batches in turn, none twice; values are those of all
    processes. An operation that builds a graph is an error.

    Values are in `results`. Loggers receive them as `name/metric`, with `name/memory_MiB`, the peak memory beyond the
    memory in use before. `trainer.callback_metrics` has them as well, so that checkpoints and early stopping can
    monitor them, but not those of the evaluation at the end of training.

    Args:
        dataloader: A DataLoader or another iterable of batches, a function that returns one (called once in a run), or
            the name of a method of the data module or the module, such as "test_dataloader".
        metrics: A torchmetrics Metric or MetricCollection, of which a copy is used. Default: None.
        name: Prefix of the names of values. Default: "eval".
        forward: `forward(module, batch)` returns the arguments of the metrics' `update`, (preds, target) or a mapping
            of arguments by name; without metrics any value. Default: batches are (inputs, target), and it returns
            `module(inputs), target`; without metrics `module(inputs)`, and a batch may be the inputs alone.
        every_n_steps: Number of optimiser steps between two evaluations. Default: None, never.
        every_n_epochs: Number of epochs between two evaluations. Default: None, which means 1 without `every_n_steps`
            and `at_end`, else never.
        at_end: Evaluate at the end of training, unless the last step was just evaluated. Default: False.
        limit_batches: Maximum number of batches, of all processes together. Default: None, all batches.
        inference_mode: Use `torch.inference_mode` instead of `torch.no_grad`. This has less overhead, but tensors that
            forward stores in lists and caches cannot be used in training afterwards. Default: False.
        collect: Keep the outputs of `forward` in `outputs`, on the CPU. Default: False.
        shard: Distribute the batches over the processes. False if the loader already yields only the batches of its
            process. Default: True.

    Attributes:
        results: An `EvaluationResult` for each evaluation: step, epoch, values, memory, seconds.
        outputs: With `collect`, the outputs of the latest evaluation, one for each batch, in the order of the data; the
            same in every process.

    Raises:
        ConfigurationError: If an argument is invalid.

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
        check_whole("every_n_steps", every_n_steps, least=1, optional=True)
        check_whole("every_n_epochs", every_n_epochs, least=1, optional=True)
        check_whole("limit_batches", limit_batches, least=1, optional=True)
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
            # This only checks the loader.
            find_loader(dataloader, nn.Identity(), trainer=None)
        if every_n_steps is None and every_n_epochs is None and not at_end:
            every_n_epochs = 1
        self.dataloader = dataloader
        self.metrics = metrics
        self.name = name
        self.forward = forward
        self.every_n_steps = every_n_steps
        self.every_n_epochs = every_n_epochs
        self.at_end = at_end
        self.limit_batches = limit_batches
        self.inference_mode = inference_mode
        self.collect = collect
        self.shard = shard
        self.results: list[EvaluationResult] = []
        self.outputs: list[Any] = []
        self._forget_run()

    def _forget_run(self) -> None:
        self._loader: Any = None
        self._shard = Shard(None)
        self._run_metrics: Metric | MetricCollection | None = None
        # Optimiser steps at the end of the last batch.
        self._steps = 0
        # Optimiser steps at the last evaluation of this run; None before the first.
        self._evaluated_step: int | None = None

    # Intervals

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Start to count at the trainer's present step."""
        # Lightning's strategies do not say this.
        portable = getattr(trainer.strategy, "portable", None)
        if getattr(portable, "is_sharded", False):
            raise ConfigurationError(
                f"{type(self).__name__} deals batches out unevenly, but under strategy={trainer.strategy.name!r} all"
                " processes run a forward equally often. Use a validation loader and `validation_step` instead."
            )
        self._forget_run()
        self._steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Evaluate if `every_n_steps` optimiser steps are done."""
        before = self._steps
        self._steps = trainer.global_step
        every = self.every_n_steps
        # With gradient accumulation or several optimisers, the count need not grow by one.
        if every is not None and self._steps // every > before // every:
            self._log(trainer, pl_module, self._evaluate(trainer, pl_module), on_step=True, on_epoch=False)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Evaluate if `every_n_epochs` epochs are done."""
        every = self.every_n_epochs
        if every is None:
            return
        is_due = (trainer.current_epoch + 1) % every == 0
        if is_due and self._evaluated_step != trainer.global_step:
            result = self._evaluate(trainer, pl_module)
            self._log(trainer, pl_module, result, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Evaluate at the end of training, if `at_end` is set."""
        if self.at_end and self._evaluated_step != trainer.global_step:
            self._log(trainer, None, self._evaluate(trainer, pl_module))

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Release the loader and the metrics."""
        self._forget_run()

    # Evaluation

    def run(self, module: nn.Module) -> EvaluationResult:
        """Evaluate now, without a trainer, on the module's device. Every process of a group must call it.

        Args:
            module: Any module.

        Returns:
            The result, which is also appended to `results`.

        Raises:
            ConfigurationError: If `dataloader` names a method that the module does not have.
            StepError: If the loader yields no batch, or a graph is built.
        """
        try:
            return self._evaluate(None, module)
        finally:
            self._forget_run()

    def concatenated(self) -> Any:
        """Concatenate the collected outputs of all batches along the first dimension.

        Raises:
            StepError: If there are no outputs, or batches differ in structure.
        """
        if not self.outputs:
            raise StepError(f"{self.name} has collected nothing: say collect=True, and evaluate first.")
        sizes = [infer_batch_size(output) or 1 for output in self.outputs]
        return gather(self.outputs, sizes, torch.device("cpu"))

    def _evaluate(self, trainer: Any, module: nn.Module) -> EvaluationResult:
        """Evaluate the module; without a trainer, on its own device."""
        # 1. Prepare the loader, once in a run, and the metrics.
        host = EvaluationHost.of(trainer, module)
        if self._loader is None:
            self._prepare(trainer, module, host)
        metrics = self._run_metrics
        if metrics is not None:
            metrics.to(host.device)
            metrics.reset()
        evaluation = EvaluationPass(
            name=f"NoGradEvaluation {self.name!r}",
            host=host,
            metrics=metrics,
            forward=self.forward,
            inference_mode=self.inference_mode,
            limit=host.num_batches(self._limit(trainer), self._shard),
            collect=self.collect,
        )
        # 2. Read the counters.
        step = 0
        epoch = 0
        if trainer is not None:
            step = trainer.global_step
            epoch = trainer.current_epoch
        # 3. Evaluate.
        with preserve_state(module, self._loader):
            _silence(module)
            host.share_buffers(module)
            module.eval()
            evaluation.run(module, self._shard.loader)
            result = evaluation.finish(step=step, epoch=epoch)
            if metrics is not None:
                # Metrics may hold lists of all predictions.
                metrics.reset()
        # 4. Note the outputs and the result.
        self.outputs = evaluation.outputs
        self._evaluated_step = step
        self.results.append(result)
        return result

    def _prepare(self, trainer: Any, module: nn.Module, host: EvaluationHost) -> None:
        """Find the loader, this process's share of it, and copy the metrics."""
        self._loader = find_loader(self.dataloader, module, trainer)
        loader = self._loader
        # Training may be reading the same loader.
        if isinstance(loader, DataLoader):
            loader = with_own_iterator(loader)
        if self.shard and getattr(trainer, "use_distributed_sampler", True):
            self._shard = host.shard(loader)
        else:
            self._shard = host.as_shard(loader)
        self._run_metrics = deepcopy(self.metrics)

    def _limit(self, trainer: Any) -> int | None:
        """Return the number of batches of all processes together; None: all."""
        # `fast_dev_run` is True for one batch, or a number of batches.
        limits = (self.limit_batches, int(getattr(trainer, "fast_dev_run", False)))
        # Neither None nor 0 is a limit.
        return min(filter(None, limits), default=None)

    def _log(self, trainer: Any, module: LightningModule | None, result: EvaluationResult, **options: Any) -> None:
        """Log the numbers of a result.

        Args:
            trainer: The trainer, whose loggers receive the numbers.
            module: Module whose `log` receives the numbers for checkpoints and early stopping; None in hooks that may
                not log.
            result: The result.
            options: Options of `self.log`.
        """
        numbers = {
            f"{self.name}/{name}": value
            for name, value in result.values.items()
            if isinstance(value, (bool, int, float))
        }
        if module is not None:
            for name, value in numbers.items():
                module.log(name, float(value), logger=False, batch_size=1, **options)
        # Memory and epoch go to the loggers alone.
        numbers |= {f"{self.name}/memory_MiB": result.memory / 2**20, "epoch": result.epoch}
        for logger in trainer.loggers:
            logger.log_metrics(metrics=numbers, step=result.step)

    # State

    @property
    def state_key(self) -> str:
        """Key of the state in checkpoints; it contains the name."""
        return f"NoGradEvaluation({self.name!r})"

    def state_dict(self) -> dict[str, Any]:
        """Return the results so far."""
        return {"results": [result.state_dict() for result in self.results]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the results of an earlier process."""
        self.results = [EvaluationResult(**values) for values in state_dict["results"]]

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings and results, without the state of a run."""
        return copied_state(self, _loader=None, _shard=Shard(None), _run_metrics=None)


def _silence(module: nn.Module) -> None:
    """Replace `self.log` by a function that does nothing, until `preserve_state` restores it.

    Otherwise the logs of training would contain values of the evaluation.
    """
    for child in module.modules():
        if is_a(child, LightningModule):
            vars(child).update(log=_log_nothing, log_dict=_log_nothing)


def _log_nothing(*args: Any, **options: Any) -> None:
    pass
