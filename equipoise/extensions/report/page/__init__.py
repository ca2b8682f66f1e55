"""The page of a report: its data, sections, charts and HTML."""
