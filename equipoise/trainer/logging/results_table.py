"""The table of results that `validate` and `test` print."""

from typing import Any

from torch import Tensor

__all__ = ["print_results", "to_scalars"]


def to_scalars(values: dict[str, Any]) -> dict[str, Any]:
    """Return values with numbers in place of tensors, which are read from their devices.

    Raises:
        ValueError: If a tensor has several elements.
    """
    return {name: _read(name, value) if isinstance(value, Tensor) else value for name, value in values.items()}


def _read(name: str, value: Tensor) -> Any:
    count = value.numel()
    if count != 1:
        raise ValueError(f"The value logged as {name!r} has {count} elements, but must be a scalar: {value}.")
    return value.item()


def print_results(outputs: list[dict[str, Any]], stage: str) -> None:
    """Print a row for each metric and a column for each loader."""
    # Importing rich takes time, which runs without a table do not spend.
    from rich import get_console
    from rich.table import Table

    from equipoise.tables.whole_table import print_table

    # 1. Collect the names of all loaders, without the indices of loaders.
    columns = []
    for values in outputs:
        columns.append({name.partition("/dataloader_idx_")[0]: value for name, value in to_scalars(values).items()})
    names = {name for column in columns for name in column}
    if not names:
        return

    # 2. Add the columns.
    table = Table(f"{stage} metric".capitalize(), header_style="bold")
    for index in range(len(columns)):
        table.add_column(f"loader {index}" if len(columns) > 1 else "value", justify="right")

    # 3. Add the rows. A loader may lack a metric.
    for name in sorted(names):
        table.add_row(name, *(_format(column.get(name, "")) for column in columns))
    print_table(table, get_console())


def _format(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
