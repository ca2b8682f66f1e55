"""Mistakes without an error: parts that share images, a loss that has nothing to do with the weights."""

import torch
from digits.data import DigitsDataModule
from digits.module import ConvNet


def test_parts_share_no_image():
    data = DigitsDataModule()
    data.setup("fit")
    parts = [{image.numpy().tobytes() for image, _ in part} for part in (data.train, data.val, data.test)]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 1797


def test_every_weight_gets_a_gradient():
    module = ConvNet(channels=4)
    module.log = lambda *args, **kwargs: None
    module.training_step((torch.rand(5, 1, 8, 8), torch.arange(5)), 0).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in module.parameters())
