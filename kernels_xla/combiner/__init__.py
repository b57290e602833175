"""Combiner: full attention by conditional expectations, in its axial and fixed forms."""
