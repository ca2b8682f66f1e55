"""Questions that a forward asks about its tensors while it is recorded, and the conditions that follow.

A forward may decide by what it asks. So a recorded forward serves for other calls only while the answers are the same.
"""

from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from equipoise.extensions.pipeline.forward.packed_sequences import padding_frame
from equipoise.extensions.pipeline.forward.user_lines import is_assertion
from equipoise.extensions.pipeline.graph.conditions import same_answer, same_shapes, same_trainable
from equipoise.extensions.pipeline.graph.traced import FOLLOWS, Condition
from equipoise.extensions.pipeline.recording.arguments import Arguments
from equipoise.extensions.pipeline.recording.targets import call_of, check_size, holds
from equipoise.extensions.pipeline.recording.tensor_nodes import Facts, Obstacle, Sizes, TensorNodes, combined
from equipoise.tree import tensors_in

__all__ = ["Question", "Questions"]

# Functions and attributes by their names. The answers depend on the sizes of a tensor.
_SHAPE = {"__len__", "dim", "is_contiguous", "is_same_size", "nbytes", "ndim", "ndimension", "nelement", "numel"}
_SHAPE |= {"shape", "size", "storage_offset", "stride"}
# The answers depend on the kind of a tensor, which is the same in all calls of one structure.
_KIND = {"_is_view", "dense_dim", "device", "dtype", "element_size", "get_device", "has_names", "is_complex", "is_conj"}
_KIND |= {"is_cpu", "is_cuda", "is_floating_point", "is_inference", "is_meta", "is_mps", "is_neg", "is_nested"}
_KIND |= {"is_quantized", "is_signed", "is_sparse", "is_sparse_csr", "is_xla", "is_xpu", "itemsize", "layout", "names"}
_KIND |= {"promote_types", "result_type", "sparse_dim", "type"}
# The answers depend on the parameters that require gradients.
_TRAINABLE = {"is_leaf", "requires_grad", "retains_grad"}
# The answers are others in every call.
_IDENTITY = {"_version", "data_ptr"}
# The answers decide nothing.
_NOTHING = {"__dir__", "__hash__", "is_storage", "is_tensor"}

# Other answers, such as sums, are other ones in nearly every call.
_COMPARABLE = (bool, int, str, type(None), torch.Size)


class Question(NamedTuple):
    """A call of a function of torch that returns no tensor.

    Attributes:
        function: The function.
        name: Its name.
        args, kwargs: Its arguments.
        result: The answer.
    """

    function: Any
    name: str
    args: Any
    kwargs: Any
    result: Any

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the question is about."""
        return list(tensors_in((self.args, self.kwargs)))


class Questions:
    """Collect the conditions under which a recorded forward serves for other calls.

    Args:
        graph: The graph of the recorded forward.
        root: Its root.
        tensors: The calls that compute tensors.
        arguments: Turns arguments of a question into those of a call.
        inputs: The network's tensors.
    """

    def __init__(
        self,
        graph: fx.Graph,
        root: nn.Module,
        tensors: TensorNodes,
        arguments: Arguments,
        inputs: Sequence[Tensor],
    ) -> None:
        self._root = root
        self._tensors = tensors
        self._arguments = arguments
        # The forward may change shapes in place. Not all tensors have one: nested ones have none.
        self._inputs = [tensor.detach() for tensor in inputs]
        self._graph = graph
        # Indices of tensors whose shapes were asked for, and other conditions.
        self._shapes_asked: set[int] = set()
        self._conditions: list[Condition] = []

    def conditions(self) -> list[Condition]:
        """Return the conditions."""
        if not self._shapes_asked:
            return self._conditions
        # One condition serves for all shapes. It comes first, since it computes nothing.
        shapes = {}
        for index in sorted(self._shapes_asked):
            shapes[index] = self._inputs[index].shape
        return [same_shapes(shapes), *self._conditions]

    def note(self, question: Question, frame: FrameType | None) -> None:
        """Note a question.

        Args:
            question: The question.
            frame: The present frame.

        Raises:
            Obstacle: If the answer may be another one in the next call, and only that call could tell.
        """
        # 1. Some questions decide nothing, or have the same answer in all calls.
        name = question.name
        tensors = question.tensors
        if not tensors or name in _NOTHING or name in _KIND:
            return

        # 2. Others decide something that is compared before the next call.
        if name in _TRAINABLE:
            self._conditions.append(same_trainable(list(self._root.parameters())))
            return
        if name == "size" and padding_frame(frame) is not None:
            # The recorded call asks for the length again.
            return
        facts = self._facts_of(tensors)
        if name in _SHAPE and facts.sizes is not Sizes.DYNAMIC:
            self._note_sizes(facts, tensors)
            return

        # 3. The rest asks for values.
        if name == "__bool__" and _is_asserted(frame):
            # An assertion decides nothing else, so it is checked when the forward runs.
            self._graph.call_function(holds, (self._tensors.node_of(tensors[0]),))
            return
        self._note_value(question, facts)

    def _facts_of(self, tensors: Iterable[Tensor]) -> Facts:
        """Return the facts about tensors together.

        Raises:
            Obstacle: If a tensor was computed where it cannot be followed.
        """
        facts = []
        for tensor in tensors:
            node = self._tensors.find_node(tensor)
            if node is None:
                self._tensors.check_origin(tensor)
            facts.append(self._tensors.facts_of(node))
        return combined(facts)

    def note_length(self, arguments: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Note that a function has returned a number of tensors that follows from the sizes of its arguments.

        Args:
            arguments: The tensors that it has received.
            results: The tensors that it has returned.

        Raises:
            Obstacle: If the number depends on values.
        """
        facts = self._facts_of([*arguments, *results])
        if facts.sizes is Sizes.DYNAMIC:
            raise Obstacle("uses a function that returns a number of tensors which depends on values")
        self._note_sizes(facts, arguments)

    def _note_sizes(self, facts: Facts, tensors: Iterable[Tensor]) -> None:
        """Note that sizes of tensors decide, and check those which are only assumed to follow from the inputs."""
        self._shapes_asked |= facts.inputs
        for tensor in tensors:
            node = self._tensors.find_node(tensor)
            facts_of_tensor = self._tensors.facts_of(node)
            if node is None or facts_of_tensor.sizes is not Sizes.ASSUMED:
                continue
            checks = [user for user in node.users if user.target is check_size]
            if not checks:
                self._graph.call_function(check_size, (node, tuple(tensor.shape))).meta[FOLLOWS] = True

    def _note_value(self, question: Question, facts: Facts) -> None:
        """Note a question about values, which the tensors of the network's call must answer alone.

        Raises:
            Obstacle: If the answer follows from the network, or is another one in nearly every call.
        """
        is_comparable = isinstance(question.result, _COMPARABLE) and question.name not in _IDENTITY
        if not facts.is_pure or not is_comparable:
            raise Obstacle(f"asks for values of tensors, by `{question.name}`")
        # Without inputs the answer is always the same.
        if facts.inputs:
            # The condition holds calls alone. The question itself would keep its tensors alive.
            function, args = call_of(question.function, question.args)
            arguments = self._arguments.convert_call(args, question.kwargs)
            index = min(facts.inputs)
            self._conditions.append(same_answer(self._root, function, arguments, question.result, index))


def _is_asserted(frame: FrameType | None) -> bool:
    """Return True if an assertion of the user's asks, and nothing else."""
    # Skip the frames of torch and of this package.
    while frame is not None:
        is_of_library = frame.f_globals.get("__name__", "").startswith(("torch.", "equipoise."))
        if not is_of_library:
            return is_assertion(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return False
