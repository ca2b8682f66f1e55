"""Images for training, validation and test, and the optimiser's schedule."""

import pytest
import torch
from pyramidnet.data import CIFAR10DataModule, MNISTDataModule
from pyramidnet.module import PyramidNetClassifier
from torch.utils.data import DataLoader, TensorDataset

from equipoise import Callback, Trainer


def write_cifar10(folder, count):
    """Each training file has its images, and each image has a number as its first two bytes."""
    for file in range(6):
        name = f"data_batch_{file + 1}.bin" if file < 5 else "test_batch.bin"
        records = torch.zeros(count, 3073, dtype=torch.uint8)
        records[:, 1] = torch.arange(count)
        records[:, 2] = file
        (folder / name).write_bytes(records.numpy().tobytes())


def write_mnist(folder, count):
    for part in ("train", "t10k"):
        images = torch.arange(28, dtype=torch.uint8).expand(count, 28, 28)
        header = bytes([0, 0, 8, 3]) + b"".join(size.to_bytes(4, "big") for size in images.shape)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + images.numpy().tobytes())
        labels = bytes([0, 0, 8, 1, *count.to_bytes(4, "big"), *(index % 10 for index in range(count))])
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels)


def test_parts_share_no_image(tmp_path):
    write_cifar10(tmp_path, 8)
    data = CIFAR10DataModule(root=tmp_path, val_images=15)
    data.setup("fit")
    data.setup("test")
    parts = [{tuple(image[0, 0, :2].tolist()) for image in part.images} for part in (data.train, data.val, data.test)]
    assert [len(part) for part in parts] == [25, 15, 8]
    assert len(set().union(*parts)) == 48


@pytest.mark.parametrize(
    ("kind", "write", "flips"), [(CIFAR10DataModule, write_cifar10, True), (MNISTDataModule, write_mnist, False)]
)
def test_only_training_images_are_augmented(tmp_path, kind, write, flips):
    write(tmp_path, 30)
    data = kind(root=tmp_path, val_images=5)
    data.setup("fit")
    data.setup("test")
    assert [(part.crop, part.flip) for part in (data.train, data.val, data.test)] == [
        (True, flips),
        *[(False, False)] * 2,
    ]
    for loader, size in [(data.val_dataloader(), 5), (data.test_dataloader(), 30)]:
        (first,), (second,) = loader, loader
        assert first[0].shape == (size, 3, 32, 32)
        assert torch.equal(first[0], second[0])
    (batch, _), *_ = data.train_dataloader()
    assert batch.shape[1:] == (3, 32, 32)


def test_digits_get_an_even_margin(tmp_path):
    write_mnist(tmp_path, 3)
    data = MNISTDataModule(root=tmp_path)
    data.setup("test")
    row = data.test.images[0, 0, 16].tolist()
    assert row == [0, 0, *range(28), 0, 0]
    assert not data.test.images[:, :, [0, 1, 30, 31]].any()


@pytest.mark.parametrize("count", [0, 40])
def test_some_images_must_remain(tmp_path, count):
    write_cifar10(tmp_path, 8)
    with pytest.raises(ValueError, match=f"val_images={count} must leave some of the 40"):
        CIFAR10DataModule(root=tmp_path, val_images=count).setup("fit")


class Options(Callback):
    """Notes the options of the optimiser in each step."""

    def __init__(self):
        self.options = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        (group,) = optimizer.param_groups
        self.options.append((group["lr"], group["momentum"], group["weight_decay"]))


def test_schedule(tmp_path):
    options = Options()
    trainer = Trainer(
        max_epochs=2,
        devices=["cpu"],
        default_root_dir=tmp_path,
        callbacks=[options],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    images = TensorDataset(torch.rand(8, 3, 32, 32), torch.arange(8))
    module = PyramidNetClassifier(alpha=12, units=1)
    trainer.fit(module, DataLoader(images, batch_size=2), DataLoader(images, batch_size=8))
    rates = [0.1] * 4 + [0.01] * 2 + [0.001] * 2
    assert options.options == [(pytest.approx(rate), 0.9, 1e-4) for rate in rates]
