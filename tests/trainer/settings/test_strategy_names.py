"""Lightning's names and objects of strategies: what they are here, or what to take instead."""

from typing import Any

import pytest
from lightning.pytorch import strategies as lightning_strategies
from lightning.pytorch.strategies import StrategyRegistry

from equipoise import ConfigurationError, DDPStrategy, FSDPStrategy
from tests.support.trainer_runs import refuses, trainer

DDP = [name for name in StrategyRegistry.available_strategies() if name.startswith("ddp")]
FSDP = ["fsdp", "fsdp_cpu_offload"]
OTHERS = sorted({*StrategyRegistry.available_strategies()} - {*DDP, *FSDP, "single_device"})


@pytest.mark.parametrize("name", DDP)
def test_every_name_of_ddp_is_ddp(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    constructor = DDPStrategy.__init__

    def noting(self: DDPStrategy, **options: Any) -> None:
        given.append(options)
        constructor(self, **options)

    monkeypatch.setattr(DDPStrategy, "__init__", noting)
    run = trainer(strategy=name, devices=2)
    assert type(run.connected_strategy) is DDPStrategy
    wanted = {}
    if "unused" in name:
        wanted = {"find_unused_parameters": name.endswith("true")}
    assert given == [wanted]


@pytest.mark.parametrize("name", ["DDP", "DDP_find_unused_parameters_FALSE"])
def test_names_of_strategies_in_capitals(name: str) -> None:
    assert type(trainer(strategy=name, devices=2).connected_strategy) is DDPStrategy


def test_lightnings_names_of_fsdp_are_fsdp() -> None:
    assert type(trainer(strategy="fsdp", devices=2).connected_strategy) is FSDPStrategy
    refuses(lambda: trainer(strategy="fsdp_cpu_offload", devices=2), "cpu_offload=True moves shards from GPUs")


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_name_of_lightning_is_refused_with_another_way(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"strategy='{name}' is not .* 'auto'|pipeline.*activation_check"):
        trainer(strategy=name)


def test_strategy_objects_of_lightning_are_refused_with_ours() -> None:
    class OfALibrary(lightning_strategies.DDPStrategy):
        """As some libraries have them."""

    class Sharding(lightning_strategies.FSDPStrategy):
        """As some libraries have them."""

    class Meshed(lightning_strategies.ModelParallelStrategy):
        """As some libraries have them."""

    inside = "inside Lightning's own loops"
    refuses(lambda: trainer(strategy=OfALibrary()), inside, "Take 'ddp'", "from equipoise")
    refuses(lambda: trainer(strategy=Sharding()), inside, "FSDPStrategy(...) from equipoise")
    refuses(lambda: trainer(strategy=Meshed()), inside, "FSDPStrategy(data=..., tensor=...)")
    large = lightning_strategies.DeepSpeedStrategy.__new__(lightning_strategies.DeepSpeedStrategy)
    refuses(lambda: trainer(strategy=large), inside, "strategy='pipeline'", "activation_checkpointing")


@pytest.mark.parametrize("name", ["RayDDPStrategy", "RayFSDPStrategy"])
def test_strategies_of_ray_are_refused(name: str) -> None:
    """Those of Ray Train, and of the older Ray Lightning; tests under Ray take the real ones."""
    base = lightning_strategies.FSDPStrategy if "FSDP" in name else lightning_strategies.DDPStrategy
    strategy = type(name, (base,), {})()
    refuses(lambda: trainer(strategy=strategy), name, "Leave strategy out", "`Trainer()` asks Ray for its place")
