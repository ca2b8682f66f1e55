"""What a process is set to beside its objects: environment, torch's modes, random generators; taken along to workers.

A worker is forked by a server that knows the program as it was when the server was started, and torch as it comes.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from equipoise.parallel import random_state
from equipoise.parallel.random_state import RandomState

__all__ = ["Surroundings"]

# Each of torch's modes: how it is read, and how it is set.
_MODES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "cudnn.benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
    ),
    "cudnn.deterministic": (
        lambda: torch.backends.cudnn.deterministic,
        lambda value: setattr(torch.backends.cudnn, "deterministic", value),
    ),
}


@dataclass(frozen=True)
class Surroundings:
    """Taken from the process that makes it.

    Attributes:
        environment: The variables.
        modes: Torch's modes.
        random: The random generators.
        folder: The working folder.
    """

    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    modes: dict[str, Any] = field(default_factory=lambda: {name: read() for name, (read, _) in _MODES.items()})
    random: RandomState = field(default_factory=random_state.capture)
    folder: str = field(default_factory=os.getcwd)

    def restore(self) -> None:
        """Makes them those of this process."""
        os.environ.clear()
        os.environ.update(self.environment)
        for name, value in self.modes.items():
            _MODES[name][1](value)
        self.random.restore()
        os.chdir(self.folder)
