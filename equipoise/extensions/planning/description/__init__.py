"""A planned step as users and strategies describe it: its settings, its devices, and what each of them holds."""
