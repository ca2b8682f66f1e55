"""The other processes of a pipeline as the main process commands them.

Each holds the parameters and buffers that its stage uses. Of those that only others use, this process keeps the shapes
alone: reading one is an error (`parallel.elsewhere`), and their values come home where the whole module is asked for. A
parameter that several stages use lies in each of them; their gradients are added up before the optimisers step, which
then do the same everywhere.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import ConfigurationError
from equipoise.interop.torch.modules import has_hooks
from equipoise.parallel.communication.remote_parameters import bring_back, send_elsewhere
from equipoise.parallel.payload.shared_payload import dumps
from equipoise.pipeline.graph.stages import StageProgram
from equipoise.pipeline.processes.commands import COMMAND, REPLY, Kind, nothing_like, rank_of
from equipoise.pipeline.processes.messages import Messenger, StageError
from equipoise.pipeline.processes.stage_spec import describe, tensors_of, used_parts

__all__ = ["StageClient"]


class StageClient:
    """Tells the other processes what to do, and knows what lies where.

    Args:
        messenger: To them.
        devices: The device of each process, in the order of their first stages; the last is this process's own. A stage
            below stands for all of its process, of which it is the first.

    Attributes:
        steps: How many training steps there were, from which the stages' random numbers follow.
        failed: The device of the stage that has failed since this was last set to None.
    """

    def __init__(self, messenger: Messenger, devices: Sequence[torch.device]) -> None:
        self.messenger, self.devices = messenger, list(devices)
        self.last = len(devices) - 1
        self.steps = self._evaluations = 0
        self.failed: torch.device | None = None
        self.moved: Callable[[], None] = lambda: None  # called before tensors go to a process that had them not
        self._module: nn.Module | None = None
        self._programs = 0

    # Commands.

    def tell(self, stage: int, name: str, *arguments: Any) -> None:
        """Tells a process to do something, and waits for nothing."""
        self.messenger.send(rank_of(stage, len(self.devices)), COMMAND, (False, name, *arguments))

    def tell_all(self, name: str, *arguments: Any) -> None:
        """Tells all other processes the same."""
        for stage in range(self.last):
            self.tell(stage, name, *arguments)

    def ask(self, orders: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Tells processes to do something, and returns their answers.

        Args:
            orders: For each stage the command and its arguments.

        Raises:
            BaseException: What went wrong in one of them, now or in a command before.
        """
        count = len(self.devices)
        for stage, order in orders.items():
            self.messenger.send(rank_of(stage, count), COMMAND, (True, *order))
        replies = {stage: self.messenger.receive(rank_of(stage, count), REPLY) for stage in orders}
        for _, failure in replies.values():
            if failure is not None:
                raise self.as_error(failure)
        return {stage: answer for stage, (answer, _) in replies.items()}

    def as_error(self, failure: StageError) -> BaseException:
        """The error that came in the place of a value; notes the device of the first one."""
        self.failed = self.failed or torch.device(failure.device)
        return failure.as_error()

    def ask_all(self, *order: Any) -> list[Any]:
        """The answers of all other processes, in the order of stages."""
        return list(self.ask(dict.fromkeys(range(self.last), order)).values())

    # What lies where.

    def begin(self, module: nn.Module) -> None:
        """Takes a module, all of which is here yet."""
        self._module = module
        tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        self.tensors = list(tensors.values())
        self._keys = {id(tensor): key for key, tensor in enumerate(self.tensors)}
        self._names = {id(part): name for name, part in module.named_modules()}
        self._holders: dict[int, list[int]] = {}  # the stages other than the last that have a tensor
        self._own: set[int] = set()  # what the last stage uses of that
        self._sent: list[set[str]] = [set() for _ in range(self.last)]
        self._learned: dict[int, bool] = {}
        self._programs = 0
        self.tell_all("begin", [Kind(isinstance(t, nn.Parameter), tuple(t.shape), t.dtype) for t in self.tensors])

    def key_of(self, tensor: Tensor) -> int | None:
        """The number of a tensor; None if it is none of the module's."""
        return self._keys.get(id(tensor))

    def is_elsewhere(self, key: int) -> bool:
        """Whether only other processes have a tensor."""
        return key in self._holders and key not in self._own

    def holds(self, stage: int, key: int) -> bool:
        """Whether the process of a stage has a tensor."""
        return not self.is_elsewhere(key) if stage == self.last else stage in self._holders.get(key, ())

    def elsewhere(self) -> list[int]:
        """The tensors that only other processes have."""
        return [key for key in self._holders if key not in self._own]

    def shared(self) -> dict[int, list[int]]:
        """The trained parameters that several processes have, and the stages other than the last that do."""
        several = {key: stages for key, stages in self._holders.items() if len(stages) + (key in self._own) > 1}
        return {key: stages for key, stages in several.items() if self.tensors[key].requires_grad}

    def owner_of(self, key: int) -> int:
        """The first stage that has a tensor."""
        return self._holders.get(key, [self.last])[0]

    def fetch(self, keys: Sequence[int]) -> dict[int, Tensor]:
        """The values of tensors that only other processes have."""
        wanted: dict[int, list[int]] = {}
        for key in keys:
            wanted.setdefault(self._holders[key][0], []).append(key)
        answers = self.ask({stage: ("give", each) for stage, each in wanted.items()})
        return {key: value for answer in answers.values() for key, value in answer.items()}

    def bring_home(self) -> None:
        """Fetches the whole module; until `send_away` all of it is here as well."""
        for key, value in self.fetch(self.elsewhere()).items():
            tensor = self.tensors[key]
            bring_back(tensor, value.to(tensor.device))

    def send_away(self, *, changed: bool = False) -> None:
        """Lets go of what only other processes need.

        Args:
            changed: Whether values were changed here, and are to be those of the others, too. Default: False.
        """
        if changed:
            for stage in range(self.last):
                values = {key: self.tensors[key] for key, stages in self._holders.items() if stage in stages}
                self.tell(stage, "take", values, {key: value.requires_grad for key, value in values.items()})
            self.messenger.flush()
        for key in self.elsewhere():
            self._drop(self.tensors[key])

    @contextmanager
    def all_at_home(self, *, changed: bool = False) -> Iterator[None]:
        """While the whole module is needed here; see `send_away`."""
        self.bring_home()
        try:
            yield
        finally:
            self.send_away(changed=changed)

    def forget(self) -> None:
        """All is here again; the others let go of it."""
        self.tell_all("begin", [])
        self.messenger.flush()
        self._module, self._holders = None, {}

    @staticmethod
    def _drop(tensor: Tensor) -> None:
        if isinstance(tensor, nn.Parameter):  # buffers are small, and may be noted and brought back
            tensor.data = nothing_like(tensor.shape, tensor.dtype).to(tensor.device)
            send_elsewhere(tensor)

    def tell_what_learns(self) -> None:
        """Tells the others which parameters are frozen, where that has changed."""
        learned = {key: self.tensors[key].requires_grad for key in self._holders}
        if learned != self._learned:
            self._learned = learned
            self.tell_all("learn", learned)

    # Stages.

    def give_out(self, root: nn.Module, stages: Sequence[StageProgram]) -> int:
        """Gives every process its stages; returns the number by which they know them.

        Args:
            root: What names in the stages' calls refer to.
            stages: The stages.
        """
        assert self._module is not None
        count = len(self.devices)
        theirs = [stages[index::count] for index in range(count)]
        parts = [{k: part for stage in own for k, part in used_parts(stage, root).items()} for own in theirs]
        needs = [
            {self._keys[id(t)] for p in each.values() for t in tensors_of(p) if id(t) in self._keys} for each in parts
        ]
        self._place(needs)
        self._programs += 1
        for index, own in enumerate(parts[:-1]):
            names = {target: self._names.get(id(part), f"{self._programs}:{target}") for target, part in own.items()}
            new = {names[target]: part for target, part in own.items() if names[target] not in self._sent[index]}
            modes = {
                names[target]: [child.training for child in part.modules()]
                for target, part in own.items()
                if isinstance(part, nn.Module)
            }
            content = dumps(new, known=self.tensors)
            self.tell(index, "program", self._programs, list(map(describe, theirs[index])), content, names, modes)
            self._sent[index] |= new.keys()
        self.messenger.flush()
        return self._programs

    def _place(self, needs: Sequence[set[int]]) -> None:
        """Sends tensors to where they are needed, and takes those that are needed here."""
        lacking = [
            {key for key in needed if stage not in self._holders.get(key, ())}
            for stage, needed in enumerate(needs[:-1])
        ]
        new = set().union(*lacking)
        away = sorted(key for key in new | needs[-1] if self.is_elsewhere(key))
        if any(has_hooks(self.tensors[key]) for key in new):
            raise ConfigurationError(
                "A parameter of the network has a hook on its gradient, but under engine='processes' it lies in another"
                " process. Take engine='threads', or do without the hook."
            )
        if new or away:
            self.moved()
        for key, value in self.fetch(away).items():
            bring_back(self.tensors[key], value)
        self._own |= needs[-1]
        if not new:
            return
        for stage, keys in enumerate(lacking):
            values = {key: self.tensors[key] for key in sorted(keys)}
            self.tell(stage, "take", values, {key: value.requires_grad for key, value in values.items()})
            for key in keys:
                self._holders[key] = sorted([*self._holders.get(key, ()), stage])
        self.messenger.flush()
        for key in self._own:
            self.tensors[key].data = self.tensors[key].data.to(self.devices[-1])
        self.send_away()

    def seed_of(self, *, training: bool) -> int:
        """For the random numbers of a step; the same in a run that was interrupted and resumed."""
        self._evaluations += 1
        count = f"{self.steps}" if training else f"{self.steps}, {self._evaluations}"
        digest = hashlib.sha256(f"{torch.initial_seed()}, {count}".encode()).digest()
        return int.from_bytes(digest[:6], "little")
