"""Both networks learn, each from its own loss; the result is that of the same loop written by hand; pictures."""

import copy

import pytest
import torch
import torch.nn.functional as F
from gan.module import GAN
from gan.png import write_png
from gan.samples import SampleGrid
from torch.utils.data import DataLoader, TensorDataset

from equipoise import Callback, Trainer

OPTIONS = {"size": 8, "noise": 4, "channels": 2}
STEPS = 6


class SeededGAN(GAN):
    """A module that draws the same noise wherever it is trained."""

    def on_train_batch_start(self, batch, batch_idx):
        torch.manual_seed(batch_idx)


@pytest.fixture
def batches():
    images = torch.rand(STEPS, 5, 1, 8, 8, dtype=torch.float64) * 2 - 1
    return list(zip(images, torch.randint(10, (STEPS, 5)), strict=True))


def fit(module, batches, folder, *callbacks, epochs=1):
    images, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    trainer = Trainer(
        max_epochs=epochs,
        devices=["cpu"],
        precision="64-true",
        default_root_dir=folder,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(images, labels), batch_size=5))


def train_by_hand(module, batches):
    generator, discriminator = module.generator, module.discriminator
    of_generator = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    for index, (images, labels) in enumerate(batches):
        torch.manual_seed(index)
        noise = torch.randn(5, 4, dtype=torch.float64)
        rows = torch.arange(5)
        drawn = generator(torch.cat([noise, F.one_hot(labels, 10).double()], dim=1))

        real_scores = discriminator(images)[rows, labels]
        drawn_scores = discriminator(drawn.detach())[rows, labels]
        loss = (F.softplus(-real_scores) + F.softplus(drawn_scores)).mean()
        of_discriminator.zero_grad()
        loss.backward()
        of_discriminator.step()

        loss = F.softplus(-discriminator(drawn)[rows, labels]).mean()
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()


def test_the_result_is_that_of_a_loop_written_by_hand(batches, tmp_path):
    torch.manual_seed(0)
    module = SeededGAN(**OPTIONS)
    reference = GAN(**OPTIONS).double()
    before = {name: value.double() for name, value in module.state_dict().items()}
    reference.load_state_dict(before)

    fit(module, batches, tmp_path)
    train_by_hand(reference, batches)

    for name, value in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=0, atol=1e-12)
    # Every weight of both networks has moved.
    unchanged = [name for name, _ in module.named_parameters() if torch.equal(before[name], module.state_dict()[name])]
    assert unchanged == []


class GradientsOfBoth(Callback):
    """Notes the gradients of both networks before each step of an optimiser."""

    def __init__(self):
        self.gradients = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradients = []
        for network in (pl_module.generator, pl_module.discriminator):
            gradients.append([copy.deepcopy(parameter.grad) for parameter in network.parameters()])
        self.gradients.append(gradients)


def test_no_gradient_reaches_the_other_network(batches, tmp_path):
    noted = GradientsOfBoth()
    fit(GAN(**OPTIONS), batches[:1], tmp_path, noted)
    at_first, at_second = noted.gradients
    # The discriminator's step: the generator has no gradients yet.
    assert all(gradient is None for gradient in at_first[0])
    # The generator's step: those of the discriminator are as they were.
    assert all(map(torch.equal, at_first[1], at_second[1]))
    assert all(gradient.any() for gradient in at_second[0])


def test_pictures_leave_the_training_alone(batches, tmp_path):
    states = []
    for callbacks in ([], [SampleGrid(rows=2, every_n_epochs=2)]):
        torch.manual_seed(0)
        module = GAN(**OPTIONS)
        fit(module, batches, tmp_path, *callbacks, epochs=4)
        states.append(module.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["epoch001.png", "epoch003.png"]


def test_a_column_for_each_digit(batches, tmp_path):
    image = pytest.importorskip("PIL.Image")

    class Drawer(GAN):
        """Draws images as grey as the digit says."""

        def forward(self, noise, labels):
            return (labels / 4.5 - 1).to(noise.dtype).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)

        def training_step(self, batch, batch_idx):
            pass

    fit(Drawer(**OPTIONS), batches, tmp_path, SampleGrid(rows=3, zoom=2))
    with image.open(tmp_path / "samples" / "epoch000.png") as picture:
        assert picture.size == (200, 60)
        assert [picture.getpixel((20 * digit + 10, 30)) for digit in range(10)] == [
            round(255 * digit / 9) for digit in range(10)
        ]
        assert picture.getpixel((0, 0)) == 0


def test_png(tmp_path):
    image = pytest.importorskip("PIL.Image")
    picture = torch.randint(256, (7, 12), dtype=torch.uint8)
    write_png(tmp_path / "picture.png", picture)
    with image.open(tmp_path / "picture.png") as file:
        assert (file.format, file.mode) == ("PNG", "L")
        assert list(file.tobytes()) == picture.flatten().tolist()
