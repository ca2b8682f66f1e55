"""The table of results that `validate` and `test` print."""

from typing import Any

from torch import Tensor

__all__ = ["print_results", "to_scalars"]


def to_scalars(values: dict[str, Any]) -> dict[str, Any]:
    """Reads tensors of one element from their devices.

    Raises:
        ValueError: If a tensor has several elements.
    """
    return {name: _read(name, value) if isinstance(value, Tensor) else value for name, value in values.items()}


def _read(name: str, value: Tensor) -> Any:
    if value.numel() != 1:
        raise ValueError(f"The value logged as {name!r} has {value.numel()} elements, but must be a scalar: {value}.")
    return value.item()


def print_results(outputs: list[dict[str, Any]], stage: str) -> None:
    """Prints a row for each metric and a column for each loader.

    Args:
        outputs: A dictionary of metrics for each loader.
        stage: What to call the metrics: "validate" or "test".
    """
    from rich import get_console
    from rich.table import Table

    columns = [
        {name.split("/dataloader_idx_")[0]: value for name, value in to_scalars(values).items()} for values in outputs
    ]
    names = sorted({name for values in columns for name in values})
    if not names:
        return
    table = Table(f"{stage} metric".capitalize(), header_style="bold")
    for index in range(len(columns)):
        table.add_column(f"loader {index}" if len(columns) > 1 else "value", justify="right")
    for name in names:
        table.add_row(name, *(_show(values.get(name, "")) for values in columns))
    get_console().print(table)


def _show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
