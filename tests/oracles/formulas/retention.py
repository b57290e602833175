import numpy as np

from tests.oracles.formulas.gla import gla

CASES = ({"chunk_size": 4, "causal": True}, {"chunk_size": 16, "causal": True})
TIMED = {"causal": True}


def retention(q, k, v, log_decay, *, chunk_size=None, causal=True, padding_mask=None, segment_ids=None):
    """`gla` with one decay for all channels of a head."""
    gates = np.repeat(log_decay[..., None], q.shape[-1], axis=-1)
    return gla(q, k, v, gates, padding_mask=padding_mask, segment_ids=segment_ids)
