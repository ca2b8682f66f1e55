"""A twister's state is read again if its memory has changed, wherever the change shows."""

import ctypes

import pytest

from equipoise.parallel.snapshot.global_generators import GlobalTwister

WORDS = 625


@pytest.mark.parametrize(
    ("position", "watched"), [(0, (0, 1, 2)), (WORDS - 1, (WORDS - 1, 0, 1))], ids=["position first", "position last"]
)
def test_the_position_and_two_words_of_the_state_show_a_change(position: int, watched: tuple[int, ...]) -> None:
    memory = (ctypes.c_uint32 * WORDS)()
    reads: list[int] = []

    def read() -> int:
        reads.append(len(reads))
        return len(reads)

    twister = GlobalTwister(ctypes.addressof(memory), position, read, lambda state: False)
    twister.mark()
    twister.mark()
    assert len(reads) == 1
    for index in watched:
        memory[index] += 1
        twister.mark()
        twister.mark()
    assert len(reads) == 1 + len(watched)


def test_an_unknown_memory_and_a_spare_number_are_always_read() -> None:
    memory = (ctypes.c_uint32 * WORDS)()
    for address, has_spare in ((0, False), (ctypes.addressof(memory), True)):
        reads: list[int] = []
        twister = GlobalTwister(address, 0, lambda reads=reads: reads.append(1), lambda state, spare=has_spare: spare)
        for _ in range(3):
            twister.mark()
        assert len(reads) == 3
