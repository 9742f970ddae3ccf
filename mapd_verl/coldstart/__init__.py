"""The supervised stage before RL: the tiny student's tokenizer, scripted searches and training."""
