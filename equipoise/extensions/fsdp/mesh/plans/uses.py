"""Uses of linear layers: which of them receive the outputs of which, with no other linear layer between."""

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import Node

__all__ = ["Group", "LayerUses"]


class Group(NamedTuple):
    """Layers that receive the outputs of some others, and of no more; and nothing else receives those.

    Attributes:
        sources: Names of the layers that compute them: linear ones, and embeddings.
        sinks: Names of the linear layers that receive them.
        norms: Names of other modules with parameters on the way, such as norms of heads.
    """

    sources: list[str]
    sinks: list[str]
    norms: list[str]


class LayerUses:
    """Notes the calls of linear layers and embeddings in a forward, and follows the graph of autograd between them.

    Args:
        module: The module, all of whose parameters require gradients.

    Example:
        >>> module = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
        >>> import torch
        >>> uses = LayerUses(module)
        >>> uses.groups(module(torch.ones(1, 2)).sum())
        [Group(sources=['0'], sinks=['2'], norms=[])]
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers: dict[Node, str] = {}
        self._norms: dict[Node, str] = {}
        # Of each layer: where its inputs come from.
        self._inputs: dict[str, list[Node | None]] = defaultdict(list)
        for name, layer in module.named_modules():
            # Subclasses may compute something else.
            if type(layer) in (nn.Linear, nn.Embedding):
                layer.register_forward_hook(self._noting(name), with_kwargs=True)
            elif not list(layer.children()) and list(layer.parameters()):
                layer.register_forward_hook(self._noting_norm(name))

    def _noting_norm(self, name: str) -> Callable[..., None]:
        def note(norm: nn.Module, args: Any, output: Any) -> None:
            node = getattr(output, "grad_fn", None)
            if node is not None:
                self._norms[node] = name

        return note

    def _noting(self, name: str) -> Callable[..., None]:
        def note(layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            (tensor,) = args or kwargs.values()
            node = output.grad_fn
            if node is not None:
                self._layers[node] = name
                self._inputs[name].append(tensor.grad_fn)

        return note

    def groups(self, loss: Tensor) -> list[Group]:
        """Return the groups of layers, in the order of their first calls.

        Args:
            loss: The value that the forward has returned.
        """
        # 1. The layers that each layer, and the loss, receives something from.
        suppliers = {}
        norms = {}
        for name, nodes in self._inputs.items():
            suppliers[name], norms[name] = self._nearest(nodes)
        of_loss, _ = self._nearest([loss.grad_fn])

        # 2. All that are connected by that, from each layer that supplies others.
        groups = []
        order = list(suppliers)
        done: set[str] = set()
        for name in suppliers:
            sources = {name} - done
            sinks: set[str] = set()
            before = -1
            while before < len(sinks):
                before = len(sinks)
                for sink, suppliers_of_sink in suppliers.items():
                    if not sources.isdisjoint(suppliers_of_sink):
                        sinks.add(sink)
                        sources |= suppliers_of_sink
            done |= sources
            if not sinks or not sources.isdisjoint(sinks | of_loss):
                continue
            between: set[str] = set()
            for sink in sinks:
                between |= norms[sink]
            group = Group(
                sources=sorted(sources, key=order.index),
                sinks=sorted(sinks, key=order.index),
                norms=sorted(between),
            )
            groups.append(group)
        return groups

    def _nearest(self, nodes: Collection[Node | None]) -> tuple[set[str], set[str]]:
        """Return the layers whose outputs come to some nodes without another layer between, and norms on the way."""
        layers = set()
        norms = set()
        passed: set[Node] = set()
        ahead = list(nodes)
        while ahead:
            node = ahead.pop()
            if node is None or node in passed:
                continue
            passed.add(node)
            layer = self._layers.get(node)
            if layer is not None:
                layers.add(layer)
                continue
            norm = self._norms.get(node)
            if norm is not None:
                norms.add(norm)
            for earlier, _ in node.next_functions:
                ahead.append(earlier)
        return layers, norms
