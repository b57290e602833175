"""Token mixers: `[b, n, d]` in, `[b, n, d]` out, one file each.

Beside Keras' methods a mixer has: `align`, the multiple at which a packed document must start to equal itself alone;
`flops(n)`, forward FLOPs over one sequence; `state_bytes(n, itemsize)`, its decode state for one sequence of up to n
tokens, or None if it cannot decode; `activations(n)`, numbers kept per token for the backward pass, an estimate. All
but `align` are known once it is built. One that has no form that is not causal says so by `causal_only = True`, one
that has no causal form by `never_causal = True`, one that refuses packed documents where it is not causal by `packs =
False`, and one whose output jumps where rounding changes what it chooses by `chooses = True`.

A mixer that can decode is the same function of a text that comes a few tokens at a time, row by row at any pace:

- `initial_state(batch, capacity=None, dtype=None)`: a flat dictionary of tensors, each with the rows as its first axis,
  so that a beam gathers rows of each alike. `capacity`, the most tokens of a row, is needed exactly where `grows`: by a
  mixer whose state is the larger the longer the text. `dtype` is that of the tokens kept, the compute dtype by default.
  One that cannot decode refuses with a ValueError.
- `extend(x, state, positions=None, valid=None, precomputed=None)`: the next k >= 1 tokens, `[b, k, d]` -> `([b, k, d],
  state)`. `valid`, int32 `[b]`, counts the real tokens at the front of each row; the rest leave no trace in the state,
  and their outputs mean nothing. `positions [b, k]` go on from the state's by default.
- In a loop over single tokens, `precompute(state)` computes once what depends on weights alone. With its result,
  `extend` defers full-chunk updates to `flush(states)`, which takes the states of all layers. Call `flush` before the
  next token.
"""

from flash_tf import renamed
from flash_tf.registry import Registry

MIXERS = Registry("mixer", folder=__name__, common=("name", "dtype"), current=renamed.mixer)
