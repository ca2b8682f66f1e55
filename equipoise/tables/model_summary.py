"""The default summary of a model: Lightning's, of which nothing is cut, without figures that were not computed."""

from typing import Any

from lightning.pytorch.callbacks import RichModelSummary
from lightning.pytorch.utilities.model_summary import get_human_readable_count

from equipoise.tables.whole_table import print_table

__all__ = ["WholeModelSummary"]

# Columns of numbers.
_JUSTIFY: dict[str, Any] = {"Params": "right", "Params per Device": "right", "FLOPs": "right"}


class WholeModelSummary(RichModelSummary):
    """Print the layers of a module with their parameters when a fit starts.

    Lightning's `RichModelSummary` cuts names at the width of a pipe, and shows FLOPs of 0 for a module without
    `example_input_array`, though they are unknown.
    """

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        """Print the summary; see Lightning's `ModelSummary.summarize`."""
        from rich import get_console
        from rich.table import Table
        from rich.text import Text

        # 1. The layers.
        console = get_console()
        table = Table(header_style=summarize_kwargs.get("header_style", "bold"))
        shown = [(head, cells) for head, cells in summary_data if total_flops or head != "FLOPs"]
        for head, _ in shown:
            table.add_column(head.strip(), justify=_JUSTIFY.get(head, "left"))
        for row in zip(*(cells for _, cells in shown), strict=True):
            table.add_row(*map(Text, row))
        print_table(table, console, repeated=2)

        # 2. The sums.
        counts = {
            "Trainable params": get_human_readable_count(trainable_parameters),
            "Non-trainable params": get_human_readable_count(total_parameters - trainable_parameters),
            "Total params": get_human_readable_count(total_parameters),
            "Total estimated model params size (MB)": f"{model_size:.3f}",
            "Modules in train mode": str(total_training_modes["train"]),
            "Modules in eval mode": str(total_training_modes["eval"]),
        }
        if total_flops:
            counts["Total FLOPs"] = get_human_readable_count(total_flops)
        for name, count in counts.items():
            console.print(Text.assemble((f"{name}: ", "bold"), count.strip()), soft_wrap=True)
