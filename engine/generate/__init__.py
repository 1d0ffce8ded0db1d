"""What turns token ids into more token ids."""
