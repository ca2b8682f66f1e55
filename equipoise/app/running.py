"""Run a composed configuration: check it, build its objects, and run them here or where its launcher says.

run ──→ check all values, begin the folder ──┬──────────────────────────→ run_values ──→ builds, fits, tests
                                             └─ launcher=ray ──→ workers ──→ run_values, in each of them

Where torchrun or Slurm has started several processes, each of them calls `run`, and rank 0 begins the folder.
"""

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback, LightningDataModule, LightningModule, seed_everything
from omegaconf import DictConfig

from equipoise.app.batch_size import with_batch_size
from equipoise.app.build import (
    announce_changes,
    build,
    build_trainer,
    check_loggers,
    check_values,
    chosen_checkpoint,
    overrides,
    plain_values,
)
from equipoise.app.hydra_errors import explained
from equipoise.app.output import begun_folder, without_empty_folder
from equipoise.app.sweeps.progress import callbacks_of_job, report_metrics
from equipoise.app.torchrun import agree_with_first, check_can_share, is_first, launched_rank
from equipoise.errors import ConfigurationError
from equipoise.formats import format_path
from equipoise.interop.remote.paths import AnyPath, to_path
from equipoise.trainer.checkpointing.file import newest_first
from equipoise.trainer.runtime.continuing import note_interrupt

__all__ = ["run", "run_values"]

_LOADERS = {
    "fit": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


def run(config: DictConfig, stage: str | None = None) -> dict[str, float]:
    """Build the objects of a composed configuration and run them, for the command and for a `hydra.main` of your own.

    Args:
        config: A configuration that has `equipoise` in its defaults list.
        stage: "fit", "validate", "test" or "predict". Default: the configuration's `stage`.

    Returns:
        The last metrics of the run, including those of the test if `test` is true.

    Raises:
        ConfigurationError: If a value is missing, a `_target_` cannot be imported, or does not take an argument.

    Example:
        >>> import hydra
        >>> from equipoise.app import run
        >>> @hydra.main(version_base="1.3", config_path="conf", config_name="config")
        ... def main(config):
        ...     run(config)
    """
    values = _plain_values(config, stage)
    output = to_path(values.get("output_dir") or ".")
    with without_empty_folder(_made_by_hydra(output)):
        return _run_in_folder(config, values, output)


def _run_in_folder(config: DictConfig, values: dict[str, Any], output: AnyPath) -> dict[str, float]:
    """Run a configuration whose folder Hydra has made, which is removed if nothing comes into it."""
    # 1. Check all values.
    launcher = None
    with explained():
        check_values(with_batch_size(values)[0])
        check_loggers(values)
        rank = launched_rank(values)
        if rank is not None:
            check_can_share(values, rank)
        values["ckpt_path"] = chosen_checkpoint(values)
        if values["ckpt_path"] not in (None, "last"):
            announce_changes(values["ckpt_path"], values)
        if values.get("launcher"):
            _check_is_local(output)
            launcher = build(values["launcher"], "launcher")
            launcher.check_run(values)

    # 2. Run here, or where the launcher says, in the folder of the first process.
    with begun_folder(output, values) if is_first(values) else nullcontext():
        if rank is not None:
            agreed = agree_with_first(config, values, rank)
            # Other values may contain the folder.
            values = _plain_values(config, values["stage"]) | agreed
        if launcher is not None:
            metrics: dict[str, float] = launcher.run(run_values, values)
        else:
            metrics = run_values(values, callbacks_of_job())
    report_metrics(metrics)
    return metrics


def _plain_values(config: DictConfig, stage: str | None) -> dict[str, Any]:
    """Return a configuration as plain values, with the stage that the command has chosen."""
    with explained():
        values = _in_own_folder(plain_values(config))
    if stage is not None:
        values["stage"] = stage
    return values


def _in_own_folder(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a run; those that an earlier run has recorded, with this run's folder for that one's.

    A recorded configuration names the folder in which it stands. A second run there would replace files of the first.
    """
    if not HydraConfig.initialized():
        return values
    runtime = HydraConfig.get().runtime
    recorded = values.get("output_dir")
    if not any(source.provider == "main" and source.path == recorded for source in runtime.config_sources):
        return values
    own: dict[str, Any] = _with_text(values, str(recorded), runtime.output_dir)
    return {**own, "ckpt_path": values["ckpt_path"]}


def _with_text(value: Any, old: str, new: str) -> Any:
    """Return a nested value with one text in place of another, wherever it occurs."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, dict):
        return {key: _with_text(part, old, new) for key, part in value.items()}
    if isinstance(value, list):
        return [_with_text(part, old, new) for part in value]
    return value


def _made_by_hydra(output: AnyPath) -> Path:
    """Return the folder that Hydra has made for a run: that of its log, if all else is written elsewhere."""
    if isinstance(output, Path):
        return output
    return Path(HydraConfig.get().runtime.output_dir if HydraConfig.initialized() else ".")


def _check_is_local(output: AnyPath) -> None:
    """Check that workers of a launcher find the folder of a run, which they read and write as one of their machines."""
    if not isinstance(output, Path):
        raise ConfigurationError(
            f"With a launcher, output_dir is a folder that all machines share, not {str(output)!r}. Leave launcher out,"
            " or leave output_dir out and write checkpoints elsewhere by callbacks.model_checkpoint.dirpath."
        )


def run_values(values: Mapping[str, Any], callbacks: Sequence[Callback] = ()) -> dict[str, float]:
    """Build the objects of a configuration whose values are checked, and run them in this process.

    Args:
        values: The configuration in plain values, as `check_values` has accepted it. Its folder exists.
        callbacks: Callbacks of the program that runs it, besides the configured ones. Default: none.

    Returns:
        The last metrics of the run, including those of the test if `test` is true.

    Raises:
        ConfigurationError: If an object cannot be built, or there are no data.
    """
    # 1. Build the objects.
    values, finders = with_batch_size(values)
    data = None
    if values["seed"] is not None:
        seed_everything(values["seed"], workers=True)
    with explained():
        if values.get("data"):
            data = build(values["data"], "data")
        module = build(values["module"], "module")
        trainer = build_trainer(values, [*callbacks, *finders])
    loader = _LOADERS[values["stage"]]
    if data is None and not overrides(module, LightningModule, loader):
        raise ConfigurationError(f"There are no data: choose some with data=NAME, or define {loader} in the module.")

    # 2. Run them, without a warning of Lightning: the folder is this run's own.
    with warnings.catch_warnings(), _wandb_finished():
        warnings.filterwarnings("ignore", "Experiment logs directory .* exists and is not empty")
        return _run_stages(trainer, module, data, values, finders)


@contextmanager
def _wandb_finished() -> Iterator[None]:
    """End the run of Weights & Biases that a block begins, with its state; the next job of a sweep would continue it.

    At the end of the program wandb would not see how an interrupted run ended.
    """
    earlier = getattr(sys.modules.get("wandb"), "run", None)
    exit_code = 1
    try:
        yield
        exit_code = 0
    finally:
        begun = getattr(sys.modules.get("wandb"), "run", None)
        if begun is not None and begun is not earlier:
            begun.finish(exit_code=exit_code)


def _run_stages(
    trainer: Any, module: Any, data: Any, values: Mapping[str, Any], finders: Sequence[Callback]
) -> dict[str, float]:
    """Run the stage, and the test that `test` asks for after a fit; return the metrics of both.

    Args:
        trainer: The trainer.
        module: The module.
        data: The data module; None if the module has the loaders.
        values: The configuration.
        finders: Callbacks of the trainer that search for the fit alone.
    """
    # 1. The stage itself.
    stage = values["stage"]
    run_stage = getattr(trainer, stage)
    try:
        result = run_stage(module, datamodule=data, ckpt_path=values["ckpt_path"])
    except KeyboardInterrupt as error:
        if stage == "fit":
            _note_interrupt(error, trainer, to_path(values["output_dir"]))
        raise
    metrics = dict(trainer.callback_metrics)

    # 2. Predictions are saved, as the command has nothing to return them to.
    if stage == "predict" and result and is_first(values):
        predictions = to_path(values["output_dir"]) / "predictions.pt"
        with predictions.open("wb") as file:
            torch.save(result, file)
        print(f"Predictions: {format_path(str(predictions))}")

    # 3. The test after a fit.
    if stage == "fit" and values["test"]:
        if _has_test(module, data):
            for finder in finders:
                trainer.callbacks.remove(finder)
            # The best of a callback that monitors a value comes first.
            keepers = sorted(trainer.checkpoint_callbacks, key=lambda each: getattr(each, "monitor", None) is None)
            paths = [getattr(keeper, "best_model_path", "") for keeper in keepers]
            trainer.test(module, datamodule=data, ckpt_path=next(filter(None, paths), None))
            metrics.update(trainer.callback_metrics)
        else:
            warnings.warn("test=true, but there is no test_step or no test_dataloader: no test is run.", stacklevel=2)
    return {name: float(value) for name, value in metrics.items()}


def _note_interrupt(error: KeyboardInterrupt, trainer: Any, output: AnyPath) -> None:
    """Note how the command continues a fit that was interrupted."""
    files: list[AnyPath] = newest_first([*output.glob("**/*.ckpt")])
    # The callbacks of other processes know what they have saved.
    if trainer.strategy.processes.spawns:
        note_interrupt(error, files[0] if files else None, 0)
    if files:
        error.add_note("The same command with ckpt_path=last does so, too.")


def _has_test(module: Any, data: Any) -> bool:
    if not overrides(module, LightningModule, "test_step"):
        return False
    if data is None:
        return overrides(module, LightningModule, "test_dataloader")
    return overrides(data, LightningDataModule, "test_dataloader")
