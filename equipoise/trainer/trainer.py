"""The Trainer: its arguments and entry points."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import Precision as LightningPrecision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy as LightningStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from equipoise.errors import ConfigurationTypeError
from equipoise.names.tracebacks import shortens_tracebacks
from equipoise.parallel.workers.preloading import preload
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.auto_strategy_and_finders import choose_strategy, search
from equipoise.trainer.checkpoint import save_checkpoint
from equipoise.trainer.lifecycle import run
from equipoise.trainer.logging.results_table import to_scalars
from equipoise.trainer.preparation import begin_run
from equipoise.trainer.runtime.preflight import as_module, data_of
from equipoise.trainer.runtime.request import Request
from equipoise.trainer.settings import arguments as check
from equipoise.trainer.settings.argument_names import reads_arguments
from equipoise.trainer.settings.callbacks import select_callbacks
from equipoise.trainer.settings.devices import Devices
from equipoise.trainer.settings.loggers import select_loggers
from equipoise.trainer.settings.precision import module_init_context, select_plugins, select_precision, set_torch_flags
from equipoise.trainer.settings.strategy import connect_strategy
from equipoise.trainer.surface.public_state import PublicState

__all__ = ["Trainer"]

preload(__name__, "torchmetrics.classification")


class Trainer(PublicState):
    """Train, validate, test and predict with an unmodified LightningModule.

    Every argument has Lightning's name, meaning and default, if Lightning has it.

    Args:
        accelerator: "cpu", "gpu", "cuda" or "mps". "auto": GPUs if the machine has any, else the CPU. Default: "auto".
        strategy: How a step is computed on the devices: a name, such as "ddp", "fsdp" or "pipeline" (docs/choosing.md),
            or a Strategy; Lightning's own are translated. "auto": `single_device` for one device; `ddp` for several
            devices, or if torchrun, Slurm or Ray have started several processes. On several GPUs the memory of a step
            is predicted before the first fit; if it does not fit under `ddp`, the simplest strategy takes its place
            with which it does. Windows cannot start processes for `ddp`, so `dp` takes its place there. Default:
            "auto".
        devices: A number of devices, -1 for all, indices ([0, 2] or "0,2") or torch devices. "auto": all GPUs of the
            machine, or the CPU; one device for each process, if torchrun, Slurm or Ray have started the processes.
            Default: "auto".
        num_nodes: Number of machines. Default: None, 1 or the number on which torchrun, Slurm or Ray have started
            processes.
        precision: "32-true", "16-mixed", "bf16-mixed", "16-true", "16-true-norm32" (normalisation layers in float32),
            "bf16-true" or "64-true", a name that an extension offers, such as "fp8" (docs/quantization.md), or a plugin
            of Lightning for one of these. Default: None, "32-true".
        logger: One or several Loggers of Lightning. True: TensorBoard, or CSV if TensorBoard is not installed. False:
            none. Default: True.
        callbacks: One callback or a list. Default: None.
        fast_dev_run: Run one batch (True), or this number of batches, of each stage, without loggers and checkpoints.
            Default: False.
        max_epochs: Number of epochs after which training ends; -1: no limit. Default: 1000, or -1 if `max_steps` or
            `max_time` is given.
        min_epochs: Number of epochs before which no request to stop ends training. Default: None.
        max_steps: Number of optimiser steps after which training ends; -1: no limit. Default: -1.
        min_steps: Number of optimiser steps before which no request to stop ends training. Default: None.
        max_time: Time after which training ends: "DD:HH:MM:SS", a timedelta, or a dictionary of its arguments.
            Default: None.
        limit_train_batches: Number (int) or fraction (float) of the batches of an epoch to use. Default: 1.0.
        limit_val_batches: The same for validation; 0: no validation. Default: 1.0.
        limit_test_batches: The same for tests. Default: 1.0.
        limit_predict_batches: The same for prediction. Default: 1.0.
        overfit_batches: Number or fraction of batches on which to train and to validate, the same in each epoch; 0:
            all. Default: 0.0.
        val_check_interval: Validate after a fraction of an epoch (float), a number of batches (int) or a time.
            Default: 1.0.
        check_val_every_n_epoch: Number of epochs from one validation to the next. None: `val_check_interval` counts
            batches over epochs. Default: 1.
        num_sanity_val_steps: Number of validation batches before training; -1: all. Default: 2.
        log_every_n_steps: Number of steps after which the values of a step go to the loggers. Default: 50.
        enable_checkpointing: Whether to add a ModelCheckpoint if `callbacks` has none. Default: True.
        enable_progress_bar: Whether to add a progress bar if `callbacks` has none. Default: True.
        enable_model_summary: Whether to print a summary of the model. Default: True.
        accumulate_grad_batches: Number of batches of an optimiser step; their gradients are weighted by their sizes.
            Default: 1.
        gradient_clip_val: Largest norm, or absolute value, of the gradients. Default: None, no clipping.
        gradient_clip_algorithm: "norm" or "value". Default: None, "norm".
        deterministic: True: use deterministic algorithms, and raise an error for an operation without one. "warn": warn
            of such an operation. Default: None, torch's setting.
        benchmark: Whether cuDNN measures which algorithm is the fastest. Default: None, torch's setting, or False with
            `deterministic`.
        inference_mode: Evaluate under `torch.inference_mode`; False: under `torch.no_grad`. Default: True.
        use_distributed_sampler: Whether strategies with several processes give each process its share of the data.
            Default: True.
        profiler: "simple", "advanced", "pytorch" or a Profiler of Lightning. Default: None.
        detect_anomaly: Find the operation that produced a NaN, at the cost of slow steps. Default: False.
        detect_nonfinite: Report a loss that is NaN or infinite once, with its step and batch. True: also name the first
            module whose output is not finite, which waits for the device in each step. None: read the loss alone,
            without waiting. False: do not look. Lightning has no such argument. Default: None.
        barebones: Turn off everything that costs time, to measure the loop. Default: False.
        plugins: Plugins of Lightning, one or a list: a CheckpointIO, which writes and reads checkpoints, a precision,
            TorchSyncBatchNorm, or the environment of torchrun or Slurm. Default: None.
        sync_batchnorm: Whether strategies with several processes compute batch statistics over all of them.
            Default: False.
        reload_dataloaders_every_n_epochs: Number of epochs after which loaders are requested again; 0: never.
            Default: 0.
        default_root_dir: Folder of files for which the user names no folder. Default: the current folder.
        enable_autolog_hparams: Whether the module's hyperparameters go to the loggers. Default: True.
        activation_checkpointing: Submodules that compute their activations again in the backward and do not keep them:
            names, patterns such as ["encoder.layers.*"], or classes. Lightning has no such argument. Default: None,
            no submodule.
        prefetch: Whether the next batch travels to a CUDA device while the device computes. "auto": a batch of at least
            64 KiB, or 1 MiB if it is pinned. True: each batch. False: none. Lightning has no such argument. Default:
            "auto".
        compile: Compile forward, loss and backward of the training step to one program for each shape of a batch, which
            is used if it computes the same as the step itself; see docs/compile.md. "auto": and if it is faster. Under
            ddp and fsdp, and in manual optimisation, blocks of the network are compiled one by one. Options of
            `torch.compile` (backend, dynamic, options) compile blocks in each case. Lightning has no such argument.
            Default: False.
        capture: Capture forward, loss and backward of the training step as a CUDA graph for each shape of a batch,
            which is replayed if it computes the same as the step itself, to the bit; see docs/compile.md. Not together
            with `compile`. Lightning has no such argument. Default: False.
        fused_optimizer: Let the optimiser step all parameters by one kernel, where torch has one for it and
            `configure_optimizers` has chosen no other way. Its rounding is another. Lightning has no such argument.
            Default: False.
        step_in_backward: Step each parameter as soon as its gradient is complete and free the gradient, so that all
            gradients never exist together; the numbers are the same. One device, optimisers of torch, no clipping by
            norm and no accumulation; see docs/memory.md. Lightning has no such argument. Default: False.
        offload_activations: Keep tensors that the forward saves for the backward in the memory of the host: those of
            at least 1 MiB (True), or of at least this number of bytes. Parameters and buffers stay. Lightning has no
            such argument. Default: False.
        verify: Number of first steps to compute on one device as well, and to compare; see docs/verify.md. Lightning
            has no such argument. Default: 0.

    Raises:
        ConfigurationError: If an argument is wrong, or contradicts another one.

    Example:
        >>> from equipoise import Trainer
        >>> trainer = Trainer(max_epochs=3, gradient_clip_val=1.0)
        >>> trainer.fit(module, train_dataloaders=train_loader, val_dataloaders=val_loader)  # doctest: +SKIP
    """

    # Arguments of the constructor, which `reads_arguments` keeps.
    constructor_arguments: dict[str, Any]
    # False until the first fit: strategy="auto" is chosen then.
    _has_strategy = False

    @reads_arguments
    @shortens_tracebacks
    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy | LightningStrategy = "auto",
        devices: Devices = "auto",
        num_nodes: int | None = None,
        precision: str | int | LightningPrecision | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        callbacks: list[Callback] | Callback | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: check.Duration | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | check.Duration | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Profiler | str | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Any = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | os.PathLike[str] | None = None,
        enable_autolog_hparams: bool = True,
        activation_checkpointing: Sequence[str | type[nn.Module]] | None = None,
        compile: bool | Literal["auto"] | Mapping[str, Any] = False,
        capture: bool = False,
        fused_optimizer: bool = False,
        detect_nonfinite: bool | None = None,
        prefetch: bool | Literal["auto"] = "auto",
        step_in_backward: bool = False,
        offload_activations: bool | int = False,
        verify: int = 0,
    ) -> None:
        # 1. Devices, strategy and precision.
        check.check_flags(
            detect_nonfinite=detect_nonfinite,
            inference_mode=inference_mode,
            enable_autolog_hparams=enable_autolog_hparams,
            use_distributed_sampler=use_distributed_sampler,
            sync_batchnorm=sync_batchnorm,
        )
        check.check_count("verify", verify, least=0)
        connected, machines = connect_strategy(strategy, accelerator, devices, num_nodes)
        in_use = select_precision(precision, connected.root_device.type)
        super().__init__(connected, in_use, check.root_directory(default_root_dir))
        self.num_nodes = machines
        self.sync_batchnorm = sync_batchnorm
        self.use_distributed_sampler = use_distributed_sampler

        # 2. Arguments that `barebones` turns off, and switches.
        options = check.check_barebones(
            barebones,
            {
                "enable_checkpointing": enable_checkpointing,
                "logger": logger,
                "enable_progress_bar": enable_progress_bar,
                "log_every_n_steps": log_every_n_steps,
                "enable_model_summary": enable_model_summary,
                "num_sanity_val_steps": num_sanity_val_steps,
                "fast_dev_run": fast_dev_run,
                "detect_anomaly": detect_anomaly,
                "detect_nonfinite": detect_nonfinite,
                "profiler": profiler,
            },
        )
        self.barebones = barebones
        self.detect_anomaly = detect_anomaly
        self.inference_mode = inference_mode
        self.detect_nonfinite = options["detect_nonfinite"]
        self.enable_autolog_hparams = enable_autolog_hparams

        # 3. Steps, and limits.
        self.run_state.choose_speed(prefetch, compile, capture, fused_optimizer)
        self.run_state.choose_savers(activation_checkpointing, step_in_backward, offload_activations)
        self.run_state.limit_training(max_epochs, min_epochs, max_steps, min_steps)
        self.run_state.limit_batches(
            limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches, overfit_batches
        )
        self.run_state.limit_validation(val_check_interval, check_val_every_n_epoch, options["num_sanity_val_steps"])
        self.run_state.limit_for_development(options["fast_dev_run"])
        self.reload_dataloaders_every_n_epochs = check.check_count(
            "reload_dataloaders_every_n_epochs", reload_dataloaders_every_n_epochs, least=0
        )
        self.log_every_n_steps = check.check_count("log_every_n_steps", options["log_every_n_steps"], least=0)
        self.accumulate_grad_batches = check.check_count("accumulate_grad_batches", accumulate_grad_batches, least=1)
        self.gradient_clip_val, self.gradient_clip_algorithm = check.gradient_clipping(
            gradient_clip_val, gradient_clip_algorithm
        )

        # 4. Flags of torch, files, loggers and callbacks.
        set_torch_flags(deterministic, benchmark)
        self._choose_objects(plugins, callbacks, max_time, options)

    def _choose_objects(self, plugins: Any, callbacks: Any, max_time: Any, options: dict[str, Any]) -> None:
        if plugins is not None:
            chosen_plugins = select_plugins(plugins)
            self.checkpoint_io = chosen_plugins.checkpoint_io
            self.requeues_on_signal = chosen_plugins.requeues
        self.profiler = check.make_profiler(options["profiler"])
        self.loggers = select_loggers(options["logger"], self.default_root_dir, dummy=bool(self.fast_dev_run))
        self.callbacks = select_callbacks(
            callbacks,
            enable_checkpointing=options["enable_checkpointing"],
            enable_progress_bar=options["enable_progress_bar"],
            enable_model_summary=options["enable_model_summary"],
            max_time=max_time,
            barebones=self.barebones,
            complete=self.precision_in_use.complete,
        )

    # Entry points.

    @shortens_tracebacks
    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train.

        Args:
            model: The module.
            train_dataloaders: A loader or a collection of them, any iterables over batches; or a data module.
            val_dataloaders: A loader, or several, which are read one after the other.
            datamodule: Brings the loaders instead.
            ckpt_path: Continue from a checkpoint: a path, "best" or "last" of the last fit, "hpc" for the newest of a
                job that Slurm has interrupted.
            weights_only: None or True: the checkpoint is read as data, and nothing in it is run; a stand-in takes the
                place of each object that is no data. False: objects are created, which runs whatever code the file
                names; only for files that you trust. Without a checkpoint it says nothing. Default: None.

        Raises:
            ConfigurationError: If module, data and options do not fit together.
            CheckpointError: If the checkpoint cannot be read or is of another model.
        """
        train, datamodule = data_of(train_dataloaders, datamodule, val_dataloaders)
        loaders = {"train": train, "val": val_dataloaders}
        self._run(TrainerFn.FITTING, model, datamodule, loaders, ckpt_path, weights_only)

    @shortens_tracebacks
    def validate(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate on the validation set.

        Args:
            model: The module. None: that of the last run, with its best checkpoint unless `ckpt_path` says otherwise.
            dataloaders: A loader or several, or a data module.
            ckpt_path: The weights: a path, "best" or "last" of the last fit.
            verbose: Print a table.
            datamodule: Brings the loaders instead.
            weights_only: See `fit`.

        Returns:
            The logged values, a dictionary for each loader.
        """
        return self._evaluate(TrainerFn.VALIDATING, model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    @shortens_tracebacks
    def test(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate on the test set; see `validate`."""
        return self._evaluate(TrainerFn.TESTING, model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    @shortens_tracebacks
    def predict(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None:
        """Predict.

        Args:
            model: The module. None: that of the last run, with its best checkpoint unless `ckpt_path` says otherwise.
            dataloaders: A loader or several, or a data module.
            datamodule: Brings the loaders instead.
            return_predictions: Whether the outputs are kept and returned; False where a callback writes them away.
            ckpt_path: The weights: a path, "best" or "last" of the last fit.
            weights_only: See `fit`.

        Returns:
            The outputs of `predict_step` for each batch, on the CPU; a list of such lists for several loaders.
        """
        loaders, datamodule = data_of(dataloaders, datamodule)
        self.predict_loop.return_predictions = return_predictions is not False
        predictions: list[Any] | None = self._run(
            TrainerFn.PREDICTING, model, datamodule, {"predict": loaders}, ckpt_path, weights_only
        )
        return predictions

    def _evaluate(
        self,
        fn: TrainerFn,
        model: Any,
        dataloaders: Any,
        ckpt_path: Any,
        verbose: bool,
        datamodule: Any,
        weights_only: Any,
    ) -> list[dict[str, float]]:
        loaders, datamodule = data_of(dataloaders, datamodule)
        stage = "val" if fn == TrainerFn.VALIDATING else "test"
        metrics = self._run(fn, model, datamodule, {stage: loaders}, ckpt_path, weights_only)
        # Where a search was all that the Tuner wanted, there are none.
        outputs = [to_scalars(values) for values in metrics or ()]
        if verbose and self.is_global_zero:
            self.evaluations[fn.value].print_results(outputs)
        return outputs

    def _run(
        self, fn: TrainerFn, model: Any, datamodule: Any, loaders: dict[str, Any], ckpt_path: Any, weights_only: Any
    ) -> Any:
        module = self.lightning_module if model is None else as_module(model)
        if module is None:
            raise ConfigurationTypeError(f"`{fn.value}` needs a module: none was passed, and there was no run before.")
        request = Request(fn, module, model is not None, datamodule, loaders, ckpt_path, weights_only)
        # The finders search under the strategy of the fit.
        if request.fitting and not self._has_strategy:
            if self.constructor_arguments.get("strategy", "auto") == "auto":
                self._replace_strategy(choose_strategy(self, request))
            # After Ctrl-C, the next fit chooses.
            self._has_strategy = True
        if not search(self, Trainer, request):
            return None
        return run(self.parts, request)

    # What users call in the course of a run.

    @shortens_tracebacks
    def save_checkpoint(
        self, filepath: str | os.PathLike[str], weights_only: bool | None = None, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint, completely or not at all; to be called in every process.

        Args:
            filepath: The file; under `FSDPStrategy(checkpoints="sharded")` the folder. A name that ends with
                ".safetensors" holds the present weights alone, see `equipoise.extensions.export`.
            weights_only: Leave out everything but the weights and the counters. Default: None, False for a checkpoint.
            storage_options: For the CheckpointIO plugin, if there is one.

        Raises:
            CheckpointError: If something in it cannot be pickled, or the disk is full.
        """
        if self.parts.hooks is None:
            raise AttributeError(
                "A checkpoint holds a module, but no run has brought one yet. Call `fit` or `validate` first."
            )
        save_checkpoint(self.parts, self.parts.hooks, filepath, weights_only, storage_options)

    def connect_module(self, model: LightningModule) -> None:
        """Set what `lightning_module` returns, without a run; Lightning's name for it is `strategy.connect`.

        Args:
            model: The module.

        Raises:
            ConfigurationError: If it is no LightningModule.
        """
        module = as_module(model)
        if module is not self.lightning_module:
            begin_run(self.parts, Request(TrainerFn.FITTING, module))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print in one process of each machine."""
        if self.local_rank == 0:
            print(*args, **kwargs)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Number of optimiser steps of the whole training, as far as it can be known.

        Requests the training loader if that is still to be done, so `configure_optimizers` may use it. Before any run
        there is none: `max_steps`.
        """
        return self.fit_loop_state.estimated_steps()

    def init_module(self, empty_init: bool | None = None) -> Any:
        """Return a context in which a module is created on the device and in the precision of this trainer.

        Args:
            empty_init: Leave parameters uninitialised, for a checkpoint that will be loaded.
        """
        return module_init_context(self.connected_strategy, self.precision_in_use, empty=bool(empty_init))
