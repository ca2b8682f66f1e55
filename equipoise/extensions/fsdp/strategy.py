"""FSDPStrategy: a process for each device, over which parameters, gradients and optimiser states are sharded."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.parallel import ParallelStyle
from torch.optim import LBFGS, Optimizer
from torchmetrics import Metric

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.device_loads import WHOLE_STEP, PlannedLoads, StepFacts
from equipoise.extensions.common.planned_devices import PlannedDevice
from equipoise.extensions.fsdp.checked_options import check_callbacks, check_divisible, check_options
from equipoise.extensions.fsdp.interop.features import FSDP
from equipoise.extensions.fsdp.interop.tensor_parallel import set_device_mesh, wait_as_default
from equipoise.extensions.fsdp.mesh.clipping import clip_by_norm
from equipoise.extensions.fsdp.mesh.configuration.common_values import copy_along_rows, share_values
from equipoise.extensions.fsdp.mesh.configuration.cut_checks import check_cut
from equipoise.extensions.fsdp.mesh.configuration.module_changes import ModuleChanges
from equipoise.extensions.fsdp.mesh.context.blocks.blockwise_sequences import BlockwiseSequences
from equipoise.extensions.fsdp.mesh.context.sequence_comparison import BLOCKS, CUT_SEQUENCES, SEQUENCES
from equipoise.extensions.fsdp.mesh.context.sequence_row import SequenceRow
from equipoise.extensions.fsdp.mesh.context.steps.divided_sequences import DividedSequences
from equipoise.extensions.fsdp.mesh.context.steps.sequence_steps import SequenceSteps
from equipoise.extensions.fsdp.mesh.data_processes import DataProcesses
from equipoise.extensions.fsdp.mesh.grid import CONTEXT, DATA, TENSOR, Size, grid_rows, make_mesh, sizes_of
from equipoise.extensions.fsdp.mesh.layer_comparison import CUT_LAYERS, LayerComparison
from equipoise.extensions.fsdp.planned_loads import sharded_loads
from equipoise.extensions.fsdp.sharded_module import ShardedModule
from equipoise.extensions.fsdp.sharded_run import ShardedRecovery, ShardedRun
from equipoise.extensions.fsdp.state.empty_modules import ParametersOnMeta
from equipoise.extensions.fsdp.state.folders import ShardFolders
from equipoise.extensions.fsdp.state.portable_state import BeforeSharding, ShardedState
from equipoise.extensions.fsdp.state.replicated_parts import replicated_parts
from equipoise.extensions.fsdp.state.whole_matrices import WholeMatrices, needs_whole_matrices
from equipoise.extensions.fsdp.steps import ShardedSteps
from equipoise.extensions.fsdp.units import Unit, choose_units, table_of, units_of_module
from equipoise.extensions.fsdp.within_steps.stepped_by_hand import SteppedByHand
from equipoise.extensions.fsdp.within_steps.whole_results import read_together
from equipoise.formats import align_columns
from equipoise.interop.adapters import check_feature
from equipoise.interop.distributed.fully_sharded import read_numbers
from equipoise.interop.lightning.classes import is_a
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.communication.process_group import another_group, loopback
from equipoise.parallel.divergence.replicated import Replicated
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.step_protocols import EvaluationStep, StepResult, TrainingStep
from equipoise.parallel.strategy_optimizer import StrategyOptimizer
from equipoise.parallel.workers.preloading import preload
from equipoise.precision import Precision
from equipoise.strategies.distributed.metric_sync import synchronise_metrics
from equipoise.strategies.distributed.module_sync import check_same_modules
from equipoise.strategies.distributed.process_strategy import ProcessStrategy
from equipoise.strategies.distributed.window_totals import Apart, average_gradients
from equipoise.strategies.portable_state import PortableState
from equipoise.strategies.recovery_support import RecoverySupport

__all__ = ["FSDPStrategy"]

preload(__name__)

# It has no state, so all strategies share it.
_BEFORE_SHARDING = BeforeSharding()


class FSDPStrategy(ProcessStrategy):
    """A process for each device; each holds a shard of all parameters, gradients and optimiser states.

    With `tensor`, so many successive processes compute each batch together, by layers that are cut over them (tensor
    parallelism; Shoeybi et al., "Megatron-LM", 2019). A plan cuts them, or the module's `configure_model` does, over
    `self.device_mesh["tensor_parallel"]`. Each part is sharded over the other processes.

    A unit of the module, such as a block, is whole in each process only while it computes (torch's `fully_shard`;
    Zhao et al., "PyTorch FSDP", 2023). Gradients are those of one device on all samples of a step. Samples are shared
    out, and processes started, as by `DDPStrategy`. After the run the module is whole again.

    All processes call the same units in the same order; a difference is an error that names both.

    Args:
        units: Names of the submodules that are gathered one at a time, patterns of them, in which * stands for
            anything between two dots, and ** for anything, or classes of them. Default: "auto", which chooses repeated
            blocks (children of a ModuleList or Sequential that share a class) and then single layers of more than
            2**20 parameters. Tied weights stay with the module itself.
        reshard_after_forward: Free a unit's weights after its forward and gather them again for its backward. False
            keeps them, which takes memory and saves an exchange. A number: keep shards over this number of processes.
            Default: None, all but the module's own.
        data: Number of batches that are computed at a time, each by `tensor` times `context` processes. Default:
            "auto", which is the number of processes divided by that.
        tensor: Number of processes of a machine over which layers are cut, which compute each batch together. "auto":
            what `data` and `context` leave of all processes, or of a machine where `data` is "auto" as well.
            Default: 1.
        tensor_plan: Plan by which layers are cut if `configure_model` cuts none: by names, with * and ** as in `units`,
            "colwise", "rowwise", further names of transformers' plans or a style of torch, and "divided" for an
            attribute such as a number of heads. Layers whose width `tensor` does not divide stay whole. Default: None,
            what the module's method `tensor_plan` returns, else the plan of a model of transformers in the module.
        context: Number of processes of a machine over which the sequences of each batch are divided in training.
            Attention sees all keys, and evaluations whole sequences. A sequence has a multiple of twice this number of
            positions. Default: 1.
        context_blocks: Names of lists of blocks (ModuleList or Sequential), with * and ** as in `units`, between which
            alone sequences are divided, of any length. Batches and all other layers, such as convolutions, are whole in
            each process. Default: None, batches are divided.
        replicas: Number of copies of the whole module, each sharded over a part of the processes; gradients are then
            exchanged between copies as well. Default: 1.
        cpu_offload: Keep shards, gradients and optimiser states in the memory of the host, and step there. Only for
            GPUs. Default: False.
        checkpoints: "full": the main process gathers whole tensors and writes a file. "sharded": each process writes
            its shards to a folder, which any strategy loads on any number of processes. Default: "full".
        save_in_background: Write sharded checkpoints while the training continues, which needs the memory of the shards
            on the host once more. A checkpoint begins after the last is complete. Default: False.
        compare_calls: Compare between the processes, before a unit is gathered, that all of them call the same one: a
            few bytes per unit. False: the calls of a step are compared at the end of its forward, and a process that
            leaves a unit out may let the others wait until `timeout`. Default: True.
        compare_layers: Compare cut layers, or parts of sequences, with whole ones before the first step of a fit: the
            loss and all gradients of the first batch, without dropout. An inequality is an error. Each process has the
            whole module and its gradients in memory for that time. False: a wrong plan gives wrong gradients.
            Default: True.
        timeout: Seconds for which processes wait for one another before a missing one counts as hung. Default: 1800.
        backend: Torch's backend. Default: "nccl" on CUDA, with `cpu_offload` "cpu:gloo,cuda:nccl"; else "gloo".

    Raises:
        ConfigurationError: If an argument is out of range or does not fit the devices.

    Example:
        >>> from equipoise import FSDPStrategy, Trainer
        >>> trainer = Trainer(strategy=FSDPStrategy(units=["blocks.*"]), devices=2, accelerator="cpu")
    """

    name: ClassVar[str] = "fsdp"
    # Blocks of the module are called as they are, and all processes begin each batch together.
    may_compile_blocks: bool = True

    _run: ShardedRun | None = None
    # The layers whose weights are gathered in another form in this run.
    _forms: Mapping[nn.Module, Callable[[Tensor], Any]] = {}
    # From `configure_model` to the end of the run, in this process.
    _changes: ModuleChanges | None = None
    # From before the layers are cut to the first step of a fit.
    _comparison: LayerComparison | None = None
    _is_fitting = False
    # The number of processes over which layers are cut.
    _columns = 1
    # The processes as rows over which sequences are divided, in a run.
    _rows: DeviceMesh | None = None

    def __init__(
        self,
        *,
        units: Sequence[str | type[nn.Module]] | Literal["auto"] = "auto",
        reshard_after_forward: bool | int | None = None,
        data: Size = "auto",
        tensor: Size = 1,
        tensor_plan: Mapping[str, str | ParallelStyle] | None = None,
        context: int = 1,
        context_blocks: Sequence[str] | None = None,
        replicas: int = 1,
        cpu_offload: bool = False,
        checkpoints: Literal["full", "sharded"] = "full",
        save_in_background: bool = False,
        compare_calls: bool = True,
        compare_layers: bool = True,
        timeout: float = 1800.0,
        backend: str | None = None,
    ) -> None:
        super().__init__(timeout=timeout, backend=backend)
        check_feature(FSDP)
        self.units = units if isinstance(units, str) else list(units)
        self.reshard_after_forward = reshard_after_forward
        self.data = data
        self.tensor = tensor
        self.tensor_plan = tensor_plan
        self.context = context
        self.context_blocks = context_blocks
        self.replicas = replicas
        self.cpu_offload = cpu_offload
        self.checkpoints = checkpoints
        self.save_in_background = save_in_background
        self.compare_calls = compare_calls
        self.compare_layers = compare_layers
        check_options(self)
        # Compiled blocks would not see the mode in which attention sees all keys.
        self.may_compile_blocks = context == 1

    def device_loads(self, devices: Sequence[PlannedDevice], module: nn.Module, facts: StepFacts) -> PlannedLoads:
        """Return the loads of the processes: shards, and a unit that computes; see `device_loads`."""
        count = len(devices)
        if count == 1:
            return PlannedLoads(loads=[WHOLE_STEP])
        for name, default in (("cpu_offload", False), ("tensor", 1), ("context_blocks", None)):
            value = getattr(self, name)
            if value != default:
                raise ConfigurationError(f"{name}={value!r} is not predicted; leave it out for a plan")
        patterns = None
        if not isinstance(self.units, str):
            patterns = self.units
        units = choose_units(module, patterns)
        shards = max(1, count // self.replicas)
        sizes_of(self.data, 1, count, count, self.context)
        has_default_freeing = self.reshard_after_forward is None
        return sharded_loads(count, shards, units, has_default_freeing=has_default_freeing, context=self.context)

    def __getstate__(self) -> dict[str, Any]:
        """Return the options; see `Strategy.__getstate__`."""
        state = super().__getstate__()
        state.pop("_changes", None)
        state.pop("_comparison", None)
        return state

    # Where it runs.

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Use one device for each process of this machine; see `Strategy.connect`."""
        if self.cpu_offload and devices[0].type != "cuda":
            raise ConfigurationError(
                f"cpu_offload=True moves shards from GPUs to the host, but the devices are {devices[0].type}. Leave it"
                " out."
            )
        if self.cpu_offload and self.backend is None:
            # Shards on the host are exchanged by gloo.
            self.backend = "cpu:gloo,cuda:nccl"
        super().connect(devices, num_nodes)
        processes = self.processes.world_size
        if processes % self.replicas:
            raise ConfigurationError(
                f"replicas={self.replicas} do not divide {processes} processes evenly. Give a number that does."
            )
        _, self._columns = sizes_of(self.data, self.tensor, processes, len(devices), self.context)
        self.processes.processes_per_batch = self._columns * self.context
        if self.processes.processes_per_batch > 1:
            self.processes.data_view = DataProcesses

    def empty_module_context(self) -> AbstractContextManager[Any]:
        """Return a context in which modules are made whose values will be loaded or drawn, unit by unit.

        Their parameters have no memory, except in one process, and where layers are cut.
        """
        if self.processes.world_size == 1 or self._columns > 1:
            return nullcontext()
        return ParametersOnMeta()

    def begin_configuration(self, module: nn.Module) -> None:
        """Give the module a `device_mesh`, which its `configure_model` reads."""
        # The hook under its former name may have begun it.
        processes = self.processes
        if processes.world_size > 1 and self._changes is None and is_a(module, LightningModule):
            self._note_whole_layers(module)
            columns = self._columns
            with loopback(only=processes.spawns):
                mesh = make_mesh(self.root_device.type, processes.world_size // columns, columns)
            self._changes = ModuleChanges(module, mesh)
            share_values(module, processes)
            set_device_mesh(module, mesh)

    def end_configuration(self, module: nn.Module) -> None:
        """Cut the layers of a module that cuts none itself, by a plan."""
        if self.processes.processes_per_batch == 1:
            return
        self.begin_configuration(module)
        changes = self._changes
        if changes is None or self._columns == 1:
            return
        if not changes.has_cut:
            from equipoise.extensions.fsdp.mesh.plans.choice import cut_by_plan

            changes.note_new_parts()
            assert is_a(module, LightningModule)
            mesh = changes.mesh
            with loopback(only=self.processes.spawns):
                cut_by_plan(module, mesh, self.tensor_plan, training=self._is_fitting)
        elif self.tensor_plan is not None:
            raise ConfigurationError(
                "`configure_model` has cut or sharded layers already, which FSDPStrategy(tensor_plan=...) would cut"
                " once more. Leave one of both out."
            )

    def _note_whole_layers(self, module: nn.Module) -> None:
        """Note how layers are before they are cut, to compare them with cut ones."""
        may_cut = self.processes.processes_per_batch > 1
        if may_cut and self.compare_layers and self._is_fitting and self._comparison is None:
            assert is_a(module, LightningModule)
            sides = CUT_LAYERS
            if self.context > 1 and self._columns > 1:
                sides = CUT_SEQUENCES
            elif self.context > 1:
                sides = SEQUENCES if self.context_blocks is None else BLOCKS
            self._comparison = LayerComparison(module, sides)

    def check_module(self, module: nn.Module, *, training: bool) -> None:
        """Refuse callbacks and plugins that need whole weights, or one file; see `Strategy.check_module`."""
        self._is_fitting = training
        if training and self.context > 1:
            check_divisible(module)
        if training and self.processes.world_size > 1:
            check_callbacks(getattr(module, "trainer", None), self)

    # The module, for the time of a run.

    def gather_weights_as(self, forms: Mapping[nn.Module, Callable[[Tensor], Any]]) -> str | None:
        """Gather the weights of layers in another form in this run, such as one of fewer bits; called before `setup`.

        Args:
            forms: By layer, what returns an object with the methods `fsdp_pre_all_gather` and `fsdp_post_all_gather` of
                torch's `fully_shard` from the layer's shard. Its weight is used by its forward alone.

        Returns:
            Why weights cannot be gathered so; None if they will be.
        """
        if self.processes.world_size == 1:
            return "one process gathers nothing"
        if self.cpu_offload:
            return "shards on the host are gathered as they are (cpu_offload=True)"
        if self.reshard_after_forward not in (None, True, False):
            return "torch gathers shards over some processes as they are (reshard_after_forward as a number)"
        self._forms = dict(forms)
        return None

    def setup(self, module: nn.Module, precision: Precision) -> None:
        """Shard the module, with the values of rank 0; see `Strategy.setup`."""
        if self.processes.world_size == 1:
            super().setup(module, precision)
            return
        if self._changes is not None:
            self._changes.note_changes()
        # It comes to its device unit by unit, since it may not fit there.
        precision.convert_module(module)
        self._module = module
        if self._changes is not None:
            # A conversion makes new parameters of cut ones.
            self._changes.copy_marks()
        with loopback(only=self.processes.spawns):
            self._run = self._begin_run(module)
            if self._changes is not None:
                self._changes.forget_parameters()
            if self._comparison is not None and self._changes is not None:
                self._comparison.begin(precision, self._changes.mesh, self._rows or self._changes.mesh)

    def _begin_run(self, module: nn.Module) -> ShardedRun:
        assert self._group is not None
        # 1. The units, of the same module everywhere.
        check_same_modules(module)
        check_cut(module, self._columns, must_cut=self._is_fitting)
        is_cut = self._changes is not None and self._changes.has_cut
        # Evaluations may be of whole layers, which are in shards over all processes.
        together = self._columns if is_cut else 1
        if self._changes is not None:
            copy_along_rows(module, self._changes.mesh[TENSOR])
        units = self._units(module)
        batches = self.processes.world_size // together
        shards = batches // self.replicas
        rows = f", each batch in {together} of them" if together > 1 else ""
        count = shards * together
        if self.processes.processes_per_batch > 1:
            places = [f"rank {rank}" for rank in range(self.processes.world_size)]
            grid = align_columns(grid_rows(self.processes.processes_per_batch, self.context, places))
            rank_zero_info(f"Processes as a grid, of which each row computes a batch:\n{grid}")
        rank_zero_info(f"Units of the module in shards over {count} processes{rows}:\n{table_of(units, shards)}")

        # 2. The shards. Sums of gradients are divided by Σw at the end of a window.
        automatic = bool(getattr(module, "automatic_optimization", True))
        divide_by = 1.0 if automatic else float(batches)
        mesh = self._mesh(is_cut=is_cut)
        sharded = ShardedModule(
            units, mesh, self._options(), by_hand=not automatic, divide_by=divide_by, forms=self._forms
        )

        # 3. All that computes with them.
        device = self.root_device
        for part in module.modules():
            # Torch has moved parameters and buffers. The states of a metric are neither.
            if isinstance(part, Metric):
                part.to(device)
        weight = Apart(device)
        groups = ExitStack()
        portable = ShardedState(module, self._group, self._folders(groups))
        sharded.on_copied = portable.adopt
        steps = ShardedSteps(
            sharded,
            self.processes,
            device,
            weight,
            compare_each=self.compare_calls,
            sequences=self._sequences(module),
            comparison=self._comparison,
        )
        return ShardedRun(
            sharded=sharded,
            steps=steps,
            weight=weight,
            portable=portable,
            recovery=ShardedRecovery(),
            by_hand=not automatic,
            groups=groups,
            callbacks=list(getattr(getattr(module, "trainer", None), "callbacks", ())),
            is_cut=is_cut,
            restores=[
                synchronise_metrics(module, self.processes.processes_per_batch),
                read_numbers(read_together(self._another_group(groups))),
            ],
        )

    def _sequences(self, module: nn.Module) -> SequenceSteps:
        """Return what computes steps, on whole sequences or on parts of them."""
        if self.context == 1:
            return SequenceSteps()
        rows = self.processes.data.world_size
        self._rows = make_mesh(self.root_device.type, rows, self._columns, self.context)
        row = SequenceRow(self._rows[CONTEXT].get_group())
        if self.context_blocks is None:
            return DividedSequences(module, row)
        return BlockwiseSequences(module, row, self.context_blocks)

    def _units(self, module: nn.Module) -> list[Unit]:
        """Return the units: those that `configure_model` has sharded by itself, else those that are chosen."""
        units = units_of_module(module)
        if not units:
            return choose_units(module, None if isinstance(self.units, str) else self.units)
        if self.units != "auto" or self.replicas != 1:
            raise ConfigurationError(
                "`configure_model` has called `fully_shard`, so the units are chosen already. Leave `units` and"
                " `replicas` out, or the call."
            )
        return units

    def _folders(self, groups: ExitStack) -> ShardFolders | None:
        """Return what writes checkpoints in shards, in a group that is left at the end; None: they are whole."""
        if self.checkpoints == "full":
            return None
        group = None
        if self.save_in_background:
            group = self._another_group(groups)
        return ShardFolders(self.processes, group)

    def _another_group(self, groups: ExitStack) -> ProcessGroup:
        """Begin a group of all processes, which is left at the end."""
        limit = timedelta(seconds=self.timeout)
        return groups.enter_context(another_group(limit, local=self.processes.spawns))

    def _mesh(self, *, is_cut: bool) -> DeviceMesh:
        """Return the processes as torch's `fully_shard` takes them: beside cut layers, those of a column."""
        if is_cut:
            assert self._changes is not None
            return self._changes.mesh[DATA]
        kind = self.root_device.type
        processes = self.processes.world_size
        if self.replicas == 1:
            return init_device_mesh(kind, (processes,), mesh_dim_names=("shard",))
        shape = (self.replicas, processes // self.replicas)
        return wait_as_default(init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard")))

    def _options(self) -> dict[str, Any]:
        """Return the arguments of torch's `fully_shard`."""
        options: dict[str, Any] = {"reshard_after_forward": self.reshard_after_forward}
        if self.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy()
        return options

    def share_batch_statistics(self, module: nn.Module) -> None:
        """Refuse to replace layers whose weights are in shards already; see `Strategy.share_batch_statistics`."""
        if self._run is None:
            return
        raise ConfigurationError(
            "sync_batchnorm=True replaces layers, whose weights are in shards by now under strategy='fsdp'. Leave it"
            " out and convert them in `configure_model`, by torch.nn.SyncBatchNorm.convert_sync_batchnorm, on GPUs."
        )

    def teardown(self, error: BaseException | None = None) -> None:
        """Make the module whole again; after an error its weights are lost; see `Strategy.teardown`."""
        changes = self._changes
        self._changes = None
        self._comparison = None
        self._rows = None
        if self._run is not None:
            self._run.end(error)
        self._forms = {}
        # The parameters are whole before the layers are.
        try:
            super().teardown(error)
        finally:
            if changes is not None:
                changes.restore()

    def replicated_tensors(self) -> Replicated:
        """Return the shards, by their places in the whole, and the buffers; see `Strategy.replicated_tensors`."""
        if self._run is None:
            return super().replicated_tensors()
        self._run.sharded.free_gathered()
        return replicated_parts(self._run.sharded.module, self.processes)

    # Computation.

    def forward_backward(self, step: TrainingStep, parts: Sequence[Any], last: bool) -> StepResult:
        """Compute the gradients of a batch, or take part without one; see `Strategy.forward_backward`."""
        if self._run is None:
            return super().forward_backward(step, parts, last)
        return self._run.steps.forward_backward(step, parts, last)

    def setup_optimizer(self, optimizer: Optimizer) -> StrategyOptimizer:
        """Gather the matrices of Muon, and free whole weights before a step by hand; see `Strategy.setup_optimizer`."""
        stepped = super().setup_optimizer(optimizer)
        if self._run is None:
            return stepped
        if isinstance(optimizer, LBFGS) and not self._run.by_hand:
            raise ConfigurationError(
                "LBFGS joins all gradients into one vector, which strategy='fsdp' has in shards. Optimise by hand, take"
                " strategy='ddp', or another optimiser."
            )
        if needs_whole_matrices(optimizer):
            stepped = WholeMatrices(optimizer)
        if self._run.by_hand:
            stepped = SteppedByHand(stepped, self._run.sharded)
        return stepped

    def finish_gradients(self, window: AccumulationWindow, optimizer: Optimizer) -> bool | None:
        """Turn the gradients of a window into their weighted mean over all processes; see the interface."""
        if self._run is None:
            return super().finish_gradients(window, optimizer)
        # Σw of all processes counts each batch as often as processes compute it together.
        together = self.processes.processes_per_batch
        return average_gradients(window, optimizer, self._run.weight.total(), together)

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        """Clip gradients in place, by the norm over the whole mesh; see `Strategy.clip_gradients`."""
        if self._run is not None and self._run.is_cut and algorithm == "norm":
            clip_by_norm(optimizer_parameters(optimizer), value)
        else:
            super().clip_gradients(optimizer, value, algorithm)

    def evaluate(self, step: EvaluationStep, parts: Sequence[Any]) -> Any:
        """Run an evaluation step; see `Strategy.evaluate`."""
        if self._run is None:
            return super().evaluate(step, parts)
        return self._run.steps.evaluate(step, parts)

    def await_others(self, step: EvaluationStep) -> None:
        """Take part in the steps of processes with more batches; see `Strategy.await_others`."""
        if self._run is not None:
            self._run.steps.await_others(step)

    @property
    def portable(self) -> PortableState:
        """Full states of the module and the optimisers; see `Strategy.portable`."""
        if self._run is not None:
            return self._run.portable
        if self.processes.world_size > 1:
            return _BEFORE_SHARDING
        return super().portable

    @property
    def recovery(self) -> RecoverySupport:
        """Support for steps that are repeated; see `Strategy.recovery`."""
        if self._run is None:
            return super().recovery
        return self._run.recovery
