"""What several kernels share: chunks, masks, norms, rotary angles, recurrences, streams."""
