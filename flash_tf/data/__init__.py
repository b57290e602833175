"""From documents to token windows: sources, tokenizer, token cache, packing, masking."""
