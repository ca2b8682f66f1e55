"""Strategies of Lightning that a library hands over are ours with the same options, or are refused by option."""

import importlib
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import DoublePrecision, FSDPPrecision, MixedPrecision, TorchCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy as TheirDDP
from lightning.pytorch.strategies import FSDPStrategy as TheirFSDP
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies import SingleDeviceStrategy as TheirSingleDevice
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.fsdp import MixedPrecision as DtypesOfShards
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from equipoise import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from equipoise.interop.lightning.arguments.fsdp import fsdp_in_our_words
from tests.support.equality import assert_equal
from tests.support.trainer_runs import Small, loader, refuses, trainer

PACKAGES = [
    pytest.param(importlib.import_module("lightning.pytorch.strategies"), id="lightning.pytorch"),
    pytest.param(pytest.importorskip("pytorch_lightning.strategies", exc_type=ImportError), id="pytorch_lightning"),
]
BOTH = pytest.mark.parametrize("package", PACKAGES)


def connected(strategy: Any, devices: int = 2, **options: Any) -> Any:
    return trainer(strategy=strategy, devices=devices, **options).connected_strategy


# One device


@BOTH
def test_the_device_of_a_single_device_strategy(package: Any) -> None:
    run = trainer(strategy=package.SingleDeviceStrategy("cpu"), accelerator="auto")
    assert type(run.connected_strategy) is SingleDeviceStrategy
    assert run.connected_strategy.devices == (torch.device("cpu"),)
    refuses(lambda: trainer(strategy=package.SingleDeviceStrategy("cuda:7"), accelerator="auto"), "cuda:7", "not exist")


def test_arguments_of_the_trainer_that_a_strategy_holds_are_taken_and_refused_twice() -> None:
    writer = TorchCheckpointIO()
    held = TheirSingleDevice("cpu", checkpoint_io=writer, precision_plugin=DoublePrecision())
    run = trainer(strategy=held)
    assert run.checkpoint_io is writer
    assert run.precision == "64-true"
    refuses(lambda: trainer(strategy=held, precision="32-true"), "precision is given twice", "'32-true'", "Leave one")
    refuses(lambda: trainer(strategy=held, plugins=TorchCheckpointIO()), "another CheckpointIO")
    placed = TheirDDP(parallel_devices=[torch.device("cpu")] * 3)
    assert trainer(strategy=placed).world_size == 3
    held = TheirDDP(accelerator=CPUAccelerator(), cluster_environment=LightningEnvironment())
    options = {"strategy": held, "accelerator": "auto", "devices": 2}
    assert trainer(**options).world_size == 2
    refuses(lambda: trainer(**options | {"accelerator": "mps"}), "accelerator is given twice", "Leave one")
    refuses(lambda: trainer(**options, plugins=SLURMEnvironment()), "another environment", "plugins")


# DDP


@BOTH
def test_options_of_ddp_are_translated(package: Any) -> None:
    """The way in which processes start ("spawn", "fork") has no meaning here."""
    strategy = connected(
        package.DDPStrategy(
            process_group_backend="gloo",
            timeout=timedelta(minutes=2),
            start_method="fork",
            find_unused_parameters=True,
            static_graph=True,
            gradient_as_bucket_view=False,
            bucket_cap_mb=7,
            broadcast_buffers=False,
        )
    )
    assert type(strategy) is DDPStrategy
    assert (strategy.backend, strategy.timeout) == ("gloo", 120.0)
    assert strategy._engine_options == {
        "bucket_cap_mb": 7,
        "find_unused_parameters": True,
        "static_graph": True,
        "gradient_as_bucket_view": False,
        "forward_sync_buffers": False,
        "comm_hook": None,
    }
    assert connected(package.DDPStrategy(bucket_cap_mb=None))._engine_options["bucket_cap_mb"] == 25.0


def test_a_fit_by_lightnings_ddp_is_that_of_one_device() -> None:
    def fitted(strategy: Any, devices: int) -> Small:
        torch.manual_seed(3)
        module = Small().double()
        run = trainer(strategy=strategy, devices=devices, precision="64-true")
        run.fit(module, loader(4 * devices, batch_size=4 // devices))
        return module

    ddp = TheirDDP(ddp_comm_hook=allreduce_hook, find_unused_parameters=False)
    assert_equal(fitted("single_device", 1), fitted(ddp, 2), 1e-12)


def test_the_hook_of_ddp_with_its_wrapper_and_state() -> None:
    state = SimpleNamespace(rank=1)
    strategy = connected(
        TheirDDP(ddp_comm_hook=allreduce_hook, ddp_comm_wrapper=fp16_compress_wrapper, ddp_comm_state=state)
    )
    hook = strategy._engine_options["comm_hook"]
    assert hook.state() is state
    assert "fp16_compress_wrapper" in hook.function.__qualname__


def test_options_of_ddp_that_change_results_are_refused_at_once() -> None:
    group, mesh = object(), object()
    refuses(
        lambda: connected(TheirDDP(process_group=group, device_mesh=mesh, model_averaging_period=3)),
        "Lightning's DDPStrategy is translated",
        f"process_group={group!r}; device_mesh={mesh!r}; model_averaging_period=3",
    )
    with_state = TheirDDP(ddp_comm_hook=allreduce_hook, ddp_comm_state=PostLocalSGDState(None, None, 3))
    refuses(lambda: connected(with_state), "PostLocalSGDState", "in each step")


def test_options_of_ddp_about_speed_are_named_in_one_warning() -> None:
    with pytest.warns(UserWarning, match=r"speed or memory alone: init_sync=False; check_reduction=True\.$") as caught:
        connected(TheirDDP(init_sync=False, check_reduction=True))
    assert len(caught) == 1
    connected(TheirDDP(init_sync=True))


# FSDP


class Block(nn.Module):
    def forward(self, value: Any) -> Any:
        return value


@BOTH
def test_options_of_fsdp_are_translated(package: Any) -> None:
    run = trainer(
        strategy=package.FSDPStrategy(
            timeout=timedelta(seconds=9),
            auto_wrap_policy={nn.Linear, Block},
            activation_checkpointing_policy={Block},
            sharding_strategy="SHARD_GRAD_OP",
            state_dict_type="sharded",
            precision_plugin=importlib.import_module(package.__name__[:-10] + "plugins").FSDPPrecision("bf16-mixed"),
            sync_module_states=True,
        ),
        devices=2,
    )
    strategy = run.connected_strategy
    assert type(strategy) is FSDPStrategy
    assert strategy.units == [Block, nn.Linear]
    assert (strategy.reshard_after_forward, strategy.checkpoints, strategy.timeout) == (False, "sharded", 9.0)
    assert run.activation_checkpointing == [Block]
    assert run.precision == "bf16-mixed"


def test_defaults_of_fsdp_are_translated() -> None:
    ours, theirs = vars(connected(FSDPStrategy())), vars(connected(TheirFSDP()))
    assert {name: value for name, value in theirs.items() if name not in ("_group", "processes")} == {
        name: value for name, value in ours.items() if name not in ("_group", "processes")
    }


def test_model_parallel_is_fsdp_with_tensor_parallelism() -> None:
    strategy = connected(ModelParallelStrategy(tensor_parallel_size=2, timeout=timedelta(seconds=9)), 4)
    assert type(strategy) is FSDPStrategy
    assert (strategy.data, strategy.tensor, strategy.checkpoints, strategy.timeout) == ("auto", 2, "sharded", 9.0)
    assert (strategy.processes.data.world_size, strategy.processes.processes_per_batch) == (2, 2)
    assert connected(ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1), 4).data == 4
    whole = connected(ModelParallelStrategy(save_distributed_checkpoint=False), 4)
    assert (whole.checkpoints, whole.processes.processes_per_batch) == ("full", 4)


@pytest.mark.parametrize(
    ("policy", "units"),
    [
        (partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}), [Block]),
        (partial(size_based_auto_wrap_policy, min_num_params=100), None),
        (lambda module, recurse, nonwrapped_numel: False, None),
    ],
    ids=["classes", "sizes", "a function"],
)
def test_wrapping_and_activation_checkpointing_policies_are_translated(policy: Any, units: Any) -> None:
    words = fsdp_in_our_words(TheirFSDP(auto_wrap_policy=policy, activation_checkpointing_policy=policy))
    assert words.options.get("units") == words.trainer.get("activation_checkpointing") == units
    assert len(words.left_out) == (0 if units else 2)


def test_activation_checkpointing_as_a_list_of_classes_is_translated() -> None:
    with pytest.warns(match="activation_checkpointing"):
        strategy = TheirFSDP(activation_checkpointing=[Block])
    assert fsdp_in_our_words(strategy).trainer["activation_checkpointing"] == [Block]


def test_hybrid_sharding_has_a_replica_for_each_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connected(TheirFSDP(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)), 4).replicas == 2
    assert connected(TheirFSDP(sharding_strategy="HYBRID_SHARD", auto_wrap_policy={Block})).replicas == 1
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    hybrid = TheirFSDP(sharding_strategy="HYBRID_SHARD", auto_wrap_policy={Block})
    assert connected(hybrid).replicas == 2
    monkeypatch.delenv("GROUP_WORLD_SIZE")
    refuses(lambda: connected(hybrid), "HYBRID_SHARD", "number of machines is unknown", "Give num_nodes")
    assert connected(hybrid, num_nodes=2).replicas == 2


def test_fsdp_without_sharding_is_ddp() -> None:
    strategy = connected(TheirFSDP(sharding_strategy="NO_SHARD"))
    assert (type(strategy), strategy.engine) == (DDPStrategy, "native")


def test_mixed_precision_of_fsdp_is_translated() -> None:
    half = DtypesOfShards(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"alone: reduce_dtype=torch.bfloat16 \(gradients are exchanged in their own"):
        assert trainer(strategy=TheirFSDP(mixed_precision=half), devices=2).precision == "bf16-mixed"
    assert trainer(strategy=TheirFSDP(mixed_precision=DtypesOfShards()), devices=2).precision == "32-true"
    double = TheirFSDP(mixed_precision=DtypesOfShards(param_dtype=torch.float64))
    refuses(lambda: connected(double), "param_dtype=torch.float64")


class NotesTypes(Small):
    """Notes the type that autocast computes in, and those of the gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.computed_in = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.of_gradients = {parameter.grad.dtype for parameter in self.parameters() if parameter.grad is not None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_of_fsdp_is_autocast_with_gradients_in_the_type_of_the_parameters(dtype: torch.dtype) -> None:
    module = NotesTypes()
    run = trainer(strategy=TheirFSDP(mixed_precision=DtypesOfShards(param_dtype=dtype)), devices=1, max_epochs=1)
    run.fit(module, loader())
    assert (module.computed_in, module.of_gradients) == (dtype, {torch.float32})


def test_options_of_fsdp_that_change_results_are_refused() -> None:
    ignoring_parts = TheirFSDP(ignored_modules=[3], param_init_fn=print, forward_prefetch=True)
    refuses(
        lambda: connected(ignoring_parts), "FSDPStrategy is translated", "ignored_modules=[3]; param_init_fn=<built"
    )
    with pytest.warns(UserWarning, match="FSDPStrategy is .* alone: backward_prefetch=.*POST.*; limit_all_g"):
        connected(TheirFSDP(backward_prefetch=BackwardPrefetch.BACKWARD_POST, limit_all_gathers=False))


def test_offloaded_shards_need_a_gpu() -> None:
    refuses(lambda: connected(TheirFSDP(cpu_offload=True)), "cpu_offload=True moves shards from GPUs")


# What is read


@pytest.mark.parametrize("name", ["_ddp_kwargs", "_checkpoint_io"])
def test_a_version_that_keeps_an_option_elsewhere_is_refused(name: str) -> None:
    strategy = TheirDDP()
    delattr(strategy, name)
    refuses(lambda: connected(strategy), "does not work with lightning", name, "Take DDPStrategy of equipoise")


def test_precisions_of_strategies_are_translated_too() -> None:
    assert trainer(strategy=TheirDDP(precision_plugin=MixedPrecision("bf16-mixed", "cpu"))).precision == "bf16-mixed"
    assert trainer(strategy=TheirFSDP(precision_plugin=FSDPPrecision("16-true"))).precision == "16-true"
