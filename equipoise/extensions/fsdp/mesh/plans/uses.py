"""Uses of linear layers: which of them receive the outputs of which, with no other linear layer between."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import Node

__all__ = ["Group", "LayerUses"]


class Group(NamedTuple):
    """Layers whose outputs come to no other layers than these, and to no loss.

    Attributes:
        sources: Names of the layers that compute them: linear ones, and embeddings.
        sinks: Names of the linear layers that receive them, and the outputs of no other layers.
    """

    sources: list[str]
    sinks: list[str]


class LayerUses:
    """Notes the calls of linear layers and embeddings in a forward, and follows the graph of autograd between them.

    Args:
        module: The module, whose parameters all require gradients.

    Example:
        >>> module = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
        >>> uses = LayerUses(module)
        >>> loss = module(torch.ones(1, 2)).sum()
        >>> uses.groups(loss)
        [Group(sources=['0'], sinks=['2'])]
    """

    def __init__(self, module: nn.Module) -> None:
        # Of each call: the layer and where its input comes from.
        self._inputs: list[tuple[str, Node | None]] = []
        self._layers: dict[Node, str] = {}
        self._hooks = []
        for name, layer in module.named_modules():
            # Subclasses may compute something else.
            if type(layer) in (nn.Linear, nn.Embedding):
                hook = layer.register_forward_hook(self._noting(name), with_kwargs=True)
                self._hooks.append(hook)

    def _noting(self, name: str) -> Callable[..., None]:
        def note(layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            tensor = args[0] if args else kwargs["input"]
            if output.grad_fn is not None:
                self._layers[output.grad_fn] = name
                self._inputs.append((name, tensor.grad_fn))

        return note

    def groups(self, loss: Tensor) -> list[Group]:
        """Return the groups of layers, in the order of their first calls.

        Args:
            loss: What the forward has returned.
        """
        for hook in self._hooks:
            hook.remove()
        # 1. The layers that come to each layer.
        suppliers: dict[str, set[str]] = {}
        for name, node in self._inputs:
            suppliers.setdefault(name, set()).update(self._nearest(node))
        of_loss = self._nearest(loss.grad_fn)
        # What was called, and is used by nothing, ends nowhere.
        receivers: dict[str, set[str]] = defaultdict(set)
        for sink, sources in suppliers.items():
            for source in sources:
                receivers[source].add(sink)

        # 2. All that are connected, from each layer that supplies others.
        groups = []
        done: set[str] = set()
        for name in suppliers:
            if name in receivers and name not in done:
                sources, sinks = _connected(name, suppliers, receivers)
                done |= sources
                if sources.isdisjoint(sinks | of_loss):
                    groups.append(Group(_in_order(suppliers, sources), _in_order(suppliers, sinks)))
        return groups

    def _nearest(self, node: Node | None) -> set[str]:
        """Return the layers whose outputs come to a node without another layer between."""
        found = set()
        seen = set()
        ahead = [node]
        while ahead:
            node = ahead.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self._layers:
                found.add(self._layers[node])
            else:
                ahead += [before for before, _ in node.next_functions]
        return found


def _connected(name: str, suppliers: dict[str, set[str]], receivers: dict[str, set[str]]) -> tuple[set[str], set[str]]:
    """Return the sources and the sinks that are connected with a source."""
    sources: set[str] = set()
    sinks: set[str] = set()
    ahead = [name]
    while ahead:
        source = ahead.pop()
        sources.add(source)
        for sink in receivers[source] - sinks:
            sinks.add(sink)
            ahead += suppliers[sink] - sources
    return sources, sinks


def _in_order(layers: dict[str, Any], names: set[str]) -> list[str]:
    return [name for name in layers if name in names]
