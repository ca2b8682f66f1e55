"""`equipoise verify` for the help and the shell."""

from equipoise.app.command import Command

__all__ = ["COMMAND"]

COMMAND = Command(
    summary="prove the first steps: computed as configured and on one device",
    run="equipoise.extensions.verification.command:show_verification",
    flags={
        "--steps=": "number of optimiser steps (3)",
        "--json": "print the result as JSON",
    },
)
