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
            value = _read(name, value)
        scalars[name] = value
    return scalars


def _read(name: str, value: Tensor) -> Any:
    if value.numel() != 1:
        raise ValueError(f"The value logged as {name!r} has {value.numel()} elements, but must be a scalar: {value}.")
    return value.item()


def print_results(outputs: list[dict[str, Any]], stage: str) -> None:
    """Print a row for each metric and a column for each loader.

    Args:
        outputs: A dictionary of metrics for each loader.
        stage: Title of the metrics: "validate" or "test".
    """
    # Importing rich takes time, which runs without a table do not spend.
    from rich import get_console
    from rich.table import Table

    columns = [_without_loaders(values) for values in outputs]
    names = sorted(set().union(*columns))
    if not names:
        return
    title = f"{stage} metric"
    table = Table(title.capitalize(), header_style="bold")
    for index in range(len(columns)):
        header = "value"
        if len(columns) > 1:
            header = f"loader {index}"
        table.add_column(header, justify="right")
    for name in names:
        cells = [_format(values.get(name, "")) for values in columns]
        table.add_row(name, *cells)
    get_console().print(table)


def _without_loaders(values: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of one loader, by names without the loader's index."""
    numbers = {}
    for name, value in to_scalars(values).items():
        plain_name = name.split("/dataloader_idx_")[0]
        numbers[plain_name] = value
    return numbers


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)
