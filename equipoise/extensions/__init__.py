"""Extensions of the core: each folder is one, found by name (`names/extensions.py`) and loaded on its first use.

An extension knows the core by its public names; the core knows none of them. `common` is what several of them share.
"""
