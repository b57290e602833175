"""Imports Keras, or says in one line why its backend cannot be imported. Import this before Keras."""

try:
    import keras  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"Keras cannot import the backend that KERAS_BACKEND names, by default tensorflow: {error}. "
        "Run pip install 'flash-tf[tensorflow]', or pip install 'flash-tf[jax]' and set KERAS_BACKEND=jax."
    ) from None
