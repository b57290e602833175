"""The declaration of a kernel. With it, tests and benchmarks call every kernel without code for each one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Tensor = Any  # a tensor of Keras' backend
State = dict[str, Tensor]  # flat; the batch is the first axis of every entry, so a beam search gathers all alike


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A kernel's incremental form: the same function, a few tokens at a time.

    Attributes:
      initial_state: `(sizes, case, dtype) -> State`. `sizes` maps axis letters to lengths. `n` is the capacity of the
        kernels that keep every token.
      extend: `(state, *, valid=None, **inputs, **case) -> (out, state)` for the next k >= 1 tokens of every row.
        `valid`, int32 `[b]`, counts the real tokens at the front of each row. The other tokens leave no trace in the
        state, and their outputs are arbitrary.
      supports: `case -> bool`. Only causal functions whose normalizer does not depend on n can be streamed.
    """

    initial_state: Callable[..., State]
    extend: Callable[..., tuple[Tensor, State]]
    supports: Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """A fast kernel, the slow function that it must equal, and how to call both.

    Attributes:
      name: The name of the kernel and of its oracle.
      fast: The implementation that layers call.
      reference: The same mathematics written for a reader: dense, O(n^2), no chunks. It keeps float64.
      stream: The incremental form, or None.
      inputs: Argument name -> its axes, one letter each; see the table in `docs/api/kernels.md`. An input without the
        axis `n` is a parameter, the same for all tokens.
      flops: `(sizes, case) -> int`. A multiply-add counts as two, and causal attention as exactly half.
      state_bytes: `(sizes, case, itemsize) -> int`, the bytes of the stream's state. `itemsize` is the bytes of a
        number in the compute dtype.
      model_chunk: `case -> int`, the chunk that is part of the function; 1 for kernels without one. A packed document
        that starts on a multiple of it gets the same result as alone.
      masks: Which of `padding_mask` and `segment_ids`, `[b, n]`, the kernel takes.
      tokenwise: Whether a token's output depends only on that token.
      ranges: Argument name -> smallest and largest number, for inputs that are restricted. Log decays are never
        positive. Features are never negative if they are divided by their sum.
    """

    name: str
    fast: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    stream: Stream | None
    inputs: Mapping[str, str]
    flops: Callable[[Mapping[str, int], Mapping[str, Any]], int]
    state_bytes: Callable[[Mapping[str, int], Mapping[str, Any], int], int]
    model_chunk: Callable[[Mapping[str, Any]], int] = lambda case: 1
    masks: tuple[str, ...] = ("padding_mask", "segment_ids")
    tokenwise: bool = False
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def of(self, case: Mapping[str, Any]) -> "KernelSpec":
        """The kernel for one case: without the inputs for which the case gives None."""
        return replace(self, inputs={name: axes for name, axes in self.inputs.items() if name not in case})
