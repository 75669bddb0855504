"""Training and distillation of language models: what `recipes/` and `hf-sigmoid train` run."""
