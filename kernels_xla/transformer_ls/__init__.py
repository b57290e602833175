"""Transformer-LS: a sliding window beside a dynamic low-rank projection."""
