"""The table of results that `validate` and `test` print."""

from typing import Any

from torch import Tensor

__all__ = ["print_results", "to_scalars"]


def to_scalars(values: dict[str, Any]) -> dict[str, Any]:
    """Return values with numbers in place of tensors, which are read from their devices.

    Raises:
        ValueError: If a tensor has several elements.
    """
    scalars = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"The value logged as {name!r} has {value.numel()} elements, but must be a scalar: {value}."
                )
            value = value.item()
        scalars[name] = value
    return scalars


def print_results(outputs: list[dict[str, Any]], stage: str) -> None:
    """Print a row for each metric and a column for each loader.

    Args:
        outputs: A dictionary of metrics for each loader.
        stage: Title of the metrics: "validate" or "test".
    """
    # Importing rich takes time, which runs without a table do not spend.
    from rich import get_console
    from rich.table import Table

    from equipoise.tables.whole_table import print_table

    # 1. Collect the names of all loaders.
    columns = [_without_loaders(values) for values in outputs]
    names = set().union(*columns)
    if not names:
        return

    # 2. Add the columns.
    table = Table(f"{stage} metric".capitalize(), header_style="bold")
    num_loaders = len(columns)
    for index in range(num_loaders):
        header = "value"
        if num_loaders > 1:
            header = f"loader {index}"
        table.add_column(header, justify="right")

    # 3. Add the rows. A loader may lack a metric.
    for name in sorted(names):
        table.add_row(name, *(_format(values.get(name, "")) for values in columns))
    print_table(table, get_console())


def _without_loaders(values: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of one loader, by names without the loader's index."""
    return {name.partition("/dataloader_idx_")[0]: value for name, value in to_scalars(values).items()}


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)
