"""Modules in shards: the private names that they use."""

from equipoise.interop.adapters import TENSOR_VERSION, Adapter, Feature

__all__ = ["FSDP"]

FSDP = Feature(
    "fsdp",
    "strategy='fsdp'",
    (
        Adapter(
            "torch",
            (
                "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
                "torch.distributed.fsdp.FSDPModule._orig_cls_mro_index",
                "torch.distributed._composable_state._module_state_mapping",
                "torch._C.DisableTorchFunctionSubclass",
                "torch._C._current_graph_task_id",
                "torch._C._will_engine_execute_node",
                "torch._guards.TracingContext",
            ),
        ),
        TENSOR_VERSION,
    ),
)
