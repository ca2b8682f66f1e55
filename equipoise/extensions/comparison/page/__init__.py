"""The page of a comparison of strategies."""
