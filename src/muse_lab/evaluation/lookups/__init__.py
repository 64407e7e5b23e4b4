"""Share of exact attention's weight on a needle that each attention attends to token by token."""
