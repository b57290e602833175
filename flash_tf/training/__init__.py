"""Strategy, optimizer, trainer, evaluator, checkpoints, and `loop.train(config, model_dir)`, which joins them."""
