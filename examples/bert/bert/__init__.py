"""BERT: masked words and the next sentence, on a text of yours or on Python's own documentation."""
