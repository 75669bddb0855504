"""Control and measurement of attention logits, head by head, while a model trains."""
