"""Compose a configuration with Hydra, and run it once or as a sweep. Hydra is imported in `app` alone.

    equipoise fit key=value ──→ main ──→ Hydra composes ──┐
    a hydra.main of your own ──→ Hydra composes ──────────┴──→ run ──→ builds data, module, callbacks, Trainer ──→ fits

Hydra looks for configurations in the user's folders, then in `equipoise/conf`, then among the structured ones. Those
are derived here from the constructors of the trainer, the strategies, the callbacks and the launchers.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import hydra
import lightning.pytorch.callbacks as lightning_callbacks
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf

from equipoise.app.build import check_values, plain_values
from equipoise.app.config.checks import import_paths
from equipoise.app.config.keys import GROUPS
from equipoise.app.config.lightning_names import translate
from equipoise.app.config.schema import config_class, option_name
from equipoise.app.config.suggestions import did_you_mean
from equipoise.app.config.unused_keys import warn_of_unused_keys
from equipoise.app.help import describe_all, describe_key
from equipoise.app.hydra_errors import explained, options
from equipoise.app.output import is_job_of_sweep
from equipoise.app.running import run
from equipoise.app.sweeps.batches import launcher_of
from equipoise.app.sweeps.collection import collected_results, noted_job, results_of_other_launchers, runs_in_turn
from equipoise.app.sweeps.objective import check_sweep, first_trial, is_sweep, sweep_value
from equipoise.app.torchrun import is_first, launched_rank, refuse_sweep
from equipoise.errors import ConfigurationError
from equipoise.interop.remote.paths import is_remote
from equipoise.names.extensions import load_extension, names_of_extensions
from equipoise.names.synonyms import meant_options
from equipoise.notices import rank_zero_warn
from equipoise.tables.width import entries, output_width, wrapped
from equipoise.trainer import Trainer

__all__ = ["complete", "compose_values", "explain_keys", "main", "run", "show_help"]

# Base classes, and one that takes functions.
_NOT_OFFERED = {
    *("BaseFinetuning", "BasePredictionWriter", "Callback", "Checkpoint", "ProgressBar", "WeightAveraging"),
    "LambdaCallback",
}

# Groups of the configuration whose options are extensions, with the kind of these.
_KINDS = {"strategy": "strategies", "launcher": "launchers", "precision": "precisions"}


class _SearchPath(SearchPathPlugin):
    """Places the package's configurations after the user's."""

    # The user's folders, after the primary one.
    folders: ClassVar[Sequence[Path]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in self.folders:
            search_path.append("project", f"file://{folder}")
        search_path.append("equipoise", "pkg://equipoise.conf")


def _register() -> None:
    """Register structured configurations of the trainer, and of every strategy, callback and launcher."""
    store = ConfigStore.instance()

    # 1. The trainer.
    trainer = config_class(Trainer, leave_out=("strategy", "callbacks", "logger"))
    store.store(name="trainer", group="trainer", node=trainer)

    # 2. Strategies.
    store.store(name="auto", group="strategy", node={"strategy": "auto"}, package="_global_")
    for name, strategy in _extensions("strategies"):
        store.store(name=name, group="strategy", node=config_class(strategy))

    # 3. Callbacks, Lightning's first: one of Equipoise replaces one of the same name.
    classes = [getattr(lightning_callbacks, name) for name in lightning_callbacks.__all__ if name not in _NOT_OFFERED]
    named = [(option_name(callback), callback) for callback in classes]
    for name, callback in [*named, *_extensions("callbacks")]:
        store.store(name=name, group="callbacks", node=config_class(callback), package=f"callbacks.{name}")

    # Every run has two of these by default. A run without them is one, too.
    for name in missing_callbacks():
        store.store(name=name, group="callbacks", node={}, package="_global_")

    # 4. Precisions beside those of the core, which are files.
    for name in names_of_extensions("precisions"):
        store.store(name=name, group="precision", node={"precision": name}, package="trainer")

    # 5. Launchers. Hydra starts jobs by a plugin, which asks the chosen launcher.
    plugin = {"_target_": "hydra_plugins.equipoise_launcher.EquipoiseLauncher"}
    store.store(name="equipoise", group="hydra/launcher", node=plugin)
    for name, launcher in _extensions("launchers"):
        options = {"defaults": [{"override /hydra/launcher": "equipoise"}], "launcher": config_class(launcher)}
        store.store(name=name, group="launcher", node=options, package="_global_")

    Plugins.instance().register(_SearchPath)


def missing_callbacks() -> list[str]:
    """Return the names of callbacks of Equipoise that were removed from this installation."""
    present = names_of_extensions("callbacks")
    return [name for name in names_of_extensions("callbacks", missing=True) if name not in present]


def _extensions(kind: str) -> Iterator[tuple[str, Any]]:
    """Yield the extensions of a kind with their names. One that cannot be loaded is reported and left out."""
    for name in names_of_extensions(kind):
        try:
            yield name, load_extension(kind, name)
        except ConfigurationError as error:
            rank_zero_warn(str(error))


_register()


# Composing.


def main(stage: str, arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Compose a configuration from a command line and run it, once or as a sweep.

    Args:
        stage: "fit", "validate", "test" or "predict".
        arguments: Overrides and flags, as Hydra takes them.
        folders: The folders with configurations, the one with the primary `config.yaml` first.

    Raises:
        ConfigurationError: If the command line or the configuration is wrong; it names the nearest right key or option.
    """
    _refuse_missing(arguments)
    _refuse_remote(arguments)
    arguments = translate(arguments, folders)
    failures: list[Exception] = []
    # Jobs of a sweep leave their results there, whatever process they run in.
    notes = ""

    def task(config: DictConfig) -> float | list[float] | None:
        try:
            if is_job_of_sweep():
                # The process of a launcher such as submitit has paths of its own.
                with import_paths(folders), noted_job(config, notes):
                    return _run_trial(config, stage)
            _run_once(config, stage)
        except Exception as error:
            # Any other sweeper or launcher has to know.
            if is_job_of_sweep() and not runs_in_turn():
                raise
            failures.append(error)
        return None

    try:
        with explained(folders):
            if is_sweep(arguments):
                rank = launched_rank()
                if rank is not None:
                    refuse_sweep(rank)
                _check_first_trial(arguments, folders)
            with collected_results() as results, results_of_other_launchers(results) as notes:
                _hydra(task, arguments, folders)
            for failure in failures:
                raise failure
    except ConfigurationError:
        # It is a MisconfigurationException, too, and may have notes.
        raise
    except MisconfigurationException as error:
        raise ConfigurationError(str(error)) from error
    except ValueError as error:
        if "Config group override must be" not in str(error):
            raise
        message = _explain_unknown_option(arguments, folders)
        if message is None:
            raise
        raise ConfigurationError(message) from error


def _refuse_missing(arguments: Sequence[str]) -> None:
    """Refuse names of extensions of Equipoise that were removed from this installation, such as `strategy=fsdp`."""
    for argument in arguments:
        group, _, choice = argument.partition("=")
        if group not in _KINDS:
            continue
        kind = _KINDS[group]
        present = names_of_extensions(kind)
        removed = set(names_of_extensions(kind, missing=True)).difference(present)
        # A sweep names several.
        for name in choice.split(","):
            if name in removed:
                # It raises the error that names the extension.
                load_extension(kind, name)


def _refuse_remote(arguments: Sequence[str]) -> None:
    """Refuse URLs for the folders that Hydra makes, as it would make local ones of that name."""
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key.lstrip("+") in ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir") and is_remote(value):
            raise ConfigurationError(
                f"{key}={value}: Hydra writes its log to this machine alone. Leave it out, and write all files of the"
                f" run elsewhere by output_dir={value}."
            )


def _run_trial(config: DictConfig, stage: str) -> float | list[float] | None:
    check_sweep(config)
    return sweep_value(config, _run_once(config, stage))


def _run_once(config: DictConfig, stage: str) -> dict[str, float]:
    missing = missing_callbacks()
    if missing and is_first():
        print(f"equipoise: missing from this installation: {', '.join(missing)}.", file=sys.stderr)
    if is_first():
        # An override may refer to a key that is missing, which is reported where the value is read.
        overrides: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
        warn_of_unused_keys(config, overrides)
    if stage != "fit" and config.get("ckpt_path") is None and is_first():
        _announce_fresh_weights(stage)
    return run(config, stage)


def _explain_unknown_option(arguments: Sequence[str], folders: Sequence[Path]) -> str | None:
    """Return the message for the first argument that chooses an unknown option of a group; None if none does."""
    for argument in arguments:
        group, _, option = argument.partition("=")
        if group not in GROUPS:
            continue
        group_options = options(group, folders)
        if option not in group_options:
            hint = did_you_mean(option, group_options, meant=meant_options(group, option, group_options))
            return f"There is no {option} in the group {group!r}{hint} (~{group} leaves the group out.)"
    return None


def _announce_fresh_weights(stage: str) -> None:
    print(
        f"equipoise: ckpt_path is null, so {stage} takes the weights as the module's constructor leaves them."
        " ckpt_path=best takes the best checkpoint of the last run, ckpt_path=last its newest.",
        file=sys.stderr,
    )


def complete(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Print completions for a shell, or the script that installs them.

    The shell passes the command line in environment variables.

    Args:
        arguments: Hydra's, such as `install=bash` or `query=bash`.
        folders: As for `main`.
    """
    _hydra(run, ["--shell-completion", *arguments], folders)


def show_help(overrides: Sequence[str], folders: Sequence[Path], flags: Mapping[str, str]) -> None:
    """Print the groups, flags and keys of a run.

    Args:
        overrides: The overrides of the command line.
        folders: As for `main`.
        flags: The flags with their meanings.
    """
    try:
        with _composed(overrides, folders) as config:
            keys = describe_all(config)
    except ConfigurationError:
        # The package's configuration shows the help even where the user's cannot be composed.
        with _composed([], folders, "equipoise") as config:
            keys = describe_all(config)
    width = output_width()
    groups = [wrapped(f"{group}: {', '.join(options(group, folders))}", width, "  ", "    ") for group in GROUPS]
    paragraphs = [
        "equipoise fit|validate|test|predict [group=option ...] [key=value ...] [flags]",
        "Groups: choose an option by group=option, several callbacks or loggers by callbacks=[a,b]; leave one out by"
        " ~group.",
        "\n".join(groups),
        f"Flags:\n\n{entries(flags)}",
        "Keys with their present values: override them by key=value, as in trainer.max_epochs=3; add one of your own by"
        " +key=value. `equipoise fit --help KEY` says all about one.",
        keys,
    ]
    print("\n\n".join(text if "\n" in text else wrapped(text, width) for text in paragraphs))


def explain_keys(keys: Sequence[str], arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Print the type, default, present value and meaning of keys.

    Raises:
        ConfigurationError: If there is no such key, or the configuration cannot be composed.
    """
    with _composed(arguments, folders) as config:
        descriptions = [describe_key(config, key) for key in keys]
    print("\n\n".join(descriptions))


@contextlib.contextmanager
def _composed(overrides: Sequence[str], folders: Sequence[Path], config_name: str = "config") -> Iterator[DictConfig]:
    """Compose a configuration without a run. In the block, classes beside the folders can be imported."""
    _refuse_missing(overrides)
    _SearchPath.folders = folders[1:]
    with (
        explained(folders),
        import_paths(folders),
        hydra.initialize_config_dir(str(folders[0]), version_base="1.3"),
    ):
        yield hydra.compose(config_name, overrides=list(overrides))


def compose_values(arguments: Sequence[str], folders: Sequence[Path], output: Path) -> dict[str, Any]:
    """Return the configuration of a fit as plain, checked values, without a run.

    Args:
        arguments: The overrides of the command line.
        folders: As for `main`.
        output: The value of `output_dir`, which Hydra sets in a run.

    Raises:
        ConfigurationError: If the configuration cannot be composed, or a value is wrong.
    """
    arguments = [*translate(arguments, folders), f"output_dir='{output}'"]
    try:
        with _composed(arguments, folders) as config:
            warn_of_unused_keys(config, arguments)
            values = plain_values(config)
            values["stage"] = "fit"
            check_values(values)
    except MisconfigurationException as error:
        raise ConfigurationError(str(error)) from error
    return values


def _check_first_trial(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    _SearchPath.folders = folders[1:]
    with import_paths(folders):
        config = first_trial(arguments, str(folders[0]))
        if config.get("launcher"):
            launcher_of(config).check_sweep(config)


def _hydra(task: Any, arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Run Hydra on these arguments, as if they were the arguments of this program."""
    _SearchPath.folders = folders[1:]
    argv = sys.argv
    full_error = os.environ.pop("HYDRA_FULL_ERROR", None)
    try:
        sys.argv = ["equipoise", *arguments]
        # Hydra raises its errors then, instead of printing them.
        os.environ["HYDRA_FULL_ERROR"] = "1"
        with import_paths(folders):
            decorate = hydra.main(version_base="1.3", config_path=str(folders[0]), config_name="config")
            run_task = decorate(task)
            run_task()
    finally:
        sys.argv = argv
        del os.environ["HYDRA_FULL_ERROR"]
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error
