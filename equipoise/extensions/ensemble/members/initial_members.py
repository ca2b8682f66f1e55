"""The first weights of an ensemble's members: each is constructed anew under a seed of its own.

The module that the user passes is the first member, as it is. The others are what the same program would have
constructed under their seeds, so each member is the model of a run of its own.
"""

import inspect
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.modules import hyperparameters_name
from equipoise.parallel.snapshot import random_state
from equipoise.validation import is_whole

__all__ = ["Factory", "InitialMember", "check_seeds", "construct_members", "member_seeds"]

# Constructs a member; called with the random generators seeded.
Factory = Callable[[], nn.Module]

_REMEDY = (
    "Give EnsembleStrategy(factory=...), a function without arguments that returns a new module, or call"
    " `self.save_hyperparameters()` in `__init__`."
)
# Names of tensors that an error lists.
_MOST_NAMES = 6
# Seeds of numpy have 32 bits.
_SEEDS = 2**32


class InitialMember(NamedTuple):
    """A member before its training.

    Attributes:
        state: Its parameters and buffers, by name.
        random_state: The state of torch's generator after it was constructed, with which its run continues.
    """

    state: dict[str, Tensor]
    random_state: Tensor


def check_seeds(seeds: Any, members: int) -> None:
    """Check the seeds that the user gave.

    Raises:
        ConfigurationError: If they are not one number for each member, all of them different.
    """
    if seeds is None:
        return
    is_list = isinstance(seeds, Sequence) and not isinstance(seeds, str)
    are_numbers = False
    if is_list:
        are_numbers = all(is_whole(seed, least=0) for seed in seeds)
    if are_numbers and len(seeds) == len(set(seeds)) == members:
        return
    raise ConfigurationError(
        f"seeds must be {members} different numbers from 0, one for each member, not {seeds!r}. Leave them out to"
        " count on from the seed of the program."
    )


def member_seeds(seeds: Sequence[int] | None, members: int) -> list[int]:
    """Return the seed of each member: those given, else the program's seed and the numbers after it.

    Args:
        seeds: The seeds that the user gave; None if there are none.
        members: The number of members.
    """
    if seeds is not None:
        return list(seeds)
    # `seed_everything` sets this variable.
    seed_of_program = os.environ.get("PL_GLOBAL_SEED")
    if seed_of_program:
        first = int(seed_of_program)
    else:
        first = torch.initial_seed()
    return [(first + index) % _SEEDS for index in range(members)]


def construct_members(module: nn.Module, factory: Factory | None, seeds: Sequence[int]) -> list[InitialMember]:
    """Construct all members but the first, which is the module.

    Args:
        module: The user's module.
        factory: The user's function that constructs a member; None: the class and its saved hyperparameters.
        seeds: The seeds of these members.

    Raises:
        ConfigurationError: If a member cannot be constructed, or is not like the module.
    """
    construct = factory
    if construct is None:
        construct = _constructor_of(module)
    members = []
    with random_state.isolated():
        for seed in seeds:
            torch.manual_seed(seed)
            random.seed(seed)
            numpy = sys.modules.get("numpy")
            if numpy is not None:
                numpy.random.seed(seed % _SEEDS)
            member = construct()
            _check_member(module, member)
            state = {}
            for name, tensor in _tensors_of(member).items():
                state[name] = tensor.detach().clone()
            members.append(InitialMember(state, torch.get_rng_state()))
    return members


def _constructor_of(module: nn.Module) -> Factory:
    """Return a function that constructs the class of a module with the hyperparameters that it saved."""
    kind = type(module)
    hyperparameters: Any = getattr(module, "hparams", {})
    name = hyperparameters_name(module) if hyperparameters else None  # type: ignore[arg-type]
    arguments: Mapping[str, Any] = hyperparameters
    # A constructor that takes all hyperparameters as one argument.
    if name is not None and name != "kwargs":
        arguments = {name: hyperparameters}

    # Only those that the constructor takes, unless it takes any.
    parameters = inspect.signature(kind).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    saved = {key: value for key, value in arguments.items() if takes_any or key in parameters}
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = []
    for key, parameter in parameters.items():
        is_required = parameter.default is parameter.empty and parameter.kind not in fixed
        if is_required and key not in saved:
            missing.append(key)
    if missing:
        raise ConfigurationError(
            f"The members of an ensemble are constructed anew, but {kind.__name__} needs {', '.join(missing)}, which"
            f" it has not saved. {_REMEDY}"
        )
    return lambda: kind(**saved)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    tensors.update(module.named_buffers())
    return tensors


def _check_member(module: nn.Module, member: Any) -> None:
    """Check that a member has the parameters and buffers of the module, with other values.

    Raises:
        ConfigurationError: If it has not.
    """
    kind = type(module).__name__
    if not isinstance(member, nn.Module):
        raise ConfigurationError(f"factory must return a new {kind}, not {member!r}.")
    # 1. The same names and shapes.
    expected = _tensors_of(module)
    tensors = _tensors_of(member)
    differing = sorted(expected.keys() ^ tensors.keys())
    for name in expected.keys() & tensors.keys():
        shape = tensors[name].shape
        if shape != expected[name].shape:
            differing.append(name)
    if differing:
        text = ", ".join(differing[:_MOST_NAMES])
        raise ConfigurationError(
            f"A new {kind} differs from the module that is trained, in {text}: was the module"
            " changed after it was constructed? Give EnsembleStrategy(factory=...) a function that does the same."
        )
    # 2. Memory of its own: a module that was an argument of the constructor would be the same in all members.
    identities = set(map(id, expected.values()))
    shared = []
    for name, tensor in tensors.items():
        if id(tensor) in identities:
            shared.append(name)
    if shared:
        text = ", ".join(shared[:_MOST_NAMES])
        raise ConfigurationError(
            f"A new {kind} shares {text} with the module: a network that is an argument is not"
            " constructed anew. Give EnsembleStrategy(factory=...) a function that constructs it, too."
        )
    # 3. Other values.
    are_equal = []
    for name, parameter in module.named_parameters():
        are_equal.append(torch.equal(tensors[name].to(parameter), parameter))
    if are_equal and all(are_equal):
        raise ConfigurationError(
            f"A new {kind} under another seed has the same parameters as the module, so the members would be equal."
            " Give EnsembleStrategy(factory=...) a function whose parameters are random."
        )
