"""No line of the package is too wide."""

from tests.support.sources import FILES, relative

COLUMNS = 120


def test_no_line_is_wider_than_120_columns() -> None:
    """Also those that ruff passes over: one long word, an address."""
    wide = [
        f"{relative(path)}:{number}"
        for path in FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > COLUMNS
    ]
    assert not wide, f"more than {COLUMNS} characters: {wide}"
