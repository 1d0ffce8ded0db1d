"""Pure functions: tensors in, numbers out."""
