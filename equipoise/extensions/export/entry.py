"""`equipoise export` for the help and the shell."""

from equipoise.app.command import Command

__all__ = ["COMMAND"]

COMMAND = Command(
    summary="write the weights of a checkpoint as safetensors",
    run="equipoise.extensions.export.command:run_export",
    flags={
        "--prefix=": "only the parameters below this name, such as model",
        "--module=": "the class of the module whose model of transformers or peft is written, for from_pretrained",
        "--weights=": "trained, instead of the averaged ones that a checkpoint may hold",
        "--dtype=": "the number format to convert to, such as bfloat16",
        "--max-shard-size=": "the largest file, such as 5GB",
        "--overwrite": "replace files that exist",
    },
    usage="CKPT OUT [flags]",
    reads_configuration=False,
    examples=(
        ("last.ckpt model.safetensors --prefix=model", "the weights of self.model"),
        ("last.ckpt folder --module=my.Module", "its model of transformers or peft, for from_pretrained"),
    ),
)
