"""Compile a function that runs a backward, with torch's compiler; private names of torch behind it.

Each name has a comment with the reason why no public one suffices. Without one of them, steps stay eager.

torch's compiler is imported with the first function that is compiled: it takes longer than all of torch.
"""

import inspect
import re
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import ConfigurationError
from equipoise.interop.adapters import Feature, missing_names
from equipoise.interop.versions import TESTED

__all__ = [
    "CompiledForward",
    "CompiledFunction",
    "CompilerError",
    "Lower",
    "NewVariant",
    "NotedInputs",
    "backends",
    "block_settings",
    "check_options",
    "why_not_compiled",
]

# The name of torch's own backend.
_INDUCTOR = "inductor"

# Options of that backend. Random numbers are drawn by torch's own operations, so they are those of the eager step.
_OPTIONS: Mapping[str, Any] = {"fallback_random": True}

# Settings while a function is traced. There is no public way to any of them.
_SETTINGS: Mapping[str, Any] = {
    # Trace the backward as a part of the function.
    "trace_autograd_ops": True,
    # Notice hooks that are added to a module later.
    "skip_nnmodule_hook_guards": False,
}

# Types of devices whose autocast a step may use.
_DEVICE_TYPES = ("cpu", "cuda")

# The compiler's name of the object whose method is traced.
_OWNER = "L['self']"

# The last line of the user's in a message of the compiler.
_USER_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in')

# Warnings of what the compiler does: it reads gradients, and instantiates functions of autograd.
_OF_COMPILER = ("The .grad attribute of a Tensor that is not a leaf", ".*should not be instantiated")

# A condition that no longer holds, in a message of the compiler: "- 0/1: module.scale == 1.0    # ...".
_CONDITION = re.compile(r"- \d+/\d+: (?P<condition>.+?)\s*(?:#.*)?$", re.MULTILINE)


class NewVariant(Exception):
    """The function would be compiled anew, which is not allowed at this time."""


class CompilerError(Exception):
    """The function cannot be compiled; the message gives the reason."""


def why_not_compiled(feature: Feature) -> str | None:
    """Return the reason why no training step can be compiled here; None if there is none.

    Args:
        feature: COMPILE, COMPILE_BLOCKS or CAPTURE.
    """
    missing = missing_names(feature, with_fallback=True)
    if not missing:
        return None
    oldest, newest = TESTED["torch"]
    return f"torch {torch.__version__} lacks {', '.join(missing)}; versions {oldest} to {newest} were tested"


class CompiledFunction:
    """A function that torch's compiler computes.

    A variant is compiled for each combination of conditions that the Python code of the function depends on, such as
    the shapes of its arguments and the attributes that it reads.

    Args:
        function: The function. It may run a backward, which writes gradients into parameters.
        own_attributes: Names of attributes that the function may change on the object whose method it is. It may change
            nothing else but tensors. Default: none.
        lower: Makes a function of a traced graph. Default: None, by the compiler's own backend.
        dynamic: Whether a number or size that changes becomes an input of the graph, so that one variant does for all.
            Default: True.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        own_attributes: Collection[str] = (),
        *,
        lower: "Lower | None" = None,
        dynamic: bool = True,
    ) -> None:
        self._own_lower = lower
        self._own_attributes = set(own_attributes)
        self._may_compile = False
        self._inputs = NotedInputs()
        copy = _with_own_code(function)
        self._code: CodeType = getattr(copy, "__func__", copy).__code__
        self._backend = self._compile
        # None: as soon as a number or size changes.
        is_dynamic = None if dynamic else False
        self._compiled = torch.compile(copy, fullgraph=True, backend=self._backend, dynamic=is_dynamic)

    def __call__(self, *args: Any) -> Any:
        """Call the function by a variant that exists.

        Raises:
            NewVariant: If no variant fits. Nothing was computed then.
        """
        modes = _Modes()
        try:
            return self._compiled(*args)
        except BaseException as error:
            modes.restore()
            # The compiler wraps what its backend raises, as `_compile` does where no variant fits.
            if _is_of_compiler(error):
                raise NewVariant from None
            raise

    def compile(self, *args: Any) -> Any:
        """Call the function, and compile a new variant if no other fits. `restore` undoes what the call has changed.

        Raises:
            CompilerError: If the compiler cannot compile the function, or its Python code changes an object.
        """
        self._inputs.begin()
        self._may_compile = True
        modes = _Modes()
        try:
            with _compiler_settings():
                return self._compiled(*args)
        except BaseException as error:
            modes.restore()
            if _is_of_compiler(error):
                raise CompilerError(_reason(error)) from error
            raise
        finally:
            self._may_compile = False
            self._inputs.end()

    def unmet_conditions(self, *args: Any) -> list[str]:
        """Return the conditions of the variants that do not hold for these arguments, as Python expressions."""
        try:
            with _compiler_settings(), torch.compiler.set_stance("fail_on_recompile"):
                self._compiled(*args)
        except Exception as error:
            return list(dict.fromkeys(match["condition"] for match in _CONDITION.finditer(str(error))))
        return []

    def obstacle(self) -> str | None:
        """Return None: nothing but conditions of the Python code prevents the use of a variant."""
        return None

    def leaves(self) -> list[Tensor]:
        """Return the tensors that have received a gradient in the last call of `compile`."""
        return self._inputs.leaves()

    def changed(self) -> list[Tensor]:
        """Return the tensors that the last call of `compile` has changed."""
        return self._inputs.changed()

    def restore(self) -> None:
        """Restore the tensors that the last call of `compile` has changed, and their gradients."""
        self._inputs.restore()

    def close(self) -> None:
        """Release the compiled variants, and the objects that their conditions refer to."""
        _release(self._code, self._backend)

    def _compile(self, graph: Any, inputs: Any) -> Any:
        """Compile a graph; the backend of torch's compiler."""
        if not self._may_compile:
            raise NewVariant
        change = _first_change(self._own_attributes)
        if change is not None:
            raise CompilerError(f"its Python code changes {change}; a hook such as on_train_batch_end can do that")
        # The compiler keeps the function below, so it must not refer to the user's objects.
        noted = self._inputs
        if self._own_lower is None:
            lowered = _lower(graph, inputs)
        else:
            lowered = self._own_lower(graph, noted)

        def run(*args: Any) -> Any:
            if noted.are_due:
                noted.note(args)
            return lowered(*args)

        return run


class CompiledForward:
    """The forward of modules of one kind, compiled together with its backward, which autograd runs as usual.

    Other lengths or attributes are compiled anew, up to the compiler's limit, as with `torch.compile`.

    Args:
        function: The forward, a function of a module and its arguments.
        backend: The name of the backend. Default: torch's own.
        dynamic: Whether sizes are inputs of the program from the start. Default: None, once they change.
        options: Settings of the default backend. Default: none.

    Attributes:
        programs: Number of graphs that were compiled.
        is_tried: True while calls may be undone. Until then code that changes other objects than its module, and their
            public lists and the like, is not compiled.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        backend: str = _INDUCTOR,
        dynamic: bool | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.programs = 0
        self.is_tried = True
        self._backend_name = backend
        self._options = dict(options or {})
        copy: Any = _with_own_code(function, innermost=False)
        self._code: CodeType = copy.__code__
        self._backend = self._compile
        self._compiled: Callable[..., Any] = torch.compile(copy, backend=self._backend, dynamic=dynamic)
        self._thread = _ThreadSettings()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the forward, compiled where no program fits.

        Raises:
            CompilerError: If it cannot be compiled.
        """
        self._thread.enter()
        try:
            return self._compiled(*args, **kwargs)
        except Exception as error:
            if _is_of_compiler(error):
                raise CompilerError(_reason(error)) from error
            raise

    def close(self) -> None:
        """Release the programs, and the objects that their conditions refer to."""
        _release(self._code, self._backend)

    def _compile(self, graph: Any, inputs: Any) -> Any:
        """Compile a graph; the backend of torch's compiler."""
        if self.is_tried:
            change = _change_elsewhere(self._code.co_varnames[0])
            if change is not None:
                raise CompilerError(f"its Python code changes {change}, which a comparison could not set back")
        self.programs += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _lower(graph, inputs, self._backend_name, self._options)


class _ThreadSettings(threading.local):
    """The settings of `block_settings` in each thread, which has settings of its own since torch 2.13."""

    def __init__(self) -> None:
        # At the first access in a thread.
        for config, name in _block_settings():
            setattr(config, name, False)

    def enter(self) -> None:
        """Set them for the calling thread, which the first access to this object does."""


def backends() -> list[str]:
    """Return the names of all backends of torch's compiler."""
    return list(torch.compiler.list_backends(exclude_tags=()))


def check_options(options: Mapping[str, Any]) -> None:
    """Check settings of the default backend.

    Raises:
        ConfigurationError: If there is no such setting, or its value has another type.
    """
    try:
        torch.compile(_same, options=dict(options))
    except (RuntimeError, AttributeError) as error:
        reason = str(error).partition(", known options")[0]
        raise ConfigurationError(f"compile: torch does not take these options. {reason}.") from error


def _same(value: Any) -> Any:
    return value


@contextmanager
def block_settings() -> Iterator[None]:
    """Set what programs of blocks need, which may be compiled at any call of a `with` block.

    They notice hooks that are added to a module later, and their backward may run twice (`retain_graph=True`). What the
    compiler itself does is no warning.
    """
    own_filters = []
    for message in _OF_COMPILER:
        warnings.filterwarnings("ignore", message=message)
        own_filters.append(warnings.filters[0])
    try:
        with ExitStack() as stack:
            for config, name in _block_settings():
                stack.enter_context(config.patch({name: False}))
            yield
    finally:
        # The user may have changed the others.
        for own_filter in own_filters:
            if own_filter in warnings.filters:
                warnings.filters.remove(own_filter)  # type: ignore[attr-defined]


def _block_settings() -> list[tuple[Any, str]]:
    """Return the settings that programs of blocks need off: the object of each, and its name."""
    import torch._functorch.config

    return [(_config(), "skip_nnmodule_hook_guards"), (torch._functorch.config, "donated_buffer")]


def _release(code: CodeType, own_backend: Callable[..., Any]) -> None:
    """Release what the compiler keeps of a function for good, in places that Python's collector does not see."""
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo.eval_frame import cached_backends

    reset_code(code)
    for key, backend in list(cached_backends.items()):
        # It stands there within a wrapper.
        if getattr(backend, "compiler_fn", backend) == own_backend:
            del cached_backends[key]


class NotedInputs:
    """The tensors that a graph receives when it is tried, and copies of them.

    Attributes:
        are_due: True in a call of `CompiledFunction.compile`, whose inputs are noted.
    """

    def __init__(self) -> None:
        self.are_due = False
        self._copies: list[tuple[Tensor, Tensor]] = []
        # Inputs that need a gradient, and the gradient that they have.
        self._gradients: list[tuple[Tensor, Tensor | None]] = []

    def begin(self) -> None:
        """Note the inputs of the next call."""
        self.are_due = True
        self._copies = []
        self._gradients = []

    def end(self) -> None:
        """Note no inputs of later calls."""
        self.are_due = False

    def note(self, inputs: Sequence[Any]) -> None:
        """Note the inputs of a call.

        Args:
            inputs: The inputs, some of which are tensors.
        """
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        self._copies = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._gradients = [(tensor, tensor.grad) for tensor in tensors if tensor.requires_grad and tensor.is_leaf]

    def leaves(self) -> list[Tensor]:
        """Return the inputs that receive a gradient."""
        return [tensor for tensor, _ in self._gradients]

    def changed(self) -> list[Tensor]:
        """Return the inputs that have changed."""
        return [tensor for tensor, _ in self._changed()]

    def rewind(self) -> None:
        """Restore the values of the inputs. Nothing is allocated for those that have changed."""
        with torch.no_grad():
            for tensor, before in self._changed():
                tensor.copy_(before)

    def restore(self) -> None:
        """Restore the values and gradients of the inputs, and forget the copies."""
        self.rewind()
        for tensor, gradient in self._gradients:
            tensor.grad = gradient
        self._copies = []
        self._gradients = []

    def _changed(self) -> list[tuple[Tensor, Tensor]]:
        return [(tensor, before) for tensor, before in self._copies if not torch.equal(tensor, before)]


# Makes a function of a traced graph, which receives the graph's inputs. In a trial they are noted.
Lower = Callable[[Any, NotedInputs], Callable[..., Any]]


def _first_change(own_attributes: set[str]) -> str | None:
    """Return the name of the first object that the traced code changes; None if it changes none.

    The compiler would change it after each call, also after one whose effects are not wanted. Own attributes may change
    on the object whose method is traced.
    """
    for name, attributes, _ in _changes():
        is_own = name == _OWNER and attributes <= own_attributes
        is_gradient = attributes == {"grad"}
        if attributes and (is_own or is_gradient):
            continue
        return _title(name, attributes)
    return None


def _change_elsewhere(owner: str) -> str | None:
    """Return the name of the first object outside of a module that the traced code changes; None if there is none.

    Inside are the attributes of the module, which is the argument `owner` of the traced function, and its submodules,
    and the containers in their public attributes.
    """
    own_container = re.compile(rf"L\['{owner}'\].*\.(?!_)\w+")
    for name, attributes, value in _changes():
        if attributes:
            is_inside = isinstance(value, nn.Module)
        else:
            is_inside = own_container.fullmatch(name) is not None
        if not is_inside:
            return _title(name, attributes)
    return None


def _title(name: str, attributes: set[str]) -> str:
    """Return the name of an object, with its first changed attribute if there is one."""
    return f"{name}.{min(attributes)}" if attributes else name


def _changes() -> Iterator[tuple[str, set[str], Any]]:
    """Yield the objects that the traced code changes: the name of each, the names of its attributes, and its value.

    A container whose elements change has no names and no value.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    effects = InstructionTranslator.current_tx().output.side_effects
    for variable in effects.id_to_variable.values():
        # Objects that the code creates have no source.
        if variable.source is None or not effects.is_modified(variable):
            continue
        attributes = set(effects.store_attr_mutations.get(variable, ()))
        # A list of tensors has no value while it is traced.
        value = getattr(variable, "value", None) if attributes else None
        yield variable.source.name, attributes, value


def _lower(graph: Any, inputs: Any, backend: str = _INDUCTOR, options: Mapping[str, Any] | None = None) -> Any:
    """Return the function that computes a graph; public ways to the backend take no function before it."""
    from torch._dynamo import lookup_backend

    compile_graph: Callable[..., Any] = lookup_backend(backend)
    if backend != _INDUCTOR:
        return compile_graph(graph, inputs)
    return compile_graph(graph, inputs, config_patches={**_OPTIONS, **(options or {})})


def _with_own_code(function: Callable[..., Any], *, innermost: bool = True) -> Callable[..., Any]:
    """Return a copy of a function or method whose code is an object of its own.

    The compiler keeps the variants with the code: they would count for all functions with this code. The innermost one
    is without decorators.
    """
    owner = getattr(function, "__self__", None)
    original: Any = getattr(function, "__func__", function)
    if innermost:
        original = inspect.unwrap(original)
    copy = FunctionType(
        original.__code__.replace(),
        original.__globals__,
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy if owner is None else MethodType(copy, owner)


@contextmanager
def _compiler_settings() -> Iterator[None]:
    """Set what a function with a backward needs while it is traced, and hide the compiler's own warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _config().patch(_SETTINGS), _optimizers_as_objects():
            yield


@contextmanager
def _optimizers_as_objects() -> Iterator[None]:
    """Let the compiler read an optimiser as any other object.

    A function that reads `optimizer.param_groups`, to log a learning rate for one, would otherwise change the user's
    optimiser (`capturable=True`), and its parameters would be constants of the graph that have no gradients. No setting
    turns that off.
    """
    from torch._dynamo.variables import UserDefinedObjectVariable, builder

    # The name is imported there, and not exported.
    names: Any = builder
    special = names.OptimizerVariable
    names.OptimizerVariable = UserDefinedObjectVariable
    try:
        yield
    finally:
        names.OptimizerVariable = special


class _Modes:
    """The modes of autograd and autocast at one moment. A traced graph sets them by calls of its own.

    So an error in the midst of a graph would leave them as they are there.
    """

    def __init__(self) -> None:
        self._is_grad_enabled = torch.is_grad_enabled()
        self._depth = _autocast_depth()
        self._keeps_casts = torch.is_autocast_cache_enabled()
        self._autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICE_TYPES]

    def restore(self) -> None:
        """Restore the modes."""
        torch.set_grad_enabled(self._is_grad_enabled)
        left = _autocast_depth() - self._depth
        for _ in range(left):
            torch.autocast_decrement_nesting()
        # The outermost context would do this at its end: casts of parameters are of no use to the next step.
        if left and not self._depth:
            torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(self._keeps_casts)
        for kind, (is_enabled, dtype) in zip(_DEVICE_TYPES, self._autocast, strict=True):
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)


def _autocast_depth() -> int:
    """Return the number of nested contexts of autocast; nothing public returns it."""
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _config() -> Any:
    """Return the settings of the compiler."""
    import torch._dynamo.config

    return torch._dynamo.config


def _is_of_compiler(error: BaseException) -> bool:
    """Return True if the compiler raised an error, and not the computation."""
    from torch._dynamo import exc

    return isinstance(error, exc.TorchDynamoException | exc.FailOnRecompileLimitHit)


def _reason(error: BaseException) -> str:
    """Return the reason that the compiler gives, in one sentence, with the user's line."""
    # 1. The backend's own error, such as a missing compiler of C++.
    message = str(getattr(error, "inner_exception", None) or error)
    first_line = message.strip().partition("\n")[0].strip() or type(error).__name__
    reason = first_line.rstrip(".")

    # 2. The line of the user's code.
    _, _, trace = str(error).partition("from user code:")
    lines = list(_USER_LINE.finditer(trace))
    if lines:
        last = lines[-1]
        reason += f" ({last['file']}, line {last['line']})"
    return reason
