"""Performance claims, one script each: it prints a ratio measured in one run."""
