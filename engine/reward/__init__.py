"""What a completion is worth."""
