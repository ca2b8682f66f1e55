"""Plans: the private names that a trace of a step uses."""

from equipoise.interop.adapters import BACKWARD_NODES, DISPATCH_MODE, Adapter, Feature

__all__ = ["PLAN"]

_FAKE = "torch._subclasses.fake_tensor"

PLAN = Feature(
    "plan",
    "predict_memory",
    (
        DISPATCH_MODE,
        Adapter("torch", (f"{_FAKE}.FakeTensorMode", f"{_FAKE}.FakeTensor", f"{_FAKE}.unset_fake_temporarily")),
        Adapter(
            "torch",
            (f"{_FAKE}.DataDependentOutputException", f"{_FAKE}.DynamicOutputShapeException"),
            "steps that read values are not predicted",
        ),
        BACKWARD_NODES,
    ),
)
