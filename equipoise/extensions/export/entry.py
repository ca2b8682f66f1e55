"""`equipoise export` for the help and the shell."""

from equipoise.app.command import Command

__all__ = ["COMMAND"]

COMMAND = Command(
    summary="write the weights of a checkpoint as safetensors",
    run="equipoise.extensions.export.command:run_export",
    flags=("--dtype=", "--max-shard-size=", "--module=", "--overwrite", "--prefix=", "--weights="),
    usage="CKPT OUT [flags]",
    reads_configuration=False,
    examples=(
        ("last.ckpt model.safetensors --prefix=model", "the weights of self.model; --dtype=bfloat16, --overwrite"),
        ("last.ckpt folder --module=my.Module", "its model of transformers or peft, for from_pretrained"),
    ),
)
