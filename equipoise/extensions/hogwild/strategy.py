"""HogwildStrategy: processes that step shared parameters without waiting for each other."""

import platform
from collections.abc import Sequence
from typing import ClassVar, Literal, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from equipoise.errors import ConfigurationError
from equipoise.extensions.hogwild.optimizers import SharedOptimizer
from equipoise.extensions.hogwild.portable_state import SharedState
from equipoise.extensions.hogwild.shared_memory import share_parameters
from equipoise.interop.lightning.callbacks import copying_callbacks
from equipoise.parallel.communication.processes import Processes
from equipoise.parallel.strategy_optimizer import StrategyOptimizer
from equipoise.parallel.workers.preloading import preload
from equipoise.precision import Precision
from equipoise.strategies.distributed.process_strategy import ProcessRun, ProcessStrategy, same_in_all_processes
from equipoise.strategies.portable_state import PortableState
from equipoise.validation import check_whole

__all__ = ["HogwildStrategy"]

preload(__name__)


class HogwildStrategy(ProcessStrategy):
    """Processes of one machine that step shared parameters on CPUs, each without waiting for the others.

    Each process computes gradients from its own samples, and its optimiser changes the parameters that all of them see,
    while others read and change them, too. The trainer starts the processes. In training every process receives
    `batch_size` samples of a step, as under `ddp`, but each takes a step of its own with them. Processes meet before
    evaluations and checkpoints, and at the end of an epoch.

    Steps are counted in each process: `max_steps`, `global_step` and schedulers count those of one process, of which
    there are as many as under `ddp` with the same loader. So the parameters are stepped `processes` times as often.

    Args:
        processes: The number of processes. Default: the number of devices of the Trainer.
        optimizer_state: "own": each process has an optimiser state of its own. "shared": all of them change one, from
            the second step on. Default: "own".
        timeout: Seconds for which processes wait for one another before a missing one counts as hung. Default: 1800.

    Raises:
        ConfigurationError: If an argument is out of range, or the devices are no CPUs of one machine.

    Source: Niu, Recht, Ré, Wright: HOGWILD!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent, 2011.

    Example:
        >>> from equipoise import HogwildStrategy, Trainer
        >>> trainer = Trainer(strategy=HogwildStrategy(processes=2), accelerator="cpu")  # doctest: +SKIP
    """

    name: ClassVar[str] = "hogwild"
    # A process that is done with its batch waits for no other.
    steps_together: ClassVar[bool] = False

    def __init__(
        self,
        *,
        processes: int | None = None,
        optimizer_state: Literal["own", "shared"] = "own",
        timeout: float = 1800.0,
    ) -> None:
        super().__init__(timeout=timeout, backend="gloo")
        check_whole("processes", processes, least=1, optional=True)
        if optimizer_state not in ("own", "shared"):
            raise ConfigurationError(f"optimizer_state must be 'own' or 'shared', not {optimizer_state!r}.")
        self.number = processes
        self.optimizer_state = optimizer_state
        self._optimizers: dict[int, SharedOptimizer] = {}

    # Where it runs.

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Use a process for each device, or the number of processes that the user gave; see `Strategy.connect`."""
        refused = sorted({str(device) for device in devices if device.type != "cpu"})
        if refused:
            raise ConfigurationError(
                f"strategy='hogwild' steps parameters in the memory of CPUs, but {', '.join(refused)} was given. Take"
                " accelerator='cpu', or strategy='ddp' for other devices."
            )
        if num_nodes != 1:
            raise ConfigurationError(
                f"strategy='hogwild' shares the memory of one machine, but num_nodes={num_nodes} was given. Take"
                " strategy='ddp' for several."
            )
        if self.number is not None:
            if len(devices) not in (1, self.number):
                raise ConfigurationError(
                    f"HogwildStrategy(processes={self.number}) starts {self.number} processes, but {len(devices)}"
                    " devices were given. Leave one of the two out."
                )
            devices = [torch.device("cpu")] * self.number
        super().connect(devices, num_nodes)

    def check_module(self, module: nn.Module, *, training: bool) -> None:
        """Refuse averages, which each process would exchange with the shared weights; see `Strategy.check_module`."""
        if not training or self.processes.world_size == 1:
            return
        for callback in copying_callbacks(module):
            raise ConfigurationError(
                f"{type(callback).__name__} exchanges the weights with a copy for each evaluation, but under"
                " strategy='hogwild' several processes would do so with the same weights. Leave it out, or take"
                " strategy='ddp'."
            )

    def on_one_device(self) -> NoReturn:
        """Refuse; see `Strategy.on_one_device`."""
        raise ConfigurationError("processes of hogwild step shared weights without waiting, so no two runs are equal.")

    def setup(self, module: nn.Module, precision: Precision) -> None:
        """Place the module, and share its parameters; see `Strategy.setup`."""
        if self.optimizer_state == "shared" and precision.scaler is not None:
            raise ConfigurationError(
                "precision='16-mixed' leaves steps out where gradients overflow, in each process by itself, so the"
                " processes cannot meet to share a state. Take precision='bf16-mixed', or"
                " HogwildStrategy(optimizer_state='own')."
            )
        super().setup(module, precision)

    def _begin_run(self, module: nn.Module) -> ProcessRun:
        processes = self.processes
        _check_one_machine(processes)
        self._optimizers = {}
        # The same values everywhere, then the same memory.
        restore_metrics = same_in_all_processes(module)
        unshare = share_parameters(list(module.parameters()), processes)
        return ProcessRun(restores=[restore_metrics, unshare])

    def sync_buffers(self) -> None:
        """Meet, so that no process steps during an evaluation or after the end; then copy the buffers of rank 0."""
        self.processes.barrier("evaluation")
        super().sync_buffers()

    # Computation.

    def setup_optimizer(self, optimizer: Optimizer) -> StrategyOptimizer:
        """Return an optimiser with its own state, or one that is shared; see `Strategy.setup_optimizer`."""
        if self.optimizer_state == "own" or self._run is None:
            return super().setup_optimizer(optimizer)
        # Called anew in each epoch, where the state stays shared.
        key = id(optimizer)
        if key not in self._optimizers:
            self._optimizers[key] = SharedOptimizer(optimizer, self.processes)
        return self._optimizers[key]

    # State.

    @property
    def portable(self) -> PortableState:
        """Full states, collected while no process steps; see `Strategy.portable`."""
        return SharedState(self.processes)


def _check_one_machine(processes: Processes) -> None:
    """Check that all processes are on one machine.

    Raises:
        ConfigurationError: If they are not; then every process raises.
    """
    machines = sorted(set(processes.gather_objects(platform.node())))
    if len(machines) > 1:
        raise ConfigurationError(
            f"strategy='hogwild' shares the memory of one machine, but the processes are on {', '.join(machines)}. Take"
            " strategy='ddp'."
        )
