"""What an exported masked language model answers."""

import tensorflow as tf

from flash_tf.exporting.readers import checked
from flash_tf.exporting.served import Served, log_likelihoods


class ServedMaskedLM(Served):
    """Fills masks, and scores texts by their pseudo-log-likelihood; see `Served`."""

    def endpoints(self):
        return {"fill_mask": (self.fill_mask, [self._reader.spec]), **super().endpoints()}

    def fill_mask(self, given):
        """Text or ids with masks -> the likeliest tokens at each mask, as `flash_tf.filling.fill_mask` has them.

        Returns:
          `masks [b]`, how many a row has; `ids` and `probabilities [b, m, k]`, likeliest first; and, for texts,
          `tokens` and `texts [b, m, k]`, the row with this mask filled. Rows with fewer masks than m end in zeros.
        """
        rows = self._reader.read(given, masks=True) if self.writes else self._reader.read(given)
        mask = self._tokenizer.mask_id
        at = tf.cast(tf.RaggedTensor.from_value_rowids(*self._places(rows.ids, mask)), tf.int32)
        masks = tf.cast(at.row_lengths(), tf.int32)
        what = "each text needs a <mask>" if self.writes else f"each row needs a mask, id {mask}"
        ids = checked(rows.ids, (tf.reduce_all(masks > 0), f"{what}, got rows with", masks))
        at = at.to_tensor()
        logits = self._head(self._encode(ids, rows.real, masked_positions=at))
        special = tf.reduce_any([tf.range(tf.shape(logits)[-1]) == i for i in self._tokenizer.special_ids], axis=0)
        logits = tf.where(special, float("-inf"), logits)
        probabilities, found = tf.math.top_k(tf.nn.softmax(logits), self._limits.top_k)
        there = tf.sequence_mask(masks, tf.shape(at)[1])[..., None]
        answer = {
            "masks": masks,
            "ids": tf.where(there, found, 0),
            "probabilities": tf.where(there, probabilities, 0.0),
        }
        if self.writes:
            filled = tf.range(tf.shape(ids)[1]) == at[..., None, None]  # [b, m, 1, n]
            texts = self._reader.write(tf.where(filled, found[..., None], ids[:, None, None]))
            answer |= {"tokens": tf.where(there, self._reader.pieces(found), ""), "texts": tf.where(there, texts, "")}
        return answer

    def _places(self, ids, mask):
        """Columns of all masks, and the rows that they are in, and how many rows there are."""
        found = tf.where(ids == mask)
        return found[:, 1], found[:, 0], tf.shape(ids, tf.int64)[0]

    def _log_likelihoods(self, rows):
        """Each token's, masked alone: a forward pass for each column."""

        def of_column(at):
            ids = tf.where(tf.range(tf.shape(rows.ids)[1]) == at, self._tokenizer.mask_id, rows.ids)
            x = self._encode(ids, rows.real, masked_positions=tf.fill([tf.shape(ids)[0], 1], at))
            return log_likelihoods(self._head(x)[:, 0], rows.ids[:, at])

        columns = tf.range(tf.shape(rows.ids)[1])
        each = tf.map_fn(of_column, columns, fn_output_signature=tf.float32, parallel_iterations=1)
        return tf.transpose(each)
