"""Training on JAX: one mesh of devices, in one process or many. Needs no TensorFlow."""
