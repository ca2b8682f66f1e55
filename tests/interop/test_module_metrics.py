"""Metrics are found by name wherever a module keeps them."""

from typing import Any

from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from equipoise.interop.module_metrics import named_metrics


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child: Any = nn.Module()
        self.own = MeanMetric()
        self.collection = MetricCollection({"sum": SumMetric()})


def names(module: nn.Module) -> list[str]:
    return list(named_metrics(module))


def test_names_of_metrics_in_plain_containers() -> None:
    module = Holder()
    module.child.by_stage = {"val": [MeanMetric(), (SumMetric(),)], 1: MetricCollection({"mean": MeanMetric()})}
    module._hidden = [SumMetric()]
    found = named_metrics(module)
    assert list(found)[2:] == [
        "_hidden.0",
        "child.by_stage.val.0",
        "child.by_stage.val.1.0",
        "child.by_stage.1.mean",
    ]
    assert found["child.by_stage.val.0"] is module.child.by_stage["val"][0]


def test_each_metric_has_one_name() -> None:
    module = Holder()
    module.child.again = [module.own, *module.collection.values(copy_state=False)]
    assert names(module) == ["own", "collection.sum"]
    shared = SumMetric()
    module.child.first, module.child.second = [shared], [shared]
    assert names(module)[2:] == ["child.first.0"]


def test_the_search_ends_in_circles_and_passes_over_data() -> None:
    module = Holder()
    circle: list[Any] = [module, SumMetric()]
    circle.append(circle)
    module.child.circle = circle
    module.child.data = [SumMetric()] * 1001
    assert names(module)[2:] == ["child.circle.1"]
