"""PipelineStrategy: the network cut into stages on several devices, computed by micro-batches."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.device_loads import PlannedLoads, StepFacts
from equipoise.extensions.common.planned_devices import PlannedDevice
from equipoise.extensions.common.timeline import Timeline
from equipoise.extensions.pipeline.cut_choice import CommonCut
from equipoise.extensions.pipeline.interop.features import PIPELINE
from equipoise.extensions.pipeline.network import StagedNetwork
from equipoise.extensions.pipeline.planning.cut import CutOptions, PinnedCut
from equipoise.extensions.pipeline.processes.launch import StageLaunch
from equipoise.extensions.pipeline.processes.main_process.client import StageClient
from equipoise.extensions.pipeline.processes.optimizers.backend import ProcessBackend
from equipoise.extensions.pipeline.processes.optimizers.process_optimizer import ProcessOptimizer
from equipoise.extensions.pipeline.processes.optimizers.replica_exchange import ReplicaExchange
from equipoise.extensions.pipeline.schedule.schedule import check_schedule, check_stages, splits
from equipoise.extensions.pipeline.strategy.checks import (
    all_are,
    check_arguments,
    check_entries,
    check_for_processes,
    check_module,
)
from equipoise.extensions.pipeline.strategy.pipelined_batch import PipelinedBatch
from equipoise.extensions.pipeline.strategy.planned_loads import stage_loads
from equipoise.extensions.pipeline.strategy.recovery import FinerBatch, PipelineRecovery
from equipoise.extensions.pipeline.strategy.run import PipelineRun
from equipoise.interop.adapters import check_feature
from equipoise.interop.lightning.callbacks import copies_of
from equipoise.interop.torch.modules import set_device_of
from equipoise.parallel.batches.sampling import NO_BATCH
from equipoise.parallel.batches.shard import Shard
from equipoise.parallel.batches.shares import even_sizes
from equipoise.parallel.batches.splitting import Splitter
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.communication.membership import compute_metrics_alone
from equipoise.parallel.communication.process_group import group_store
from equipoise.parallel.communication.tensor_copies import copy_from_first
from equipoise.parallel.divergence.replicated import Replicated
from equipoise.parallel.step_protocols import StepResult, TrainingStep
from equipoise.parallel.strategy_optimizer import StrategyOptimizer
from equipoise.precision import Precision
from equipoise.strategies.distributed.loaders import refuse_missing_batch, shard_of_process
from equipoise.strategies.distributed.metric_sync import synchronise_metrics
from equipoise.strategies.distributed.module_sync import check_same_modules
from equipoise.strategies.distributed.sample_shares import ProcessShares
from equipoise.strategies.portable_state import PortableState
from equipoise.strategies.recovery_support import RecoverySupport
from equipoise.strategies.strategy import Strategy, Transfer

__all__ = ["PipelineStrategy"]


class PipelineStrategy(Strategy):
    """Cut the network into stages, one or more for each device, and compute micro-batches of a batch in a pipeline.

    `training_step` runs for every micro-batch, and calls the network once: the module itself, as in `self(x)`, or its
    largest child, as in `self.network(x)`. What it computes before runs on the last device, and so does the loss. The
    gradient is that of the whole batch: micro-batches are weighted by their samples, or by their `loss_weight`.

    The cut is chosen when the network is first called: every part of it is measured, and a dynamic programme minimises
    the time of the slowest stage among the cuts that fit into memory. The cut is logged, and saved in checkpoints.

    Args:
        micro_batches: Number of micro-batches of a batch; fewer if it has fewer samples. Default: twice the devices.
        schedule: "1f1b", which holds fewer activations, or "gpipe"; with several stages on each device, which idle
            less, "interleaved_1f1b", "looped_bfs" or, which idles least, "interleaved_zero_bubble". Default: "1f1b".
        stages_per_device: Number of stages of each device. Of p devices, device d has the stages d, d + p, d + 2p, ...
            Default: 1 for "gpipe" and "1f1b", which have no more, 2 for the others; "interleaved_zero_bubble" may
            have 1.
        cut_before: Names of the modules with which the stages but the first begin. Default: chosen; a module may
            choose them by a method `pipeline_cuts`, which returns such names.
        speeds: Speeds of the devices (of a replica) relative to one another, such as [3, 1], from which the cut is
            chosen; a cut by `cut_before` stays as it is. Default: equal.
        link_speeds: MiB per second that pass from each device to the next, and last from the last one to the first; the
            cut counts the time in which values pass. Default: measured for engine="processes", otherwise not counted.
        engine: "threads": all stages are computed in this process. "processes": the stages of each device are in a
            process of its own. The process of the last stage has the module, the data, the losses, callbacks and
            checkpoints, and sends the others their layers. The trainer starts the processes, or torchrun or Slurm do,
            also on several machines. Default: "threads".
        threads: For that engine, whether every device has a thread. Default: if all devices differ. Stages on a CPU
            have none with `Trainer(activation_checkpointing=...)`.
        timeout: Seconds for which processes wait for one another before a missing one counts as hung. The first
            process counts as hung, too, if a callback or loader sleeps for so long and computes nothing. Default: 1800.
        replicas: Number of replicas of the network, for engine="processes". The devices are divided among them: the
            first replica has the first ones. Each trains on its part of every step's samples, as processes do under
            DDP, and gradients are those of one device on all samples of a step. Evaluations compute what one device
            computes. Default: 1.
        shares: A number above or equal to 0 for each replica, relative to one another, by which the samples of a step
            are shared out. Default: evenly.

    Attributes:
        timeline: The last training step as it ran; None before the first.

    Raises:
        ConfigurationError: If an argument is out of range, or does not fit the others.

    Example:
        >>> from equipoise import PipelineStrategy, Trainer
        >>> trainer = Trainer(strategy=PipelineStrategy(micro_batches=4), devices=["cpu", "cpu"], logger=False,
        ...                   enable_checkpointing=False)
    """

    name: ClassVar[str] = "pipeline"

    def __init__(
        self,
        *,
        micro_batches: int | None = None,
        schedule: str = "1f1b",
        stages_per_device: int | None = None,
        cut_before: Sequence[str] | None = None,
        speeds: Sequence[float] | None = None,
        link_speeds: Sequence[float] | None = None,
        engine: Literal["threads", "processes"] = "threads",
        threads: bool | None = None,
        timeout: float = 1800.0,
        replicas: int = 1,
        shares: Sequence[float] | None = None,
    ) -> None:
        check_feature(PIPELINE)
        check_arguments(
            micro_batches=micro_batches,
            cut_before=cut_before,
            speeds=speeds,
            link_speeds=link_speeds,
            threads=threads,
            engine=engine,
            timeout=timeout,
            replicas=replicas,
            shares=shares,
        )
        self.engine = engine
        self.replicas = replicas
        self.timeout = timeout
        self.micro_batches = micro_batches
        self.schedule = check_schedule(schedule)
        self.stages_per_device = check_stages(self.schedule, stages_per_device)
        self.cut_before: list[str] | None = None
        if cut_before is not None:
            self.cut_before = list(cut_before)
        self.speeds = speeds
        self.link_speeds = link_speeds
        self.threads = threads
        # Blocks inside a stage are called as they are. Other processes have no part of the trainer, and a schedule that
        # splits the backward goes through it operation by operation.
        self.may_compile_blocks: bool | str = False
        if engine == "threads" and not splits(self.schedule):
            self.may_compile_blocks = "repeated, between steps"
        self._user_shares = shares
        self._shares: ProcessShares | None = None
        self.timeline: Timeline | None = None
        # The processes, once the devices are known; None for threads.
        self._launch: StageLaunch | None = None
        self._is_training = False
        # The cut and the number of steps of an earlier run, with which the next one continues. Random numbers of other
        # processes follow from the number.
        self._pinned: PinnedCut | None = None
        self._steps = 0
        self._run: PipelineRun | None = None

    # Where it runs.

    @property
    def root_device(self) -> torch.device:
        """The last device, to which batches are copied, and where losses are computed."""
        return self.devices[-1]

    def default_devices(self, available: Sequence[torch.device]) -> Sequence[torch.device]:
        """Return all devices; see `Strategy.default_devices`."""
        return available

    def device_loads(self, devices: Sequence[PlannedDevice], module: nn.Module, facts: StepFacts) -> PlannedLoads:
        """Return the loads of the stages; see `device_loads`. All replicas have the same."""
        # 1. The devices of a replica.
        count = len(devices) // self.replicas
        if count < 2:
            raise ConfigurationError(f"a pipeline needs two devices or more, not {len(devices)}")

        # 2. The cut, if it is known already.
        cut_before = self.cut_before
        if cut_before is None and callable(getattr(module, "pipeline_cuts", None)):
            cut_before = list(module.pipeline_cuts())  # type: ignore[operator]
        num_cuts = count * self.stages_per_device - 1
        if cut_before is not None and len(cut_before) != num_cuts:
            raise ConfigurationError(
                f"{count} devices need cut_before with as many names as there are cuts, {num_cuts}, not {cut_before}"
            )
        planned = stage_loads(
            count,
            self.stages_per_device,
            self._num_micro_batches(count),
            self.schedule,
            cut_before,
            copies_inputs=devices[0].kind == "cuda",
        )
        loads = list(planned.loads) * self.replicas
        return PlannedLoads(loads=loads, batches=self.replicas, note=planned.note)

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Use the devices, each for one stage or for several; see `Strategy.connect`."""
        if self.engine == "processes":
            launch = StageLaunch(devices, num_nodes, self.timeout, self.replicas, on_joined=self._use_device_of_process)
            self._launch = launch
            self.processes = launch
            self._use_device_of_process()
            # One device for each process of a replica, on all machines.
            num_devices = launch.count
        else:
            super().connect(devices, num_nodes)
            num_devices = len(devices)
        # The first stage begins where the network does, so it has no entry.
        num_cuts = num_devices * self.stages_per_device - 1
        plan = f"{num_devices} devices"
        if self.replicas > 1:
            plan += " of each replica"
        if self.stages_per_device == 1:
            plan += ", a stage on each"
        else:
            plan += f", {self.stages_per_device} on each"
        check_entries("cut_before", self.cut_before, num_cuts, plan)
        check_entries("speeds", self.speeds, num_devices, plan)
        check_entries("link_speeds", self.link_speeds, num_devices, plan)

    def _use_device_of_process(self) -> None:
        assert self._launch is not None
        self.devices = (self._launch.device,)
        if self.replicas > 1:
            self._shares = ProcessShares(
                self._user_shares, self.replicas, self.processes.rank, self.root_device, simulated={}
            )

    def check_module(self, module: nn.Module, *, training: bool) -> None:
        """Refuse a module whose backward does not run by micro-batches; see `Strategy.check_module`."""
        self._is_training = training
        check_module(module, training=training)
        if training and self.engine == "processes":
            check_for_processes(module)

    def setup(self, module: nn.Module, precision: Precision) -> None:
        """Convert the module; its parts are placed when the network is first called."""
        # 1. Convert the module, and let it name the last device as its own.
        precision.convert_module(module)
        set_device_of(module, self.root_device)
        self._module = module

        # 2. Continue the random numbers of earlier runs in the processes of other stages.
        client = None if self._launch is None else self._launch.processes
        if client is not None:
            client.seeds.steps = self._steps

        # 3. Intercept calls of the network from now on.
        network = StagedNetwork(
            module,
            self._cut_options(client),
            self.cut_before,
            threads=self.threads,
            training=self._is_training,
            pinned=self._pinned,
            processes=client,
            common_cut=self._common_cut(),
        )
        self._run = self._new_run(network, module, client)
        network.cover()

    def _cut_options(self, client: StageClient | None) -> CutOptions:
        devices = tuple(self.devices)
        measured_on = None
        if client is not None:
            devices = tuple(client.commands.devices)
            # The devices of other processes cannot be measured from here.
            measured_on = self.root_device
        return CutOptions(
            devices=devices * self.stages_per_device,
            measured_on=measured_on,
            schedule=self.schedule,
            micro_batches=self._num_micro_batches(len(devices)),
            stages_per_device=self.stages_per_device,
            speeds=self.speeds,
            links=[1 / (speed * 2**20) for speed in self.link_speeds or ()],
        )

    def _common_cut(self) -> CommonCut | None:
        """Return the cut of all replicas; None if there is one replica."""
        if self.replicas == 1:
            return None
        store = group_store()
        # Replicas have begun their process groups themselves.
        assert store is not None
        return CommonCut(store)

    def _new_run(self, network: StagedNetwork, module: nn.Module, client: StageClient | None) -> PipelineRun:
        """Return the state of a run. Workers begin with the module, which becomes the same in all replicas."""
        splitter = Splitter(module)
        if client is None:
            return PipelineRun(network, splitter)
        copies = copies_of(module)
        if self.replicas > 1:
            check_same_modules(module)
            for replicated in (module, *copies):
                copy_from_first((*replicated.parameters(), *replicated.buffers()))
        backend = ProcessBackend(client, module, self._own_state, self._load_own_state, copies)
        if self.replicas == 1:
            return PipelineRun(network, splitter, backend, restore_metrics=compute_metrics_alone(module))
        exchange = ReplicaExchange(backend, module)
        return PipelineRun(network, splitter, backend, exchange, synchronise_metrics(module))

    def _num_micro_batches(self, num_devices: int) -> int:
        """Return the number of micro-batches of a batch that has enough samples."""
        if self.micro_batches is None:
            return 2 * num_devices
        return self.micro_batches

    def share_batch_statistics(self, module: nn.Module) -> None:
        """Refuse statistics over several replicas; see `Strategy.share_batch_statistics`.

        Raises:
            ConfigurationError: If there are several replicas.
        """
        if self.replicas > 1:
            raise ConfigurationError(
                "sync_batchnorm=True does not go with replicas of a pipeline: their layers are in other processes, and"
                " compute micro-batches. Leave it out, or take layers without batch statistics."
            )

    def teardown(self, error: BaseException | None = None) -> None:
        """Restore the module; see `Strategy.teardown`."""
        # The field is reset first, so that an error below leaves no state of the run behind.
        run = self._run
        self._run = None
        if self._launch is not None:
            self._launch.forget_failure()
        if run is not None:
            run.network.release()
            self._keep_cut(run.network)
            if run.restore_metrics is not None:
                run.restore_metrics()
            if run.backend is not None:
                self._end_backend(run.backend)
        super().teardown(error)

    def _keep_cut(self, network: StagedNetwork) -> None:
        """Keep the cut of a network for the next run and for checkpoints."""
        if network.cut is not None:
            self._pinned = network.cut.pinned

    def _end_backend(self, backend: ProcessBackend) -> None:
        """Take the states of other processes back, if these still answer."""
        self._steps = backend.processes.seeds.steps
        if backend.processes.commands.messenger.broken:
            # Nothing arrives any more, and a module without the values of other stages cannot be moved.
            self._module = None
        else:
            backend.end()

    @property
    def recovery(self) -> RecoverySupport:
        """Support for steps that are repeated; see `Strategy.recovery`."""
        if self._run is None:
            return super().recovery
        return PipelineRecovery(self._run.network, self._run.backend)

    @property
    def portable(self) -> PortableState:
        """Full states of the module and the optimisers; see `Strategy.portable`."""
        if self._run is None or self._run.backend is None:
            return PortableState(self._own_state, self._load_own_state)
        return self._run.backend

    # Computation.

    @property
    def _current_run(self) -> PipelineRun:
        assert self._run is not None
        return self._run

    def shard(self, loader: Any, stage: str) -> Shard:
        """Return this replica's part of a loader; see `Strategy.shard`."""
        if self._shares is None:
            return super().shard(loader, stage)
        return shard_of_process(loader, stage, self.processes, self._shares.sizes_for)

    def sync_buffers(self) -> None:
        """Copy the buffers of the first replica, which checkpoints hold, to all replicas; see the interface."""
        if self._run is None or self._run.exchange is None:
            return
        if self._launch is not None and self._launch.is_connected:
            self._run.exchange.copy_buffers()

    def replicated_tensors(self) -> Replicated:
        """Return what replicas have alike, as this one has it; see `Strategy.replicated_tensors`."""
        if self._run is None or self._run.exchange is None:
            return super().replicated_tensors()
        return self._run.exchange.replicated()

    def batch_to_devices(self, batch: Any, transfer: Transfer) -> Sequence[Any]:
        """Copy a batch to the last device; see `Strategy.batch_to_devices`."""
        refuse_missing_batch(batch, shares_statistics=False)
        # This replica joins the exchange of the step without a batch.
        if batch is NO_BATCH:
            return ()
        return (transfer(batch, self.root_device),)

    def forward_backward(self, step: TrainingStep, parts: Sequence[Any], last: bool) -> StepResult:
        """Compute a batch in micro-batches; see `Strategy.forward_backward`."""
        run = self._current_run
        assert self._module is not None
        # A batch that did not fit into memory is the same step.
        if run.client is not None and not isinstance(parts, FinerBatch):
            run.client.seeds.begin_step()
        if not parts:
            return run.pass_by(step)
        run.network.begin_step()
        sizes = self._micro_batch_sizes(parts)
        micro_batches = [parts[0]]
        if len(sizes) > 1:
            micro_batches = run.splitter.parts(parts[0], sizes)
        batch = PipelinedBatch(step, self._module, micro_batches, sizes)
        try:
            with run.computing(batch):
                results = batch.compute(run.network, run.client)
        finally:
            if batch.timeline is not None:
                self.timeline = batch.timeline
        run.follow = batch.follow
        # `finish_gradients` runs the hook of a window's last backward, when gradients are weighed. With several batches
        # the hook sees them before that, as on one device.
        is_one_of_several = step.window is not None and step.window.parts > 1 and run.backend is None
        if not last or is_one_of_several:
            run.follow_backward()
        # All micro-batches log by the module's own metrics, so each metric is its own original.
        return step.merge(results, sizes, self.root_device, original=lambda metric: metric)

    def _micro_batch_sizes(self, parts: Sequence[Any]) -> list[int]:
        """Return the number of samples of each micro-batch of a batch."""
        run = self._current_run
        size = run.splitter.size(parts[0])
        # A batch of unknown size is one micro-batch.
        sizes = [1]
        if size is not None:
            count = self._num_micro_batches(len(run.network.options.own_devices))
            if isinstance(parts, FinerBatch):
                # The usual number did not fit into memory.
                count *= parts.factor
            sizes = [samples for samples in even_sizes(size, min(size, count)) if samples]
        if isinstance(parts, FinerBatch):
            parts.indices = range(len(sizes))
        return sizes

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward of a micro-batch, down to the inputs of the last stage.

        Its graph is retained in two cases. What was computed before the network, and is used beside it too, runs
        backward once more from the first stage. And a schedule that splits the backward of a stage uses the graph of
        the last stage again, of which a loss may use something beside its output, an attribute for instance.
        """
        batch = self._current_run.batch
        retains_graph = batch is not None and batch.retains_graph
        if retains_graph or splits(self.schedule):
            kwargs = {"retain_graph": True, **kwargs}
        super().backward(loss, *args, **kwargs)

    def finish_gradients(self, window: AccumulationWindow, optimizer: Optimizer) -> bool | None:
        """Turn the gradients of all stages into their weighted mean; see `Strategy.finish_gradients`."""
        run = self._current_run
        # Parameters may have moved to the devices of their stages since the optimiser was constructed.
        run.network.placement.settle_optimizer(optimizer)
        if run.exchange is not None:
            is_weightless: bool | None = run.exchange.finish(window, optimizer)
        else:
            if run.backend is not None:
                run.backend.finish_gradients(optimizer, window.correction())
            is_weightless = super().finish_gradients(window, optimizer)
        # The hook of the last backward sees the gradients as on one device: weighed, and summed over all stages.
        run.follow_backward()
        return is_weightless

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        """Clip gradients over all stages; see `Strategy.clip_gradients`."""
        if self._run is None or self._run.backend is None:
            super().clip_gradients(optimizer, value, algorithm)
        else:
            self._run.backend.clip(optimizer, value, algorithm)

    def setup_optimizer(self, optimizer: Optimizer) -> StrategyOptimizer:
        """Step the optimiser in all processes; see `Strategy.setup_optimizer`."""
        if self._run is None or self._run.backend is None:
            return super().setup_optimizer(optimizer)
        return ProcessOptimizer(optimizer, self._run.backend)

    # State.

    def _own_state(self) -> dict[str, Any]:
        """Return the cut, with which a resumed run continues, and the number of steps, for random numbers."""
        if self._run is not None:
            self._keep_cut(self._run.network)
        state: dict[str, Any] = {}
        if self._pinned is not None:
            state["cut_before"] = self._pinned.names
            state["calls"] = self._pinned.calls
        if self.engine == "processes":
            client = None if self._run is None else self._run.client
            state["steps"] = self._steps if client is None else client.seeds.steps
        return state

    def _load_own_state(self, state: dict[str, Any]) -> None:
        """Restore a saved cut. It is used if it is for as many devices, and the user names no other cut."""
        names = state.get("cut_before")
        calls = state.get("calls")
        if isinstance(names, list) and isinstance(calls, list) and all_are(str, [*names, *calls]):
            self._pinned = PinnedCut(names=names, calls=calls)
            # A checkpoint may be read after `setup`.
            if self._run is not None:
                self._run.network.pin(self._pinned)
        steps = state.get("steps")
        if isinstance(steps, int):
            self._steps = steps
            if self._run is not None and self._run.client is not None:
                self._run.client.seeds.steps = steps

    def __getstate__(self) -> dict[str, Any]:
        """Return the options; see `Strategy`. A timeline stays in the process of its run."""
        return {**super().__getstate__(), "timeline": None}
