"""Training steps as files: exported by TensorFlow, compiled and run by XLA through JAX alone."""
