"""The precisions that Lightning has too, on the CPU."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam

from .. import data
from ..harness import Case, column, parity
from ..modules import Classifier, with_optimizers


class Reports(Classifier):
    """Logs the types it computes in, and makes a tensor under the run's default type."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.log("input_bits", float(torch.finfo(batch[0].dtype).bits))
        self.log("logit_bits", float(torch.finfo(logits.dtype).bits))
        self.log("weight_bits", float(torch.finfo(self.net[0].weight.dtype).bits))
        self.log("made_bits", float(torch.finfo(torch.ones(1).dtype).bits))
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch[0])


def adam(module: Any) -> Adam:
    return Adam(module.parameters(), 0.01)


def plain_sgd(module: Any) -> SGD:
    return SGD(module.parameters(), 0.1)


def fit_and_evaluate(trainer: Any, module: Any, given: Any) -> Any:
    trainer.fit(module, **given)
    return [
        trainer.test(module, given["val_dataloaders"], verbose=False),
        trainer.predict(module, given["val_dataloaders"]),
    ]


PRECISIONS = {
    "32-true": (32, 32, 32),
    "bf16-mixed": (32, 16, 32),
    "bf16-true": (16, 16, 16),
    "16-true": (16, 16, 16),
    "64-true": (64, 64, 64),
}


def proof(precision: str) -> Any:
    names = ("input_bits", "logit_bits", "weight_bits")
    return lambda r: tuple(column(r, name)[0] for name in names) == PRECISIONS[precision]


CASES = [
    *(
        Case(
            name=f"{precision}",
            module=Reports,
            options={"precision": precision},
            run=fit_and_evaluate,
            proves=proof(precision),
        )
        for precision in PRECISIONS
    ),
    *(
        Case(
            name=f"{precision}-all-at-once",
            module=with_optimizers(adam, Reports, dropout=0.2, batch_norm=True),
            data=data.shuffled,
            options={"precision": precision, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
            watch=False,
        )
        for precision in PRECISIONS
    ),
    *(
        Case(name=f"named-{name}", module=with_optimizers(plain_sgd, Reports), options={"precision": name}, watch=False)
        for name in (32, "64", "bf16")
    ),
]

test_parity = parity(CASES)
