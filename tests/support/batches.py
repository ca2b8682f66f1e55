"""Ready batches for the networks of `tests.support.networks.transparency`."""

from typing import Any

import torch

__all__ = ["CLASSES", "FEATURES", "SIZES", "TOKENS", "VOCABULARY", "Batches"]

FEATURES, CLASSES, TOKENS, VOCABULARY = 6, 4, 5, 11
SIZES = [11, 11, 7, 11, 3]  # of the batches; accumulated in twos, the last window is ragged


class Batches(list[Any]):
    """Ready batches; masks are uneven, and whole samples are masked."""

    def __init__(self, sizes: list[int], seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        super().__init__(self._batch(size, draw) for size in sizes)

    @staticmethod
    def _batch(size: int, draw: torch.Generator) -> dict[str, Any]:
        lengths = torch.randint(1, TOKENS + 1, (size, 1), generator=draw)
        return {
            "features": torch.randn(size, TOKENS, FEATURES, generator=draw),
            "label": torch.randint(CLASSES, (size,), generator=draw),
            "tokens": torch.randint(VOCABULARY, (size, TOKENS), generator=draw),
            "mask": torch.arange(TOKENS).expand(size, TOKENS) < lengths,
            "name": "shared by all parts",
            "temperature": torch.tensor(1.0),
        }
