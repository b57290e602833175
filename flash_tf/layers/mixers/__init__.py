"""Token mixers: `[b, n, d]` in, `[b, n, d]` out, one file each.

Beside Keras' methods, a mixer has these members. All except `align` are known once the mixer is built.

- `align`: a packed document gives the same output as alone if it starts at a multiple of this.
- `flops(n)`: forward FLOPs over one sequence.
- `state_bytes(n, itemsize)`: bytes of the decoding state for one sequence of up to n tokens; None if it cannot decode.
- `activations(n)`: numbers kept per token for the backward pass, an estimate.
- `causal_only = True`: the mixer is always causal. `never_causal = True`: it is never causal.
- `longest`: the most tokens of a text; None, or no such member, where nothing limits it.
- `packs = False`: without `causal`, the mixer refuses packed documents.
- `chooses = True`: the mixer selects tokens, so rounding may change the selection and the output may jump.

A mixer that can decode computes the same function while the text arrives a few tokens at a time, for each row at its
own pace:

- `initial_state(batch, capacity=None, dtype=None)`: a flat dictionary of tensors. The batch is the first axis of each,
  so that beam search can gather rows. A mixer whose state grows with the text has `grows = True` and needs `capacity`,
  the most tokens of a row; other mixers refuse it. `dtype` is the dtype of kept tokens: the compute dtype by default,
  or a narrower one. A mixer that cannot decode raises a ValueError.
- `extend(x, state, positions=None, valid=None, precomputed=None)`: the next k >= 1 tokens, `[b, k, d]` -> `([b, k, d],
  state)`. `valid`, int32 `[b]`, counts the real tokens at the front of each row. The other tokens do not change the
  state, and their outputs are undefined. `positions [b, k]` continue from the state's by default.
- In a loop over single tokens, `precompute(state)` computes once what depends on weights alone. With its result,
  `extend` defers full-chunk updates to `flush(states)`, which takes the states of all layers. Call `flush` before the
  next token.
"""

from flash_tf import renamed
from flash_tf.registry import Registry

MIXERS = Registry("mixer", folder=__name__, common=("name", "dtype"), current=renamed.mixer)
