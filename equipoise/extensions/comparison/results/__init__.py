"""Results of a comparison: plain data, tables, the page, the recommendation."""
