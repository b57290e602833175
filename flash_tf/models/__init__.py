"""Models: embedding, a residual stack of any mixer, a head. One file a task.

`MODELS` has them by the names that a config gives them.
"""

from flash_tf import backend  # noqa: F401
from flash_tf.models.backbone import Backbone
from flash_tf.models.causal_lm import CausalLM
from flash_tf.models.classifier import Classifier
from flash_tf.models.language_model import MODELS as MODELS
from flash_tf.models.masked_lm import MaskedLM
from flash_tf.models.matcher import Matcher
from flash_tf.models.regressor import Regressor
from flash_tf.models.span import SpanExtractor

__all__ = ["Backbone", "CausalLM", "Classifier", "MaskedLM", "Matcher", "Regressor", "SpanExtractor"]


def __dir__() -> list[str]:
    return __all__
