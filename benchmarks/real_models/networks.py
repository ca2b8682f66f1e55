"""Networks that translate sentences of unequal length, which they pack."""

from torch import Tensor, nn

__all__ = ["Encoder", "PackingSeq2Seq", "Seq2Seq"]

WORDS, WIDTH = 20, 16


class PackingSeq2Seq(nn.Module):
    """Packs sentences in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, 2, batch_first=True)
        self.decoder = nn.GRU(WIDTH, WIDTH, 2, batch_first=True)
        self.output = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        embedded = self.embedding(source)
        packed = nn.utils.rnn.pack_padded_sequence(embedded, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, state = self.encoder(packed)
        decoded, _ = self.decoder(self.embedding(target), state)
        result: Tensor = self.output(decoded)
        return result


class Encoder(nn.Module):
    """Packs sentences and encodes them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, 2, batch_first=True)

    def forward(self, source: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embedding(source)
        packed = nn.utils.rnn.pack_padded_sequence(embedded, lengths.cpu(), batch_first=True, enforce_sorted=False)
        encoded, state = self.encoder(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(encoded, batch_first=True)
        return padded, state


class Seq2Seq(nn.Module):
    """Has a submodule that packs sentences."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.decoder = nn.GRU(WIDTH, WIDTH, 2, batch_first=True)
        self.output = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        _, state = self.encoder(source, lengths)
        decoded, _ = self.decoder(self.embedding(target), state)
        result: Tensor = self.output(decoded)
        return result
