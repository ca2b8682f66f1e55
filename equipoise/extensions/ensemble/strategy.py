"""EnsembleStrategy: several members of one class, trained side by side on one device."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.errors import ConfigurationError
from equipoise.extensions.ensemble.computation.choice import Choice, Mode
from equipoise.extensions.ensemble.computation.together import Together
from equipoise.extensions.ensemble.data.member_batches import MemberParts, MembersBatch, batch_of
from equipoise.extensions.ensemble.data.member_order import with_member_order
from equipoise.extensions.ensemble.data.random_streams import RandomStreams
from equipoise.extensions.ensemble.gradients import clip_by_norm, clip_by_value
from equipoise.extensions.ensemble.members.initial_members import Factory, check_seeds, construct_members, member_seeds
from equipoise.extensions.ensemble.members.stacked_members import StackedMembers
from equipoise.extensions.ensemble.optimizers import OptimizerState
from equipoise.extensions.ensemble.outputs import MemberLogs, averaged
from equipoise.extensions.ensemble.portable_state import MemberStates
from equipoise.extensions.ensemble.run import EnsembleRun
from equipoise.interop.lightning.callbacks import copying_callbacks
from equipoise.interop.lightning.classes import is_overridden
from equipoise.interop.torch.modules import has_gradient_hooks
from equipoise.parallel.batches.shard import Shard
from equipoise.parallel.batches.splitting import Splitter
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.equality import copied
from equipoise.parallel.replicas.replicable import check_replicable
from equipoise.parallel.snapshot import random_state
from equipoise.parallel.step_protocols import EvaluationStep, StepResult, TrainingStep
from equipoise.parallel.strategy_optimizer import StrategyOptimizer
from equipoise.precision import Precision
from equipoise.strategies.portable_state import PortableState
from equipoise.strategies.recovery_support import RecoverySupport
from equipoise.strategies.strategy import Strategy, Transfer
from equipoise.tree import map_leaves
from equipoise.validation import check_whole

__all__ = ["EnsembleStrategy"]

_MODES = ("auto", "together", "one_by_one")


class _NoRecovery(RecoverySupport):
    """Refuses to repeat steps: what a member needs is not known from the memory that all of them need."""

    def why_not(self, *, training: bool, leave_out: bool) -> str:
        """Return the reason; see `RecoverySupport.why_not`."""
        return "an ensemble does not repeat steps; take fewer members, mode='one_by_one', or smaller batches"


class EnsembleStrategy(Strategy):
    """Several members of one class, trained side by side on one device; each is the model of a run of its own.

    Each member has a seed, from which follow its initial weights and the order of its batches. The first one is the
    module that is trained. Each other one is constructed anew under its seed: by `factory`, else from the module's
    class and its saved hyperparameters. `training_step` is computed for all members together, if that gives the same
    numbers and was measured to be quicker, else once for each member.

    Logged values are means over the members; in evaluations `name/member_0` and so on are logged, too. Predictions are
    averaged. Checkpoints are those of the first member, which any strategy loads, with the others beside;
    `equipoise.split_ensemble` writes a checkpoint for each member.

    Args:
        members: The number of members, from 2.
        seeds: A seed for each member; that of the first one counts for private generators of loaders alone. Default:
            the seed of `seed_everything`, else torch's initial seed, and the numbers after it.
        factory: Function without arguments that constructs a member. Default: the class of the module, with the
            hyperparameters that `save_hyperparameters` has saved.
        own_order: Give each member batches of its own from loaders that shuffle. Default: True; False: all members
            receive the same batches, which are read once.
        mode: "together": a step is computed for all members together. "one_by_one": each step after the other. "auto":
            measured in the first steps. Steps that draw random numbers, as dropout does, are computed together with
            "together" alone, with other numbers than a member's own run draws. Default: "auto".

    Raises:
        ConfigurationError: If an argument is out of range, or there are several devices.

    Example:
        >>> from equipoise import EnsembleStrategy, Trainer
        >>> trainer = Trainer(strategy=EnsembleStrategy(members=4), devices=["cpu"], logger=False)
    """

    name: ClassVar[str] = "ensemble"

    def __init__(
        self,
        *,
        members: int = 4,
        seeds: Sequence[int] | None = None,
        factory: Factory | None = None,
        own_order: bool = True,
        mode: Mode = "auto",
    ) -> None:
        check_whole("members", members, least=2)
        check_seeds(seeds, members)
        if factory is not None and not callable(factory):
            raise ConfigurationError(f"factory must be a function that constructs a member, not {factory!r}.")
        if not isinstance(own_order, bool):
            raise ConfigurationError(f"own_order must be True or False, not {own_order!r}.")
        if mode not in _MODES:
            raise ConfigurationError(f"mode must be 'auto', 'together' or 'one_by_one', not {mode!r}.")
        self.members = members
        self.seeds = seeds
        self.factory = factory
        self.own_order = own_order
        self.mode: Mode = mode
        self._run: EnsembleRun | None = None
        self._scales_loss = False
        self._forget()

    def _forget(self) -> None:
        """Forget the members of an earlier module."""
        # The module, which is the first member, and the weights of its other members between runs. The module is kept:
        # a program may hold only the strategy, to read the members after a run.
        self._module_of_members: nn.Module | None = None
        self._states: list[dict[str, Any]] | None = None
        # Those of a checkpoint, until the run begins.
        self._loaded_states: list[dict[str, Any]] | None = None
        self._optimizer_states: list[list[OptimizerState]] = []
        self._streams: RandomStreams | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the options, and the weights of the members."""
        state = super().__getstate__()
        # Neither can be sent or written.
        state["_module_of_members"] = None
        state["_streams"] = None
        return state

    # Where it runs.

    def on_one_device(self) -> NoReturn:
        """Refuse; see `Strategy.on_one_device`."""
        raise ConfigurationError("the members of an ensemble train from seeds of their own.")

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Use one device; see `Strategy.connect`."""
        super().connect(devices, num_nodes)
        if len(devices) != 1:
            raise ConfigurationError(
                f"strategy='ensemble' trains all members on one device, but {len(devices)} were given:"
                f" {', '.join(map(str, devices))}. Give one, such as devices=1."
            )

    def check_module(self, module: nn.Module, *, training: bool) -> None:
        """Refuse a module of which there cannot be several members; see `Strategy.check_module`."""
        check_replicable(module, self.devices)
        if not training:
            return
        kind = type(module).__name__
        if not getattr(module, "automatic_optimization", True):
            raise ConfigurationError(
                f"{kind} optimises by hand (automatic_optimization=False), but under strategy='ensemble'"
                " `training_step` runs once for each member, and each would step the optimiser. Train the members in"
                " runs of their own."
            )
        if is_overridden("configure_gradient_clipping", module):
            raise ConfigurationError(
                f"{kind} overrides `configure_gradient_clipping`, which would see the gradients of the first member"
                " alone. Use Trainer(gradient_clip_val=...), which clips those of each member."
            )
        for callback in copying_callbacks(module):
            raise ConfigurationError(
                f"{type(callback).__name__} would average the weights of the first member alone. Leave it out, or train"
                " the members in runs of their own."
            )
        for name, parameter in module.named_parameters():
            if has_gradient_hooks(parameter):
                raise ConfigurationError(
                    f"The parameter {name!r} has a hook, which would see the gradient of the first member alone."
                    " Remove it, or train the members in runs of their own."
                )

    def setup(self, module: nn.Module, precision: Precision) -> None:
        """Place the module, and construct the other members; see `Strategy.setup`."""
        self._scales_loss = precision.scaler is not None
        # 1. Before the module is placed: members are constructed from its values.
        states = self._initial_states(module)
        super().setup(module, precision)
        # 2. All members on the device.
        device = self.root_device
        members = StackedMembers(module, states, device)
        self._run = EnsembleRun(
            members,
            Together(members, allows_randomness=self.mode == "together", autocast=precision.autocast),
            Choice(self.mode, device),
            MemberLogs(members.metrics(), device),
            Splitter(module),
        )

    def _initial_states(self, module: nn.Module) -> list[dict[str, Any]]:
        """Return the weights of all members but the first: of a checkpoint, of the run before, or new ones."""
        # 1. Those of a checkpoint, or of the run before with the same module.
        seeds = member_seeds(self.seeds, self.members)
        is_known = self._module_of_members is module
        states = self._loaded_states
        if states is None and is_known:
            states = self._states
        streams = None
        if is_known:
            streams = self._streams
        # 2. New ones.
        if states is None:
            new_members = construct_members(module, self.factory, seeds[1:])
            states = [member.state for member in new_members]
            streams = RandomStreams([member.random_state for member in new_members], seeds[1:])
        if streams is None:
            streams = RandomStreams.seeded(seeds[1:])
        # 3. The run, and those after it, belong to this module.
        self._forget()
        self._module_of_members = module
        self._streams = streams
        streams.begin_run()
        return states

    def teardown(self, error: BaseException | None = None) -> None:
        """Release the members' devices, and keep the members; see `Strategy.teardown`."""
        # The field is reset first, so that an error below leaves no state of the run behind.
        run = self._run
        self._run = None
        # What outlives the run: the module and the optimiser are those of the first member again.
        if run is not None:
            self._states = [_on_cpu(state) for state in run.members.states()[1:]]
            self._optimizer_states = run.other_optimizer_states()
            for optimizer in run.optimizers.values():
                optimizer.release()
            run.members.release()
        super().teardown(error)

    @property
    def _current_run(self) -> EnsembleRun:
        assert self._run is not None
        return self._run

    @property
    def recovery(self) -> RecoverySupport:
        """Support for steps that are repeated: none."""
        return _NoRecovery()

    # Members.

    def member_modules(self) -> list[nn.Module]:
        """Return each member as a module of its own, on the CPU, with memory of its own.

        Raises:
            ConfigurationError: If there was no run.
        """
        module = self._module_of_members
        if module is None:
            raise ConfigurationError("There are no members yet: they are constructed in a run.")
        states = self._other_states()
        modules = [copy.deepcopy(module).cpu() for _ in range(self.members)]
        for member, state in zip(modules[1:], states or [], strict=True):
            member.load_state_dict(state)
        return modules

    def _other_states(self) -> list[dict[str, Any]] | None:
        """Return the weights of all members but the first, during a run and after it."""
        if self._run is not None:
            return self._run.members.states()[1:]
        return self._states

    # Data.

    def shard(self, loader: Any, stage: str) -> Shard:
        """Return a loader with a batch for each member; see `Strategy.shard`."""
        streams = self._streams
        assert streams is not None
        is_training = stage == "train"
        own_order = self.own_order
        return Shard(with_member_order(loader, streams, self.members, own_order=own_order, is_training=is_training))

    def batch_to_devices(self, batch: Any, transfer: Transfer) -> Sequence[Any]:
        """Copy the batch of each member to the device; see `Strategy.batch_to_devices`."""
        device = self.devices[0]
        if type(batch) is MembersBatch:
            return MemberParts.of([transfer(part, device) for part in batch])
        first = batch_of(batch, 0)
        # All members share it.
        if first is batch:
            return (transfer(batch, device),)
        # A loader among several may be shared by all members, whose steps may change its batches.
        others = [map_leaves(copied, batch_of(batch, member)) for member in range(1, self.members)]
        return MemberParts.of([transfer(part, device) for part in (first, *others)])

    # Computation.

    def forward_backward(self, step: TrainingStep, parts: Sequence[Any], last: bool) -> StepResult:
        """Compute the gradients of all members; see `Strategy.forward_backward`."""
        run = self._current_run
        assert self._streams is not None
        self._streams.begin_training()
        result = run.choice.run(partial(self._train, step, self._batches(parts)))
        run.is_window_open = not last
        return result

    def _batches(self, parts: Sequence[Any]) -> list[Any]:
        if isinstance(parts, MemberParts):
            return parts.members
        return [parts[0]] * self.members

    def _train(self, step: TrainingStep, batches: list[Any]) -> StepResult:
        """Run the step of each member, and one backward for all of them."""
        run = self._current_run
        members = run.members
        # 1. The forwards.
        run.load_gradients()
        results = self._run_members(step, batches)
        run.logs.log(step, results, by_member=False)
        joined = run.weights.join(results)

        # 2. The backward. A window begins without gradients, of which the trainer knows the first member's alone.
        if step.begins_window:
            members.clear_gradients()
        else:
            members.begin_backward()
        run.computed = []
        if run.together.has_batched:
            run.computed = [index for index, result in enumerate(results) if result.loss is not None]
        step.backward(StepResult(joined.loss, joined.weight, None))
        if joined.loss is None:
            members.show_gradients()

        # 3. Hooks see the mean loss, and what the first member returned.
        return StepResult(joined.mean, joined.weight, results[0].outputs)

    def evaluate(self, step: EvaluationStep, parts: Sequence[Any]) -> Any:
        """Run the evaluation step of each member, and return the mean of their outputs; see `Strategy.evaluate`."""
        run = self._current_run
        run.members.refresh()
        with step.hook_scope():
            results = self._one_by_one(step, self._batches(parts))
        run.logs.log(step, results, by_member=True)
        return averaged([result.outputs for result in results])

    def _run_members(self, step: TrainingStep, batches: list[Any]) -> list[StepResult]:
        """Run the training step of each member in the present way."""
        run = self._current_run
        run.members.refresh()
        run.together.has_batched = False
        with step.hook_scope():
            if run.choice.together:
                size = run.splitter.size(batches[0]) or 1
                results = run.together.run(step, batches, size, partial(self._one_by_one, step, batches))
                if not run.choice.is_made and run.together.reason:
                    run.choice.settle(together=False, reason=run.together.reason)
                return results
            if run.choice.watches_draws:
                return self._watched(step, batches, run.choice)
            return self._one_by_one(step, batches)

    def _one_by_one(self, step: TrainingStep | EvaluationStep, batches: Sequence[Any]) -> list[StepResult]:
        """Run the step of each member after the other, with its random numbers."""
        run = self._current_run
        streams = self._streams
        assert streams is not None
        run.members.refresh_copies()
        if batches[1] is batches[0]:
            # A step may change its batch.
            batches = [batches[0], *(map_leaves(copied, batch) for batch in batches[1:])]
        results = []
        for member, (module, batch) in enumerate(zip(run.members.modules, batches, strict=True)):
            size = run.splitter.size(batch) or 1
            results.append(streams.run(member, partial(step.run_on, module, batch, size)))
        return results

    def _watched(self, step: TrainingStep, batches: list[Any], choice: Choice) -> list[StepResult]:
        """Run them one by one. A step that draws random numbers is not computed together by choice."""
        streams = self._streams
        assert streams is not None
        global_state = random_state.capture()
        states = streams.get_state()
        results = self._one_by_one(step, batches)
        if not global_state.equals(random_state.capture()) or not torch.equal(states, streams.get_state()):
            choice.settle(together=False, reason="the step draws random numbers, which would be others")
        return results

    def collect_gradients(self) -> None:
        """Add the members' gradients to the stacked ones; see `Strategy.collect_gradients`."""
        if self._run is not None:
            self._run.members.collect_gradients(self._run.computed)

    def finish_gradients(self, window: AccumulationWindow, optimizer: Optimizer) -> bool | None:
        """Turn the gradients of each member into its weighted mean; see `Strategy.finish_gradients`."""
        run = self._current_run
        # 1. What all members have in common: a window that is not full.
        factor = window.correction()
        if factor is not None:
            run.members.scale_gradients(factor)
        # 2. Members whose weights differ.
        factors: Tensor | None = run.weights.correction()
        if factors is not None:
            run.members.scale_gradients(factors)
        return None

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        """Clip the gradients of each member by themselves; see `Strategy.clip_gradients`."""
        parameters = self._current_run.optimizer_of(optimizer).parameters()
        if algorithm == "value":
            clip_by_value(parameters, value)
        elif algorithm == "norm":
            clip_by_norm(parameters, value)
        else:
            raise ConfigurationError(f"Gradients are clipped by 'norm' or by 'value', not by {algorithm!r}.")

    def setup_optimizer(self, optimizer: Optimizer) -> StrategyOptimizer:
        """Return an optimiser as it is stepped for all members; see `Strategy.setup_optimizer`."""
        if self._scales_loss:
            raise ConfigurationError(
                "strategy='ensemble' cannot scale the loss (16-mixed): an overflow in one member would skip the step of"
                " all. Choose precision='bf16-mixed', or train the members in runs of their own."
            )
        return self._current_run.optimizer_of(optimizer)

    # State.

    @property
    def portable(self) -> PortableState:
        """Full states: the first member's, and those of the others beside; see `Strategy.portable`."""
        return MemberStates(
            self.members,
            self._run,
            self._other_states,
            self._keep_loaded,
            self._own_state,
            self._load_own_state,
        )

    def _keep_loaded(self, states: list[dict[str, Any]]) -> None:
        self._loaded_states = states

    def _own_state(self) -> dict[str, Any]:
        """Return what the members but the first need to continue: random numbers, optimisers, open windows."""
        if self._run is None:
            state: dict[str, Any] = {"optimizers": self._optimizer_states}
        else:
            state = self._run.state()
        if self._streams is not None:
            state["streams"] = self._streams.get_state()
        return state

    def _load_own_state(self, state: dict[str, Any]) -> None:
        """Restore a saved state; its optimisers and gradients are used when the run comes to them."""
        if self._run is not None:
            self._run.load(state)
        if self._streams is not None and "streams" in state:
            self._streams.set_state(state["streams"])


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state whose tensors are on the CPU."""
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
