"""A causal language model of transformers: trained whole, then fine-tuned by low-rank adapters."""
