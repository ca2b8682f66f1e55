"""This machine: its devices (`equipoise devices`), and what a bug report says about it (`equipoise doctor`)."""
