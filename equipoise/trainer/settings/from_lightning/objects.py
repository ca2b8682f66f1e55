"""Strategies and plugins of Lightning among the arguments of the Trainer, put into our words before it sees them."""

import os
from typing import Any

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.arguments.fsdp import MACHINES
from equipoise.interop.lightning.arguments.plugins import sort_plugins
from equipoise.interop.lightning.arguments.quantization import quantization_in_our_words
from equipoise.interop.lightning.arguments.strategies import is_lightning_strategy, strategy_in_our_words
from equipoise.names.extensions import load_extension
from equipoise.parallel.communication.rank import find_rank
from equipoise.strategies.by_name import make_strategy
from equipoise.strategies.single_device import SingleDeviceStrategy
from equipoise.trainer.settings.from_lightning.strategy_names import refuse_object

__all__ = ["translate_objects"]

# Arguments of the Trainer for which a strategy of Lightning has a plugin.
_PLUGINS = ("checkpoint_io", "environment")


def translate_objects(options: dict[str, Any]) -> None:
    """Replace strategies and plugins of Lightning among the Trainer's arguments.

    Args:
        options: The arguments by name, which are changed.

    Raises:
        ConfigurationError: If an object has no counterpart, or contradicts an argument.
    """
    _translate_strategy(options)
    _translate_plugins(options)
    _translate_quantization(options)


def _translate_strategy(options: dict[str, Any]) -> None:
    """Replace a strategy of Lightning by ours, and add the arguments that it holds."""
    strategy = options.get("strategy")
    if not is_lightning_strategy(strategy):
        return
    words = strategy_in_our_words(strategy)
    if words is None:
        refuse_object(strategy)
        return
    # 1. What it holds for the trainer.
    arguments = dict(words.trainer)
    # Lightning's Trainer prefers the devices of the strategy, too.
    if "devices" in arguments:
        options["devices"] = arguments.pop("devices")
    plugins = [arguments.pop(name) for name in _PLUGINS if name in arguments]
    if plugins:
        options["plugins"] = [*_as_list(options.get("plugins")), *plugins]
    for name, value in arguments.items():
        if options.get(name) not in (None, "auto"):
            raise ConfigurationError(
                f"{name} is given twice: Trainer({name}={options[name]!r}), and {type(strategy).__name__} holds"
                f" {value!r}. Leave one of them out."
            )
        options[name] = value

    # 2. The strategy itself.
    if words.options.get("replicas") == MACHINES:
        words.options["replicas"] = _number_of_machines(options.get("num_nodes"))
    options["strategy"] = make_strategy(words.name, **words.options)


def _number_of_machines(num_nodes: Any) -> int:
    if num_nodes is not None:
        return int(num_nodes)
    rank = find_rank()
    if rank is None:
        return 1
    if rank.num_nodes is None:
        raise ConfigurationError(
            "sharding_strategy='HYBRID_SHARD' keeps a copy of the module on each machine, but the number of machines is"
            f" unknown: {rank.origin}. Give num_nodes, or device_mesh=(copies, shards)."
        )
    return rank.num_nodes


def _translate_plugins(options: dict[str, Any]) -> None:
    """Replace plugins of Lightning by the arguments that mean the same; a CheckpointIO and an environment remain."""
    if options.get("plugins") is None:
        return
    plugins = sort_plugins(options["plugins"])
    if plugins.precision is not None:
        if options.get("precision") is not None:
            raise ConfigurationError(
                f"precision is given twice: precision={options['precision']!r}, and plugins hold"
                f" {type(plugins.precision).__name__}. Leave one of them out."
            )
        options["precision"] = plugins.precision
    if plugins.sync_batchnorm:
        options["sync_batchnorm"] = True
    if plugins.starts_processes:
        _check_nobody_else_starts(options.get("strategy"))
    # The trainer uses these as they are.
    remaining = [plugin for plugin in (plugins.checkpoint_io, plugins.environment) if plugin is not None]
    options["plugins"] = remaining or None


def _translate_quantization(options: dict[str, Any]) -> None:
    words = quantization_in_our_words(options.get("precision"))
    if words is None:
        return
    options["precision"] = words.precision
    quantization = load_extension("callbacks", "quantization")(**words.options)
    options["callbacks"] = [*_as_list(options.get("callbacks")), quantization]


def _check_nobody_else_starts(strategy: Any) -> None:
    """Refuse Lightning's own environment in a task of Slurm that the trainer would join.

    Under torchrun it joins the processes, as it would in Lightning.
    """
    if isinstance(strategy, SingleDeviceStrategy) and strategy.independent:
        return
    without_slurm = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    rank = find_rank()
    if rank is not None and find_rank(without_slurm) is None:
        raise ConfigurationError(
            f"LightningEnvironment leaves the processes of Slurm out, but {rank.origin}. Leave it out to train one"
            " model in all tasks, or take strategy=SingleDeviceStrategy(independent=True) from equipoise for one model"
            " in each."
        )


def _as_list(objects: Any) -> list[Any]:
    if objects is None:
        return []
    if isinstance(objects, list | tuple):
        return list(objects)
    return [objects]
