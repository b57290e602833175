"""Where the time of a step goes: captures with TensorFlow's profiler, and reads what it wrote."""
