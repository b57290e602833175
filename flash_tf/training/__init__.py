"""Training: `loop.train(config, model_dir, progress)` joins run, step, evaluator and checkpoints."""
