"""Names of the calls of a traced forward: modules that they belong to, and the names that users know."""

from torch import fx

from equipoise.extensions.pipeline.graph.traced import Traced

__all__ = ["modules_of", "names_of", "owner_of", "with_parents"]

# The traced root holds the network as its attribute `network`.
_PREFIX = "network."


def owner_of(node: fx.Node) -> str | None:
    """Return the name of the network's module or tensor that a call uses; None if it uses none."""
    target = str(node.target)
    if node.op in ("call_module", "get_attr") and target.startswith(_PREFIX):
        return target.removeprefix(_PREFIX)
    return None


def modules_of(node: fx.Node) -> list[str]:
    """Return the names of the network's modules in whose forwards a call is, and of the module that it calls."""
    paths = list(node.meta.get("nn_module_stack", {}))
    if node.op in ("call_module", "get_attr"):
        paths.append(str(node.target))
    return [path.removeprefix(_PREFIX) for path in paths if path.startswith(_PREFIX)]


def names_of(traced: Traced) -> list[tuple[str, bool]]:
    """Return for each call the name that users know, and True if that is the name of a module or tensor.

    That is the outermost module that begins with this call, such as "encoder.layers.7". A call with which no module
    begins has the name of the call itself.
    """
    begun: set[str] = set()
    names = []
    for node in traced.calls:
        # A module begins with the first call in it.
        new_modules = []
        for path in modules_of(node):
            for name in with_parents(path):
                if name not in begun:
                    new_modules.append(name)
        begun.update(new_modules)
        if new_modules:
            names.append((new_modules[0], True))
        else:
            names.append((node.name, False))
    return names


def with_parents(name: str) -> list[str]:
    """Return the name of a module and those of the modules that contain it, the outermost first.

    Example:
        >>> with_parents("encoder.layers.0")
        ['encoder', 'encoder.layers', 'encoder.layers.0']
    """
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
