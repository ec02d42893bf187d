"""How the ranks share one model. Only the runtime comes in."""
