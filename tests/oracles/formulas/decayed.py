import numpy as np

from tests.oracles.formulas.gated import gated


def decayed(q, k, v, log_decay, *, chunk_size=None, causal=True, padding_mask=None, segment_ids=None):
    """`gated` with one decay for all channels of a head."""
    gates = np.repeat(log_decay[..., None], q.shape[-1], axis=-1)
    return gated(q, k, v, gates, padding_mask=padding_mask, segment_ids=segment_ids)
