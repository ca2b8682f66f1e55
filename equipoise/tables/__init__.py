"""Tables on a terminal or in a pipe: redrawn while something runs, or printed whole."""

__all__: list[str] = []
