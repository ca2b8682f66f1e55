"""The loops people write by hand: the measure of all others."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from workload import LEARNING_RATE, LoaderOf, TimedBatches, loader_of, loader_of_samples, network

__all__ = ["accumulate", "evaluate", "train", "train_on_samples"]


def train(data: TimedBatches, loader: LoaderOf = loader_of, make: Callable[[], nn.Module] = network) -> nn.Module:
    """One step for each batch."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for features, labels in loader(data):
        loss = F.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def train_on_samples(data: TimedBatches) -> nn.Module:
    """Train on batches that a DataLoader collates from samples in memory."""
    return train(data, loader_of_samples)


def accumulate(data: TimedBatches, window: int = 4) -> nn.Module:
    """One step for every four batches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for index, (features, labels) in enumerate(loader_of(data)):
        loss = F.cross_entropy(model(features), labels)
        (loss / window).backward()
        if (index + 1) % window == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def evaluate(data: TimedBatches) -> nn.Module:
    """The loss of each batch, without gradients."""
    model = network().eval()
    with torch.inference_mode():
        for features, labels in loader_of(data):
            F.cross_entropy(model(features), labels)
    return model
