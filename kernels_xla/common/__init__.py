"""Code that several kernels share: chunks, masks, norms, rotary embedding, recurrences, streams."""
