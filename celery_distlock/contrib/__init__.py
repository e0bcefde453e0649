"""What fits the package into frameworks; nothing else in the package imports it."""
