"""Trained models as files that work without this package: a SavedModel for servers, a TensorFlow Lite file."""
