"""HogwildStrategy: processes that step shared parameters without waiting for each other."""
