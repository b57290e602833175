"""Weights of public models as presets of this package, and back. Each file of `families` is one public architecture."""
