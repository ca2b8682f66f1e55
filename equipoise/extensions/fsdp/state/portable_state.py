"""Full states of a module in shards, which any other strategy can load."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim import Optimizer

from equipoise.errors import CheckpointError, ConfigurationError
from equipoise.extensions.fsdp.state.folders import CollectedShards, ShardFolders
from equipoise.extensions.fsdp.state.gathering import whole
from equipoise.extensions.fsdp.state.loaded_shards import shard_like
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.shards.reading import ShardReader
from equipoise.parallel.shards.sources import placeholder_for, source_of
from equipoise.strategies.distributed.process_group import ProcessGroup
from equipoise.strategies.portable_state import PortableState

__all__ = ["BeforeSharding", "ShardedState"]


class BeforeSharding(PortableState):
    """States of a module that is to be sharded, or is whole again."""

    is_sharded: ClassVar[bool] = True


class ShardedState(PortableState):
    """Gathers whole tensors in the main process, and cuts loaded ones into shards.

    The other processes take part and receive tensors without memory. While the content of a folder is collected, all
    processes receive such tensors, and nothing is gathered.

    Args:
        module: The module in shards.
        group: The processes.
        folders: Writes checkpoints as folders of shards. Default: None, they are whole.

    Attributes:
        optimizers: The optimisers of the run, which get the module's own parameters at its end.
    """

    is_sharded: ClassVar[bool] = True
    folders: ShardFolders | None = None

    def __init__(self, module: nn.Module, group: ProcessGroup, folders: ShardFolders | None = None) -> None:
        self._module = module
        self._num_copies = 0
        self._group = group
        self.folders = folders
        self.optimizers: list[Optimizer] = []

    def connect_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Note the optimisers; see `PortableState.connect_optimizers`.

        Raises:
            ConfigurationError: If one has parameters that were made before the module was sharded.
        """
        shards = set(map(id, self._module.parameters()))
        for optimizer in optimizers:
            trained = [parameter for parameter in optimizer_parameters(optimizer) if parameter.requires_grad]
            if trained and not any(id(parameter) in shards for parameter in trained):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} has no parameter of the sharded module, so it would train nothing"
                    " under strategy='fsdp'. Create it in `configure_optimizers`, not in `__init__`: the module's"
                    " parameters are replaced by shards in between."
                )
        self.optimizers = list(optimizers)

    def _check_complete(self) -> None:
        """Check that all processes can take part.

        Raises:
            CheckpointError: If this process has failed.
        """
        if not self._group.is_connected:
            raise CheckpointError(
                "The run has failed, so the other processes do not take part any more, and each process has only its"
                " shards of the weights under strategy='fsdp'. Nothing was saved. Save during the run, as by"
                " ModelCheckpoint(every_n_train_steps=...), and resume from there."
            )

    @property
    def _collected(self) -> CollectedShards | None:
        """The shards of the folder whose content is being collected; None: tensors are gathered."""
        return None if self.folders is None else self.folders.collected

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the module's full state; see `PortableState.module_state`.

        Each process loads its shards of it by `module.load_state_dict`.
        """
        return self._portable("state_dict", module, module.state_dict())

    def _portable(self, name: str, module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state of the module or of a copy, whole or with placeholders of this name."""
        self._check_complete()
        # The first name of each parameter, as one that is tied is saved once. Buffers have one name each.
        first_names: dict[int, str] = {}
        aliases: dict[str, str] = {}
        for alias, parameter in module.named_parameters(remove_duplicate=False):
            aliases[alias] = first_names.setdefault(id(parameter), alias)
        portable = {}
        for key, value in state.items():
            portable[key] = self._value(f"{name}/{aliases.get(key, key)}", value)
        return portable

    def _value(self, name: str, value: Any) -> Any:
        """Return a value as a whole, or a placeholder of a name while shards are collected."""
        if self._collected is not None:
            return self._collected.add(name, value)
        return whole(value, keep=self._group.is_main)

    def adopt(self, copied: nn.Module) -> None:
        """Let the `state_dict` of a copy of the module be portable; all processes call it together."""
        name = f"copies/{self._num_copies}"
        self._num_copies += 1

        def make_portable(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            state_of_copy = {}
            for key, value in state.items():
                if key.startswith(prefix):
                    state_of_copy[key.removeprefix(prefix)] = value
            for key, value in self._portable(name, module, state_of_copy).items():
                state[prefix + key] = value

        # Torch annotates nothing here.
        copied.register_state_dict_post_hook(make_portable)  # type: ignore[no-untyped-call]

    def averaging(self) -> AbstractContextManager[None]:
        """Let shards stand beside buffers, which are whole, in one operation; see `PortableState.averaging`."""
        for unit in self._module.modules():
            # A callback would read and change the weights that a step by hand has gathered.
            if isinstance(unit, FSDPModule):
                unit.reshard()
        return implicit_replication()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimiser's full state; see `PortableState.optimizer_state`."""
        self._check_complete()
        content = optimizer.state_dict()
        place = [*self.optimizers, optimizer].index(optimizer)
        states = {}
        for number, state in content["state"].items():
            portable = {}
            for key, value in state.items():
                portable[key] = self._value(f"optimizer_states/{place}/{number}/{key}", value)
            states[number] = portable
        return {**content, "state": states}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load an optimiser's state, each process its shards; see `PortableState.load_optimizer_state`."""
        parameters = list(optimizer_parameters(optimizer))
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameter_of = dict(zip(numbers, parameters, strict=False))
        states = {}
        for number, values in state["state"].items():
            parameter = parameter_of.get(number)
            shards = {}
            for key, value in values.items():
                shards[key] = shard_like(parameter, value)
            states[number] = shards
        optimizer.load_state_dict({**state, "state": states})

    def gradients(self, optimizers: Sequence[Optimizer], *, window_is_open: bool) -> list[Tensor | None]:
        """Return the gradients of an open window in the main process; see `PortableState.gradients`.

        They are summed over all processes already, so the others have none to add.
        """
        self._check_complete()
        # A process without a batch so far takes part, too.
        if not any(self._group.gather_objects(window_is_open)):
            return []
        gathered: list[Tensor | None] = []
        for index, gradient in enumerate(super().gradients(optimizers, window_is_open=True)):
            gathered.append(self._value(f"gradients/{index}", gradient))
        if self._group.is_main:
            return gathered
        return [None for _ in gathered]

    def load_gradients(self, optimizers: Sequence[Optimizer], gradients: Sequence[Tensor | None]) -> None:
        """Set the sums of what all processes have saved; see `PortableState.load_gradients`."""
        # 1. Find the gradients that lie in a folder, and the parameters for which any process has another one.
        folder = self._folder_of(gradients)
        here = {index: gradient for index, gradient in enumerate(gradients) if gradient is not None}
        present = set(chain(*self._group.gather_objects(list(here))))
        if self._group.rank % self._group.processes_per_batch:
            # Those that compute a batch together have one position, which counts once.
            here = {}
        # 2. Sum over the processes, and keep a shard.
        parameters = chain.from_iterable(map(optimizer_parameters, optimizers))
        for index, parameter in enumerate(parameters):
            shard = None
            if index in present:
                gradient = here.get(index)
                if folder is None:
                    gradient = _sum_over_processes(parameter, gradient)
                else:
                    gradient = placeholder_for(folder, f"gradients/{index}")
                shard = shard_like(parameter, gradient)
            parameter.grad = shard

    def _folder_of(self, gradients: Sequence[Tensor | None]) -> ShardReader | None:
        """Return the sharded checkpoint in which the gradients of an open window lie; None if they are whole.

        The positions of most processes refer to none of them.
        """
        sources = [source_of(gradient) for gradient in gradients]
        paths_here = {source.reader.path for source in sources if source is not None}
        for paths in self._group.gather_objects(paths_here):
            for path in paths:
                return ShardReader(path)
        return None


def _sum_over_processes(parameter: nn.Parameter, gradient: Tensor | None) -> Tensor:
    """Return the sum of the whole gradients of a parameter that the processes have; None counts as zero."""
    total = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    if gradient is not None:
        total += gradient.to(parameter.device)
    dist.all_reduce(total)
    return total
