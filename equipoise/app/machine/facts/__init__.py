"""Facts about this machine and its packages, each kind read by one file, and printed by none of them."""
