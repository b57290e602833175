"""FLASH: mixed chunk attention, its decoding, and the variant with weighted chunks."""
