"""What a kernel declares about itself, so that tests and benchmarks need no per-kernel code."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Tensor = Any  # of the backend that Keras runs on
State = dict[str, Tensor]  # flat; every entry has the batch as its first axis, so a beam gathers rows of each alike


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The same function, fed a few tokens at a time.

    Attributes:
      initial_state: `(sizes, case, dtype) -> State`; `sizes` maps axis letters to lengths, `n` being the capacity of
        those kernels that keep every token.
      extend: `(state, *, valid=None, **inputs, **case) -> (out, state)` for the next k >= 1 tokens of every row.
        `valid`, int32 `[b]`, counts the real tokens at the front of each row; the rest leave no trace in the state,
        and their outputs mean nothing.
      supports: `case -> bool`: only causal functions whose normaliser ignores n can be streamed.
    """

    initial_state: Callable[..., State]
    extend: Callable[..., tuple[Tensor, State]]
    supports: Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """A fast kernel, the slow function it must equal, and how to call both.

    Attributes:
      name: The module's name.
      fast: The implementation that layers call.
      reference: The same mathematics written for a reader: dense, O(n^2), no chunks. Keeps float64.
      stream: Its incremental form, or None where it has none.
      inputs: Argument name -> its axes, one letter each; see the table in README.md. An input without the axis `n`
        is a parameter, the same for all tokens.
      cases: Keyword arguments worth testing, each one a test case. Chunks are small, so that there are several. A case
        that names an input gives None for it: the function without that input. See `of`.
      timed: The keyword arguments to benchmark: what a real model would use.
      flops: `(sizes, case) -> int`, multiply-adds counted as two, causal attention at exactly half.
      state_bytes: `(sizes, case, itemsize) -> int`, of the stream's state; `itemsize` is that of the compute dtype.
      model_chunk: `case -> int`, the chunk that is part of the function, where packed documents must start to equal
        themselves alone; 1 for kernels without one.
      masks: Those of `padding_mask` and `segment_ids`, `[b, n]`, that are taken.
      tokenwise: Whether a token's output depends on that token alone.
      ranges: Argument name -> least and most of its numbers, where any number will not do: log decays are never
        positive, and features are where they are divided by their sum.
    """

    name: str
    fast: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    stream: Stream | None
    inputs: Mapping[str, str]
    cases: tuple[Mapping[str, Any], ...]
    timed: Mapping[str, Any]
    flops: Callable[[Mapping[str, int], Mapping[str, Any]], int]
    state_bytes: Callable[[Mapping[str, int], Mapping[str, Any], int], int]
    model_chunk: Callable[[Mapping[str, Any]], int] = lambda case: 1
    masks: tuple[str, ...] = ("padding_mask", "segment_ids")
    tokenwise: bool = False
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def of(self, case: Mapping[str, Any]) -> "KernelSpec":
        """The kernel as one case has it: without the inputs that the case leaves out."""
        return replace(self, inputs={name: axes for name, axes in self.inputs.items() if name not in case})
