"""Standard tasks through lm-eval."""
