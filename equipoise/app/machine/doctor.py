"""`equipoise doctor`: print what a bug report says about the machine and its packages, as text or JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from equipoise.app.config.suggestions import did_you_mean
from equipoise.app.machine.facts.collection import collect_facts
from equipoise.app.machine.text import facts_as_text
from equipoise.errors import ConfigurationError

__all__ = ["show_doctor"]


def show_doctor(arguments: Sequence[str]) -> None:
    """Run the command.

    Args:
        arguments: None, or `--json`.

    Raises:
        ConfigurationError: If there are other arguments.
    """
    for argument in arguments:
        if argument != "--json":
            hint = did_you_mean(argument, ["--json"])
            raise ConfigurationError(f"equipoise doctor takes no argument {argument!r}{hint}")
    # All facts come before the first line: what packages print while they are imported is not between the lines.
    facts = collect_facts()
    if "--json" in arguments:
        print(json.dumps(asdict(facts), indent=2))
    else:
        print(facts_as_text(facts))
