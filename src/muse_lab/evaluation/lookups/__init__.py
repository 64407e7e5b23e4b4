"""How much of exact attention's weight on a needle each attention attends to token by token."""
