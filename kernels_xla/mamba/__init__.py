"""Mamba: the selective scan and the short convolution before it."""
