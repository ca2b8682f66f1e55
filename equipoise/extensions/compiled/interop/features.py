"""Steps and blocks that torch's compiler computes: the private names that they use."""

from equipoise.interop.adapters import DISPATCH_MODE, TENSOR_VERSION, Adapter, Feature

__all__ = ["CAPTURE", "COMPILE", "COMPILE_BLOCKS"]

_DYNAMO = "torch._dynamo"
_EAGER = "steps stay eager, and a warning gives the reason"
_WITH_BACKWARD = Adapter(
    "torch",
    (
        "torch.Tensor._backward_hooks",
        "torch.Tensor._post_accumulate_grad_hooks",
        "torch.nn.modules.module._has_any_global_hook",
        f"{_DYNAMO}.config.trace_autograd_ops",
        f"{_DYNAMO}.variables.builder.OptimizerVariable",
        f"{_DYNAMO}.variables.UserDefinedObjectVariable",
    ),
    _EAGER,
)
_COMPILER = Adapter(
    "torch",
    (
        f"{_DYNAMO}.config.skip_nnmodule_hook_guards",
        f"{_DYNAMO}.exc.TorchDynamoException",
        f"{_DYNAMO}.exc.FailOnRecompileLimitHit",
        f"{_DYNAMO}.lookup_backend",
        f"{_DYNAMO}.symbolic_convert.InstructionTranslator",
        f"{_DYNAMO}.eval_frame.cached_backends",
        "torch._C._dynamo.eval_frame.reset_code",
    ),
    _EAGER,
)
_REFERENCES = Adapter(
    "torch",
    (
        *TENSOR_VERSION.names,
        *DISPATCH_MODE.names,
        "torch._C._storage_Use_Count",
        "torch.Tensor._use_count",
    ),
    _EAGER,
)

COMPILE = Feature("compile", "Trainer(compile=True)", (_WITH_BACKWARD, _COMPILER))
COMPILE_BLOCKS = Feature(
    "compile blocks",
    "Trainer(compile=True) in parts or processes",
    (_COMPILER, Adapter("torch", ("torch._functorch.config.donated_buffer",), _EAGER)),
)
CAPTURE = Feature("capture", "Trainer(capture=True)", (_WITH_BACKWARD, _COMPILER, _REFERENCES))
