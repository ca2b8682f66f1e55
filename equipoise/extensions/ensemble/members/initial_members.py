"""The first weights of an ensemble's members: each is constructed anew under a seed of its own.

The module that the user passes is the first member, as it is. The others are what the same program would have
constructed under their seeds, so each member is the model of a run of its own.
"""

import inspect
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.errors import ConfigurationError
from equipoise.interop.lightning.modules import hyperparameters_name
from equipoise.interop.torch.modules import STRUCTURE
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
# Attributes that members do not share, or that training does not use.
_NOT_SHARED = frozenset({*STRUCTURE, "_example_input_array"})
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
    attributes = []
    with random_state.isolated():
        for seed in seeds:
            member = _constructed(construct, seed)
            _check_member(module, member)
            state = {}
            for name, tensor in _tensors_of(member).items():
                state[name] = tensor.detach().clone()
            members.append(InitialMember(state, torch.get_rng_state()))
            attributes.append(_attributes_of(member))
        _check_attributes(construct, seeds, attributes)
    return members


def _constructed(construct: Factory, seed: int) -> Any:
    """Construct a member under a seed."""
    _seed_generators(seed)
    return construct()


def _seed_generators(seed: int) -> None:
    """Seed the program's generators on the CPU."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % _SEEDS)


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


def _attributes_of(member: nn.Module) -> dict[str, Leaf]:
    """Return numbers, tensors that are not registered, and generators, in attributes and hooks, by their places."""
    # A member may refer to the program's generators, which are none of its own.
    _seed_generators(0)
    kind = type(member).__name__
    parts = {}
    for name, part in member.named_modules():
        parts[f"{kind}.{name}".rstrip(".")] = Root(part, left_out=_NOT_SHARED)
    attributes = {}
    numbers_of_hooks: dict[Any, int] = {}
    for leaf in Leaves().of(parts):
        is_registered = "_buffers" in leaf.path
        # Tensors that each forward computes from parameters, as that of `nn.utils.weight_norm`.
        is_computed = isinstance(leaf.value, Tensor) and leaf.value.grad_fn is not None
        if leaf.kind not in ("values", "generators") or is_registered or is_computed or isinstance(leaf.value, str):
            continue
        # Each hook of a process has a key of its own; their order is the same in all members.
        path = list(leaf.path)
        for index, (previous, step) in enumerate(pairwise(leaf.path), start=1):
            if isinstance(step, list) and isinstance(previous, str) and "_hooks" in previous:
                path[index] = [numbers_of_hooks.setdefault(step[0], len(numbers_of_hooks))]
        attributes[text_of(path)] = leaf
    return attributes


def _check_attributes(construct: Factory, seeds: Sequence[int], attributes: Sequence[dict[str, Leaf]]) -> None:
    """Check that members have the same attributes beside parameters and buffers: in a run they share the module's.

    The module itself is not compared, since a program may have changed its attributes after the construction.

    Args:
        construct: Constructs a member.
        seeds: The seeds of the members.
        attributes: The attributes of each.

    Raises:
        ConfigurationError: If an attribute depends on the seed.
    """
    # 1. At least two members.
    first, *attributes_of_others = attributes
    if not attributes_of_others:
        attributes_of_others = [_attributes_of(_constructed(construct, (seeds[0] + 1) % _SEEDS))]
    places = set()
    for attributes_of_member in attributes_of_others:
        places |= _differing(first, attributes_of_member)
    # 2. The time, say, is another one under the same seed as well.
    if places:
        places -= _differing(first, _attributes_of(_constructed(construct, seeds[0])))
    if places:
        raise ConfigurationError(
            f"{min(places)} depends on the seed, but all members of an ensemble share that of the module. Make it the"
            " same under every seed, register it as a buffer if it is a tensor, or train the members in runs of their"
            " own."
        )


def _differing(expected: Mapping[str, Leaf], attributes: Mapping[str, Leaf]) -> set[str]:
    """Return the places at which two members have different attributes."""
    places = expected.keys() & attributes.keys()
    return {place for place in places if not _is_same(expected[place], attributes[place])}


def _is_same(one: Leaf, other: Leaf) -> bool:
    # A mark has the numbers of tensors in place of their elements.
    if not one.content.has_tensors or not other.content.has_tensors:
        return one.mark == other.mark
    try:
        tree, tensors = extract_tensors(one.value)
        other_tree, other_tensors = extract_tensors(other.value)
        # Only arrays of numpy.
        if not tensors:
            return one.mark == other.mark
        return repr(tree) == repr(other_tree) and not any(map(gap_of, tensors, other_tensors))
    except RuntimeError:
        # Some dtypes and layouts cannot be compared, and tensors on the meta device have no elements.
        return True


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
