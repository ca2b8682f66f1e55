"""Networks without a plan: how much is found to be cut over two processes, and the difference to one device."""

import argparse
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.device_mesh.cells import fit, largest_difference
from benchmarks.device_mesh.networks import NETWORKS, Network
from equipoise import ConfigurationError, FSDPStrategy
from equipoise.extensions.fsdp.mesh.grid import is_cut


def without_plan(network: Network) -> Network:
    """Return a network without its plan, nor the one that transformers has for it."""

    def make() -> nn.Module:
        model = network.make()
        for part in model.modules():
            if hasattr(part, "_tp_plan"):
                vars(part)["_tp_plan"] = {}
        return model

    return network._replace(make=make, plan=None)


class CutLayers(Callback):
    """Notes which layers are cut.

    Attributes:
        names: The names of their weights, with * in the place of numbers.
        share: Which part of all elements of the parameters they have.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.share = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Note them."""
        cut = {name: parameter for name, parameter in pl_module.named_parameters() if is_cut(parameter)}
        patterns = (re.sub(r"\.\d+\.", ".*.", name) for name in cut if name.endswith(".weight"))
        self.names = list(dict.fromkeys(name.removeprefix("network.").removesuffix(".weight") for name in patterns))
        total = sum(parameter.numel() for parameter in pl_module.parameters())
        self.share = sum(parameter.numel() for parameter in cut.values()) / total


def row_of(name: str) -> str:
    """Return a line of the table: what is found, and the largest difference of a weight."""
    network = without_plan(NETWORKS[name])
    expected = fit(network, "single_device", 1, 1)
    layers = CutLayers()
    try:
        weights = fit(network, FSDPStrategy(tensor=2, timeout=300.0), 2, 1, [layers])
    except ConfigurationError as error:
        return f"| {name} | refused: {str(error).split('. ')[0]} | | |"
    difference = largest_difference(weights, expected)
    return f"| {name} | {', '.join(layers.names)} | {layers.share:.0%} | {difference:.1e} |"


def main() -> None:
    """Find plans, train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=[*NETWORKS], default=[*NETWORKS], help="default: all")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| network | cut layers | of all parameters | difference |\n| --- | --- | --- | --- |")
    for name in options.networks:
        print(row_of(name), flush=True)


if __name__ == "__main__":
    main()
