"""Several small classifiers of digits: each by itself, all together, and a smaller one that learns from them."""
