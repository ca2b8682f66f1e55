"""The mean of the members is that of their probabilities, and a student learns from those of its teachers."""

import pytest
import torch
from ensemble.comparison import MemberComparison
from ensemble.data import FewDigitsDataModule
from ensemble.module import Classifier, Student, measures

from equipoise import ConfigurationError, EnsembleStrategy, Trainer


@pytest.fixture
def trainer(tmp_path):
    return Trainer(
        max_epochs=2,
        strategy=EnsembleStrategy(members=3),
        devices=["cpu"],
        default_root_dir=tmp_path,
        callbacks=[MemberComparison()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.fixture
def trained(trainer):
    """The trainer of an ensemble, with its checkpoint."""
    data = FewDigitsDataModule(train_images=100)
    module = Classifier(channels=2)
    trainer.fit(module, data)
    path = f"{trainer.default_root_dir}/ensemble.ckpt"
    trainer.save_checkpoint(path)
    return trainer, module, data, path


def test_parts_share_no_image():
    data = FewDigitsDataModule(train_images=300)
    data.setup("fit")
    assert (len(data.train), len(data.test)) == (300, 1497)
    parts = [{image.numpy().tobytes() for image, _ in part} for part in (data.train, data.test)]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 1797


def test_comparison_with_the_members_by_hand(trained, tmp_path, capsys):
    trainer, module, data, _ = trained
    trainer.test(module, data)

    images, labels = data.test.tensors
    with torch.no_grad():
        of_members = [member(images).softmax(1) for member in trainer.strategy.member_modules()]
    of_members.append(torch.stack(of_members).mean(0))
    printed = capsys.readouterr().out
    for name, probabilities in zip(["member_0", "member_1", "member_2", "mean_probabilities"], of_members, strict=True):
        for measure, metric in measures().items():
            value = metric(probabilities, labels)
            torch.testing.assert_close(trainer.callback_metrics[f"{measure}/{name}"].cpu(), value)
            assert f"{value:.4f}" in printed
        error = 100 * (probabilities.argmax(1) != labels).float().mean()
        assert f">{error:.2f}</text>" in (tmp_path / "members.svg").read_text()


def test_a_strategy_without_members_is_refused(tmp_path):
    trainer = Trainer(devices=["cpu"], default_root_dir=tmp_path, callbacks=[MemberComparison()], logger=False)
    with pytest.raises(ConfigurationError, match="choose strategy=ensemble"):
        trainer.test(Classifier(), FewDigitsDataModule())


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_student_s_loss(trained, temperature):
    trainer, _, data, path = trained
    student = Student(teacher=path, temperature=temperature, channels=2)
    student.log = lambda *args, **kwargs: None
    student.on_fit_start()
    batch = data.train[:10]
    loss = student.training_step(batch, 0)

    # The divergence by its definition.
    scores = [member(batch[0]).detach() / temperature for member in trainer.strategy.member_modules()]
    targets = torch.stack(scores).softmax(2).mean(0)
    predictions = (student(batch[0]) / temperature).softmax(1)
    expected = (targets * (targets.log() - predictions.log())).sum(1).mean() * temperature**2
    torch.testing.assert_close(loss, expected)
    # Teachers are neither trained nor saved.
    assert len(list(student.parameters())) == 6
    loss.backward()
    assert all(parameter.grad.any() for parameter in student.parameters())


def test_a_student_without_a_teacher_learns_labels():
    student = Student(channels=2)
    student.log = lambda *args, **kwargs: None
    student.on_fit_start()
    images, labels = torch.rand(6, 1, 8, 8), torch.arange(6)
    expected = torch.nn.functional.cross_entropy(student(images), labels)
    torch.testing.assert_close(student.training_step((images, labels), 0), expected)
