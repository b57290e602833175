"""FLASH, GAU and the Transformers they are measured against, as Keras layers and models."""

__version__ = "0.1.0"
