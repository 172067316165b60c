"""Shared vocabulary of Tandem: types, states, configuration, errors, wire code. Imports neither torch nor ray."""

__version__ = "0.1.0"
