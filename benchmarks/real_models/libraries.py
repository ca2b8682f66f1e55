"""Imports the libraries of the models, or says why one is absent."""

import importlib
import os
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before a library reads it: models are built from their configurations
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

__all__ = ["LIBRARIES", "absence", "version_of"]

LIBRARIES = ("transformers", "timm", "torchvision", "diffusers", "torch_geometric")


def absence(library: str) -> str:
    """The reason why a library cannot be imported; empty if it can."""
    try:
        importlib.import_module(library)
    except ImportError as error:
        return f"{library} cannot be imported: {error}"
    return ""


def version_of(library: str) -> str:
    """The version of a library; empty if it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def _complete_torchvision() -> None:
    """Defines operators that torchvision lacks, here and in processes of stages; see `start/missing_operators.py`."""
    if not version_of("torchvision"):
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        folder = str(Path(__file__).parent / "start")
        sys.path.append(folder)
        importlib.import_module("missing_operators").define()
        importlib.import_module("torchvision")
        _add_to_path(folder)


def _add_to_path(folder: str) -> None:
    """Lets processes that this one starts import from a folder."""
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = folder if not others else os.pathsep.join([folder, others])


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _complete_torchvision()
