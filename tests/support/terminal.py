"""Terminal that understands what a live display sends, shows it as a person sees it, and refuses anything else."""

import io
import re

__all__ = ["Terminal"]

_TOKEN = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|([\x00-\x1f\x7f])|([^\x00-\x1f\x7f]+)")


class Terminal(io.TextIOBase):
    """A screen of endless height.

    Attributes:
        lines: Its lines, with trailing blanks removed when read by `text`.
        cursor_visible: Whether the cursor can be seen.
        wrapped: Lines that ran over the right edge.
        sent: Everything that was written.
    """

    encoding = "utf-8"

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines = [""]
        self.row = self.column = 0
        self.cursor_visible = True
        self.wrapped: list[str] = []
        self.sent = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.sent += text
        position = 0
        for match in _TOKEN.finditer(text):
            assert match.start() == position, f"not understood: {text[position : match.start()]!r}"
            position = match.end()
            parameter, command, control, plain = match.groups()
            if plain is not None:
                self._put(plain)
            elif control is not None:
                self._control(control)
            else:
                self._command(parameter, command)
        assert position == len(text), f"not understood: {text[position:]!r}"
        return len(text)

    def _put(self, text: str) -> None:
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + text + line[self.column + len(text) :]
        self.column += len(text)
        if self.column > self.width:
            self.wrapped.append(self.lines[self.row])

    def _control(self, control: str) -> None:
        assert control in "\r\n", f"control character {control!r}"
        self.column = 0
        if control == "\n":
            self.row += 1
            if self.row == len(self.lines):
                self.lines.append("")

    def _command(self, parameter: str, command: str) -> None:
        if command == "A":
            self.row -= int(parameter or 1)
            assert self.row >= 0, "the cursor left the screen"
        elif command == "K":
            assert parameter == "2"
            self.lines[self.row] = ""
        elif parameter == "?25":
            self.cursor_visible = {"h": True, "l": False}[command]
        else:
            assert command == "m", f"escape sequence {parameter}{command}"

    @property
    def text(self) -> str:
        """Return the text on the screen."""
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")
