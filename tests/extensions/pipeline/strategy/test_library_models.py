"""A small twin of a library's language model, unedited, in stages: as on one device."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.batches import TOKENS, VOCABULARY
from tests.support.networks.transparency import Base
from tests.support.pipelines import assert_as_on_one_device, pipelined, processes

WIDTH = 8


class Output(OrderedDict):  # type: ignore[type-arg]
    """A mapping whose items are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor | None, cache: list[Tensor]) -> tuple[Tensor, Tensor]:
        size, length = hidden.shape[:-1]
        query = self.query(self.norm(hidden)).view(size, length, 2, -1).transpose(1, 2)
        cache.append(query)
        attended = nn.functional.scaled_dot_product_attention(query, query, query, mask, is_causal=mask is None)
        attended = attended.transpose(1, 2).reshape(size, length, -1)
        return hidden + attended, attended


class Twin(nn.Module):
    """Asks for sizes, dtypes, masks and values of its arguments; returns a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def mask_of(self, attention_mask: Tensor | None, length: int, dtype: torch.dtype) -> Tensor | None:
        if attention_mask is None or (attention_mask.ndim == 2 and bool(attention_mask.all())):
            return None
        least = torch.finfo(dtype).min
        future = torch.full((length, length), least, dtype=dtype, device=attention_mask.device).triu(1)
        hidden = torch.zeros_like(attention_mask, dtype=dtype).masked_fill(~attention_mask, least)
        return torch.maximum(future + hidden[:, None, None, :], torch.tensor(least, dtype=dtype))

    def forward(self, tokens: Tensor, attention_mask: Tensor | None, labels: Tensor) -> Output:
        length = tokens.shape[1]
        hidden = self.embedding(tokens) + self.positions(torch.arange(length, device=tokens.device))
        mask = self.mask_of(attention_mask, length, hidden.dtype)
        cache: list[Tensor] = []
        for layer in self.layers:
            hidden, *_ = layer(hidden, mask, cache=cache)
        output = Output(logits=self.head(hidden), cache=tuple(cache[-1:]))
        losses = nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), reduction="none")
        output["losses"] = losses.view(labels.shape)
        return output


class Language(Base):
    masks = True

    def __init__(self) -> None:
        super().__init__()
        self.net = Twin()

    def forward(self, tokens: Tensor, mask: Tensor) -> Any:
        return self.net(tokens, attention_mask=mask if self.masks else None, labels=tokens)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = batch["mask"].double()
        loss = (self(batch["tokens"], batch["mask"]).losses * weight).sum() / weight.sum().clamp(min=1)
        return {"loss": loss, "loss_weight": weight.sum()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch["tokens"], batch["mask"]).losses.mean())


class Unmasked(Language):
    masks = False


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "plan"), [(Language, pipelined(3, micro_batches=2)), (Unmasked, processes(2, micro_batches=2))]
)
def test_a_language_model_in_stages(make, plan):
    assert_as_on_one_device(make, plan, sizes=(8, 8, 5), val=(5,))
