"""The network has the article's size, its shortcut adds no weights, and the augmentation moves and mirrors images."""

import pytest
import torch
from pyramidnet.data import NormalizedImages
from pyramidnet.module import PyramidNetClassifier
from pyramidnet.network import PyramidNet, Unit

NO_CHANGE = {"mean": [0.0], "deviation": [1.0]}


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def formula(widths):
    """The number of parameters of a network whose units have these widths, each with that of its input before it."""
    stem = 3 * 16 * 9 + 2 * 16
    units = sum(
        2 * width + 9 * width * wider + 2 * wider + 9 * wider * wider + 2 * wider
        for width, wider in zip([16, *widths], widths, strict=False)
    )
    head = 2 * widths[-1] + (widths[-1] + 1) * 10
    return stem + units + head


def test_the_article_s_network():
    network = PyramidNetClassifier().network
    widths = [unit.layers[1].out_channels for unit in network.units]
    assert widths == list(range(21, 272, 5))
    assert count(network) == formula(widths) == 24_253_410


def test_widths_that_are_no_whole_numbers():
    network = PyramidNet(alpha=32, units=2)
    widths = [unit.layers[1].out_channels for unit in network.units]
    assert widths == [20, 23, 27, 30, 34, 37]
    assert count(network) == formula(widths)


def test_sizes_of_the_stages():
    network = PyramidNet(alpha=12, units=2)
    features = network.stem(torch.rand(1, 3, 32, 32))
    sizes = []
    for unit in network.units:
        features = unit(features)
        sizes.append(features.shape[-1])
    assert sizes == [32, 32, 16, 16, 8, 8]


@pytest.mark.parametrize(("stride", "size"), [(1, 5), (2, 3)])
def test_shortcut(stride, size):
    unit = Unit(2, 5, stride)
    torch.nn.init.zeros_(unit.layers[-1].weight)
    features = torch.rand(3, 2, 5, 5)
    result = unit(features)
    assert result.shape == (3, 5, size, size)
    pooled = torch.nn.functional.avg_pool2d(features, stride, ceil_mode=True) if stride > 1 else features
    assert torch.equal(result[:, :2], pooled)
    assert not result[:, 2:].any()


def test_every_weight_gets_a_gradient():
    module = PyramidNetClassifier(alpha=12, units=1)
    module.log = lambda *args, **kwargs: None
    module.training_step((torch.rand(4, 3, 32, 32), torch.arange(4)), 0).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in module.parameters())


def test_normalised_images():
    images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 32, 32)
    data = NormalizedImages(images, torch.tensor([4, 7]), mean=[0.5, 0.4, 0.0], deviation=[0.5, 0.2, 1.0])
    batch, labels = data.__getitems__([1, 0])
    assert labels.tolist() == [7, 4]
    torch.testing.assert_close(batch[:, :, 9, 9], torch.tensor([[1.0, 3.0, 1.0], [-1.0, -2.0, 0.0]]))
    image, label = data[1]
    assert torch.equal(image, batch[0])
    assert label == 7


def test_crops_move_images_by_up_to_four_pixels():
    images = torch.zeros(200, 1, 32, 32, dtype=torch.uint8)
    images[:, :, 16, 20] = 255
    data = NormalizedImages(images, torch.zeros(200), **NO_CHANGE, crop=True)
    batch, _ = data.__getitems__(list(range(200)))
    assert batch.shape == (200, 3, 32, 32)
    places = batch[:, 0].flatten(1).argmax(1)
    rows = places.div(32, rounding_mode="floor")
    columns = places % 32
    assert set(rows.tolist()) == set(range(12, 21))
    assert set(columns.tolist()) == set(range(16, 25))


def test_half_of_the_images_are_mirrored():
    images = torch.arange(32, dtype=torch.uint8).expand(200, 1, 32, 32)
    data = NormalizedImages(images, torch.zeros(200), **NO_CHANGE, flip=True)
    batch, _ = data.__getitems__(list(range(200)))
    is_mirrored = batch[:, 0, 0, 0] > 0
    assert 60 < is_mirrored.sum() < 140
    assert torch.equal(batch[is_mirrored][0, 0, 0], torch.arange(31, -1, -1) / 255)
    assert torch.equal(batch[~is_mirrored][0, 0, 0], torch.arange(32) / 255)
