"""The text, its vocabulary and its masks: mistakes there raise no error."""

import pytest
import torch
from bert.pairs import SentencePairs, join, mask_words
from bert.text import read_documentation, read_file, sentences
from bert.vocabulary import BEGIN, END, MASK, PAD, SPECIAL_WORDS, UNKNOWN, Vocabulary


def test_sentences():
    assert sentences(["is", "it", "?", "it", "is", ".", "so"]) == [["is", "it", "?"], ["it", "is", "."], ["so"]]


def test_a_line_is_a_document(tmp_path):
    (tmp_path / "text").write_text(" = Title = \n \n One . Two . \n")
    assert read_file(tmp_path / "text") == [[["=", "title", "="]], [["one", "."], ["two", "."]]]


def test_missing_file_says_what_is_there(tmp_path):
    (tmp_path / "other").touch()
    with pytest.raises(FileNotFoundError, match=r"no text in .*\(other\).*data\.root"):
        read_file(tmp_path / "text")


@pytest.mark.slow
def test_the_documentation_is_that_of_this_python():
    documentation = read_documentation()
    words = [word for documents in documentation.values() for document in documents for s in document for word in s]
    assert len(words) > 100_000
    assert documentation["json"][0][0][:3] == ["json", "(", "javascript"]


def test_the_most_frequent_words_have_numbers():
    vocabulary = Vocabulary([["b", "a", "c", "a"], ["<unk>", "c"]], size=7)
    assert vocabulary.words == [*SPECIAL_WORDS, "a", "c"]
    assert vocabulary.counts.tolist() == [0, 0, 0, 0, 0, 2, 2]
    assert vocabulary.encode(["c", "b", "<unk>", "<mask>"]) == [6, UNKNOWN, UNKNOWN, UNKNOWN]
    with pytest.raises(ValueError, match="no room"):
        Vocabulary([], size=5)


def test_samples_of_two_sentences():
    first = torch.tensor([[5, 6, PAD], [7, PAD, PAD]])
    second = torch.tensor([[8, PAD, PAD], [9, 5, 6]])
    words, segments = join(first, second)
    assert words.tolist() == [[BEGIN, 5, 6, END, 8, END, 0, 0, 0], [BEGIN, 7, END, 9, 5, 6, END, 0, 0]]
    assert segments.tolist() == [[1, 1, 1, 1, 2, 2, 0, 0, 0], [1, 1, 1, 2, 2, 2, 2, 0, 0]]


def test_second_sentences_follow_or_not():
    # Two documents of sentences "0", "1", ... of one word; the last one of each is no first sentence.
    documents = [[[str(number)] for number in range(start, start + 50)] for start in (0, 50)]
    vocabulary = Vocabulary([sentence for document in documents for sentence in document], size=200)
    pairs = SentencePairs(documents, vocabulary, length=7)
    assert len(pairs) == 98
    words, segments, targets, is_next = pairs.draw(torch.Generator().manual_seed(0), masked=0.0, random=0.0).tensors
    numbers = [[int(vocabulary.words[number]) for number in row] for row in words[:, [1, 3]].tolist()]
    follows = torch.tensor([second == first + 1 for first, second in numbers])
    assert follows[is_next == 1].all()
    assert not follows[is_next == 0].all()
    assert 30 < is_next.sum() < 70
    assert segments.shape == targets.shape == (98, 7)


def test_long_sentences_are_cut_and_nothing_is_lost():
    sentence = [str(number) for number in range(10)]
    vocabulary = Vocabulary([sentence], size=20)
    pairs = SentencePairs([[sentence]], vocabulary, length=11)
    assert len(pairs) == 2  # words 0 to 3 before 4 to 7, and those before 8 and 9


def test_shares_of_masked_words():
    words = torch.randint(len(SPECIAL_WORDS), 100, (2000, 50))
    words[:, 0] = BEGIN
    words[:, 25] = UNKNOWN
    words[:, 40:] = PAD
    masked, targets = mask_words(words, torch.Generator().manual_seed(0), 100, masked=0.8, random=0.1)
    is_target = targets != PAD
    assert torch.equal(targets[is_target], words[is_target])
    assert torch.equal(masked[~is_target], words[~is_target])
    assert not is_target[:, [0, 25, *range(40, 50)]].any()
    assert is_target.sum() / (2000 * 38) == pytest.approx(0.15, abs=0.01)
    of_targets = masked[is_target]
    assert (of_targets == MASK).float().mean() == pytest.approx(0.8, abs=0.01)
    # One of 95 words is by chance the word itself.
    assert (of_targets == targets[is_target]).float().mean() == pytest.approx(0.1 + 0.1 / 95, abs=0.01)
    assert of_targets.min() >= MASK


def test_each_sample_has_a_target():
    words = torch.full((500, 4), UNKNOWN)
    words[:, 2] = 7
    _, targets = mask_words(words, torch.Generator().manual_seed(0), 10, masked=0.8, random=0.1)
    assert targets.tolist() == [[0, 0, 7, 0]] * 500
