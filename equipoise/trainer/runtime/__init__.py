"""One run: the objects that its parts share, checks before it, signals during it."""
