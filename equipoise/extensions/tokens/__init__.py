"""Batches by tokens: a batch sampler with a budget of tokens, and packed sequences."""

from typing import TYPE_CHECKING

from equipoise.names.public import lazy_dir, lazy_getattr, names_of

if TYPE_CHECKING:
    from equipoise.extensions.tokens.packed_collate import PackedCollate as PackedCollate
    from equipoise.extensions.tokens.sampler import TokenBatchSampler as TokenBatchSampler
else:
    __getattr__ = lazy_getattr(__name__)
    __dir__ = lazy_dir(__name__)

__all__ = names_of(__name__)
