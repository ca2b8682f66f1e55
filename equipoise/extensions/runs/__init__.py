"""`equipoise runs`: runs side by side, from the files that they leave."""
