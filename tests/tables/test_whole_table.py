"""Tables that are printed whole: in a pipe, on a wide and on a narrow terminal."""

import io

import pytest
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from equipoise.tables.whole_table import print_table

HEADS = ("strategy", "device", "samples", "peak", "usable", "largest batch", "at the peak")
ROWS = [
    ("single_device", "24 GiB", "64", "546.12 MiB", "22.31 GiB", "12,345,678", "forward: activations 123.4 MiB"),
    ("", "[2x80 GiB]", "32", "1,046.12 MiB", "22.32 GiB", "2 x 123,456", "backward: gradients 12.34 MiB"),
]


def table():
    table = Table(box=SIMPLE, title="Plan", caption="Below.")
    for head in HEADS:
        table.add_column(head, justify="right", overflow="fold" if head == "at the peak" else "ellipsis")
    for row in ROWS:
        table.add_row(*row)
    return table


def printed(width, is_terminal):
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=is_terminal, color_system=None, markup=False)
    print_table(table(), console, repeated=2)
    return file.getvalue()


def numbers():
    return [cell for row in ROWS for cell in row[:-1] if cell]


def test_a_table_in_a_pipe_is_printed_whole():
    text = printed(20, is_terminal=False)
    for row in ROWS:
        (line,) = [line for line in text.splitlines() if row[1] in line]
        assert all(cell in line for cell in row)


@pytest.mark.parametrize("width", [60, 110])
def test_a_narrow_terminal_gets_all_numbers_within_its_width(width):
    text = printed(width, is_terminal=True)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for cell in numbers():
        assert cell in text
    for word in ("activations", "gradients", "Below."):
        assert text.count(word) == 1
    # A cell stands in the row of its strategy and device.
    (line,) = [line for line in text.splitlines() if "12,345,678" in line]
    assert "single_device" in line
    assert "24 GiB" in line


def test_a_wide_terminal_gets_one_table():
    assert printed(200, is_terminal=True) == printed(20, is_terminal=False)
