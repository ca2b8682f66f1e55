"""Plugins of Lightning mean here what they mean there, or are refused with the argument that takes their place."""

import importlib
import signal
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LSFEnvironment
from lightning.pytorch.callbacks import LearningRateFinder, LearningRateMonitor
from lightning.pytorch.plugins import (
    BitsandbytesPrecision,
    DoublePrecision,
    MixedPrecision,
    Precision,
    TorchSyncBatchNorm,
    TransformerEnginePrecision,
)
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch.amp import GradScaler

from equipoise import Quantization, SingleDeviceStrategy
from tests.support.trainer_runs import Small, loader, refuses, trainer

PACKAGES = [
    pytest.param(importlib.import_module("lightning.pytorch.plugins"), id="lightning.pytorch"),
    pytest.param(pytest.importorskip("pytorch_lightning.plugins", exc_type=ImportError), id="pytorch_lightning"),
]
BOTH = pytest.mark.parametrize("package", PACKAGES)

# Precisions

PRECISIONS: dict[str, Any] = {
    "32-true": ("Precision", ()),
    "64-true": ("DoublePrecision", ()),
    "16-true": ("HalfPrecision", ("16-true",)),
    "bf16-true": ("HalfPrecision", ("bf16-true",)),
    "bf16-mixed": ("MixedPrecision", ("bf16-mixed", "cpu")),
    "16-mixed": ("MixedPrecision", ("16-mixed", "cpu")),
}


@BOTH
@pytest.mark.parametrize(("mode", "kind", "compresses"), [("nf4", "nf4", False), ("fp4-dq", "fp4", True)])
def test_four_bits_of_bitsandbytes_are_quantised_weights(package: Any, mode: str, kind: str, compresses: bool) -> None:
    given = package.BitsandbytesPrecision(mode, torch.bfloat16, {"head"})
    for options in ({"plugins": [given]}, {"precision": given, "callbacks": LearningRateMonitor(log_momentum=True)}):
        run = trainer(**options, logger=True)
        assert run.precision == "bf16-true"
        (callback,) = [callback for callback in run.callbacks if isinstance(callback, Quantization)]
        assert (callback.kind, callback.compress_statistics, callback.exclude) == (kind, compresses, ["head*"])


def test_precisions_of_few_bits_without_a_counterpart(monkeypatch: pytest.MonkeyPatch) -> None:
    eight = BitsandbytesPrecision("int8-training")
    refuses(lambda: trainer(plugins=[eight]), "_Linear8bitLt in torch.float16", "Quantization('int8')")
    monkeypatch.setattr(TransformerEnginePrecision, "__init__", lambda self: None)
    plugin: Any = TransformerEnginePrecision
    for precision in (plugin(), "transformer-engine", "transformer-engine-float16", "float8"):
        refuses(lambda given=precision: trainer(precision=given), "precision='fp8'", "'fp8-true'")
    refuses(lambda: trainer(plugins=[plugin()]), "TransformerEnginePrecision is no precision here")


@BOTH
@pytest.mark.parametrize("name", PRECISIONS)
def test_plugins_of_precision_are_translated(package: Any, name: str) -> None:
    kind, arguments = PRECISIONS[name]
    plugin = getattr(package, kind)(*arguments)
    assert trainer(plugins=[plugin]).precision == trainer(precision=plugin).precision == name


def test_the_scaler_of_mixed_precision_scales() -> None:
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)
    run = trainer(plugins=MixedPrecision("16-mixed", "cpu", scaler))
    run.fit(Small(), loader(3))
    assert run.scaler is scaler
    assert scaler.get_scale() == 16.0


def test_a_search_leaves_the_users_scaler_alone() -> None:
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)

    class WithRate(Small):
        lr = 1e-3

    run = trainer(
        plugins=MixedPrecision("16-mixed", "cpu", scaler), callbacks=[LearningRateFinder(num_training_steps=20)]
    )
    run.fit(WithRate(), loader(1))
    assert scaler.get_scale() == 8.0


class OfALibrary(MixedPrecision):
    """Computes in its own way."""


def test_precisions_without_a_counterpart() -> None:
    own = OfALibrary("bf16-mixed", "cpu")
    for options in ({"plugins": own}, {"precision": own}):
        refuses(lambda options=options: trainer(**options), "OfALibrary is not supported", "Take precision=...")
    refuses(lambda: trainer(plugins=DoublePrecision(), precision=32), "precision is given twice", "precision=32")
    refuses(lambda: trainer(plugins=[Precision(), DoublePrecision()]), "another precision")
    elsewhere = MixedPrecision("bf16-mixed", "cuda")
    refuses(lambda: trainer(plugins=elsewhere), "MixedPrecision(device='cuda')", "are cpu", "precision='bf16-mixed'")


# Layers


@BOTH
def test_torch_sync_batch_norm_is_sync_batchnorm(package: Any) -> None:
    assert trainer(plugins=[package.TorchSyncBatchNorm()]).sync_batchnorm
    assert not trainer(plugins=[]).sync_batchnorm


class OwnLayers(LayerSync):
    def apply(self, model: Any) -> Any:
        return model

    revert = apply


class OwnBatchNorm(TorchSyncBatchNorm):
    """Exchanges layers in another way."""


@pytest.mark.parametrize("kind", [OwnLayers, OwnBatchNorm])
def test_other_layer_synchronisation_is_refused(kind: Any) -> None:
    refuses(lambda: trainer(plugins=[kind()]), kind.__name__, "Take sync_batchnorm=True")


# Environments


@BOTH
def test_plugins_of_environments_are_translated(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    environments = importlib.import_module(package.__name__ + ".environments")
    assert trainer(plugins=[environments.LightningEnvironment()]).world_size == 1
    assert trainer(plugins=environments.SLURMEnvironment()).world_size == 1
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    for kind in (environments.TorchElasticEnvironment, environments.LightningEnvironment):
        run = trainer(plugins=[kind()], devices=2, strategy="ddp")
        assert (run.global_rank, run.world_size) == (1, 2)


def test_lightnings_own_environment_in_tasks_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PROCID": 1,
        "NTASKS": 2,
        "LOCALID": 1,
        "JOB_ID": 7,
        "STEP_ID": 0,
        "NTASKS_PER_NODE": 2,
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    alone = [LightningEnvironment()]
    refuses(lambda: trainer(plugins=alone), "leaves the processes of Slurm out", "SLURM_PROCID=1", "independent=True")
    assert trainer(plugins=alone, strategy=SingleDeviceStrategy(independent=True)).world_size == 1
    assert trainer(plugins=[SLURMEnvironment()], devices=2, strategy="ddp").global_rank == 1


@pytest.mark.parametrize("requeues", [True, False])
def test_without_auto_requeue_sigusr1_does_not_requeue_the_job(requeues: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    handlers: list[Any] = []

    class Asks(Small):
        def on_train_start(self) -> None:
            handlers.append(signal.getsignal(signal.SIGUSR1))

    trainer(plugins=SLURMEnvironment(auto_requeue=requeues)).fit(Asks(), loader())
    (handler,) = handlers
    assert callable(handler) == requeues
    assert (handler is signal.SIG_DFL) != requeues


def test_environments_without_a_counterpart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cluster(TorchElasticEnvironment):
        """That of a company."""

    refuses(lambda: trainer(plugins=[Cluster()]), "not Cluster", "Leave it out", "RANK, WORLD_SIZE and LOCAL_RANK")
    monkeypatch.setattr(LSFEnvironment, "__init__", lambda self: None)
    refuses(lambda: trainer(plugins=[LSFEnvironment()]), "not LSFEnvironment", "Leave it out")
    other = SLURMEnvironment(requeue_signal=signal.SIGHUP)
    refuses(lambda: trainer(plugins=[other]), "waits for SIGUSR1", "--signal=SIGUSR1@120")


@pytest.mark.parametrize("several", [[LightningEnvironment(), TorchElasticEnvironment()], [TorchSyncBatchNorm()] * 2])
def test_two_plugins_of_one_kind_are_refused(several: Any) -> None:
    refuses(lambda: trainer(plugins=several), "plugins holds two for the same", type(several[1]).__name__)
