"""Evidence: what is promised, measured."""
