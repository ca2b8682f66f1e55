"""A model of transformers, trained or fine-tuned to tell two kinds of documentation apart."""
