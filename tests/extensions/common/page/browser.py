"""A page as a browser has it after its scripts have run."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["after_script", "needs_browser"]

_BROWSER = shutil.which("chromium") or shutil.which("google-chrome")

needs_browser = pytest.mark.skipif(_BROWSER is None, reason="Chromium is not installed")


def after_script(page: str, script: str, folder: Path) -> str:
    """Return a page after a script has run beside its own, as Chromium has it then."""
    # The policy of the page lets no other script run.
    page = re.sub(r"<meta http-equiv[^>]*>", "", page).replace("</body>", f"<script>{script}</script></body>")
    (folder / "page.html").write_text(page)
    assert _BROWSER is not None
    command = [_BROWSER, "--headless", "--no-sandbox", "--dump-dom", str(folder / "page.html")]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
