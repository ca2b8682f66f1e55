"""`equipoise runs`: the table, the JSON and the page of runs."""

from equipoise.extensions.runs.command.command import page_of_sweep, show_runs

__all__ = ["page_of_sweep", "show_runs"]
