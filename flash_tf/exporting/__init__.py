"""Trained models as files that need none of this package: a SavedModel for servers, a TensorFlow Lite file."""
