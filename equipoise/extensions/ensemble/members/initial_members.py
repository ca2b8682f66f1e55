"""The first weights of an ensemble's members: each is constructed anew under a seed of its own.

The module that the user passes is the first member, as it is. The others are what the same program would have
constructed under their seeds, so each member is the model of a run of its own.
"""

import inspect
import os
import random
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.modules import hyperparameters_name
from equipoise.parallel.equality import gap_of
from equipoise.parallel.snapshot import random_state
from equipoise.parallel.snapshot.plain.leaves import Leaf, Leaves
from equipoise.parallel.snapshot.plain.paths import Root
from equipoise.parallel.snapshot.plain.places import text_of
from equipoise.tree import extract_tensors
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
        ConfigurationError: If a member cannot be constructed, is not like the module, or has attributes that depend on
            its seed.
    """
    construct = factory
    if construct is None:
        construct = _constructor_of(module)
    members = []
    # What the module has beside its weights may have been set after its construction, so that members are compared with
    # one another: a further one is constructed if there is only one.
    attributes: list[Leaf] = []
    further_seeds = [(seeds[0] + 1) % _SEEDS] if len(seeds) == 1 else []
    with random_state.isolated():
        for seed in [*seeds, *further_seeds]:
            member = _constructed(construct, seed)
            _check_member(module, member)
            state = {}
            for name, tensor in _tensors_of(member).items():
                state[name] = tensor.detach().clone()
            members.append(InitialMember(state, torch.get_rng_state()))
            attributes_of_member = _attributes_of(member)
            attributes = attributes or attributes_of_member
            differing = _differing(attributes, attributes_of_member)
            if differing:
                # The time, say, is another one under the same seed, too.
                again = _attributes_of(_constructed(construct, seeds[0]))
                _check_differing(differing - _differing(attributes, again))
    return members[: len(seeds)]


def _constructed(construct: Factory, seed: int) -> Any:
    """Construct a member under a seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % _SEEDS)
    return construct()


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


def _attributes_of(member: nn.Module) -> list[Leaf]:
    """Return numbers, tensors that are not registered, and generators, in attributes and hooks of a member."""
    kind = type(member).__name__
    parts = {f"{kind}.{name}".rstrip("."): Root(part) for name, part in member.named_modules()}
    leaves = Leaves().of(parts)
    return [leaf for leaf in leaves if leaf.kind in ("values", "generators") and not isinstance(leaf.value, str)]


def _differing(expected: Sequence[Leaf], attributes: Sequence[Leaf]) -> set[str]:
    """Return the places at which two members have different attributes."""
    places = set()
    # In order: the hooks of each member have keys of their own.
    for one, other in zip(expected, attributes, strict=False):
        is_equal = one.mark == other.mark
        # A mark has the numbers of tensors in place of their elements.
        tree, tensors = extract_tensors(one.value)
        if tensors:
            other_tree, other_tensors = extract_tensors(other.value)
            is_equal = repr(tree) == repr(other_tree) and not any(map(_differ, tensors, other_tensors))
        if not is_equal:
            places.add(text_of(one.path))
    return places


def _differ(expected: Tensor, tensor: Tensor) -> bool:
    # Tensors on the meta device have no elements.
    return not expected.is_meta and bool(gap_of(expected, tensor))


def _check_differing(places: Collection[str]) -> None:
    """Check that no attribute depends on the seed.

    Raises:
        ConfigurationError: If one does: the members of a run share the module's.
    """
    if places:
        raise ConfigurationError(
            f"{min(places)} is another value under another seed, but all members of an ensemble have that of the"
            " module. Register it with `self.register_buffer`, make it the same under every seed, or train the members"
            " in runs of their own."
        )


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
