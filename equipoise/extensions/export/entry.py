"""`equipoise export` for the help and the shell; the command itself is imported when it runs."""

from collections.abc import Sequence
from pathlib import Path

from equipoise.app.command import Command

__all__ = ["COMMAND"]


def _run(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    from equipoise.extensions.export.command import run_export

    run_export(arguments, folders)


COMMAND = Command(
    summary="write the weights of a checkpoint as safetensors",
    run=_run,
    flags=("--dtype=", "--max-shard-size=", "--module=", "--overwrite", "--prefix=", "--weights="),
    usage="CKPT OUT [flags]",
    reads_configuration=False,
    examples=(
        ("last.ckpt model.safetensors --prefix=model", "the weights of self.model; --dtype=bfloat16, --overwrite"),
        ("last.ckpt folder --module=my.Module", "its model of transformers or peft, for from_pretrained"),
    ),
)
