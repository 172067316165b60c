"""Measurements: every figure in README and docs comes from a command of this package."""
