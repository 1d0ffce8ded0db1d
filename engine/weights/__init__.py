"""How a new version reaches the engines."""
