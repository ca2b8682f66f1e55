"""Layers of few bits: frozen weights that are stored in them, and training whose products are computed in float8."""
