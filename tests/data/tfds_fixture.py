"""Small datasets in the format of TFDS, with the names, features and versions of the real ones."""

from pathlib import Path

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

FEATURES = {
    "c4/en:3.1.0": {
        "text": tfds.features.Text(),
        "url": tfds.features.Text(),
        "content-type": tfds.features.Text(),
        "content-length": tfds.features.Text(),
        "timestamp": tfds.features.Text(),
    },
    "wiki40b/en:1.3.0": {
        "text": tfds.features.Text(),
        "wikidata_id": tfds.features.Text(),
        "version_id": tfds.features.Text(),
    },
    "pg19:0.1.1": {
        "book_text": tfds.features.Text(),
        "book_id": np.int32,
        "book_title": tfds.features.Text(),
        "publication_date": tfds.features.Text(),
        "book_link": tfds.features.Text(),
    },
}
TEXT_KEYS = {"c4/en:3.1.0": "text", "wiki40b/en:1.3.0": "text", "pg19:0.1.1": "book_text"}


def store(name: str, data_dir: Path, splits: dict[str, list[str]]) -> None:
    """Writes the dataset `name` (a key of FEATURES) with these texts in order, under `data_dir`."""
    path, version = name.split(":")
    builder, _, config = path.partition("/")
    features = FEATURES[name]
    tfds.dataset_builders.store_as_tfds_dataset(
        name=builder,
        config=config or None,
        version=version,
        features=tfds.features.FeaturesDict(features),
        split_datasets={split: _dataset(features, TEXT_KEYS[name], texts) for split, texts in splits.items()},
        data_dir=data_dir,
        disable_shuffling=True,
    )


def _dataset(features: dict, text_key: str, texts: list[str]) -> tf.data.Dataset:
    """Examples whose other features are fillers: the example's number."""
    numbers = np.arange(len(texts), dtype=np.int32)
    columns = {key: numbers if feature is np.int32 else numbers.astype(str) for key, feature in features.items()}
    return tf.data.Dataset.from_tensor_slices({**columns, text_key: texts})
