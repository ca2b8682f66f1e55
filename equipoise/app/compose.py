"""Compose a configuration with Hydra, build its objects and run them. Hydra is imported in `app` alone.

    equipoise fit key=value ──→ main ──→ Hydra composes ──┐
    a hydra.main of your own ──→ Hydra composes ──────────┴──→ run ──→ builds data, module, callbacks, Trainer ──→ fits

Configurations are looked for in the user's folders, then in `equipoise/conf`, then among the structured ones, which are
made here from the constructors of the trainer, the strategies and the callbacks.
"""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import hydra
import lightning.pytorch.callbacks as lightning_callbacks
import torch
import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, seed_everything
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import equipoise
from equipoise.app.build import build, build_trainer, check_values, chosen_checkpoint, overrides, plain_values
from equipoise.app.config.checks import GROUPS, did_you_mean
from equipoise.app.config.lightning_names import translate
from equipoise.app.config.schema import config_class, option_name
from equipoise.app.help import describe_key
from equipoise.app.messages import explain, options
from equipoise.app.output import keep_metrics, without_empty_folder
from equipoise.app.sweep import check_first_trial, check_sweep, is_sweep, sweep_value
from equipoise.errors import ConfigurationError
from equipoise.report.facts import shorten

__all__ = ["complete", "explain_keys", "main", "run"]

_LOADERS = {
    "fit": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
# Base classes, one that takes functions, and two that work on the inside of Lightning's loops.
_NOT_OFFERED = {
    *("BaseFinetuning", "BasePredictionWriter", "Callback", "Checkpoint", "ProgressBar", "WeightAveraging"),
    *("LambdaCallback", "BatchSizeFinder", "LearningRateFinder"),
}


class _SearchPath(SearchPathPlugin):
    """Puts the package's configurations behind the user's."""

    folders: ClassVar[Sequence[Path]] = ()  # the user's, after the primary one

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in self.folders:
            search_path.append("project", f"file://{folder}")
        search_path.append("equipoise", "pkg://equipoise.conf")


def _register() -> None:
    """Makes structured configurations of the trainer, and of every strategy and callback that has a public name."""
    store = ConfigStore.instance()
    trainer = config_class(equipoise.Trainer, leave_out=("strategy", "callbacks", "logger"))
    store.store(name="trainer", group="trainer", node=trainer)
    store.store(name="auto", group="strategy", node={"strategy": "auto"}, package="_global_")
    own = [getattr(equipoise, name) for name in equipoise.__all__]
    for strategy in own:
        if issubclass(strategy, equipoise.Strategy) and strategy.name:
            store.store(name=strategy.name, group="strategy", node=config_class(strategy))
    offered = [getattr(lightning_callbacks, name) for name in lightning_callbacks.__all__ if name not in _NOT_OFFERED]
    for callback in (*offered, *own):
        if issubclass(callback, lightning_callbacks.Callback) and callback is not equipoise.Callback:
            name = option_name(callback)
            store.store(name=name, group="callbacks", node=config_class(callback), package=f"callbacks.{name}")
    Plugins.instance().register(_SearchPath)


_register()


# Composing.


def main(stage: str, arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Composes a configuration from a command line and runs it, once or as a sweep.

    Args:
        stage: "fit", "validate", "test" or "predict".
        arguments: Overrides and flags, as Hydra takes them.
        folders: The folders to look in for configurations, the one with the primary `config.yaml` first.

    Raises:
        ConfigurationError: If the command line or the configuration is wrong; it names the nearest right key or option.
    """
    arguments = translate(arguments, folders)
    failures: list[Exception] = []

    def task(config: DictConfig) -> float | list[float] | None:
        sweeping = HydraConfig.get().mode == RunMode.MULTIRUN
        try:
            if sweeping:
                check_sweep(config)
            if stage != "fit" and config.get("ckpt_path") is None:
                _announce_fresh_weights(stage)
            metrics = run(config, stage)
            return sweep_value(config, metrics) if sweeping else None
        except Exception as error:
            if sweeping:
                raise  # Hydra says which job it was, once all are done
            failures.append(error)
            return None

    try:
        if is_sweep(arguments):
            _first_trial(arguments, folders)
        _hydra(task, arguments, folders)
        for failure in failures:
            raise failure
    except MisconfigurationException as error:
        raise ConfigurationError(str(error)) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        if "--help" not in arguments:
            raise ConfigurationError(explain(error, folders)) from error
        _hydra(task, ["--help"], folders, "equipoise")  # help without what is missing
    except ValueError as error:
        if "Config group override must be" not in str(error):
            raise
        group, _, option = next(
            a for a in (a.partition("=") for a in arguments) if a[0] in GROUPS and a[2] not in options(a[0], folders)
        )
        hint = did_you_mean(option, options(group, folders))
        raise ConfigurationError(
            f"There is no {option} in the group {group!r}{hint} (~{group} leaves the group out.)"
        ) from error


def _announce_fresh_weights(stage: str) -> None:
    print(
        f"equipoise: ckpt_path is null, so {stage} takes the weights as the module's constructor leaves them."
        " ckpt_path=best takes the best checkpoint of the last run, ckpt_path=last its newest.",
        file=sys.stderr,
    )


def complete(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Prints what a shell asks for to complete a command line, which it gives in the environment.

    Args:
        arguments: Hydra's, such as `install=bash` or `query=bash`.
        folders: As for `main`.
    """
    _hydra(run, ["--shell-completion", *arguments], folders)


def explain_keys(keys: Sequence[str], arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Print the type, default, present value and meaning of keys.

    Args:
        keys: The keys, such as "trainer.max_epochs".
        arguments: The overrides of the command line.
        folders: As for `main`.

    Raises:
        ConfigurationError: If there is no such key, or the configuration cannot be composed.
    """
    _SearchPath.folders = folders[1:]
    try:
        with _paths_of(folders), hydra.initialize_config_dir(str(folders[0]), version_base="1.3"):
            config = hydra.compose("config", overrides=list(arguments))
            print("\n\n".join(describe_key(config, key) for key in keys))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigurationError(explain(error, folders)) from error


def _first_trial(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Checks a sweep before it begins."""
    _SearchPath.folders = folders[1:]
    with _paths_of(folders):
        check_first_trial(arguments, str(folders[0]), "config")


def _hydra(task: Any, arguments: Sequence[str], folders: Sequence[Path], config_name: str = "config") -> None:
    """Runs Hydra on these arguments, as if they had been this program's."""
    _SearchPath.folders = folders[1:]
    argv = sys.argv
    full_error = os.environ.pop("HYDRA_FULL_ERROR", None)
    try:
        sys.argv = ["equipoise", *arguments]
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra is to raise its errors, not to print them
        with _paths_of(folders):
            hydra.main(version_base="1.3", config_path=str(folders[0]), config_name=config_name)(task)()
    finally:
        sys.argv = argv
        del os.environ["HYDRA_FULL_ERROR"]
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error


@contextlib.contextmanager
def _paths_of(folders: Sequence[Path]) -> Iterator[None]:
    """Put the folders beside those of the configurations on Python's path, for what a `_target_` names."""
    path = sys.path.copy()
    sys.path[:0] = [str(folder.parent) for folder in folders]
    try:
        yield
    finally:
        sys.path[:] = path


# Running.


def run(config: DictConfig, stage: str | None = None) -> dict[str, float]:
    """Builds what a composed configuration names and runs it, for the command and for a `hydra.main` of your own.

    Args:
        config: A configuration that has `equipoise` in its defaults list.
        stage: "fit", "validate", "test" or "predict". Default: the configuration's `stage`.

    Returns:
        The metrics the run ended with, those of the test included if `test` is true.

    Raises:
        ConfigurationError: If a value is missing, a `_target_` cannot be imported, or does not take an argument.

    Example:
        >>> import hydra
        >>> from equipoise.app import run
        >>> @hydra.main(version_base="1.3", config_path="conf", config_name="config")
        ... def main(config):
        ...     run(config)
    """
    try:
        values = plain_values(config)
        if stage is not None:
            values["stage"] = stage
        output = Path(values.get("output_dir") or ".")
        with without_empty_folder(output):
            check_values(values)
            values["ckpt_path"] = chosen_checkpoint(values)
        _prepare(output, values)
        data = build(values["data"], "data") if values.get("data") else None
        module = build(values["module"], "module")
        trainer = build_trainer(values)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigurationError(explain(error)) from error
    loader = _LOADERS[values["stage"]]
    if data is None and not overrides(module, LightningModule, loader):
        raise ConfigurationError(f"There are no data: choose some with data=NAME, or define {loader} in the module.")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Experiment logs directory .* exists and is not empty"
        )  # it is this run's own
        if values["stage"] != "fit":
            warnings.filterwarnings("ignore", "The dirpath has changed")  # nothing is saved there
        return _work(trainer, module, data, values)


def _prepare(output: Path, values: Mapping[str, Any]) -> None:
    """Begin the folder of the run, and seed."""
    output.mkdir(parents=True, exist_ok=True)
    if values["stage"] != "fit" or values["ckpt_path"] in (None, "last", "best"):
        keep_metrics(output)  # a run that is resumed goes on in the file
    OmegaConf.save(OmegaConf.create(dict(values)), output / "config.yaml")
    if values["seed"] is not None:
        seed_everything(values["seed"], workers=True)


def _work(trainer: Any, module: Any, data: Any, values: Mapping[str, Any]) -> dict[str, float]:
    """Run the stage, and the test that `test` asks for after a fit; return the metrics of both."""
    stage = values["stage"]
    result = getattr(trainer, stage)(module, datamodule=data, ckpt_path=values["ckpt_path"])
    metrics = dict(trainer.callback_metrics)
    if stage == "predict" and result:
        predictions = Path(values["output_dir"], "predictions.pt")
        torch.save(result, predictions)
        print(f"Predictions: {shorten(str(predictions))}")
    if stage == "fit" and values["test"]:
        owner, base = (module, LightningModule) if data is None else (data, LightningDataModule)
        if overrides(owner, base, "test_dataloader") and overrides(module, LightningModule, "test_step"):
            best = getattr(trainer.checkpoint_callback, "best_model_path", "")
            trainer.test(module, datamodule=data, ckpt_path=best or None)
            metrics.update(trainer.callback_metrics)
        else:
            warnings.warn("test=true, but there is no test_step or no test_dataloader: no test is run.", stacklevel=2)
    return {name: float(value) for name, value in metrics.items()}
