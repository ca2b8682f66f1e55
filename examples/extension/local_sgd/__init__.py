"""Local SGD for Equipoise: a strategy, a callback, a command and a section of the report."""
