"""The stack that all language models share: embedding, positions, residual blocks, tied head."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from flash_tf import presets, renamed
from flash_tf.layers.base import Base
from flash_tf.layers.block import EPSILON, ResidualBlock, normalizer
from flash_tf.layers.common import check_counts, normal, options, own_policies
from flash_tf.layers.feedforward import FEEDFORWARDS
from flash_tf.layers.mixers import MIXERS
from flash_tf.layers.positions import runtime_zero, token_positions
from flash_tf.layers.remat import Recomputed
from flash_tf.layers.scaled_sin import ScaledSinusoidalEmbedding
from flash_tf.models import block_loop
from flash_tf.models.backbone import Backbone
from flash_tf.models.transfer import Transfer, transfer
from flash_tf.registry import Registry, check_options, listed
from kernels_xla.common.lengths import at_most
from kernels_xla.common.spec import Tensor

MOST = {"vocabulary_size": 2**31 - 1, "width": 2**31 - 1, "depth": 1024}  # ids are int32; a block takes a while to make
MODELS = Registry("model", folder="flash_tf.models", common=("name", "dtype"))


@keras.saving.register_keras_serializable("flash_tf")
class TokenEmbedding(keras.layers.ReversibleEmbedding):
    """An embedding that casts rows after the lookup, so that the table's gradient is summed in the table's dtype.

    Args:
      *args: Passed to `keras.layers.ReversibleEmbedding`, as `**kwargs`.
      **kwargs: See `*args`.

    Call arguments:
      inputs: Integers `[b, n]`; in reverse, activations `[b, n, d]`.
      reverse: Whether it gives logits.

    Returns:
      Rows of the table `[b, n, d]`; in reverse, products with all rows, `[b, n, V]`.

    Example:
      >>> TokenEmbedding(100, 16)(ops.zeros((2, 3), "int32")).shape
      TensorShape([2, 3, 16])
    """

    def add_weight(self, *args, **kwargs) -> keras.Variable:
        return super().add_weight(*args, **{**kwargs, "autocast": False})

    def call(self, inputs: Tensor, reverse: bool = False) -> Tensor:
        if not (reverse and self.tie_weights) or inputs.shape[1] != 1 or self.quantization_mode:
            return super().call(inputs, reverse=reverse)
        # Uses the table as it is stored: XLA:CPU would transpose it for every token.
        table, rows = (ops.cast(x, self.reverse_dtype) for x in (self.embeddings, inputs[:, 0]))
        return ops.transpose(ops.matmul(table, ops.transpose(rows)))[:, None]


class LanguageModel(Base, Recomputed, keras.Model):
    """Token ids `[b, n]` -> logits `[b, n, V]`: `norm(x) E^T + bias`, E being the embedding.

    The parameter counts of FLASH's tables imply a tied embedding and an output bias. The options from `embedding_norm`
    on come from other papers: a head without bias as in LLaMA, or RoBERTa's head. A subclass sets `causal`
    and has `call`.

    Args:
      vocabulary_size: V.
      width: d.
      depth: Number of blocks; a block is a mixer, and a feed-forward layer if there is one.
      mixer: `{"type": name, **options}` of a mixer. The model sets `causal`. A list of mixers divides the blocks into
        equal runs, in the list's order.
      feedforward: `{"type": name, **options}`, or None: a gated attention unit needs none.
      norm: "scale_norm", FLASH's for masked models, "layer_norm", for causal ones, "layer_norm_without_bias",
        "rms_norm" or "simple_rms_norm".
      position_embedding: "scaled_sin", "learned", or None.
      max_length: The longest sequence for learned positions; None for other positions.
      dropout: Dropout rate on the output of every layer.
      remat: Number of blocks, from the first, that the backward pass recomputes instead of keeping; True for all. It
        saves memory and costs up to a third more time. `keras.RematScope` sets it. On JAX, all are then one loop, and
        the program does not grow with `depth`.
      embedding_norm: The norm before the first block, or None.
      head_bias: Whether each token of the vocabulary has a bias.
      head_norm: The norm before the head; None for `norm`.
      head_projection: Whether `gelu(W x + b)` comes before that norm, as in BERT's head for masked tokens.
      tie_embeddings: Whether the head's matrix is the embedding; else it has weights of its own, as in LLaMA.
      norm_epsilon: Added to the mean square or the variance in every norm.
      head_norm_epsilon: The same for the norm before the head; None for `norm_epsilon`.
      post_norm: Whether a block's norm comes after its sum, as in BERT. The norm before the head stays.
      token_types: Number of token types, as BERT's two; each adds a learned vector to its tokens. None for no types.
      norm_implementation: "auto", "xla" or "pallas", for the norm of each block; see `ResidualBlock`.
      **kwargs: Passed to `keras.Model`.

    Attributes:
      tokenizer: The tokenizer for methods that take text; None until one is set.
    """

    causal: bool
    tokenizer: Any = None
    predicts_tokens = True  # a head gives logits `[..., V]` of tokens
    HEAD = (
        "output_bias",
        "transform",
        "embedding/reverse_embeddings",
    )  # weights by which two models with one stack may differ

    def __init__(
        self,
        vocabulary_size: int,
        width: int,
        depth: int,
        mixer: dict | list[dict],
        feedforward: dict | None = None,
        norm: str = "scale_norm",
        position_embedding: str | None = "scaled_sin",
        max_length: int | None = None,
        dropout: float = 0.0,
        remat: bool | int = False,
        embedding_norm: str | None = None,
        head_bias: bool = True,
        head_norm: str | None = None,
        head_projection: bool = False,
        tie_embeddings: bool = True,
        norm_epsilon: float = EPSILON,
        head_norm_epsilon: float | None = None,
        post_norm: bool = False,
        token_types: int | None = None,
        norm_implementation: str = "auto",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.vocabulary_size, self.width, self.depth = vocabulary_size, width, depth
        self.mixer = renamed.mixer(mixer)
        self.feedforward, self.norm, self.position_embedding = feedforward, norm, position_embedding
        self.max_length, self.dropout, self.remat = max_length, dropout, remat
        self.embedding_norm, self.head_bias = embedding_norm, head_bias
        self.supports_masking = True
        self.head_norm, self.head_projection = head_norm, head_projection
        self.tie_embeddings, self.norm_epsilon = tie_embeddings, norm_epsilon
        self.head_norm_epsilon = head_norm_epsilon
        self.post_norm, self.token_types = post_norm, token_types
        self.norm_implementation = norm_implementation
        self._check()
        self._make_layers()

    def _check(self):
        name = type(self).__name__
        for option, most in MOST.items():
            if not 1 <= getattr(self, option) <= most:
                raise ValueError(f"{name} needs {option} >= 1 and <= {most}, got {getattr(self, option)}")
        check_counts(self, token_types=self.token_types)
        if self.position_embedding not in ("scaled_sin", "learned", None):
            raise ValueError(
                f"{name}: position_embedding must be 'scaled_sin', 'learned' or null, got {self.position_embedding!r}"
            )
        if (self.position_embedding == "learned") != (self.max_length is not None):
            raise ValueError(
                f"{name}: position_embedding 'learned' needs max_length, and no other takes it, "
                f"got max_length {self.max_length} with {self.position_embedding!r}"
            )
        if not 0 <= self.remat <= self.depth:
            raise ValueError(f"{name} needs remat true, false or up to depth {self.depth} blocks, got {self.remat}")
        if not (parts := len(listed(self.mixer))) or self.depth % parts:
            raise ValueError(f"{name}: mixers of a list must divide the blocks, got {parts} for depth {self.depth}")

    def _make_embeddings(self, same):
        self.embedding = TokenEmbedding(
            self.vocabulary_size,
            self.width,
            tie_weights=self.tie_embeddings,
            embeddings_initializer=normal(),
            reverse_dtype=self.compute_dtype,
            name="embedding",
            **same,
        )
        if self.position_embedding == "scaled_sin":
            self.positions = ScaledSinusoidalEmbedding(self.width, name="positions", **same)
        elif self.position_embedding == "learned":
            self.positions = keras.layers.Embedding(
                self.max_length, self.width, embeddings_initializer=normal(), name="positions", **same
            )
        if self.token_types is not None:
            self.types = keras.layers.Embedding(
                self.token_types, self.width, embeddings_initializer=normal(), name="types", **same
            )

    def _make_layers(self):
        same = {"dtype": self.dtype_policy}
        self._make_embeddings(same)
        self.blocks = []
        for i, kind in enumerate(self.kinds):
            self._check_direction(kind)
            mixer = MIXERS.build(kind, causal=self.causal, name="mixer", **same)
            self.blocks.append(self._block(mixer, "mixer", i))
            if self.feedforward is not None:
                inner = FEEDFORWARDS.build(self.feedforward, name="feedforward", **same)
                self.blocks.append(self._block(inner, "feedforward", i))
        if self.embedding_norm is not None:
            self.first_norm = normalizer(self.embedding_norm, self.norm_epsilon, name="first_norm", **same)
        if self.head_projection:
            self.transform = keras.layers.Dense(
                self.width, activation="gelu", kernel_initializer=normal(), name="transform", **same
            )
        epsilon = self.norm_epsilon if self.head_norm_epsilon is None else self.head_norm_epsilon
        self.final_norm = normalizer(self.head_norm or self.norm, epsilon, name="final_norm", **same)

    def _check_direction(self, kind):
        named = isinstance(kind, Mapping) and kind.get("type") in MIXERS.names()  # `build` names what is wrong
        if named and not self.causal and getattr(MIXERS.get(kind["type"]), "causal_only", False):
            name = type(self).__name__
            raise ValueError(f"{name} reads a text both ways, which mixer {kind['type']!r} cannot: take another mixer")

    def _block(self, inner, name, i):
        again = self.remat is True or i < self.remat
        options = {"norm": self.norm, "dropout": self.dropout, "remat": again, "norm_epsilon": self.norm_epsilon}
        options |= {"post_norm": self.post_norm, "norm_implementation": self.norm_implementation}
        return ResidualBlock(inner, **options, name=f"{name}_{i}", dtype=self.dtype_policy)

    def build(self, input_shape: tuple | None = None) -> None:
        del input_shape  # no weight depends on it
        activations = (None, None, self.width)
        self.embedding.build((None, None))
        if self.position_embedding is not None:
            self.positions.build((None, None))
        others = [getattr(self, name) for name in ("types", "first_norm", "transform") if hasattr(self, name)]
        for layer in (*self.blocks, *others, self.final_norm):
            layer.build(activations)
        own_policies(self)
        self.output_bias = None
        if self.head_bias:
            self.output_bias = self.add_weight(name="output_bias", shape=(self.vocabulary_size,), initializer="zeros")
        self.built = True

    def recomputed(self, call: Callable) -> Callable:
        self.remat = True
        for block in self.blocks:
            block.recomputed(call)
        return call

    def embed(self, token_ids: Tensor, positions: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Token ids, their positions and types `[b, n]` -> `[b, n, d]`, the input of the first block."""
        most = self.max_length if self.position_embedding == "learned" else None
        needs = f"{self.name} has learned positions for max_length"
        x = at_most(self.embedding(at_most(token_ids, most, needs)), most, needs)
        if self.position_embedding is not None:  # whose lookup could else fail before the check, and say less
            x = x + ops.cast(self.positions(at_most(positions, most, needs)), x.dtype)
        if self.token_types is not None:
            types = self.types(ops.zeros_like(token_ids) if token_type_ids is None else token_type_ids)
            x = x + ops.cast(types, x.dtype)  # a quantized embedding gives float32
        return x if self.embedding_norm is None else self.first_norm(x)

    def tokenize(self, texts: list[str]) -> list:
        """The token ids of each text, int32 `[length]`.

        Raises:
          ValueError: The model has no tokenizer, or a text has no token.
        """
        if self.tokenizer is None:
            raise ValueError(f"{self.name} takes token ids: it has no tokenizer for texts")
        found = self.tokenizer.encode(list(texts))
        for text, ids in zip(texts, found, strict=True):
            if not len(ids):
                raise ValueError(f"the text {text!r} has no tokens")
        return found

    def encode(
        self,
        token_ids: Tensor,
        padding_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
        prefix_mask: Tensor | None = None,
        training: bool | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Token ids `[b, n]` -> normalized activations `[b, n, d]` of the last layer.

        A text is one row, and a list of texts one row each. Shorter rows are padded on the right with zeros.

        Raises:
          ValueError: Token ids have another shape, or a text has no tokens.
        """
        if isinstance(token_ids, str) or (isinstance(token_ids, list) and isinstance(token_ids[0], str)):
            token_ids, padding_mask = self._padded([token_ids] if isinstance(token_ids, str) else token_ids)
            x = self.encode(token_ids, padding_mask=padding_mask)
            return ops.where(padding_mask[..., None], x, ops.zeros_like(x))
        if len(shape := tuple(np.shape(token_ids))) != 2:
            raise ValueError(f"{self.name} needs token ids of the shape [b, n], got {shape}")
        masks = {"padding_mask": padding_mask, "segment_ids": segment_ids}
        if positions is None:
            positions = token_positions(token_ids, segment_ids) + runtime_zero(token_ids)
        if token_type_ids is not None and self.token_types is None:
            raise ValueError(f"{self.name} reads token_type_ids only with the option token_types, got token_types=None")
        if not self.built:
            self.build()
        x = self.embed(token_ids, positions, token_type_ids)
        mixers = self._check_prefix(prefix_mask)
        # Keras would pass a None on, also to layers of a caller, in place of what the caller's own call was given.
        mode = {} if training is None else {"training": training}

        def call(block, x):
            prefix = {"prefix_mask": prefix_mask} if block.inner in mixers else {}
            return block(x, **masks, **prefix, positions=positions, **mode)

        stride, segment = len(self.blocks) // self.depth, len(self.blocks) // len(listed(self.mixer))
        loop = bool(training) and all(block.remat for block in self.blocks)
        for i in range(0, len(self.blocks), segment):  # whose mixers are of one kind
            x = block_loop.through(self.blocks[i : i + segment], stride, x, call, loop)
        return self.final_norm(self.project(x))

    def _check_prefix(self, prefix_mask):
        """The mixers that get the prefix mask, all or none. Raises a ValueError if a mixer does not support it."""
        mixers = [] if prefix_mask is None else self.mixers
        if without := [type(mixer).__name__ for mixer in mixers if not getattr(mixer, "takes_prefix", False)]:
            raise ValueError(f"{self.name}: a prefix_mask needs mixers that support it, as gau; {without[0]} does not")
        return mixers

    def project(self, x: Tensor) -> Tensor:
        """The output of the last block -> the input of the norm before the head, both `[..., d]`."""
        return self.transform(x) if self.head_projection else x

    def _padded(self, texts):
        """Token ids `[b, n]` of texts, and their padding mask."""
        rows = self.tokenize(texts)
        longest = max(map(len, rows))
        ids = [[*row, *[0] * (longest - len(row))] for row in rows]
        real = ops.arange(longest, dtype="int32")[None] < ops.convert_to_tensor([[len(row)] for row in rows], "int32")
        return ops.convert_to_tensor(ids, "int32"), real

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> None:
        """None: logits carry no mask."""

    def compute_output_spec(self, token_ids: Tensor, *arguments, **options) -> keras.KerasTensor:
        """The output of a symbolic call. Keras on JAX cannot trace an unknown length."""
        del arguments, options
        return keras.KerasTensor((*unpack(token_ids, {})["token_ids"].shape, self.vocabulary_size), self.compute_dtype)

    def compute_output_shape(self, token_ids_shape: tuple) -> tuple:
        """For `keras.layers.TimeDistributed`."""
        return self.compute_output_spec(keras.KerasTensor(token_ids_shape, "int32")).shape

    def head(self, x: Tensor) -> Tensor:
        """Activations `[..., d]` -> logits `[..., V]`."""
        logits = self.embedding(x, reverse=True)
        return logits if self.output_bias is None else logits + ops.cast(self.output_bias, self.compute_dtype)

    @property
    def head_weights(self) -> Tensor:
        """The head's matrix as `[V, d]`: the embedding, or weights of its own."""
        return self.embedding.embeddings if self.tie_embeddings else ops.transpose(self.embedding.reverse_embeddings)

    @property
    def input_dtype(self) -> str:
        """The dtype of ids, which Keras writes into the signature of an exported model."""
        return "int32"

    @property
    def backbone(self) -> Backbone:
        """What `encode` computes, as a layer of another Keras model, which shares the weights."""
        if "_backbone" not in vars(self):
            object.__setattr__(self, "_backbone", Backbone(self))  # Keras would count it as a part of its own model
        return self._backbone

    def __dir__(self) -> list[str]:
        """All attributes but the backbone: Keras saves by a walk over them, and a backbone leads back to its model."""
        return [name for name in super().__dir__() if name not in ("backbone", "_backbone")]

    @property
    def kinds(self) -> list[dict]:
        """The mixer of each block, first to last, as options."""
        parts = listed(self.mixer)
        return [parts[i * len(parts) // self.depth] for i in range(self.depth)]

    @property
    def mixers(self) -> list[keras.layers.Layer]:
        """The mixer of each block, first to last."""
        return [block.inner for block in self.blocks[:: 1 if self.feedforward is None else 2]]

    @property
    def longest(self) -> int | None:
        """The most tokens of a text: of learned positions, and of mixers such as cosFormer; None without a limit."""
        limits = (self.max_length, *(getattr(mixer, "longest", None) for mixer in self.mixers))
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def align(self) -> int:
        """Where packed documents must start: a multiple of this."""
        return math.lcm(*(mixer.align for mixer in self.mixers))

    @property
    def grows(self) -> bool:
        """Whether the state of a block grows with the text, so that it needs a capacity."""
        return any(mixer.grows for mixer in self.mixers)

    @property
    def obstacle(self) -> str | None:
        """Why it cannot decode from a state, or None."""
        return next((mixer.obstacle for mixer in self.mixers if mixer.obstacle is not None), None)

    def flops(self, n: int, predicted: int) -> int:
        """Forward FLOPs over one sequence of n tokens, multiply-adds as two, the head on `predicted` positions."""
        head = 2 * predicted * self.width * self.vocabulary_size + 2 * n * self.width**2 * self.head_projection
        return head + sum(block.inner.flops(n) for block in self.blocks)

    def activation_bytes(self, n: int, predicted: int, itemsize: int) -> int:
        """Estimated bytes that one sequence keeps for the backward pass: layers and logits."""
        again = [block.inner.activations(n) for block in self.blocks if block.remat]
        kept = [block.inner.activations(n) for block in self.blocks if not block.remat]
        layers = len(again) * self.width + max(
            [sum(kept), *again]
        )  # kept activations are freed before a block is recomputed
        return itemsize * n * layers + predicted * self.vocabulary_size * (4 + itemsize)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **options(self)}

    def init_from(self, source: "LanguageModel") -> Transfer:
        """Starts from the weights of another model with the same stack, for example of one that `ft.load` read.

        The heads may differ: a `Classifier` takes the stack of a `MaskedLM` or `CausalLM` and keeps its new network.

        Args:
          source: The other model.

        Returns:
          The names of the weights that were `loaded`, stay `fresh`, or were `left` in the source.

        Raises:
          ValueError: The source is no such model, or the stacks differ; the message then names a weight. Nothing was
            assigned.
        """
        if not isinstance(source, LanguageModel):
            raise ValueError(f"{self.name} starts from another model of ft.models, got {type(source).__name__}")
        for model in (source, self):
            if not model.built:
                model.build()
        return transfer(source, self)

    def save_assets(self, directory: str) -> None:
        """Writes the tokenizer, if there is one, beside the weights: Keras calls it for a `.keras` file."""
        if self.tokenizer is not None:
            self.tokenizer.save(f"{directory}/{self.tokenizer.file}")

    def load_assets(self, directory: str | None) -> None:
        """Reads what `save_assets` wrote."""
        self.tokenizer = None if directory is None else presets.read_tokenizer(directory, self.vocabulary_size)

    def save_to_preset(self, directory: str) -> None:
        """Writes the model, and its tokenizer if it has one, to a folder; see `flash_tf.presets`."""
        presets.save(self, directory)

    @classmethod
    def from_preset(cls, directory: str, **options) -> "LanguageModel":
        """The model in a folder of `save_to_preset`, on any backend; `options` override the constructor's.

        The model of a task, as a `Classifier`, can come from the preset of any model, or of another head: it takes the
        stack, and of a head what has its names and shapes; the rest starts fresh. `options` then has what the head
        needs.

        Raises:
          ValueError: There is no preset, its files are damaged, it is of another class, or its weights do not fit the
            options.
        """
        own, of_stack = (inspect.signature(c).parameters for c in (cls, LanguageModel))
        of_head = {name: value for name, value in options.items() if name in own and name not in of_stack}
        if cls.predicts_tokens or (presets.class_of(directory) is cls and presets.has(directory, of_head)):
            return presets.load(cls, directory, options)
        source = presets.load(LanguageModel, directory, {})
        stack = {name: getattr(source, name) for name in of_stack if name in own and name != "kwargs"}
        check_options(cls, {**stack, **presets.own(options)}, where=f"{cls.__name__}.from_preset")
        model = cls(**{**stack, "dtype": source.dtype_policy, **options})
        model.init_from(source)
        model.tokenizer = source.tokenizer
        return model


ENCODED = tuple(name for name in inspect.signature(LanguageModel.encode).parameters if name not in ("self", "training"))


def unpack(inputs: Any, arguments: Mapping[str, Any], mask: Any = None) -> dict[str, Any]:
    """The call arguments of a model. The first may be a dictionary of all of them, as `fit` passes it.

    Args:
      inputs: Token ids, or a dictionary of call arguments.
      arguments: The other call arguments.
      mask: Keras' own mask of `inputs`, or a dictionary of masks. It serves if there is no `padding_mask`.

    Raises:
      ValueError: A dictionary has no `token_ids`, or an argument that the model does not have.
    """
    if isinstance(inputs, Mapping):
        known = dict.fromkeys((*ENCODED, *arguments))
        unknown = [name for name in inputs if name not in known]
        if unknown or "token_ids" not in inputs:
            needed = f"a dictionary of inputs needs token_ids, and may have {', '.join(list(known)[1:])}"
            raise ValueError(f"{needed}, got {', '.join(map(repr, inputs))}")
    given = {**arguments, **(inputs if isinstance(inputs, Mapping) else {"token_ids": inputs})}
    mask = mask.get("token_ids") if isinstance(mask, Mapping) else mask
    return given if mask is None or given.get("padding_mask") is not None else {**given, "padding_mask": mask}
