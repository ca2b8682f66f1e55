"""The model: its size, and that both of its losses train."""

import pytest
import torch
from bert.module import BERT
from bert.vocabulary import MASK, PAD


def small(**changes):
    module = BERT(**{"vocabulary": 50, "hidden": 16, "layers": 2, "heads": 2, "dropout": 0.0} | changes)
    module.log = lambda *args, **kwargs: None
    return module


def samples(*counts, is_next):
    """Samples of nine words, of which the first few are targets."""
    words = torch.randint(5, 50, (len(counts), 9))
    is_target = torch.arange(9) < torch.tensor(counts).unsqueeze(1)
    masked = torch.where(is_target, MASK, words)
    return masked, torch.ones_like(words), torch.where(is_target, words, PAD), torch.tensor(is_next)


@pytest.mark.parametrize("vocabulary", [1000, 30000])
def test_parameters_of_the_article(vocabulary):
    with torch.device("meta"):
        module = BERT(vocabulary=vocabulary)
    counts = [sum(parameter.numel() for parameter in part.parameters()) for part in (module, module.blocks[0])]
    assert counts == [513 * vocabulary + 6_319_362, 789_760]


@pytest.mark.parametrize("answer", [0, 1])
def test_both_answers_to_the_next_sentence_train(answer):
    module = small()
    module.training_step(samples(3, 2, is_next=[answer, answer]), 0)["loss"].backward()
    # The score of the right class rises, that of the other falls.
    assert module.next_head.bias.grad[answer] < 0 < module.next_head.bias.grad[1 - answer]


def test_every_weight_gets_a_gradient():
    module = small()
    module.training_step(samples(3, 2, is_next=[0, 1]), 0)["loss"].backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in module.parameters())


def test_words_that_are_no_targets_do_not_count():
    module = small(next_weight=0.0)
    words, segments, targets, is_next = samples(2, 1, is_next=[0, 1])
    outputs = module.training_step((words, segments, targets, is_next), 0)
    log_shares = module(words, segments)[0].log_softmax(dim=2)
    places = [(0, 0), (0, 1), (1, 0)]
    total = sum(log_shares[sample, place, targets[sample, place]] for sample, place in places)
    torch.testing.assert_close(outputs["loss"], -total / 3)
    assert outputs["loss_weight"] == 3


def test_parts_of_a_batch_weigh_as_the_whole():
    module = small().double()
    whole = samples(5, 1, 2, is_next=[0, 1, 1])
    parts = [[tensor[:1] for tensor in whole], [tensor[1:] for tensor in whole]]
    outputs = [module.training_step(part, 0) for part in parts]
    total = sum(output["loss"] * output["loss_weight"] for output in outputs) / 8
    torch.testing.assert_close(total, module.training_step(whole, 0)["loss"], rtol=1e-12, atol=0)


def test_padding_changes_nothing():
    module = small().double()
    words, segments, _, _ = samples(2, is_next=[0])
    longer = [torch.nn.functional.pad(tensor, (0, 4)) for tensor in (words, segments)]
    for scores, of_longer in zip(module(words, segments), module(*longer), strict=True):
        torch.testing.assert_close(scores, of_longer.narrow(1, 0, scores.shape[1]))


def test_the_rate_rises_and_falls():
    module = small(warmup=10000, lr=1.0)
    rates = [module._share_of_lr(step - 1) for step in (1, 5000, 10000, 40000)]
    assert rates == pytest.approx([1e-4, 0.5, 1.0, 0.5])
