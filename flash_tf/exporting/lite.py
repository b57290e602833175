"""Converts a model to a TensorFlow Lite file: ids to logits, and the decoding step."""

import re
import tempfile

import tensorflow as tf

from flash_tf.exporting.signatures import Served, ServedCausalLM
from kernels_xla.common.accelerator import tracing_for


def convert(served: Served) -> bytes:
    """The file's bytes. It takes one text of any length: `logits`, and `decode_step` if the model decodes. In float32.

    A device checks nothing: an id outside the vocabulary, or more tokens than the state has room for, give meaningless
    numbers. The first state is zeros.

    Raises:
      ValueError: TensorFlow Lite lacks an operator. The message says which.
    """
    with tracing_for("lite"), tempfile.TemporaryDirectory() as folder:
        signatures = {
            name: tf.function(function, autograph=False).get_concrete_function(*specs)
            for name, function, specs in _functions(served)
        }
        tf.saved_model.save(served, folder, signatures=signatures)
        converter = tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=list(signatures))
        try:
            return converter.convert()
        except Exception as error:  # the class is not public
            lacking = re.findall(r"(?:TF Select|Custom) ops: (.+)", str(error))
            if not lacking:
                raise
            raise ValueError(f"TensorFlow Lite has no operator {', '.join(lacking)}, which this model needs") from error


def _functions(served):
    """Name, function and arguments of each signature."""

    def logits(ids):
        return {"logits": served.plain_logits(ids)}

    def decode_step(token, *state):
        found, state = served.step(token, *state)
        return {"logits": found, **served.named(state)}

    yield "logits", logits, [tf.TensorSpec([1, None], tf.int32, "ids")]
    if isinstance(served, ServedCausalLM) and served.decodes:
        yield "decode_step", decode_step, [tf.TensorSpec([1], tf.int32, "token"), *served.state_specs(1)]
